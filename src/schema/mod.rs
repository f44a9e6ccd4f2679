//! Event types as data: the registry that turns a request into a [`Draft`].

use crate::domain::{Chart, Draft, IdempotencyKey, Principal, Scope, TypeName, Version};
use serde_json::Value;
use std::path::Path;

/// All event types, their versions, the assets and the chart of accounts; built once at start.
#[derive(Debug)]
pub struct Registry {
    chart: Chart,
    types: Vec<EventType>,
}

/// Why the types cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the types cannot be used")]
pub struct LoadError {}

/// An event type.
#[derive(Debug)]
pub struct EventType {
    name: TypeName,
    summary: String,
    scope: Scope,
    current: Version,
    versions: Vec<SchemaVersion>,
}

impl EventType {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &TypeName {
        &self.name
    }

    /// One line about it.
    #[must_use]
    pub fn summary(&self) -> &str {
        &self.summary
    }

    /// The scope that writing it takes.
    #[must_use]
    pub fn scope(&self) -> Scope {
        self.scope
    }

    /// The version that records have.
    #[must_use]
    pub fn current(&self) -> Version {
        self.current
    }

    /// All versions that are accepted, oldest first.
    pub fn versions(&self) -> impl Iterator<Item = &SchemaVersion> {
        self.versions.iter()
    }

    /// One version.
    #[must_use]
    pub fn version(&self, version: Version) -> Option<&SchemaVersion> {
        self.versions.iter().find(|one| one.version == version)
    }

    /// The JSON Schema of `data.input` in a record.
    #[must_use]
    pub fn input_schema(&self) -> Value {
        Value::Null
    }
}

/// One version of a type's data.
#[derive(Debug)]
pub struct SchemaVersion {
    version: Version,
    schema: Value,
    examples: Vec<Example>,
}

impl SchemaVersion {
    /// Which version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Its JSON Schema.
    #[must_use]
    pub fn schema(&self) -> &Value {
        &self.schema
    }

    /// Its examples, by name.
    #[must_use]
    pub fn examples(&self) -> &[Example] {
        &self.examples
    }
}

/// An example of a version: a request, and what comes of it.
#[derive(Clone, Debug)]
pub struct Example {
    /// Its name.
    pub name: String,
    /// Whether the request is accepted.
    pub accepted: bool,
    /// The file: `{"request": ..., "expect": ...}`.
    pub text: String,
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
    /// Builds the registry.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn load(directory: Option<&Path>) -> Result<Registry, LoadError> {
        let _ = directory;
        Ok(Registry {
            chart: Chart::default(),
            types: Vec::new(),
        })
    }

    /// The chart of accounts.
    #[must_use]
    pub fn chart(&self) -> &Chart {
        &self.chart
    }

    /// All types, by name.
    pub fn types(&self) -> impl Iterator<Item = &EventType> {
        self.types.iter()
    }

    /// One type.
    #[must_use]
    pub fn event_type(&self, name: &str) -> Option<&EventType> {
        self.types.iter().find(|kind| kind.name.as_str() == name)
    }

    /// The JSON Schema of a type's record.
    #[must_use]
    pub fn record_schema(&self, kind: &EventType) -> Value {
        let _ = kind;
        Value::Null
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
