//! Event types as data: the registry that turns a request into a [`Draft`].

use crate::domain::{Draft, IdempotencyKey, Principal};

/// All event types, their versions, the assets and the chart of accounts; built once at start.
#[derive(Debug)]
pub struct Registry {}

/// One member that is wrong, by JSON Pointer.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct FieldError {
    /// RFC 6901 pointer into the request body, such as `/data/amount`.
    pub pointer: String,
    /// What is wrong with it.
    pub detail: String,
}

/// Why a request does not become a draft.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Does not parse or validate (400).
    #[error("the request is invalid")]
    Invalid(Vec<FieldError>),
    /// No such type (400 `unknown_type`).
    #[error("there is no type {0:?}")]
    UnknownType(String),
    /// No such version of the type (400 `unknown_schema`).
    #[error("there is no schema {0:?}")]
    UnknownSchema(String),
    /// The type takes a scope that the token lacks (403 `scope_missing`).
    #[error("the type takes the scope {0}")]
    ScopeMissing(&'static str),
    /// Another's subject without `ledger:write:any` (403 `subject_not_yours`).
    #[error("writing for another subject takes the scope ledger:write:any")]
    SubjectNotYours,
}

impl Registry {
    /// Reads the body of `POST /v1/events` and makes the draft. Pure CPU.
    ///
    /// # Errors
    /// [`Refused`], in the documented order of refusals.
    pub fn draft(
        &self,
        principal: &Principal,
        key: IdempotencyKey,
        traceparent: Option<String>,
        body: &[u8],
    ) -> Result<Draft, Refused> {
        let _ = (principal, key, traceparent, body);
        Err(Refused::Invalid(Vec::new()))
    }
}
