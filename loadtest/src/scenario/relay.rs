//! From the commit to a consumer: how long it takes at several rates, how fast a backlog goes, and what a snapshot that somebody
//! holds open costs.
//!
//! Both ends of a lag are read from this machine's clock: the record's `recordedtime`, and the receipt.

use super::Bench;
use super::stand::{Delivered, Stand};
use crate::load::{Arrivals, Kind, Plan, Tally};
use crate::report::plot::by_percentile;
use crate::report::{
    Axis, Cell, Findings, Plot, Scale, budget, grouped, millis, percentiles, quantile_ms,
};
use crate::server::Setup;
use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use std::time::Duration;
use tokio::time::Instant;

const ALL_ROLES: &str = "api,relay,keeper";
/// Rates whose lag is measured, in events a second; the second is the budget's.
const RATES: [f64; 2] = [100.0, 1_000.0];
/// Connections of an open loop.
const IN_FLIGHT: u32 = 512;
/// Events that wait when a relay begins.
const BACKLOG: u64 = 100_000;
const BACKLOG_LIMIT: Duration = Duration::from_secs(300);

/// Runs it.
///
/// # Errors
/// When a run fails its gate.
pub async fn run(bench: &mut Bench) -> Result<Findings> {
    let saturated = bench.saturated().await?;
    let mut findings = Findings::default();
    let lags = lags(bench, saturated.in_flight).await.context("lag")?;
    lag_findings(&mut findings, &lags);
    let drained = backlog(bench).await.context("backlog")?;
    findings.text(format!(
        "A backlog of {} events, written while no relay ran: a relay that starts then delivers it in {:.1} s, {:.0} messages a second.",
        grouped(BACKLOG),
        drained.as_secs_f64(),
        BACKLOG as f64 / drained.as_secs_f64()
    ));
    let held = held(bench, saturated.rate / 2.0, saturated.in_flight)
        .await
        .context("a session held open")?;
    held_findings(&mut findings, &held);
    Ok(findings)
}

/// Name of the load, what came of it, and the lag of its messages in microseconds.
type Lag = (String, Tally, Histogram<u64>);

async fn lags(bench: &Bench, in_flight: u32) -> Result<Vec<Lag>> {
    let lasts = bench.seconds(10, 60);
    let work = bench.lab.with_ledger("relay", async |ledger| {
        let mut stand = Stand::raise(bench, ledger, &Setup::roles(ALL_ROLES)).await?;
        let mut plans = Vec::new();
        for per_second in RATES {
            let plan = Plan {
                arrivals: Arrivals::Poisson { per_second },
                in_flight: IN_FLIGHT,
                lasts,
                ..stand.plan(Kind::Transfer)?
            };
            plans.push((format!("{per_second:.0} a second"), plan));
        }
        let plan = Plan {
            in_flight,
            lasts,
            ..stand.plan(Kind::Transfer)?
        };
        plans.push((format!("saturation, {in_flight} in flight"), plan));
        let mut measured = Vec::new();
        for (name, plan) in plans {
            stand.take_lag_us()?;
            let delivered = stand.deliver(plan).await?;
            measured.push((name, delivered.tally, stand.take_lag_us()?));
        }
        stand.finish().await?;
        Ok(measured)
    });
    work.await
}

fn lag_findings(findings: &mut Findings, lags: &[Lag]) {
    if let Some((_, _, lag_us)) = lags.get(1) {
        findings.row(&budget::RELAY_LAG, quantile_ms(lag_us, 0.99));
    }
    findings.text("From the commit to the receipt by a consumer:");
    let lines = lags.iter().map(|(name, tally, lag_us)| {
        let [p50, p90, p99, p999, max] = percentiles(lag_us);
        [
            name.as_str().into(),
            Cell::Rate(tally.rate()),
            p50,
            p90,
            p99,
            p999,
            max,
        ]
    });
    findings.table(
        [
            "load", "events/s", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "max ms",
        ],
        lines.collect(),
    );
    findings.plot(Plot {
        file: "lag".to_owned(),
        title: "From the commit to a consumer, by percentile".to_owned(),
        x: Axis {
            label: "percentile",
            scale: Scale::Nines,
        },
        y: Axis {
            label: "ms",
            scale: Scale::Log10,
        },
        series: lags
            .iter()
            .map(|(name, _, lag_us)| by_percentile(name, lag_us))
            .collect(),
    });
}

