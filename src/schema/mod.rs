//! Event types as data: the registry that turns a request into a [`Draft`].
//!
//! Pure CPU after the start: reads no state, no clock, opens nothing. What it cannot decide without state it leaves to
//! the decision, as part of the draft.

mod declared;
mod effects;
mod embedded;
mod examples;
mod expression;
mod kind;
mod load;
mod request;
mod values;

#[cfg(test)]
mod tests;

pub use kind::{EventType, Example, SchemaVersion};
pub use load::LoadError;

use crate::domain::{
    Asset, Chart, Draft, FailedCheck, IdempotencyKey, Principal, Scope, Subject, Version,
};
use effects::{Assets, Outcome};
use expression::{Engine, Variables};
use request::Envelope;
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// All event types, their versions, the assets and the chart of accounts; built once at start.
#[derive(Debug)]
pub struct Registry {
    engine: Engine,
    assets: Arc<Assets>,
    chart: Chart,
    types: BTreeMap<String, EventType>,
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
    #[error("there is no type {0:?}; GET /v1/types lists what there is")]
    UnknownType(String),
    /// No such version of the type (400 `unknown_schema`).
    #[error("the type has no version {0:?}; GET /v1/types lists what there is")]
    UnknownSchema(String),
    /// The type takes a scope that the token lacks (403 `scope_missing`).
    #[error("the type takes the scope {0}")]
    ScopeMissing(&'static str),
    /// Another's subject without `ledger:write:any` (403 `subject_not_yours`).
    #[error("writing for another subject takes the scope ledger:write:any")]
    SubjectNotYours,
}

impl Registry {
    /// All types, by name.
    pub fn types(&self) -> impl Iterator<Item = &EventType> {
        self.types.values()
    }

    /// One type.
    #[must_use]
    pub fn event_type(&self, name: &str) -> Option<&EventType> {
        self.types.get(name)
    }

    /// All assets of the ledger, by code.
    pub fn assets(&self) -> impl Iterator<Item = &Asset> {
        self.assets.values()
    }

    /// The asset of this spelling; None for any spelling but the one, such as `EUR`, `EUR/0` or `eur/2`.
    #[must_use]
    pub fn asset(&self, spelling: &str) -> Option<Asset> {
        effects::asset(&self.assets, spelling).cloned()
    }

    /// The chart of accounts.
    #[must_use]
    pub fn chart(&self) -> &Chart {
        &self.chart
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
        let mut envelope = Envelope::read(body).map_err(|error| Refused::Invalid(vec![error]))?;
        let kind = self.kind_of(&envelope)?;
        if !principal.scopes.has(kind.scope()) {
            return Err(Refused::ScopeMissing(kind.scope().name()));
        }
        let version = version_of(kind, &envelope)?;
        let data = envelope.data.take().unwrap_or(Value::Null);
        let mut errors = envelope.errors;
        if let Some(version) = version
            && !errors.iter().any(|error| error.pointer == "/data")
            && !version.accepts(&data)
        {
            errors.extend(version.errors(&data));
        }
        let Some(version) = version
            .map(SchemaVersion::version)
            .filter(|_| errors.is_empty())
        else {
            errors.truncate(kind::ERRORS_MAX);
            return Err(Refused::Invalid(errors));
        };
        let subject = envelope
            .subject
            .unwrap_or_else(|| principal.subject.clone());
        if subject != principal.subject && !principal.scopes.has(Scope::WriteAny) {
            return Err(Refused::SubjectNotYours);
        }
        // Members are sorted: serde_json's map is a B-tree, which a test holds.
        let sent = data.to_string();
        let fingerprint = request::fingerprint(
            kind.name().as_str(),
            version,
            &subject,
            envelope.time,
            &sent,
        );
        let made = self.make(kind, version, &subject, &principal.subject, &data, sent)?;
        Ok(Draft {
            subject,
            principal: principal.clone(),
            event_type: kind.name().clone(),
            schema: kind.current(),
            input_schema: (version != kind.current()).then_some(version),
            time: envelope.time,
            expected_sequence: envelope.expected_sequence,
            key,
            fingerprint,
            input: made.input,
            passes_freeze: kind.passes_freeze,
            unknown_account: made.outcome.unknown_account,
            failed_check: made.outcome.failed,
            moves: made.outcome.moves,
            unique: made.outcome.unique,
            traceparent,
        })
    }

