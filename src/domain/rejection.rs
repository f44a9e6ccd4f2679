//! Why the ledger refuses an event: one variant a reason, each with its stable code.
//!
//! Says nothing of HTTP; the edge gives each code its status.

use super::address::{Address, Subject};
use super::money::Asset;
use jiff::Timestamp;
use std::borrow::Cow;

/// A refusal under the locks. It writes nothing and does not burn the idempotency key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// The token was revoked before this event was decided.
    #[error("the token has been revoked")]
    TokenRevoked,
    /// The key belongs to a request of another meaning.
    #[error("the idempotency key was used for a request of another meaning")]
    KeyReused,
    /// The user's sequence is not the expected one.
    #[error("the user's sequence is {actual}, not {expected}")]
    SequenceConflict {
        /// What the client believed.
        expected: u64,
        /// What it is.
        actual: u64,
    },
    /// A user whose account is debited, or the subject, is frozen.
    #[error("the user {0} is frozen")]
    UserFrozen(Subject),
    /// The writer may not debit this account.
    #[error("debiting {0} takes the scope ledger:write:any")]
    AccountNotYours(Address),
    /// No such account, and this event may not open it.
    #[error("there is no account {0}")]
    AccountUnknown(Address),
    /// A move from an account to itself.
    #[error("the account {0} is both source and target")]
    SameAccount(Address),
    /// A business key is taken.
    #[error("the key {key:?} is taken")]
    KeyTaken {
        /// The type's own code for it.
        code: String,
        /// The key.
        key: String,
        /// When it is free again, if ever.
        until: Option<Timestamp>,
    },
    /// A rule of the type does not hold.
    #[error("{detail}")]
    CheckFailed {
        /// The type's own code, or `type_error`.
        code: String,
        /// What was found.
        detail: String,
    },
    /// An amount or a balance would leave the range of 38 digits.
    #[error("an amount or a balance would exceed 38 digits")]
    AmountOverflow,
    /// The sources do not hold enough.
    #[error("{account} does not hold enough {asset}")]
    InsufficientFunds {
        /// The last source that was asked.
        account: Address,
        /// Of what.
        asset: Asset,
    },
    /// The record would be longer than 64 KiB.
    #[error("the record would exceed 65536 bytes")]
    RecordTooLarge,
}

impl Rejection {
    /// A valid event on which the type's own arithmetic failed.
    pub fn type_error(detail: impl Into<String>) -> Self {
        Rejection::CheckFailed {
            code: "type_error".to_owned(),
            detail: detail.into(),
        }
    }

    /// Its stable code.
    #[must_use]
    pub fn code(&self) -> Cow<'_, str> {
        Cow::Borrowed(match self {
            Rejection::TokenRevoked => "token_revoked",
            Rejection::KeyReused => "idempotency_key_reused",
            Rejection::SequenceConflict { .. } => "sequence_conflict",
            Rejection::UserFrozen(_) => "user_frozen",
            Rejection::AccountNotYours(_) => "account_not_yours",
            Rejection::AccountUnknown(_) => "account_unknown",
            Rejection::SameAccount(_) => "same_account",
            Rejection::KeyTaken { code, .. } | Rejection::CheckFailed { code, .. } => code,
            Rejection::AmountOverflow => "amount_overflow",
            Rejection::InsufficientFunds { .. } => "insufficient_funds",
            Rejection::RecordTooLarge => "record_too_large",
        })
    }
}
