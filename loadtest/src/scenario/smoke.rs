//! The shortest look: everything running, 256 requests in flight, beside the control.
//!
//! Says whether the machine and the service are what they were; the other scenarios say why not.

use super::Bench;
use super::stand::Stand;
use crate::load::{Kind, Plan};
use crate::report::{Cell, Findings, millis, percentiles};
use crate::server::Setup;
use anyhow::Result;

const IN_FLIGHT: u32 = 256;

/// Runs it.
///
/// # Errors
/// When the run fails its gate.
pub async fn run(bench: &mut Bench) -> Result<Findings> {
    let lasts = bench.seconds(5, 15);
    let work = bench.lab.with_ledger("smoke", async |ledger| {
        let mut stand = Stand::raise(bench, ledger, &Setup::everything()).await?;
        let plan = Plan {
            in_flight: IN_FLIGHT,
            lasts,
            ..stand.plan(Kind::Transfer)?
        };
        let delivered = stand.deliver(plan).await?;
        stand.finish().await?;
        Ok(delivered)
    });
    let delivered = work.await?;
    let mut findings = Findings::default();
    let [p50, p90, p99, p999, max] = percentiles(&delivered.tally.latency_us);
    findings.table(
        [
            "in flight",
            "accepted/s",
            "delivered/s",
            "p50 ms",
            "p90 ms",
            "p99 ms",
            "p99.9 ms",
            "max ms",
            "relay behind, ms",
        ],
        vec![[
            u64::from(IN_FLIGHT).into(),
            Cell::Rate(delivered.tally.rate()),
            Cell::Rate(delivered.rate),
            p50,
            p90,
            p99,
            p999,
            max,
            millis(delivered.behind.as_secs_f64() * 1_000.0),
        ]],
    );
    Ok(findings)
}
