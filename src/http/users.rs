//! Users: where a history stands and what its owner holds.

use super::problem::Problem;
use super::request::Call;
use super::{cursor, json};
use crate::domain::{Subject, time};
use crate::store::reads;
use axum::body::Body;
use axum::http::Response;
use serde_json::json;

/// `GET /v1/users/{subject}`: a user without events has the sequence 0 and a head of zeros.
pub(super) async fn get(call: Call) -> Result<Response<Body>, Problem> {
    let subject = Subject::parse(call.path("subject"))
        .ok_or_else(|| Problem::invalid("a subject is 1 to 128 visible ASCII characters"))?;
    let limit = call.limit()?;
    let list = ["user", subject.as_str()];
    let place = match call.query("after") {
        Some(text) => cursor::decode(&list, text)?,
        None => " ".to_owned(),
    };
    let after = place
        .split_once(' ')
        .ok_or_else(|| Problem::invalid("after is not a cursor of this list"))?;
    if !call.may_read(subject.as_str()) {
        return Err(Problem::not_found());
    }
    let client = call.client().await?;
    let reading = reads::user_state(&client, &subject, after, limit);
    let (user, accounts) = call.read(&client, reading).await?;
    let next = accounts
        .last()
        .filter(|_| accounts.len() >= usize::from(limit))
        .map(|last| cursor::encode(&list, &format!("{} {}", last.account, last.asset)));
    let zeros = "0".repeat(64);
    let body = match user {
        Some(user) => json!({
            "subject": subject, "status": user.status, "sequence": user.sequence,
            "head": hex::encode(user.head), "last_recordedtime": time::micros(user.last_at),
            "accounts": accounts, "next": next,
        }),
        None => json!({
            "subject": subject, "status": "active", "sequence": 0, "head": zeros,
            "accounts": accounts, "next": next,
        }),
    };
    Ok(json(body.to_string()))
}
