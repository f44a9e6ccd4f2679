//! The forms of the files in `schema/`, as they are written.
//!
//! Only shapes: every unknown key is an error; what the texts mean is found out by whoever compiles them.

use serde::Deserialize;
use std::collections::BTreeMap;

/// `type.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TypeFile {
    pub(super) summary: String,
    pub(super) scope: String,
    pub(super) current: String,
    #[serde(default)]
    pub(super) passes_freeze: bool,
    #[serde(default)]
    pub(super) check: Vec<CheckEntry>,
    #[serde(default, rename = "move")]
    pub(super) moves: Vec<MoveEntry>,
    #[serde(default)]
    pub(super) unique: Vec<UniqueEntry>,
    #[serde(default)]
    pub(super) upcast: Vec<UpcastEntry>,
    #[serde(default)]
    pub(super) distinct: Vec<DistinctEntry>,
}

/// `[[check]]`: refuses with `code` unless `that` holds.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CheckEntry {
    pub(super) when: Option<String>,
    pub(super) that: String,
    pub(super) code: String,
    pub(super) detail: Option<String>,
}

/// `[[move]]`: posts.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MoveEntry {
    pub(super) name: Option<String>,
    pub(super) when: Option<String>,
    pub(super) asset: String,
    pub(super) amount: String,
    pub(super) from: Sources,
    pub(super) to: Targets,
}

/// `from`.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "`from` is an account or a list of accounts")]
pub(super) enum Sources {
    One(String),
    Many(Vec<String>),
}

/// `to`.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "`to` is an account or a list of {account, amount | share | rest, each?, when?}"
)]
pub(super) enum Targets {
    One(String),
    Many(Vec<TargetEntry>),
}

/// One element of `to`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TargetEntry {
    pub(super) account: String,
    pub(super) amount: Option<String>,
    pub(super) share: Option<Share>,
    #[serde(default)]
    pub(super) rest: bool,
    pub(super) each: Option<String>,
    pub(super) when: Option<String>,
}

/// Basis points: a number, or an expression.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "`share` is basis points, or an expression for them"
)]
pub(super) enum Share {
    Points(u32),
    Expression(String),
}

/// `[[unique]]`: takes a business key.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct UniqueEntry {
    pub(super) when: Option<String>,
    pub(super) key: String,
    #[serde(rename = "for")]
    pub(super) lasts: Option<Lasts>,
    pub(super) namespace: Option<String>,
    pub(super) code: Option<String>,
}

/// How long a key is taken.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "`for` is a number of seconds, or such as \"24h\""
)]
pub(super) enum Lasts {
    Seconds(u32),
    Text(String),
}

impl Lasts {
    /// The number of seconds, at least one; None when the text is no duration.
    pub(super) fn seconds(&self) -> Option<u32> {
        let seconds = match self {
            Lasts::Seconds(seconds) => Some(*seconds),
            Lasts::Text(text) => {
                let unit = match text.bytes().last()? {
                    b's' => 1,
                    b'm' => 60,
                    b'h' => 3_600,
                    b'd' => 86_400,
                    _ => return None,
                };
                let number: u32 = text[..text.len() - 1].parse().ok()?;
                number.checked_mul(unit)
            }
        };
        seconds.filter(|seconds| *seconds > 0)
    }
}

/// `[[upcast]]`: makes the data of version `to` out of the version before it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct UpcastEntry {
    pub(super) to: String,
    #[serde(default)]
    pub(super) set: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) drop: Vec<String>,
}

/// `[[distinct]]`: elements equal in `by` and `same` are one; equal in `by` only are refused.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DistinctEntry {
    pub(super) list: String,
    pub(super) by: Vec<String>,
    #[serde(default)]
    pub(super) same: Vec<String>,
    #[serde(default = "DistinctEntry::dropped")]
    pub(super) dropped: String,
    #[serde(default = "DistinctEntry::code")]
    pub(super) code: String,
}

impl DistinctEntry {
    fn dropped() -> String {
        "dropped".to_owned()
    }
    fn code() -> String {
        "conflicting_lines".to_owned()
    }
}

/// `accounts.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AccountsFile {
    #[serde(default)]
    pub(super) account: Vec<AccountEntry>,
}

/// One pattern of the chart.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AccountEntry {
    pub(super) pattern: String,
    pub(super) guard: GuardEntry,
    pub(super) floor: Option<String>,
    pub(super) opened_by_credit: bool,
}

/// The guard's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum GuardEntry {
    Floor,
    None,
}

/// An example file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ExampleFile<'a> {
    #[serde(borrow)]
    pub(super) request: &'a serde_json::value::RawValue,
    pub(super) expect: Expected,
}

/// What an example's request must come to. An accepted one names `input` and `moves`, a refused one `code` and `pointer`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Expected {
    pub(super) input: Option<serde_json::Value>,
    pub(super) moves: Option<serde_json::Value>,
    pub(super) code: Option<String>,
    pub(super) pointer: Option<String>,
}
