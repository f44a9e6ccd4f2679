//! Opaque cursors: where a list goes on.
//!
//! A cursor belongs to one list with its filters; given to another it is refused, never silently applied.

use super::problem::Problem;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

const VERSION: &str = "1";
const LENGTH_MAX: usize = 1_024;

/// The identity of a list: its name and filters. The parts hold no line breaks.
fn identity(list: &[&str]) -> String {
    hex::encode(&Sha256::digest(list.join("\n").as_bytes())[..8])
}

/// The cursor of `list` after `place`.
pub(super) fn encode(list: &[&str], place: &str) -> String {
    URL_SAFE_NO_PAD.encode(format!("{VERSION} {} {place}", identity(list)))
}

/// The place that a cursor of `list` names.
pub(super) fn decode(list: &[&str], cursor: &str) -> Result<String, Problem> {
    decoded(list, cursor).ok_or_else(|| Problem::invalid("after is not a cursor of this list"))
}

fn decoded(list: &[&str], cursor: &str) -> Option<String> {
    if cursor.len() > LENGTH_MAX {
        return None;
    }
    let text = String::from_utf8(URL_SAFE_NO_PAD.decode(cursor).ok()?).ok()?;
    let (version, rest) = text.split_once(' ')?;
    let (owner, place) = rest.split_once(' ')?;
    // Anybody can write a cursor, and the database takes no NUL in a text.
    let ours = version == VERSION && owner == identity(list) && !place.contains('\0');
    ours.then(|| place.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_belongs_to_its_list() {
        let cursor = encode(&["events", "alice", ""], "42");
        assert_eq!(decode(&["events", "alice", ""], &cursor).unwrap(), "42");
        assert!(decode(&["events", "bob", ""], &cursor).is_err());
        let forged = encode(&["user", "alice"], "users:a\0 EUR/2");
        assert!(decode(&["user", "alice"], &forged).is_err());
        for bad in ["", "!", "MSAx", &"A".repeat(2_000)] {
            assert!(decode(&["events", "alice", ""], bad).is_err(), "{bad:?}");
        }
    }
}
