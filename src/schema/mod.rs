//! Event types as data: the registry that turns a request into a [`Draft`].

use crate::domain::{Chart, Draft, IdempotencyKey, Principal, TypeName, Version};

/// All event types, their versions, the assets and the chart of accounts; built once at start.
#[derive(Debug, Default)]
pub struct Registry {
    chart: Chart,
}

/// An event type, for those who write events of it.
#[derive(Clone, Debug)]
pub struct TypeInfo {
    /// Its name.
    pub name: TypeName,
    /// What it is for.
    pub summary: String,
    /// The scope it takes.
    pub scope: &'static str,
    /// The version that events are stored in.
    pub current: Version,
    /// The versions that are accepted, oldest first.
    pub versions: Vec<Version>,
}

/// One version of a type.
#[derive(Clone, Debug)]
pub struct VersionInfo<'a> {
    /// The JSON Schema of `data`, as text.
    pub schema: &'a str,
    /// Requests that are accepted or refused.
    pub examples: Vec<Example<'a>>,
}

/// One example of a version.
#[derive(Clone, Copy, Debug)]
pub struct Example<'a> {
    /// Its name.
    pub name: &'a str,
    /// Whether the version accepts it.
    pub accepted: bool,
    /// The example, as JSON text.
    pub request: &'a str,
}

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
    /// The chart of accounts.
    #[must_use]
    pub fn chart(&self) -> &Chart {
        &self.chart
    }

    /// Every type, by name.
    #[must_use]
    pub fn types(&self) -> Vec<TypeInfo> {
        Vec::new()
    }

    /// One version of a type.
    #[must_use]
    pub fn version(&self, name: &TypeName, version: Version) -> Option<VersionInfo<'_>> {
        let _ = (name, version);
        None
    }

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
