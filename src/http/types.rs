//! Event types: the contract, as the registry holds it.

use super::json;
use super::problem::Problem;
use super::request::Call;
use crate::domain::Version;
use crate::schema::{EventType, SchemaVersion};
use axum::body::Body;
use axum::http::Response;
use serde_json::{Value, json};

fn described(kind: &EventType) -> Value {
    let versions: Vec<Version> = kind.versions().map(SchemaVersion::version).collect();
    json!({
        "type": kind.name(), "summary": kind.summary(), "scope": kind.scope().name(),
        "current": kind.current(), "versions": versions,
    })
}

/// `GET /v1/types`
pub(super) async fn list(call: Call) -> Result<Response<Body>, Problem> {
    checked(&call).await?;
    let items: Vec<Value> = call.app.registry.types().map(described).collect();
    Ok(json(json!({ "items": items }).to_string()))
}

/// `GET /v1/types/{type}`: with the JSON Schemas of a record and of the input in it.
pub(super) async fn get(call: Call) -> Result<Response<Body>, Problem> {
    checked(&call).await?;
    let registry = &call.app.registry;
    let kind = registry
        .event_type(call.path("type"))
        .ok_or_else(Problem::not_found)?;
    let mut body = described(kind);
    body["input_schema"] = kind.input_schema();
    body["record_schema"] = registry.record_schema(kind);
    Ok(json(body.to_string()))
}

/// `GET /v1/types/{type}/{version}`: the JSON Schema of `data`, and examples of requests with what comes of them.
pub(super) async fn version(call: Call) -> Result<Response<Body>, Problem> {
    checked(&call).await?;
    let kind = call
        .app
        .registry
        .event_type(call.path("type"))
        .ok_or_else(Problem::not_found)?;
    let found = Version::parse(call.path("version"))
        .and_then(|version| kind.version(version))
        .ok_or_else(Problem::not_found)?;
    let examples = found
        .examples()
        .iter()
        .map(|example| {
            // The registry has read the file when it was built.
            let file: Value =
                serde_json::from_str(&example.text).map_err(|_| Problem::internal())?;
            Ok(json!({"name": example.name, "accepted": example.accepted, "example": file}))
        })
        .collect::<Result<Vec<Value>, Problem>>()?;
    let body = json!({
        "type": kind.name(), "version": found.version(), "schema": found.schema(),
        "examples": examples,
    });
    Ok(json(body.to_string()))
}

/// The registry answers without the database, but a revoked token reads nothing, here as elsewhere.
async fn checked(call: &Call) -> Result<(), Problem> {
    let client = call.client().await?;
    call.read(&client, async { Ok(()) }).await
}
