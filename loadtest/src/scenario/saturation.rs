//! How much the service takes: a closed loop of transfers between random users, with ever more requests in flight.
//!
//! Its ratio to the control is what the budget is about.

use super::stand::{Delivered, Stand};
use super::{Bench, Saturated};
use crate::load::{Kind, Plan, Tally};
use crate::report::{Axis, Cell, Findings, Plot, Scale, Series, budget, millis, percentiles};
use crate::server::Setup;
use anyhow::{Context, Result};
use std::time::Duration;

const IN_FLIGHT: [u32; 11] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024];
/// Where saturation is usually found, for who only needs to know about where it is.
const IN_FLIGHT_SHORT: [u32; 2] = [64, 256];

/// From so many on a step of the standard set is longer: the most is found there, and what the relay is behind at its end counts as time.
const SATURATED_FROM: u32 = 128;

const HEAD: [&str; 8] = [
    "in flight",
    "events/s",
    "p50 ms",
    "p90 ms",
    "p99 ms",
    "p99.9 ms",
    "max ms",
    "503",
];

/// Runs it.
///
/// # Errors
/// When a run fails its gate.
pub async fn run(bench: &mut Bench) -> Result<Findings> {
    let lasts: fn(&Bench, u32) -> Duration =
        |bench, in_flight| bench.seconds(if in_flight < SATURATED_FROM { 2 } else { 5 }, 10);
    let paused = paused(bench, lasts).await?;
    let delivered = delivered(bench, &IN_FLIGHT, lasts).await?;
    bench.saturated = Some(best(&delivered)?);

    let mut findings = Findings::default();
    let most = paused
        .iter()
        .map(|(_, tally)| tally.rate())
        .fold(0.0, f64::max);
    findings.row(&budget::SATURATION, most);
    findings.row(&budget::SATURATION_RELAY, best(&delivered)?.rate);
    findings.text("With the relay paused (roles `api` and `keeper`), latency of answers 201:");
    let line = |(in_flight, tally): &(u32, Tally)| table_line(*in_flight, tally, tally.rate());
    findings.table(HEAD, paused.iter().map(line).collect());
    findings.text(
        "With relay, broker and a consumer that acknowledges each message from a quorum queue. Events a second are \
         those accepted within the measured time, over that time and what the relay was behind at its end, so a relay that falls behind \
         lowers them:",
    );
    let lines = delivered.iter().map(|(in_flight, delivered)| {
        let [first, rate, p50, p90, p99, p999, max, unavailable] =
            table_line(*in_flight, &delivered.tally, delivered.rate);
        let behind = millis(delivered.behind.as_secs_f64() * 1_000.0);
        [first, rate, p50, p90, p99, p999, max, unavailable, behind]
    });
    let [a, b, c, d, e, f, g, h] = HEAD;
    findings.table(
        [a, b, c, d, e, f, g, h, "relay behind, ms"],
        lines.collect(),
    );
    findings.plot(plot(&paused, &delivered));
    Ok(findings)
}

/// Where everything together saturates, found in a few seconds and kept.
///
/// # Errors
/// When a run fails its gate.
pub async fn find(bench: &mut Bench) -> Result<Saturated> {
    let lasts = |_: &Bench, _| Duration::from_secs(4);
    let found = best(&delivered(bench, &IN_FLIGHT_SHORT, lasts).await?)?;
    bench.saturated = Some(found);
    Ok(found)
}

async fn paused(bench: &Bench, lasts: fn(&Bench, u32) -> Duration) -> Result<Vec<(u32, Tally)>> {
    let work = bench.lab.with_ledger("saturation", async |ledger| {
        let mut stand = Stand::raise(bench, ledger, &Setup::roles("api,keeper")).await?;
        let mut steps = Vec::new();
        for in_flight in IN_FLIGHT {
            let plan = Plan {
                in_flight,
                lasts: lasts(bench, in_flight),
                ..stand.plan(Kind::Transfer)?
            };
            steps.push((in_flight, stand.drive(plan).await?));
        }
        stand.finish().await?;
        Ok(steps)
    });
    work.await.context("with the relay paused")
}

async fn delivered(
    bench: &Bench,
    in_flight: &[u32],
    lasts: fn(&Bench, u32) -> Duration,
) -> Result<Vec<(u32, Delivered)>> {
    let work = bench.lab.with_ledger("saturation", async |ledger| {
        let mut stand = Stand::raise(bench, ledger, &Setup::everything()).await?;
        let mut steps = Vec::new();
        for in_flight in in_flight {
            let plan = Plan {
                in_flight: *in_flight,
                lasts: lasts(bench, *in_flight),
                ..stand.plan(Kind::Transfer)?
            };
            steps.push((*in_flight, stand.deliver(plan).await?));
        }
        stand.finish().await?;
        Ok(steps)
    });
    work.await.context("with the relay")
}

fn best(steps: &[(u32, Delivered)]) -> Result<Saturated> {
    steps
        .iter()
        .map(|(in_flight, delivered)| Saturated {
            rate: delivered.rate,
            in_flight: *in_flight,
        })
        .max_by(|one, other| one.rate.total_cmp(&other.rate))
        .context("nothing was measured")
}

fn table_line(in_flight: u32, tally: &Tally, rate: f64) -> [Cell; 8] {
    let [p50, p90, p99, p999, max] = percentiles(&tally.latency_us);
    [
        u64::from(in_flight).into(),
        Cell::Rate(rate),
        p50,
        p90,
        p99,
        p999,
        max,
        tally.unavailable.into(),
    ]
}

fn plot(paused: &[(u32, Tally)], delivered: &[(u32, Delivered)]) -> Plot {
    let paused = paused
        .iter()
        .map(|(in_flight, tally)| (f64::from(*in_flight), tally.rate()));
    let delivered = delivered
        .iter()
        .map(|(in_flight, delivered)| (f64::from(*in_flight), delivered.rate));
    Plot {
        file: "throughput".to_owned(),
        title: "Throughput by requests in flight".to_owned(),
        x: Axis {
            label: "requests in flight",
            scale: Scale::Log2,
        },
        y: Axis {
            label: "events/s",
            scale: Scale::Linear,
        },
        series: vec![
            Series {
                name: "relay paused".to_owned(),
                points: paused.collect(),
            },
            Series {
                name: "relay, broker, consumer".to_owned(),
                points: delivered.collect(),
            },
        ],
    }
}
