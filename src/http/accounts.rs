//! Accounts: what one holds.

use super::json;
use super::problem::Problem;
use super::request::Call;
use crate::domain::{Address, Guard, Scope};
use crate::store::reads;
use axum::body::Body;
use axum::http::Response;
use serde_json::json;

/// `GET /v1/accounts/{address}`: an account that the chart knows and nobody has used holds nothing.
pub(super) async fn get(call: Call) -> Result<Response<Body>, Problem> {
    let address = Address::parse(call.path("address"))
        .ok_or_else(|| Problem::invalid("not the address of an account in its one spelling"))?;
    let account = call
        .app
        .registry
        .chart()
        .account(&address)
        .filter(|account| match &account.owner {
            Some(owner) => call.may_read(owner.as_str()),
            None => call.principal.scopes.has(Scope::ReadAny),
        })
        .ok_or_else(Problem::not_found)?;
    let client = call.client().await?;
    let (guard, balances) = match account.guard {
        Guard::Floor(_) => {
            let reading = reads::floor_balances(&client, &address);
            ("floor", call.read(&client, reading).await?)
        }
        Guard::None => {
            let reading = reads::summed_balances(&client, &address);
            ("none", call.read(&client, reading).await?)
        }
    };
    let mut body = json!({"account": address, "guard": guard, "balances": balances});
    if let Some(owner) = account.owner {
        body["owner"] = owner.as_str().into();
    }
    Ok(json(body.to_string()))
}
