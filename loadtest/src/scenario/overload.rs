//! Three times as many arrivals as the service takes: what it refuses, and that what it accepts does not wait for ever.
//!
//! Arrivals keep to their schedule; those that find every stream of the generator busy are dropped and counted, never sent. There are
//! more streams than the queues of the service hold, or the generator would bound what waits, and the service would refuse nothing.

use super::Bench;
use super::half::over_time;
use super::stand::Stand;
use crate::load::{Arrivals, Kind, Plan, Protocol, Second, Step, Tally};
use crate::report::{Cell, Findings, grouped, mebibytes, median, millis};
use crate::server::{Memory, Setup};
use anyhow::{Result, ensure};
use std::time::Duration;

const TIMES: f64 = 3.0;
/// Requests that wait for an answer at the same time: twice what the default queue holds.
const IN_FLIGHT: u32 = 8_192;
/// Streams of HTTP/2 on so many connections: as many of HTTP/1.1 would want more open files than a process usually may have.
const PROTOCOL: Protocol = Protocol::Http2 { connections: 64 };
/// Arrivals that may wait for one of them.
const QUEUE_MAX: usize = 2_048;
/// Half of saturation, before and after.
const CALM: Duration = Duration::from_secs(5);

/// How the service is set, the name of its plot, and what waits for a lane at most.
const CASES: [(&str, &str, Option<&str>); 2] = [
    ("default queue (4,096 commands)", "default-queue", None),
    ("short queue (128 commands)", "short-queue", Some("128")),
];

/// The service gives a command up before that, so whatever it accepts is answered by then: its deadline of 10 s, a second for a batch that
/// has begun, and some for this generator, which is as busy.
const ACCEPTED_LIMIT: Duration = Duration::from_secs(15);

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
    let lasts = bench.seconds(10, 60);
    let mut measured = Vec::new();
    for (name, file, lane_queue) in CASES {
        let overloaded = overloaded(bench, saturated.rate, lasts, lane_queue).await?;
        measured.push((name, file, overloaded));
    }
    let mut findings = Findings::default();
    findings.text(format!(
        "Arrivals at half of saturation for {} s, then at {:.0} a second for {} s, three times what everything together takes, then at half \
         again; over {} streams of HTTP/2 that each wait for their answer. Latency is that of accepted events from the intended start: the \
         median of the p50 and p99 of the seconds of overload, and of the last three of the calm after it.",
        CALM.as_secs(),
        TIMES * saturated.rate,
        lasts.as_secs(),
        grouped(IN_FLIGHT.into())
    ));
    findings.table(
        [
            "",
            "accepted/s",
            "p50 ms",
            "p99 ms",
            "p99 ms afterwards",
            "refused by status and code",
            "never sent",
            "memory of the service at most, MiB",
        ],
        measured
            .iter()
            .map(|(name, _, overloaded)| line(name, overloaded, lasts))
            .collect(),
    );
    for (name, file, overloaded) in &measured {
        let mut plot = over_time(
            &overloaded.tally,
            &format!("Latency of accepted events, {name}"),
        );
        plot.file = (*file).to_owned();
        findings.plot(plot);
    }
    Ok(findings)
}

async fn overloaded(
    bench: &Bench,
    saturation: f64,
    lasts: Duration,
    lane_queue: Option<&'static str>,
) -> Result<Overloaded> {
    let mut setup = Setup::everything();
    if let Some(items) = lane_queue {
        setup
            .variables
            .push(("DAYBOOK_LANE_QUEUE".to_owned(), items.to_owned()));
    }
    let step = |times: f64, lasts| Step {
        per_second: times * saturation,
        lasts,
    };
    let steps = vec![step(0.5, CALM), step(TIMES, lasts), step(0.5, CALM)];
    let work = bench.lab.with_ledger("overload", async |ledger| {
        let mut stand = Stand::raise(bench, ledger, &setup).await?;
        let plan = Plan {
            protocol: PROTOCOL,
            arrivals: Arrivals::Stepped(steps),
            in_flight: IN_FLIGHT,
            queue_max: QUEUE_MAX,
            lasts: CALM + lasts + CALM,
            ..stand.plan(Kind::Transfer)?
        };
        let tally = stand.drive(plan).await?;
        ensure!(
            tally.unreached == 0,
            "connections were refused: {}",
            tally.trouble()
        );
        let slowest = Duration::from_micros(tally.service_us.max());
        ensure!(
            slowest <= ACCEPTED_LIMIT,
            "an accepted event was answered after {slowest:?}"
        );
        let memory = stand.server.memory()?;
        stand.finish().await?;
        Ok(Overloaded { tally, memory })
    });
    work.await
}

fn line(name: &str, overloaded: &Overloaded, lasts: Duration) -> [Cell; 8] {
    let tally = &overloaded.tally;
    let from = i64::try_from(CALM.as_secs()).unwrap_or(i64::MAX);
    let until = from.saturating_add(i64::try_from(lasts.as_secs()).unwrap_or(i64::MAX));
    let seconds = |from: i64, until: i64| -> Vec<&Second> {
        let within = |second: &&Second| (from..until).contains(&second.at_s);
        tally.seconds.iter().filter(within).collect()
    };
    // The first second of overload has not filled the queues yet.
    let during = seconds(from + 1, until);
    let done: u64 = during.iter().map(|second| second.done).sum();
    let afterwards = seconds(until + 2, i64::MAX);
    [
        name.into(),
        Cell::Rate(done as f64 / during.len().max(1) as f64),
        median_ms(&during, |second| second.p50_us),
        median_ms(&during, |second| second.p99_us),
        median_ms(&afterwards, |second| second.p99_us),
        refusals(tally).into(),
        tally.dropped.into(),
        mebibytes(overloaded.memory.most),
    ]
}

fn median_ms(seconds: &[&Second], of: fn(&Second) -> u64) -> Cell {
    let busy = seconds.iter().filter(|second| second.done > 0);
    median(busy.map(|second| of(second)))
        .map_or_else(|| "-".into(), |us| millis(us as f64 / 1_000.0))
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
