//! Accounts that everybody wants: 64 writers on one guarded account, and 64 writers on one that is neither locked nor checked.
//!
//! The relay is paused: what is measured is the lock.

use super::Bench;
use super::stand::Stand;
use crate::load::{Kind, Plan, Tally};
use crate::report::{Findings, budget};
use crate::server::Setup;
use anyhow::{Context, Result};

const WRITERS: u32 = 64;

/// What is done, whether the account is a `floor` one, and how the load does it.
const CASES: [(&str, bool, Kind); 4] = [
    (
        "64 writers debit one `floor` account, a user's",
        true,
        Kind::TransferFrom(1),
    ),
    (
        "64 writers credit one `floor` account, a user's",
        true,
        Kind::TransferTo(1),
    ),
    (
        "64 writers pay out of one `none` account, `world`",
        false,
        Kind::Deposit,
    ),
    (
        "64 writers pay into one `none` account, `world`",
        false,
        Kind::Withdrawal,
    ),
];

/// Runs it.
///
/// # Errors
/// When a run fails its gate.
pub async fn run(bench: &mut Bench) -> Result<Findings> {
    let lasts = bench.seconds(5, 20);
    let measured = bench.lab.with_ledger("hot", async |ledger| {
        let mut stand = Stand::raise(bench, ledger, &Setup::roles("api,keeper")).await?;
        let mut measured: Vec<Tally> = Vec::new();
        for (_, _, kind) in CASES {
            let plan = Plan {
                in_flight: WRITERS,
                lasts,
                ..stand.plan(kind)?
            };
            measured.push(stand.drive(plan).await?);
        }
        stand.finish().await?;
        Ok(measured)
    });
    let measured = measured.await?;
    let slowest = CASES
        .iter()
        .zip(&measured)
        .filter(|((_, is_floor, _), _)| *is_floor)
        .map(|(_, tally)| tally.rate())
        .min_by(f64::total_cmp)
        .context("nothing was measured")?;
    let mut findings = Findings::default();
    findings.row(&budget::HOT_FLOOR, slowest);
    findings.text("Closed loop, relay paused. The row of the budget is the slower of the two on the `floor` account.");
    let loads = CASES.iter().zip(&measured);
    findings.loads(loads.map(|((name, ..), tally)| (*name, tally.rate(), &tally.latency_us)));
    Ok(findings)
}
