//! From the commit to a consumer: how long it takes at several rates, how fast a backlog goes, and what a snapshot that somebody
//! holds open costs.
//!
//! Both ends of a lag are read from this machine's clock: the record's `recordedtime`, and the receipt.

use super::Bench;
use super::stand::{Delivered, Stand};
use crate::load::{Kind, Plan, Tally};
use crate::report::{Cell, Findings, Size, budget, grouped, millis, plot, quantile_ms};
use crate::server::Setup;
use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use std::time::Duration;
use tokio::time::Instant;

/// Rates whose lag is measured, in events a second; the second is the budget's.
const RATES: [f64; 2] = [100.0, BUDGET_RATE];
const BUDGET_RATE: f64 = 1_000.0;
/// Events that wait when a relay begins.
const BACKLOG: u64 = 100_000;
/// Seconds for which is looked at what is possible beside a snapshot, and without one; of the standard set, and in full.
const CAPACITY_S: (u64, u64) = (6, 20);
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
    let (events, drained) = backlog(bench).await.context("backlog")?;
    findings.text(format!(
        "A backlog of {} events, written while no relay ran: a relay that starts then delivers it in {:.1} s, {:.0} messages a second.",
        grouped(events),
        drained.as_secs_f64(),
        events as f64 / drained.as_secs_f64()
    ));
    let held = held(bench, saturated.half(), saturated.in_flight)
        .await
        .context("a session held open")?;
    held_findings(&mut findings, &held, bench.full);
    Ok(findings)
}

/// How long messages of a load were under way.
struct Lag {
    /// Of the load.
    name: String,
    /// Events a second of an open loop.
    rate: Option<f64>,
    tally: Tally,
    lag_us: Histogram<u64>,
}

async fn lags(bench: &Bench, in_flight: u32) -> Result<Vec<Lag>> {
    let lasts = bench.seconds(10, 60);
    let work = bench.lab.with_ledger("relay", async |ledger| {
        let mut stand = Stand::raise(bench, ledger, &Setup::everything()).await?;
        let mut measured = Vec::new();
        for per_second in RATES {
            let (tally, lag_us) = stand.arrive(per_second, lasts).await?;
            tally.all_answered()?;
            measured.push(Lag {
                name: format!("{per_second:.0} a second"),
                rate: Some(per_second),
                tally,
                lag_us,
            });
        }
        let plan = Plan {
            in_flight,
            lasts,
            ..stand.plan(Kind::Transfer)?
        };
        let (tally, lag_us) = stand.deliver_lag(plan).await?;
        measured.push(Lag {
            name: format!("saturation, {in_flight} in flight"),
            rate: None,
            tally,
            lag_us,
        });
        stand.finish().await?;
        Ok(measured)
    });
    work.await
}

fn lag_findings(findings: &mut Findings, lags: &[Lag]) {
    let budgeted = lags.iter().find(|lag| lag.rate == Some(BUDGET_RATE));
    if let Some(lag) = budgeted {
        findings.row(&budget::RELAY_LAG, quantile_ms(&lag.lag_us, 0.99));
    }
    findings.text(
        "From the commit to the receipt by a consumer. It counts from the record's `recordedtime`, which is read before the commit's flush, \
         so the flush is in it:",
    );
    let loads = lags.iter();
    findings.loads(loads.map(|lag| (lag.name.as_str(), lag.tally.rate(), &lag.lag_us)));
    findings.plot(plot::percentiles(
        "lag",
        "From the commit to a consumer, by percentile",
        lags.iter().map(|lag| (lag.name.as_str(), &lag.lag_us)),
    ));
}

/// A backlog, and how long a relay takes for it, from its start to the last receipt.
async fn backlog(bench: &Bench) -> Result<(u64, Duration)> {
    let work = bench.lab.with_ledger("relay", async |ledger| {
        let mut stand = Stand::raise_for_later(bench, ledger, &Setup::roles("api,keeper")).await?;
        let left = BACKLOG.saturating_sub(u64::from(bench.users));
        ensure!(
            left > 0,
            "a backlog of {BACKLOG} events has room for fewer users only"
        );
        let plan = Plan {
            in_flight: 256,
            warm_up: Duration::ZERO,
            lasts: BACKLOG_LIMIT,
            count_max: left,
            ..stand.plan(Kind::Transfer)?
        };
        let events = u64::from(bench.users) + stand.drive(plan).await?.created;
        let began = Instant::now();
        let relay = ledger.serve(&Setup::roles("relay")).await?;
        stand.drained().await?;
        let took = began.elapsed();
        relay.stop().await?;
        stand.finish().await?;
        Ok((events, took))
    });
    work.await
}