    fn kind_of(&self, envelope: &Envelope) -> Result<&EventType, Refused> {
        let Some(name) = &envelope.event_type else {
            return Err(Refused::Invalid(envelope.errors.clone()));
        };
        self.event_type(name)
            .ok_or_else(|| Refused::UnknownType(shortened(name)))
    }

    /// Upcasts, normalises and evaluates valid data.
    fn make(
        &self,
        kind: &EventType,
        version: Version,
        subject: &Subject,
        writer: &Subject,
        data: &Value,
        sent: String,
    ) -> Result<Made, Refused> {
        let mut outcome = Outcome::default();
        let mut input = Cow::Borrowed(data);
        if version != kind.current() {
            match kind.upcast(&self.engine, &self.assets, version, data, subject, writer) {
                Ok(upcast) => input = Cow::Owned(upcast),
                Err(failure) => outcome.fail(failure, "upcast"),
            }
        }
        if outcome.failed.is_none() {
            let conflict = if kind.normalises(&input) {
                kind.normalise(input.to_mut()).err()
            } else {
                None
            };
            let variables = Variables::new(&input, subject.as_str(), writer.as_str());
            outcome =
                kind.effects
                    .evaluate(&self.engine, &variables, &input, &self.assets, &self.chart);
            if let Some((code, detail)) = conflict {
                outcome.failed = Some(FailedCheck { code, detail });
            }
        }
        let text = match &input {
            Cow::Borrowed(_) => sent,
            Cow::Owned(value) => value.to_string(),
        };
        let input = serde_json::value::RawValue::from_string(text).map_err(|error| {
            Refused::Invalid(vec![FieldError {
                pointer: "/data".to_owned(),
                detail: error.to_string(),
            }])
        })?;
        Ok(Made { input, outcome })
    }

    /// The JSON Schema of a type's record, as it is stored, answered and published.
    #[must_use]
    pub fn record_schema(&self, kind: &EventType) -> Value {
        let text = serde_json::json!({"type": "string"});
        let posting = serde_json::json!({
            "type": "object",
            "properties": {"account": text, "asset": text, "amount": text, "balance": text},
            "required": ["account", "asset", "amount"],
            "additionalProperties": false,
        });
        serde_json::json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": format!("{} record", kind.name()),
            "description": "A CloudEvents 1.0 object in compact JSON.",
            "type": "object",
            "properties": {
                "specversion": {"const": "1.0"},
                "id": {"type": "string", "format": "uuid"},
                "source": text,
                "type": {"const": kind.name()},
                "subject": text,
                "time": {"type": "string", "format": "date-time", "description": "When it took effect."},
                "recordedtime": {"type": "string", "format": "date-time", "description": "When it was recorded."},
                "schemaversion": text,
                "inputschema": {"type": "string", "description": "The client's version, when it is another one."},
                "usersequence": {"type": "string", "pattern": "^[1-9][0-9]*$"},
                "previoushash": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
                "idempotencykey": text,
                "authid": {"type": "string", "description": "The writer, when he is not the subject."},
                "data": {
                    "type": "object",
                    "properties": {
                        "input": kind.input_schema(),
                        "postings": {"type": "array", "items": posting},
                        "effects": {"type": "object"},
                    },
                    "required": ["input", "postings"],
                },
            },
            "required": ["specversion", "id", "source", "type", "subject", "time", "recordedtime", "schemaversion",
                "usersequence", "previoushash", "idempotencykey", "data"],
        })
    }
}

/// What valid data comes to.
struct Made {
    input: Box<serde_json::value::RawValue>,
    outcome: Outcome,
}

/// A name from a request, short enough to be repeated in an answer.
fn shortened(name: &str) -> String {
    name.chars().take(64).collect()
}

/// The version that a request names. None when it names none, which is among the envelope's errors.
fn version_of<'a>(
    kind: &'a EventType,
    envelope: &Envelope,
) -> Result<Option<&'a SchemaVersion>, Refused> {
    let Some(text) = &envelope.schema else {
        return Ok(None);
    };
    match Version::parse(text).and_then(|version| kind.version(version)) {
        Some(version) => Ok(Some(version)),
        None => Err(Refused::UnknownSchema(shortened(text))),
    }
}
