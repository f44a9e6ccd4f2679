//! A draft: a valid request with everything named that it will touch; what is left needs the locks.
//!
//! Made by `schema` only. Nothing here reads state.

use super::address::{Account, Address, Subject};
use super::money::{Amount, Asset};
use super::principal::Principal;
use jiff::Timestamp;
use std::fmt;
use std::sync::Arc;

/// The name of an event type: `[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*`, at most 64 bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TypeName(Arc<str>);

impl TypeName {
    /// Longest name, in bytes.
    pub const LENGTH_MAX: usize = 64;

    /// Takes a text, if it is a type name.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let segment = |part: &str| {
            part.as_bytes().first().is_some_and(u8::is_ascii_lowercase)
                && part
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
        };
        let fits = (1..=Self::LENGTH_MAX).contains(&text.len());
        (fits && text.split('.').all(segment)).then(|| TypeName(text.into()))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TypeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl serde::Serialize for TypeName {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

/// A schema version, `major.minor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Breaks clients.
    pub major: u16,
    /// Adds to the form.
    pub minor: u16,
}

impl Version {
    /// Reads the one spelling, such as `1.7`: no sign, no leading zero.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.split_once('.')?;
        let version = Version {
            major: major.parse().ok()?,
            minor: minor.parse().ok()?,
        };
        (version.to_string() == text).then_some(version)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl serde::Serialize for Version {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The client's key for "this is the same request": 1 to 128 visible ASCII characters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IdempotencyKey(Arc<str>);

impl IdempotencyKey {
    /// Longest key, in bytes.
    pub const LENGTH_MAX: usize = 128;

    /// Takes a header's value; one pair of quotation marks around it does not count.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let inner = text
            .strip_prefix('"')
            .and_then(|t| t.strip_suffix('"'))
            .unwrap_or(text);
        Self::exact(inner)
    }

    /// The key of exactly this text, as it was stored: quotation marks are part of it.
    #[must_use]
    pub fn exact(text: &str) -> Option<Self> {
        let fits = (1..=Self::LENGTH_MAX).contains(&text.len());
        (fits && text.bytes().all(|b| b.is_ascii_graphic())).then(|| IdempotencyKey(text.into()))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl serde::Serialize for IdempotencyKey {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

/// An amount that may depend on what the moves before it took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AmountExpr {
    /// Known when the draft was made.
    Known(Amount),
    /// What an earlier move of the same event took from one of its sources (both counted from 0).
    Taken {
        /// Index of the earlier move in [`Draft::moves`].
        of_move: usize,
        /// Index of the source in that move's `from`.
        source: usize,
    },
    /// A sum.
    Plus(Box<AmountExpr>, Box<AmountExpr>),
    /// A difference.
    Minus(Box<AmountExpr>, Box<AmountExpr>),
    /// A floored share in basis points.
    BasisPoints(Box<AmountExpr>, u32),
}

/// What one target of a move receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Portion {
    /// This much.
    Amount(AmountExpr),
    /// Basis points of what the fixed amounts leave. Without a `Rest` the shares of a move sum to 10,000 and are split by
    /// largest remainder, ties to the first; with one they are floored.
    Share(u32),
    /// All that the others leave. At most one a move.
    Rest,
}

/// One receiver of a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Where it goes.
    pub account: Account,
    /// How much of it.
    pub portion: Portion,
}

/// Money that changes its place: taken from `from` in order, each down to its floor, and given to `to`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// In what.
    pub asset: Asset,
    /// How much in all.
    pub amount: AmountExpr,
    /// Sources, in the order in which they are emptied.
    pub from: Vec<Account>,
    /// Targets. Without `Share` and `Rest` their amounts sum to `amount`.
    pub to: Vec<Target>,
}

/// A business key that this event takes, for ever or for a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UniqueKey {
    /// Which set of keys; the type's name unless the type says otherwise.
    pub namespace: String,
    /// The key in it.
    pub key: String,
    /// The refusal's code when it is taken.
    pub code: String,
    /// For how many seconds it is taken; for ever when None.
    pub seconds: Option<u32>,
}

/// A rule of the type that the request breaks; reported in its place in the order of refusals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedCheck {
    /// The type's own code, or `type_error`.
    pub code: String,
    /// What was found, for the client.
    pub detail: String,
}

/// A valid request, ready for a lane.
#[derive(Clone, Debug)]
pub struct Draft {
    /// Whose history it extends.
    pub subject: Subject,
    /// Who writes it.
    pub principal: Principal,
    /// Its type.
    pub event_type: TypeName,
    /// The type's current version, which `input` satisfies.
    pub schema: Version,
    /// The version the client used, when it is another one.
    pub input_schema: Option<Version>,
    /// When it took effect, when the client says so.
    pub time: Option<Timestamp>,
    /// The sequence that the client believes the user to have.
    pub expected_sequence: Option<u64>,
    /// The client's key.
    pub key: IdempotencyKey,
    /// SHA-256 of the request's meaning as sent.
    pub fingerprint: [u8; 32],
    /// The data in the current version, as compact JSON.
    pub input: Box<serde_json::value::RawValue>,
    /// Whether a frozen user's event of this type is accepted all the same.
    pub passes_freeze: bool,
    /// An address in it that the chart does not know.
    pub unknown_account: Option<Address>,
    /// The first rule of the type that it breaks.
    pub failed_check: Option<FailedCheck>,
    /// Its moves, in order.
    pub moves: Vec<Move>,
    /// The business keys it takes.
    pub unique: Vec<UniqueKey>,
    /// The W3C trace context it came with.
    pub traceparent: Option<String>,
}

impl Draft {
    /// Every account that it may debit.
    pub fn debited(&self) -> impl Iterator<Item = &Account> {
        self.moves.iter().flat_map(|one| &one.from)
    }

    /// Every account and asset it may touch.
    pub fn touched(&self) -> impl Iterator<Item = (&Account, &Asset)> {
        self.moves.iter().flat_map(|one| {
            one.from
                .iter()
                .chain(one.to.iter().map(|target| &target.account))
                .map(move |account| (account, &one.asset))
        })
    }

    /// The subject and every owner it debits: the users whose locks it needs.
    pub fn locked_users(&self) -> impl Iterator<Item = &Subject> {
        self.debited()
            .filter_map(|account| account.owner.as_ref())
            .chain([&self.subject])
    }
}
