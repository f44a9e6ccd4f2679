//! The rules of the ledger: what an event means and whether it may happen.
//!
//! Pure: no IO, no clock, no randomness, no async. Time and ids come in as values.

pub mod address;
pub mod decide;
pub mod draft;
pub mod money;
pub mod principal;
#[cfg(test)]
pub(crate) mod properties;
pub mod rejection;
pub mod time;

pub use address::{Account, AccountPattern, Address, Chart, Guard, Subject};
pub use decide::{Accepted, Decision, Posting, State, Stored, UserState, decide};
pub use draft::{
    AmountExpr, Draft, FailedCheck, IdempotencyKey, Move, Portion, Target, TypeName, UniqueKey,
    Version,
};
pub use money::{Amount, Asset};
pub use principal::{Principal, Scope, Scopes};
pub use rejection::Rejection;
