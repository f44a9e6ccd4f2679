//! The same load over both protocols: keep-alive connections of HTTP/1.1, and streams of a few HTTP/2 connections.
//!
//! The relay is paused: what is measured is the edge.

use super::Bench;
use super::stand::Stand;
use crate::load::{Kind, Plan, Protocol, Tally};
use crate::report::Findings;
use crate::server::Setup;
use anyhow::Result;

const IN_FLIGHT: u32 = 256;

/// The protocols, HTTP/1.1 again at the end: a machine drifts.
const CASES: [(&str, Protocol); 4] = [
    ("HTTP/1.1, 256 connections", Protocol::Http1),
    ("HTTP/2, 4 connections", Protocol::Http2 { connections: 4 }),
    (
        "HTTP/2, 16 connections",
        Protocol::Http2 { connections: 16 },
    ),
    ("HTTP/1.1, 256 connections, again", Protocol::Http1),
];

/// Runs it.
///
/// # Errors
/// When a run fails its gate, or the service does not speak HTTP/2.
pub async fn run(bench: &mut Bench) -> Result<Findings> {
    let lasts = bench.seconds(3, 15);
    let work = bench.lab.with_ledger("http2", async |ledger| {
        let mut stand = Stand::raise(bench, ledger, &Setup::roles("api,keeper")).await?;
        let mut measured: Vec<Tally> = Vec::new();
        for (_, protocol) in CASES {
            let plan = Plan {
                protocol,
                in_flight: IN_FLIGHT,
                lasts,
                ..stand.plan(Kind::Transfer)?
            };
            measured.push(stand.drive(plan).await?);
        }
        stand.finish().await?;
        Ok(measured)
    });
    let measured = work.await?;
    let mut findings = Findings::default();
    findings.text("Closed loop, 256 requests in flight, relay paused:");
    let loads = CASES.iter().zip(&measured);
    findings.loads(loads.map(|((name, _), tally)| (*name, tally.rate(), &tally.latency_us)));
    Ok(findings)
}
