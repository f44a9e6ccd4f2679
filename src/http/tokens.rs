//! Revocation of tokens: one by its id, or all of a subject's up to a moment.

use super::no_content;
use super::problem::Problem;
use super::request::{Call, database};
use crate::auth::{LEEWAY_S, is_token_id};
use crate::domain::{Scope, Subject};
use crate::store::reads;
use axum::body::Body;
use axum::http::Response;
use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use std::sync::Arc;

/// `{"issuer"?, "jti"}` or `{"issuer"?, "subject", "issued_before"?}`, either with `expires_at`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    issuer: Option<String>,
    jti: Option<String>,
    subject: Option<String>,
    issued_before: Option<String>,
    expires_at: Option<String>,
}

/// What is to be revoked, and of which issuer.
enum Revocation {
    Token {
        issuer: Arc<str>,
        token_id: String,
    },
    Subject {
        issuer: Arc<str>,
        subject: Subject,
        issued_before: Option<Timestamp>,
    },
}

/// `POST /v1/tokens/revoke`: one's own token, or all of one's own; anything else takes `ledger:admin`.
pub(super) async fn revoke(call: Call) -> Result<Response<Body>, Problem> {
    let body: Request = serde_json::from_slice(&call.body).map_err(|error| {
        Problem::invalid(format!(
            "the body does not parse: line {} column {}",
            error.line(),
            error.column()
        ))
    })?;
    let now = Timestamp::now();
    let expires_at = moment("expires_at", body.expires_at.as_deref())?;
    if expires_at.is_some_and(|at| at <= now) {
        return Err(Problem::invalid("expires_at has passed"));
    }
    let revocation = revocation(&call, body, now)?;
    allowed(&call, &revocation)?;
    let client = call.client().await?;
    // The check comes first, not beside: a revoked token must not change anything.
    call.read(&client, async { Ok(()) }).await?;
    match revocation {
        Revocation::Token { issuer, token_id } => {
            reads::revoke_token(&client, &issuer, &token_id, expires_at).await
        }
        Revocation::Subject {
            issuer,
            subject,
            issued_before,
        } => reads::revoke_subject(&client, &issuer, &subject, issued_before, expires_at).await,
    }
    .map_err(|error| database(&error))?;
    Ok(no_content())
}

fn revocation(call: &Call, body: Request, now: Timestamp) -> Result<Revocation, Problem> {
    let verifier = &call.app.verifier;
    let issuer = body
        .issuer
        .map(|name| {
            verifier
                .issuer(&name)
                .ok_or_else(|| Problem::invalid("there is no such issuer"))
        })
        .transpose()?;
    let issued_before = moment("issued_before", body.issued_before.as_deref())?;
    match (body.jti, body.subject) {
        (Some(token_id), None) if issued_before.is_none() => {
            if !is_token_id(&token_id) {
                return Err(Problem::invalid("jti is 1 to 128 visible characters"));
            }
            let issuer = issuer.unwrap_or_else(|| call.principal.issuer.clone());
            Ok(Revocation::Token { issuer, token_id })
        }
        (None, Some(text)) => {
            let subject = Subject::parse(&text)
                .ok_or_else(|| Problem::invalid("subject is 1 to 128 visible ASCII characters"))?;
            // A moment to come would lock the subject out until then, and could not be taken back.
            let latest = now + SignedDuration::from_secs(LEEWAY_S);
            if issued_before.is_some_and(|at| at > latest) {
                return Err(Problem::invalid("issued_before is in the future"));
            }
            let issuer = issuer
                .or_else(|| verifier.issuer_of(&subject))
                .ok_or_else(|| Problem::invalid("no issuer names such a subject"))?;
            Ok(Revocation::Subject {
                issuer,
                subject,
                issued_before,
            })
        }
        _ => Err(Problem::invalid(
            "the body has either jti, or subject with or without issued_before",
        )),
    }
}

fn allowed(call: &Call, revocation: &Revocation) -> Result<(), Problem> {
    let principal = &call.principal;
    let own = match revocation {
        Revocation::Token { issuer, token_id } => {
            *issuer == principal.issuer && **token_id == *principal.token_id
        }
        Revocation::Subject {
            issuer, subject, ..
        } => *issuer == principal.issuer && *subject == principal.subject,
    };
    if own || principal.scopes.has(Scope::Admin) {
        return Ok(());
    }
    Err(Problem::scope_missing(Scope::Admin.name()))
}

/// RFC 3339, not before 1970.
fn moment(name: &str, text: Option<&str>) -> Result<Option<Timestamp>, Problem> {
    text.map(|text| {
        text.parse()
            .ok()
            .filter(|at| *at >= Timestamp::UNIX_EPOCH)
            .ok_or_else(|| {
                Problem::invalid(format!("{name} is a time such as 2026-11-30T11:00:00Z"))
            })
    })
    .transpose()
}