/// What goes on around a session that holds a snapshot.
struct Held {
    before: Moment,
    /// At its end.
    during: Moment,
    /// With what it had kept removed: how much of the difference is the machine's, and of the longer history.
    after: Moment,
    held_for: Duration,
}

/// Half load for a while, and then what is possible.
struct Moment {
    half: Tally,
    /// Of its messages, in microseconds.
    lag_us: Histogram<u64>,
    /// A closed loop.
    capacity: Delivered,
}

async fn held(bench: &Bench, per_second: f64, in_flight: u32) -> Result<Held> {
    let held_for = bench.seconds(60, 600);
    let work = bench.lab.with_ledger("relay", async |ledger| {
        let mut stand = Stand::raise(bench, ledger, &Setup::everything()).await?;
        let free = bench.seconds(8, 60);
        let capacity_lasts = bench.seconds(CAPACITY_S.0, CAPACITY_S.1);
        let before = moment(&mut stand, per_second, free, in_flight, capacity_lasts).await?;
        let client = ledger.database.connect().await?;
        // The snapshot is taken by the first query, and lives until the transaction ends.
        client
            .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox")
            .await?;
        let during = moment(&mut stand, per_second, held_for, in_flight, capacity_lasts).await?;
        client.batch_execute("COMMIT").await?;
        // As autovacuum would within a minute.
        client
            .batch_execute("VACUUM (ANALYZE)")
            .await
            .context("VACUUM")?;
        let after = moment(&mut stand, per_second, free, in_flight, capacity_lasts).await?;
        stand.finish().await?;
        Ok(Held {
            before,
            during,
            after,
            held_for,
        })
    });
    work.await
}

async fn moment(
    stand: &mut Stand<'_>,
    per_second: f64,
    lasts: Duration,
    in_flight: u32,
    capacity_lasts: Duration,
) -> Result<Moment> {
    let (half, lag_us) = stand.arrive(per_second, lasts).await?;
    let plan = Plan {
        in_flight,
        lasts: capacity_lasts,
        ..stand.plan(Kind::Transfer)?
    };
    Ok(Moment {
        half,
        lag_us,
        capacity: stand.deliver(plan).await?,
    })
}

fn held_findings(findings: &mut Findings, held: &Held, is_full: bool) {
    let free = |of: fn(&Moment) -> f64| of(&held.before).max(of(&held.after));
    let [writes, relay]: [fn(&Moment) -> f64; 2] = [
        |moment| moment.capacity.tally.rate(),
        |moment| moment.capacity.rate,
    ];
    for (budget, of) in [(&budget::HELD_WRITES, writes), (&budget::HELD_RELAY, relay)] {
        let size = Size {
            is: format!("{} s", held.held_for.as_secs()),
            is_full,
        };
        findings.sized_row(budget, lost_percent(free(of), of(&held.during)), size);
    }
    findings.text(format!(
        "A session that holds a REPEATABLE READ snapshot open for {} s at half load, so that nothing dead can be removed. Half load is an \
         open loop; what is still possible at the end, with the snapshot still held, is a closed one. What is lost is counted from the \
         better of before and after:",
        held.held_for.as_secs()
    ));
    let line = |name: &str, moment: &Moment| {
        [
            name.into(),
            millis(quantile_ms(&moment.half.latency_us, 0.99)),
            millis(quantile_ms(&moment.lag_us, 0.99)),
            not_answered(&moment.half).into(),
            Cell::Rate(writes(moment)),
            Cell::Rate(relay(moment)),
        ]
    };
    findings.table(
        [
            "",
            "p99 of answers at half load, ms",
            "p99 of receipts, ms",
            "of half load not answered",
            "writes possible/s",
            "delivered/s",
        ],
        vec![
            line("before", &held.before),
            line("held open", &held.during),
            line("let go and vacuumed", &held.after),
        ],
    );
}

/// Arrivals that were not answered as they had to be.
fn not_answered(tally: &Tally) -> u64 {
    tally.dropped + tally.unavailable + tally.unknown + tally.unreached
}

/// How much less, in per cent; not less than nothing.
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
