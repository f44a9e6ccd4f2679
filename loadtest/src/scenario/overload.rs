//! Three times as many arrivals as the service takes: what it refuses, and that what it accepts does not wait for ever.
//!
//! Arrivals keep to their schedule; those that find every connection of the generator busy are dropped and counted, never sent.

use super::Bench;
use super::stand::Stand;
use crate::load::{Arrivals, Kind, Plan, Tally};
use crate::report::{Cell, Findings, mebibytes, percentiles};
use crate::server::{Memory, Setup};
use anyhow::{Result, ensure};

const TIMES: f64 = 3.0;
/// Clients that wait for an answer at the same time.
const IN_FLIGHT: u32 = 2_048;
/// Arrivals that may wait for one of them.
const QUEUE_MAX: usize = 2_048;

/// How the service is set, and what its lanes queue then.
const CASES: [(&str, Option<&str>); 2] = [
    ("default queues (4 lanes of 4,096)", None),
    ("short queues (4 lanes of 128)", Some("128")),
];

struct Overloaded {
    tally: Tally,
    memory: Memory,
}

/// Runs it.
///
/// # Errors
/// When a run fails its gate.
pub async fn run(bench: &mut Bench) -> Result<Findings> {
    let saturated = bench.saturated().await?;
    let per_second = TIMES * saturated.rate;
    let mut measured = Vec::new();
    for (name, lane_queue) in CASES {
        measured.push((name, overloaded(bench, per_second, lane_queue).await?));
    }
    let mut findings = Findings::default();
    findings.text(format!(
        "Poisson arrivals at {per_second:.0} a second, three times what everything together takes, from 2,048 connections that each wait for \
         their answer. Latency is that of accepted events, from the send."
    ));
    let lines = measured.iter().map(|(name, overloaded)| {
        let [p50, _, p99, _, max] = percentiles(&overloaded.tally.service_us);
        let tally = &overloaded.tally;
        [
            (*name).into(),
            Cell::Rate(tally.rate()),
            p50,
            p99,
            max,
            refusals(tally).into(),
            tally.dropped.into(),
            mebibytes(overloaded.memory.most),
        ]
    });
    findings.table(
        [
            "",
            "accepted/s",
            "p50 ms",
            "p99 ms",
            "max ms",
            "refused by status and code",
            "never sent",
            "memory of the service at most, MiB",
        ],
        lines.collect(),
    );
    Ok(findings)
}

async fn overloaded(
    bench: &Bench,
    per_second: f64,
    lane_queue: Option<&'static str>,
) -> Result<Overloaded> {
    let mut setup = Setup::roles("api,relay,keeper");
    if let Some(items) = lane_queue {
        setup
            .variables
            .push(("DAYBOOK_LANE_QUEUE", items.to_owned()));
    }
    let work = bench.lab.with_ledger("overload", async |ledger| {
        let mut stand = Stand::raise(bench, ledger, &setup).await?;
        let plan = Plan {
            arrivals: Arrivals::Poisson { per_second },
            in_flight: IN_FLIGHT,
            queue_max: QUEUE_MAX,
            lasts: bench.seconds(10, 60),
            ..stand.plan(Kind::Transfer)?
        };
        let tally = stand.drive(plan).await?;
        ensure!(
            tally.unreached == 0,
            "connections were refused: {}",
            tally.trouble()
        );
        let memory = stand.server.memory()?;
        stand.finish().await?;
        Ok(Overloaded { tally, memory })
    });
    work.await
}

/// What was refused: codes where the answer had one, and outcomes that nobody knows.
fn refusals(tally: &Tally) -> String {
    let mut parts: Vec<String> = tally
        .by_status
        .iter()
        .filter(|(status, _)| !matches!(status, 200 | 201))
        .map(|(status, count)| format!("{status}: {count}"))
        .collect();
    parts.extend(
        tally
            .by_code
            .iter()
            .map(|(code, count)| format!("`{code}`: {count}")),
    );
    if tally.unknown > 0 {
        parts.push(format!("outcome unknown: {}", tally.unknown));
    }
    if parts.is_empty() {
        parts.push("nothing".to_owned());
    }
    parts.join(", ")
}
