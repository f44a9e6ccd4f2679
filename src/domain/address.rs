//! Subjects, account addresses, and the chart that says what an address is.
//!
//! An address has ONE spelling: segments of `[A-Za-z0-9._@-]`, everything else percent-encoded, joined by colons.

use super::money::Amount;
use std::fmt;
use std::sync::Arc;

/// Who an event is about: 1 to 128 visible ASCII characters (0x21 to 0x7E).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subject(Arc<str>);

impl Subject {
    /// Longest subject, in bytes.
    pub const LENGTH_MAX: usize = 128;

    /// Takes a text, if it is a subject.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let fits = (1..=Self::LENGTH_MAX).contains(&text.len());
        (fits && text.bytes().all(|b| b.is_ascii_graphic())).then(|| Subject(text.into()))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl serde::Serialize for Subject {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

const fn plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'@' | b'-')
}

/// The address of an account, such as `users:alice:available`, `platform:fees` or `world`; canonical by construction.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(Arc<str>);

impl Address {
    /// Longest address, in bytes: a subject of 128 characters, all percent-encoded, and some more.
    pub const LENGTH_MAX: usize = 512;

    /// Joins segments, percent-encoding what is outside `[A-Za-z0-9._@-]`. None when there is no segment, one is empty,
    /// or the whole is longer than [`Self::LENGTH_MAX`].
    #[must_use]
    pub fn from_segments<'a>(segments: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let mut text = String::new();
        for segment in segments {
            if segment.is_empty() {
                return None;
            }
            if !text.is_empty() {
                text.push(':');
            }
            for byte in segment.bytes() {
                if plain(byte) {
                    text.push(char::from(byte));
                } else {
                    text.push('%');
                    text.push_str(&hex::encode_upper([byte]));
                }
            }
        }
        (!text.is_empty() && text.len() <= Self::LENGTH_MAX).then(|| Address(text.into()))
    }

    /// Takes a text that already is an address in its one spelling.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let decoded: Option<Vec<String>> = text.split(':').map(decode_segment).collect();
        let address = Self::from_segments(decoded?.iter().map(String::as_str))?;
        (address.as_str() == text).then_some(address)
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn decode_segment(segment: &str) -> Option<String> {
    let bytes = segment.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'%' {
            let pair = bytes.get(at + 1..at + 3)?;
            out.extend_from_slice(&hex::decode(pair).ok()?);
            at += 3;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    String::from_utf8(out).ok()
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl serde::Serialize for Address {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

/// How an account's balance is protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// A locked balances row that may not pass below this floor.
    Floor(Amount),
    /// Never locked and never checked, so it cannot become a hot row; its balance is the sum of its postings.
    None,
}

/// An address as the chart of accounts understands it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Where it is.
    pub address: Address,
    /// Whose it is; nobody's for `world` and the platform's accounts.
    pub owner: Option<Subject>,
    /// How its balance is protected.
    pub guard: Guard,
    /// Whether a credit may open it; else it must exist.
    pub opened_by_credit: bool,
}

/// One pattern of the chart, such as `users:{owner}:available` or `platform:*`.
#[derive(Clone, Debug)]
pub struct AccountPattern {
    /// Its segments, first to last.
    pub segments: Vec<Segment>,
    /// How balances of such accounts are protected.
    pub guard: Guard,
    /// Whether a credit may open such an account.
    pub opened_by_credit: bool,
}

/// One segment of a pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// Exactly this text.
    Literal(String),
    /// `{owner}`: any subject, percent-encoded.
    Owner,
    /// `*`: any one segment.
    Any,
}

impl AccountPattern {
    /// Reads a pattern's text: literals, `{owner}` (at most once) and `*`, joined by colons.
    #[must_use]
    pub fn parse(text: &str, guard: Guard, opened_by_credit: bool) -> Option<Self> {
        let mut segments = Vec::new();
        for part in text.split(':') {
            segments.push(match part {
                "{owner}" => Segment::Owner,
                "*" => Segment::Any,
                literal if !literal.is_empty() && literal.bytes().all(plain) => {
                    Segment::Literal(literal.to_owned())
                }
                _ => return None,
            });
        }
        let owners = segments.iter().filter(|s| **s == Segment::Owner).count();
        (owners <= 1).then_some(AccountPattern {
            segments,
            guard,
            opened_by_credit,
        })
    }

    fn matches(&self, address: &Address) -> Option<Option<Subject>> {
        let mut owner = None;
        let mut parts = address.as_str().split(':');
        for segment in &self.segments {
            let part = parts.next()?;
            match segment {
                Segment::Literal(literal) if literal == part => {}
                Segment::Literal(_) => return None,
                Segment::Owner => owner = Some(Subject::parse(&decode_segment(part)?)?),
                Segment::Any => {}
            }
        }
        parts.next().is_none().then_some(owner)
    }
}

/// The chart of accounts: the first pattern that matches says what an address is.
#[derive(Clone, Debug, Default)]
pub struct Chart {
    patterns: Vec<AccountPattern>,
}

impl Chart {
    /// Takes the patterns in the order in which they are tried.
    #[must_use]
    pub fn new(patterns: Vec<AccountPattern>) -> Self {
        Chart { patterns }
    }

    /// What this address is; None when no pattern knows it.
    #[must_use]
    pub fn account(&self, address: &Address) -> Option<Account> {
        self.patterns.iter().find_map(|pattern| {
            pattern.matches(address).map(|owner| Account {
                address: address.clone(),
                owner,
                guard: pattern.guard,
                opened_by_credit: pattern.opened_by_credit,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_chart_tells_owner_and_guard() {
        let chart = Chart::new(vec![
            AccountPattern::parse("users:{owner}:available", Guard::Floor(Amount::ZERO), true)
                .unwrap(),
            AccountPattern::parse("platform:*", Guard::None, true).unwrap(),
        ]);
        let address = Address::from_segments(["users", "a:b/c", "available"]).unwrap();
        assert_eq!(address.as_str(), "users:a%3Ab%2Fc:available");
        let account = chart.account(&address).unwrap();
        assert_eq!(account.owner.unwrap().as_str(), "a:b/c");
        assert!(
            chart
                .account(&Address::parse("platform:fees").unwrap())
                .is_some()
        );
        assert!(
            chart
                .account(&Address::parse("platform:fees:x").unwrap())
                .is_none()
        );
        assert!(chart.account(&Address::parse("world").unwrap()).is_none());
        assert!(AccountPattern::parse("a::b", Guard::None, true).is_none());
        assert!(AccountPattern::parse("{owner}:{owner}", Guard::None, true).is_none());
    }

    proptest! {
        #[test]
        fn an_address_has_one_spelling(segments in prop::collection::vec("[ -~]{1,20}", 1..4)) {
            let address = Address::from_segments(segments.iter().map(String::as_str)).unwrap();
            prop_assert_eq!(Address::parse(address.as_str()), Some(address));
        }

        #[test]
        fn what_parses_is_canonical(text in "[a-c:%0-9A-Fa-f]{0,20}") {
            if let Some(address) = Address::parse(&text) {
                prop_assert_eq!(address.as_str(), text);
            }
        }
    }
}
