//! Accounts: what one holds.

use super::json;
use super::problem::Problem;
use super::request::Call;
use crate::domain::{Address, Guard, Scope};
use crate::store::reads::{self, Balance};
use crate::store::snapshots;
use axum::body::Body;
use axum::http::Response;
use serde_json::json;
use tracing::Instrument;

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
    let (guard, balances) = match account.guard {
        Guard::Floor(_) => {
            let client = call.client().await?;
            let reading = reads::floor_balances(&client, &address);
            ("floor", call.read(&client, reading).await?)
        }
        Guard::None => ("none", summed(call, address.clone()).await?),
    };
    let mut body = json!({"account": address, "guard": guard, "balances": balances});
    if let Some(owner) = account.owner {
        body["owner"] = owner.as_str().into();
    }
    Ok(json(body.to_string()))
}

/// Reads snapshot and tail when its turn comes: while no keeper has folded for long, or ever, such a read may take seconds, and must
/// leave connections to others. The request's deadline bounds the wait.
async fn summed(call: Call, address: Address) -> Result<Vec<Balance>, Problem> {
    let turn = call.app.sums.clone().acquire_owned().await;
    let turn = turn.map_err(|_| Problem::internal())?;
    // A task of its own: a request that is given up must not give back turn and connection while the statement still runs.
    let summing = async move {
        let _turn = turn;
        let client = call.client().await?;
        let reading = async {
            let statement = client.prepare_cached(snapshots::SUMMED_BALANCES).await?;
            snapshots::summed_balances(&client, &statement, address.as_str()).await
        };
        call.read(&client, reading).await
    };
    tokio::spawn(summing.in_current_span())
        .await
        .unwrap_or_else(|error| {
            tracing::error!(%error, "a sum ended early");
            Err(Problem::internal())
        })
}
