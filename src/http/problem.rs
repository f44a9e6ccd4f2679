//! Problem documents (RFC 9457) and the one table of codes.
//!
//! Never tells anything of the inside: what went wrong with us is in the log, under the request's id.

use crate::auth::AuthError;
use crate::commit::Unavailable;
use crate::domain::Rejection;
use crate::schema::{FieldError, Refused};
use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, Response, StatusCode};
use jiff::Timestamp;
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// A code, its status and its title.
#[derive(Clone, Copy, Debug)]
pub struct Code {
    /// Stable; clients decide by it.
    pub code: &'static str,
    /// The HTTP status.
    pub status: u16,
    /// For people.
    pub title: &'static str,
}

const fn row(code: &'static str, status: u16, title: &'static str) -> Code {
    Code {
        code,
        status,
        title,
    }
}

/// Every code of the service. A type's own codes (of `check` and `unique`) are 422 and are not here.
pub const CODES: &[Code] = &[
    row("token_missing", 401, "A token is required"),
    row("token_invalid", 401, "The token is not valid"),
    row("token_revoked", 401, "The token has been revoked"),
    row("scope_missing", 403, "The token lacks a scope"),
    row("subject_not_yours", 403, "The subject is another's"),
    row("invalid_request", 400, "The request is not valid"),
    row(
        "idempotency_key_missing",
        400,
        "An idempotency key is required",
    ),
    row(
        "idempotency_key_invalid",
        400,
        "The idempotency key is not valid",
    ),
    row("unknown_type", 400, "There is no such event type"),
    row("unknown_schema", 400, "There is no such schema version"),
    row("schema_retired", 410, "The schema version has been retired"),
    row("not_found", 404, "There is nothing here for you"),
    row(
        "method_not_allowed",
        405,
        "The resource does not take this method",
    ),
    row("request_timeout", 408, "The request did not arrive in time"),
    row("body_too_large", 413, "The body is too large"),
    row(
        "unsupported_media_type",
        415,
        "The body must be application/json",
    ),
    row(
        "idempotency_key_reused",
        422,
        "The idempotency key belongs to another request",
    ),
    row("sequence_conflict", 409, "The user's sequence is another"),
    row("user_frozen", 422, "The user is frozen"),
    row("account_not_yours", 422, "The account is another's"),
    row("account_unknown", 422, "There is no such account"),
    row(
        "same_account",
        422,
        "Source and target are the same account",
    ),
    row(
        "type_error",
        422,
        "The type cannot be applied to this event",
    ),
    row("amount_overflow", 422, "An amount is out of range"),
    row("insufficient_funds", 422, "The sources do not hold enough"),
    row("record_too_large", 422, "The record would be too large"),
    row("internal", 500, "Something is wrong with the service"),
    row("lane_full", 503, "Too many requests are waiting"),
    row(
        "deadline_passed",
        503,
        "The deadline passed; nothing was done",
    ),
    row("database_unavailable", 503, "The database is not available"),
    row("clock_skew", 503, "The clocks are too far apart"),
    row("stopping", 503, "The service is stopping"),
    row(
        "outcome_unknown",
        504,
        "The outcome is not known: send the same request again",
    ),
];

/// What a client is told to wait after a 503, in seconds.
const RETRY_AFTER_S: u64 = 1;

/// A refusal on its way to the client.
#[derive(Clone, Debug)]
pub struct Problem {
    code: Cow<'static, str>,
    status: u16,
    title: Cow<'static, str>,
    detail: String,
    members: Map<String, Value>,
    retry_after_s: Option<u64>,
}

impl Problem {
    /// A problem of the table. A code that is not there is a type's own: 422.
    #[must_use]
    pub fn new(code: &str, detail: impl Into<String>) -> Self {
        match CODES.iter().find(|row| row.code == code) {
            None => Self::of_type(code.to_owned(), detail),
            Some(row) => Problem {
                code: row.code.into(),
                status: row.status,
                title: row.title.into(),
                detail: detail.into(),
                members: Map::new(),
                retry_after_s: (row.status == 503).then_some(RETRY_AFTER_S),
            },
        }
    }

    fn of_type(code: String, detail: impl Into<String>) -> Self {
        Problem {
            code: code.into(),
            status: 422,
            title: "A rule of the event type does not hold".into(),
            detail: detail.into(),
            members: Map::new(),
            retry_after_s: None,
        }
    }

