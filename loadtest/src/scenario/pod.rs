//! A small pod: the whole service in a control group of 0.4 cores and 64 MiB. First the reference workload, then its ceiling.
//!
//! Only the service is limited; Postgres, RabbitMQ and the load have the machine.

use super::Bench;
use super::half::over_time;
use super::stand::{Delivered, Stand};
use crate::cgroup::{Limits, Usage};
use crate::load::{Arrivals, Kind, Plan, Tally};
use crate::report::{
    Axis, Cell, Findings, Plot, Scale, Series, Size, budget, grouped, in_mebibytes, millis,
    percentiles, quantile_ms,
};
use crate::server::Setup;
use anyhow::{Context, Result};
use std::time::Duration;

const POD: Limits = Limits {
    cpu_millis: 400,
    memory_bytes: 64 * 1024 * 1024,
};
/// The reference workload: a million and a half events a day.
const REFERENCE_PER_S: f64 = 17.0;
const IN_FLIGHT: [u32; 4] = [16, 64, 128, 256];
/// Open-loop rates that are tried, in hundredths of what the closed loop reached, upwards until one misses its bound.
const SHARES: [u32; 6] = [40, 55, 70, 80, 90, 100];
/// The bound on the p99 of an open-loop rate, in milliseconds.
const P99_MS_MAX: f64 = 100.0;
/// How far the relay may be behind at the end of a rate that counts: this part of the time that it was driven for, or a few of the
/// group's periods.
const BEHIND_PART: u32 = 20;
const BEHIND_MIN: Duration = Duration::from_millis(500);

struct Measured {
    reference: Tally,
    reference_lasts: Duration,
    closed: Vec<(u32, Delivered)>,
    open: Vec<(f64, Delivered)>,
    usage: Usage,
}

/// Runs it.
///
/// # Errors
/// When control groups cannot be made here, or a run fails its gate.
pub async fn run(bench: &mut Bench) -> Result<Findings> {
    let measured = measure(bench).await?;
    let mut findings = Findings::default();
    let largest = measured
        .open
        .iter()
        .filter(|(_, delivered)| holds(delivered))
        .map(|(_, delivered)| delivered.rate)
        .fold(0.0, f64::max);
    let size = Size {
        is: format!("{} s at 17/s before", measured.reference_lasts.as_secs()),
        is_full: bench.full,
    };
    findings.sized_row(&budget::POD, largest, size);
    findings.text(format!(
        "Roles api, relay and keeper in one process, of a program that nobody else runs. Memory at most: {} MiB of 64, page cache included, which holds the whole program from its copying; \
         killed for want of memory: {}; made to wait in {} of {} periods of 100 ms, for {} ms added up over its threads, in the whole scenario.",
        in_mebibytes(measured.usage.memory_bytes_max),
        measured.usage.oom_kills,
        measured.usage.throttled,
        measured.usage.periods,
        grouped(measured.usage.throttled_ms)
    ));
    reference(&mut findings, &measured.reference);
    ceiling(&mut findings, &measured);
    Ok(findings)
}

fn reference(findings: &mut Findings, reference: &Tally) {
    findings.text(
        "The reference workload, Poisson arrivals at 17 a second: transfers of every version, tokens of three algorithms, 2 % sent again, 2 % refused:",
    );
    let [p50, p90, p99, p999, max] = percentiles(&reference.latency_us);
    findings.table(
        ["events", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "max ms"],
        vec![[reference.created.into(), p50, p90, p99, p999, max]],
    );
    findings.plot(over_time(reference, "The reference workload, 17 a second"));
}

