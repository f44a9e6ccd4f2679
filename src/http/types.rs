//! Event types: the contract, as the registry holds it.

use super::json;
use super::problem::Problem;
use super::request::Call;
use crate::domain::{TypeName, Version};
use crate::schema::TypeInfo;
use axum::body::Body;
use axum::http::Response;
use serde_json::value::RawValue;
use serde_json::{Value, json};

fn described(info: &TypeInfo) -> Value {
    json!({
        "type": info.name, "summary": info.summary, "scope": info.scope,
        "current": info.current, "versions": info.versions,
    })
}

/// `GET /v1/types`
pub(super) async fn list(call: Call) -> Result<Response<Body>, Problem> {
    let items: Vec<Value> = call.app.registry.types().iter().map(described).collect();
    checked(&call).await?;
    Ok(json(json!({ "items": items }).to_string()))
}

/// `GET /v1/types/{type}`
pub(super) async fn get(call: Call) -> Result<Response<Body>, Problem> {
    checked(&call).await?;
    let types = call.app.registry.types();
    let info = types
        .iter()
        .find(|info| info.name.as_str() == call.path("type"))
        .ok_or_else(Problem::not_found)?;
    Ok(json(described(info).to_string()))
}

/// `GET /v1/types/{type}/{version}`
pub(super) async fn version(call: Call) -> Result<Response<Body>, Problem> {
    checked(&call).await?;
    let name = TypeName::parse(call.path("type")).ok_or_else(Problem::not_found)?;
    let version = Version::parse(call.path("version")).ok_or_else(Problem::not_found)?;
    let info = call
        .app
        .registry
        .version(&name, version)
        .ok_or_else(Problem::not_found)?;
    let schema: Box<RawValue> = parsed(info.schema)?;
    let examples = info
        .examples
        .iter()
        .map(|example| {
            let request: Box<RawValue> = parsed(example.request)?;
            Ok(json!({"name": example.name, "accepted": example.accepted, "request": request}))
        })
        .collect::<Result<Vec<Value>, Problem>>()?;
    let body = json!({
        "type": name, "version": version, "schema": schema, "examples": examples,
    });
    Ok(json(body.to_string()))
}

/// The registry answers without the database, but a revoked token reads nothing, here as elsewhere.
async fn checked(call: &Call) -> Result<(), Problem> {
    let client = call.client().await?;
    call.read(&client, async { Ok(()) }).await
}

/// What the registry holds was parsed when it was built.
fn parsed(text: &str) -> Result<Box<RawValue>, Problem> {
    serde_json::from_str(text).map_err(|_| Problem::internal())
}