    /// A request that does not parse or validate.
    #[must_use]
    pub fn invalid(detail: impl Into<String>) -> Self {
        Self::new("invalid_request", detail)
    }

    /// What does not exist, or is not the client's.
    #[must_use]
    pub fn not_found() -> Self {
        Self::new("not_found", "there is no such resource, or it is not yours")
    }

    /// The refusal of a token that lacks the scopes of a route.
    #[must_use]
    pub fn scope_missing(scopes: &str) -> Self {
        Self::new("scope_missing", format!("this takes the scope {scopes}"))
    }

    /// Something is wrong with us; what, is in the log.
    #[must_use]
    pub fn internal() -> Self {
        Self::new(
            "internal",
            "the request could not be answered; the log has its id",
        )
    }

    /// With one more member.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.members.insert(name.to_owned(), value.into());
        self
    }

    /// Its code.
    #[must_use]
    pub fn code(&self) -> &str {
        &self.code
    }

    /// Its status.
    #[must_use]
    pub const fn status(&self) -> u16 {
        self.status
    }

    fn challenge(&self) -> Option<&'static str> {
        match &*self.code {
            "token_missing" => Some("Bearer realm=\"daybook\""),
            "token_invalid" | "token_revoked" => {
                Some("Bearer realm=\"daybook\", error=\"invalid_token\"")
            }
            "scope_missing" => Some("Bearer realm=\"daybook\", error=\"insufficient_scope\""),
            _ => None,
        }
    }

    /// The document.
    #[must_use]
    pub fn into_response(self, request_id: &str) -> Response<Body> {
        let challenge = self.challenge();
        let mut members = Map::new();
        members.insert("type".to_owned(), format!("/problems/{}", self.code).into());
        members.insert("title".to_owned(), self.title.into());
        members.insert("status".to_owned(), self.status.into());
        members.insert("code".to_owned(), self.code.into());
        members.insert("detail".to_owned(), self.detail.into());
        members.insert("request_id".to_owned(), request_id.into());
        if let Some(seconds) = self.retry_after_s {
            members.insert("retry_after".to_owned(), seconds.into());
        }
        members.extend(self.members);
        let mut response = Response::new(Body::from(Value::Object(members).to_string()));
        *response.status_mut() =
            StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(seconds) = self.retry_after_s {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(challenge) = challenge {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
        }
        response
    }

    /// A refusal under the locks. `now` only serves to say how long a key is still taken.
    #[must_use]
    pub fn rejected(rejection: &Rejection, now: Timestamp) -> Self {
        let detail = rejection.to_string();
        match rejection {
            Rejection::CheckFailed { code, .. } => Self::of_type(code.clone(), detail),
            Rejection::KeyTaken { code, key, until } => {
                let mut problem = Self::of_type(code.clone(), detail).with("key", key.as_str());
                if let Some(until) = until {
                    let left = until.duration_since(now).as_secs().saturating_add(1);
                    problem.retry_after_s = Some(u64::try_from(left).unwrap_or_default().max(1));
                    problem = problem.with("until", crate::domain::time::micros(*until));
                }
                problem
            }
            other => {
                let problem = Self::new(&other.code(), detail);
                match other {
                    Rejection::SequenceConflict { expected, actual } => {
                        problem.with("expected", *expected).with("actual", *actual)
                    }
                    Rejection::UserFrozen(subject) => problem.with("subject", subject.as_str()),
                    Rejection::AccountNotYours(account)
                    | Rejection::AccountUnknown(account)
                    | Rejection::SameAccount(account) => problem.with("account", account.as_str()),
                    Rejection::InsufficientFunds { account, asset } => problem
                        .with("account", account.as_str())
                        .with("asset", asset.as_str()),
                    _ => problem,
                }
            }
        }
    }
}

impl From<AuthError> for Problem {
    fn from(error: AuthError) -> Self {
        Problem::new(error.code(), error.to_string())
    }
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Self {
        let problem = Problem::new(refused_code(&refused), refused.to_string());
        match refused {
            Refused::Invalid(errors) => problem.with("errors", field_errors(&errors)),
            Refused::ScopeMissing(scope) => problem.with("scope", scope),
            _ => problem,
        }
    }
}