fn ceiling(findings: &mut Findings, measured: &Measured) {
    findings.text("A closed loop; what the relay was behind at the end counts as time:");
    let closed = measured.closed.iter();
    findings.table(
        [
            "in flight",
            "events/s",
            "p50 ms",
            "p99 ms",
            "max ms",
            "relay behind, ms",
        ],
        closed
            .map(|(in_flight, delivered)| line(u64::from(*in_flight).into(), delivered))
            .collect(),
    );
    findings.text("Poisson arrivals, upwards until the p99 exceeds 100 ms, something fails, or the relay is behind by more than a twentieth of the time (half a second at least):");
    let open = measured.open.iter();
    findings.table(
        [
            "arrivals/s",
            "events/s",
            "p50 ms",
            "p99 ms",
            "max ms",
            "relay behind, ms",
        ],
        open.map(|(rate, delivered)| line(format!("{rate:.0}").into(), delivered))
            .collect(),
    );
    findings.plot(plot(measured));
}

async fn measure(bench: &Bench) -> Result<Measured> {
    let (lasts, reference_lasts) = (bench.seconds(3, 15), bench.seconds(60, 600));
    let setup = Setup {
        limits: Some(POD),
        ..Setup::everything()
    };
    bench
        .lab
        .with_ledger("pod", async |ledger| {
            let mut stand = Stand::raise(bench, ledger, &setup).await?;
            let plan = Plan {
                arrivals: Arrivals::Poisson {
                    per_second: REFERENCE_PER_S,
                },
                lasts: reference_lasts,
                ..stand.mixed(bench)?
            };
            let reference = stand.drive(plan).await?;
            reference.all_answered().context("the reference workload")?;
            let mut closed = Vec::new();
            for in_flight in IN_FLIGHT {
                let plan = Plan {
                    in_flight,
                    lasts,
                    ..stand.plan(Kind::Transfer)?
                };
                closed.push((in_flight, stand.deliver(plan).await?));
            }
            let most = closed
                .iter()
                .map(|(_, delivered)| delivered.rate)
                .fold(1.0, f64::max);
            let open = climb(&mut stand, most, lasts).await?;
            let usage = stand
                .finish()
                .await?
                .context("the server was not limited")?;
            Ok(Measured {
                reference,
                reference_lasts,
                closed,
                open,
                usage,
            })
        })
        .await
}

/// Open-loop rates, upwards, to the first that does not hold.
async fn climb(stand: &mut Stand<'_>, most: f64, lasts: Duration) -> Result<Vec<(f64, Delivered)>> {
    let mut open = Vec::new();
    for share in SHARES {
        let per_second = most * f64::from(share) / 100.0;
        let plan = Plan {
            arrivals: Arrivals::Poisson { per_second },
            in_flight: 256,
            lasts,
            ..stand.plan(Kind::Transfer)?
        };
        let delivered = stand.deliver(plan).await?;
        let goes_on = holds(&delivered);
        open.push((per_second, delivered));
        if !goes_on {
            break;
        }
    }
    Ok(open)
}

fn holds(delivered: &Delivered) -> bool {
    let tally = &delivered.tally;
    tally.all_answered().is_ok()
        && quantile_ms(&tally.latency_us, 0.99) <= P99_MS_MAX
        && delivered.behind <= (tally.window / BEHIND_PART).max(BEHIND_MIN)
}

fn line(first: Cell, delivered: &Delivered) -> [Cell; 6] {
    let [p50, _, p99, _, max] = percentiles(&delivered.tally.latency_us);
    let behind = millis(delivered.behind.as_secs_f64() * 1_000.0);
    [first, Cell::Rate(delivered.rate), p50, p99, max, behind]
}

fn plot(measured: &Measured) -> Plot {
    let p99 = measured
        .open
        .iter()
        .map(|(rate, delivered)| (*rate, quantile_ms(&delivered.tally.latency_us, 0.99)));
    Plot {
        file: "arrivals".to_owned(),
        title: "p99 by rate of arrivals, 0.4 cores and 64 MiB".to_owned(),
        x: Axis {
            label: "arrivals/s",
            scale: Scale::Linear,
        },
        y: Axis {
            label: "p99, ms",
            scale: Scale::Log10,
        },
        series: vec![Series {
            name: "p99".to_owned(),
            points: p99.collect(),
        }],
    }
}
