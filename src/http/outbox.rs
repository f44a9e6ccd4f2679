//! The outbox as an operator sees it.

use super::json;
use super::problem::Problem;
use super::request::Call;
use crate::domain::time;
use crate::store::outbox;
use axum::body::Body;
use axum::http::Response;
use serde_json::{Value, json};

/// `GET /v1/outbox`: depth, age of the oldest row, events parked, and what is held for want of a queue, by type.
pub(super) async fn get(call: Call) -> Result<Response<Body>, Problem> {
    let client = call.client().await?;
    let reading = async { tokio::try_join!(outbox::depth(&client), outbox::held(&client)) };
    let (depth, held) = call.read(&client, reading).await?;
    let held: Vec<Value> = held
        .into_iter()
        .map(|held| {
            json!({"type": held.routing_key, "count": held.events, "since": time::micros(held.since)})
        })
        .collect();
    let body = json!({
        "depth": depth.waiting, "oldest_age_seconds": depth.oldest_seconds, "parked": depth.parked,
        "held": held,
    });
    Ok(json(body.to_string()))
}