impl From<Unavailable> for Problem {
    fn from(unavailable: Unavailable) -> Self {
        Problem::new(
            unavailable_code(unavailable),
            "nothing was written; send the same request again",
        )
    }
}

/// The code of a refusal before the locks.
#[must_use]
pub const fn refused_code(refused: &Refused) -> &'static str {
    match refused {
        Refused::Invalid(_) => "invalid_request",
        Refused::UnknownType(_) => "unknown_type",
        Refused::UnknownSchema(_) => "unknown_schema",
        Refused::ScopeMissing(_) => "scope_missing",
        Refused::SubjectNotYours => "subject_not_yours",
    }
}

/// The code of a request that could not be taken.
#[must_use]
pub const fn unavailable_code(unavailable: Unavailable) -> &'static str {
    match unavailable {
        Unavailable::QueueFull => "lane_full",
        Unavailable::DeadlinePassed => "deadline_passed",
        Unavailable::Database => "database_unavailable",
        Unavailable::ClockSkew => "clock_skew",
        Unavailable::Stopping => "stopping",
    }
}

fn field_errors(errors: &[FieldError]) -> Value {
    errors
        .iter()
        .map(|error| json!({"pointer": error.pointer, "detail": error.detail}))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Address, Asset, Subject};
    use std::collections::HashSet;

    fn rejections() -> Vec<Rejection> {
        let address = Address::parse("world").unwrap();
        vec![
            Rejection::TokenRevoked,
            Rejection::KeyReused,
            Rejection::SequenceConflict {
                expected: 1,
                actual: 2,
            },
            Rejection::UserFrozen(Subject::parse("alice").unwrap()),
            Rejection::AccountNotYours(address.clone()),
            Rejection::AccountUnknown(address.clone()),
            Rejection::SameAccount(address.clone()),
            Rejection::type_error("x"),
            Rejection::AmountOverflow,
            Rejection::InsufficientFunds {
                account: address,
                asset: Asset::from_canonical("EUR/2"),
            },
            Rejection::RecordTooLarge,
        ]
    }

    #[test]
    fn every_code_is_in_the_table_once() {
        let known: HashSet<&str> = CODES.iter().map(|row| row.code).collect();
        assert_eq!(known.len(), CODES.len());
        for rejection in rejections() {
            assert!(known.contains(&*rejection.code()), "{rejection:?}");
        }
        for refused in [
            Refused::Invalid(Vec::new()),
            Refused::UnknownType(String::new()),
            Refused::UnknownSchema(String::new()),
            Refused::ScopeMissing("ledger:admin"),
            Refused::SubjectNotYours,
        ] {
            assert!(known.contains(refused_code(&refused)), "{refused:?}");
        }
        for error in [AuthError::Missing, AuthError::Expired] {
            assert!(known.contains(error.code()));
        }
        for unavailable in [
            Unavailable::QueueFull,
            Unavailable::DeadlinePassed,
            Unavailable::Database,
            Unavailable::ClockSkew,
            Unavailable::Stopping,
        ] {
            assert_eq!(Problem::from(unavailable).status(), 503);
            assert!(known.contains(unavailable_code(unavailable)));
        }
    }

    #[test]
    fn a_types_own_code_is_422_even_when_it_is_the_services() {
        let rejection = Rejection::CheckFailed {
            code: "internal".to_owned(),
            detail: "no".to_owned(),
        };
        let problem = Problem::rejected(&rejection, Timestamp::UNIX_EPOCH);
        assert_eq!((problem.status(), problem.code()), (422, "internal"));
    }

    #[test]
    fn a_key_taken_for_a_time_says_how_long() {
        let rejection = Rejection::KeyTaken {
            code: "payout_too_soon".to_owned(),
            key: "k".to_owned(),
            until: Some(Timestamp::from_millisecond(2_500).unwrap()),
        };
        let response =
            Problem::rejected(&rejection, Timestamp::UNIX_EPOCH).into_response("request-1");
        assert_eq!(response.status(), 422);
        assert_eq!(response.headers()[RETRY_AFTER], "3");
        let response = Problem::from(AuthError::Missing).into_response("request-1");
        assert_eq!(response.status(), 401);
        assert!(response.headers().contains_key(WWW_AUTHENTICATE));
    }
}