/// How long a relay takes for a backlog, from its start to the last receipt.
async fn backlog(bench: &Bench) -> Result<Duration> {
    let work = bench.lab.with_ledger("relay", async |ledger| {
        let mut stand = Stand::raise_for_later(bench, ledger, &Setup::roles("api,keeper")).await?;
        let left = BACKLOG.saturating_sub(u64::from(bench.users));
        let plan = Plan {
            in_flight: 256,
            warm_up: Duration::ZERO,
            lasts: BACKLOG_LIMIT,
            count_max: left,
            ..stand.plan(Kind::Transfer)?
        };
        stand.drive(plan).await?;
        let began = Instant::now();
        let relay = ledger.serve(&Setup::roles("relay")).await?;
        stand.drained().await?;
        let took = began.elapsed();
        relay.stop().await?;
        stand.finish().await?;
        Ok(took)
    });
    work.await
}

/// A session that holds a snapshot: before, and while it is held.
struct Held {
    /// A closed loop before it, and at the end of it.
    capacity: [Delivered; 2],
    /// Half load without it, and with it; with the lag in microseconds.
    half: [(Tally, Histogram<u64>); 2],
    held_for: Duration,
}

async fn held(bench: &Bench, per_second: f64, in_flight: u32) -> Result<Held> {
    let held_for = bench.seconds(60, 600);
    let work = bench.lab.with_ledger("relay", async |ledger| {
        let mut stand = Stand::raise(bench, ledger, &Setup::roles(ALL_ROLES)).await?;
        let before = at_half(&mut stand, per_second, bench.seconds(10, 60)).await?;
        let capacity_before = at_capacity(&mut stand, in_flight).await?;
        let client = ledger.database.connect().await?;
        // The snapshot is taken by the first query, and lives until the transaction ends.
        client
            .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox")
            .await?;
        let during = at_half(&mut stand, per_second, held_for).await?;
        let capacity_during = at_capacity(&mut stand, in_flight).await?;
        client.batch_execute("COMMIT").await?;
        stand.finish().await?;
        Ok(Held {
            capacity: [capacity_before, capacity_during],
            half: [before, during],
            held_for,
        })
    });
    work.await
}

async fn at_half(
    stand: &mut Stand<'_>,
    per_second: f64,
    lasts: Duration,
) -> Result<(Tally, Histogram<u64>)> {
    let plan = Plan {
        arrivals: Arrivals::Poisson { per_second },
        in_flight: IN_FLIGHT,
        lasts,
        ..stand.plan(Kind::Transfer)?
    };
    stand.take_lag_us()?;
    let delivered = stand.deliver(plan).await?;
    Ok((delivered.tally, stand.take_lag_us()?))
}

async fn at_capacity(stand: &mut Stand<'_>, in_flight: u32) -> Result<Delivered> {
    let plan = Plan {
        in_flight,
        lasts: Duration::from_secs(6),
        ..stand.plan(Kind::Transfer)?
    };
    stand.deliver(plan).await
}

fn held_findings(findings: &mut Findings, held: &Held) {
    let [before, during] = &held.capacity;
    findings.row(
        &budget::HELD_WRITES,
        lost_percent(before.tally.rate(), during.tally.rate()),
    );
    findings.row(&budget::HELD_RELAY, lost_percent(before.rate, during.rate));
    findings.text(format!(
        "A session that holds a REPEATABLE READ snapshot open for {} s at half load, so that nothing dead can be removed. Half load is an \
         open loop; what is still possible at the end, with the snapshot still held, is a closed one:",
        held.held_for.as_secs()
    ));
    let line = |name: &str, (half, lag_us): &(Tally, Histogram<u64>), capacity: &Delivered| {
        [
            name.into(),
            millis(quantile_ms(&half.latency_us, 0.99)),
            millis(quantile_ms(lag_us, 0.99)),
            Cell::Rate(capacity.tally.rate()),
            Cell::Rate(capacity.rate),
        ]
    };
    let [half_before, half_during] = &held.half;
    findings.table(
        [
            "",
            "p99 of answers at half load, ms",
            "p99 of receipts, ms",
            "writes possible/s",
            "delivered/s",
        ],
        vec![
            line("without", half_before, before),
            line("held open", half_during, during),
        ],
    );
}

/// How much less, in hundredths; not less than nothing.
fn lost_percent(before: f64, after: f64) -> f64 {
    (100.0 * (1.0 - after / before)).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_a_share_of_what_was() {
        assert!((lost_percent(1_000.0, 850.0) - 15.0).abs() < 1e-9);
        assert_eq!(lost_percent(1_000.0, 1_100.0), 0.0);
    }
}
