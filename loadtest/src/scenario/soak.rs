//! Half of saturation for half an hour: memory, outbox and latency have to stay where they are.
//!
//! Not a part of the standard set.

use super::Bench;
use super::stand::Stand;
use crate::gate::outbox;
use crate::load::{Arrivals, Plan, Tally};
use crate::report::{
    Axis, Findings, Plot, Scale, Series, grouped, mebibytes, median, millis, percentiles,
};
use crate::server::{Memory, Setup};
use anyhow::{Result, ensure};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, interval};
use tokio_postgres::Client;

const SAMPLE_EVERY: Duration = Duration::from_secs(5);
const MINUTE_S: i64 = 60;
/// What a median may grow by, besides a tenth: the outbox is mostly empty, and a page more or less is no leak.
const MEMORY_SPARE: u64 = 4 * 1024 * 1024;
const OUTBOX_SPARE: u64 = 500;

/// The service at one moment.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at_s: f64,
    memory_bytes: u64,
    outbox: u64,
}

/// Runs it.
///
/// # Errors
/// When the run fails its gate.
pub async fn run(bench: &mut Bench) -> Result<Findings> {
    let per_second = bench.saturated().await?.half();
    let lasts = bench.seconds(60, 1_800);
    let work = bench.lab.with_ledger("soak", async |ledger| {
        let mut stand = Stand::raise(bench, ledger, &Setup::everything()).await?;
        let plan = Plan {
            arrivals: Arrivals::Poisson { per_second },
            in_flight: 512,
            lasts,
            ..stand.mixed(bench)?
        };
        let (done, stop) = oneshot::channel();
        // A task of its own: the arrivals must not wait for a look at the outbox.
        let client = stand.ledger.database.connect().await?;
        let sampler = tokio::spawn(sample(client, stand.server.pid(), stop));
        let tally = stand.drive(plan).await?;
        drop(done);
        let samples = sampler.await??;
        tally.all_answered()?;
        if bench.full {
            flat(&samples)?;
        }
        stand.finish().await?;
        Ok((tally, samples))
    });
    let (tally, samples) = work.await?;
    Ok(findings(per_second, lasts, &tally, &samples))
}

/// Looks at the service every few seconds until the other end of the channel is dropped.
async fn sample(client: Client, pid: u32, mut stop: oneshot::Receiver<()>) -> Result<Vec<Sample>> {
    let began = Instant::now();
    let mut ticks = interval(SAMPLE_EVERY);
    let mut samples = Vec::new();
    loop {
        tokio::select! {
            _ = &mut stop => return Ok(samples),
            _ = ticks.tick() => samples.push(Sample {
                at_s: began.elapsed().as_secs_f64(),
                memory_bytes: Memory::of(pid)?.now,
                outbox: outbox(&client).await?,
            }),
        }
    }
}

/// That memory and outbox stayed where they were: their medians in the last quarter are about those of the second. The first is left
/// out, since pools and caches fill in it. Latency is shown, and depends on the machine.
///
/// # Errors
/// When one of them grew.
fn flat(samples: &[Sample]) -> Result<()> {
    let quarter = samples.len() / 4;
    ensure!(quarter > 0, "{} samples are too few", samples.len());
    let of_quarter = |from: usize, of: fn(&Sample) -> u64| {
        let samples = samples.iter().skip(from * quarter).take(quarter);
        median(samples.map(of)).unwrap_or(0)
    };
    let memory: fn(&Sample) -> u64 = |sample| sample.memory_bytes;
    let outbox: fn(&Sample) -> u64 = |sample| sample.outbox;
    for (what, of, spare) in [
        ("bytes of memory", memory, MEMORY_SPARE),
        ("outbox rows", outbox, OUTBOX_SPARE),
    ] {
        let (early, late) = (of_quarter(1, of), of_quarter(3, of));
        ensure!(
            late <= early + early / 10 + spare,
            "{early} {what} in the second quarter became {late} in the last"
        );
    }
    Ok(())
}

fn findings(per_second: f64, lasts: Duration, tally: &Tally, samples: &[Sample]) -> Findings {
    let mut findings = Findings::default();
    findings.text(format!(
        "Poisson arrivals at {per_second:.0} a second for {} minutes, transfers of every version between users drawn by Zipf's law, with tokens of three algorithms, 2 % sent again, 2 % refused; {} events.",
        lasts.as_secs() / 60,
        grouped(tally.created)
    ));
    let [p50, p90, p99, p999, max] = percentiles(&tally.latency_us);
    findings.table(
        ["p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "max ms"],
        vec![[p50, p90, p99, p999, max]],
    );
    let minutes = minutes(tally);
    let lines = minutes.iter().map(|(minute, p99_ms)| {
        let within = |sample: &&Sample| (sample.at_s / 60.0).floor() == *minute;
        let most =
            |of: fn(&Sample) -> u64| samples.iter().filter(within).map(of).max().unwrap_or(0);
        [
            format!("{minute:.0}").into(),
            millis(*p99_ms),
            mebibytes(most(|sample| sample.memory_bytes)),
            most(|sample| sample.outbox).into(),
        ]
    });
    findings.table(
        [
            "minute",
            "median of its seconds' p99, ms",
            "memory at most, MiB",
            "outbox at most",
        ],
        lines.collect(),
    );
    findings.plot(memory(samples));
    findings.plot(Plot {
        file: "p99".to_owned(),
        title: "p99 by minute: the median of its seconds".to_owned(),
        x: Axis {
            label: "minute",
            scale: Scale::Linear,
        },
        y: Axis {
            label: "ms",
            scale: Scale::Linear,
        },
        series: vec![Series {
            name: "p99".to_owned(),
            points: minutes,
        }],
    });
    findings
}

fn memory(samples: &[Sample]) -> Plot {
    let resident = |sample: &Sample| sample.memory_bytes as f64 / f64::from(1 << 20);
    Plot {
        file: "memory".to_owned(),
        title: "Memory of the service".to_owned(),
        x: Axis {
            label: "s",
            scale: Scale::Linear,
        },
        y: Axis {
            label: "MiB",
            scale: Scale::Linear,
        },
        series: vec![Series {
            name: "resident".to_owned(),
            points: samples
                .iter()
                .map(|sample| (sample.at_s, resident(sample)))
                .collect(),
        }],
    }
}

/// For each minute of the measured time the median of its seconds' p99, in milliseconds.
fn minutes(tally: &Tally) -> Vec<(f64, f64)> {
    let mut minutes = Vec::new();
    let measured: Vec<(i64, u64)> = tally
        .seconds
        .iter()
        .filter(|second| second.at_s >= 0 && second.done > 0)
        .map(|second| (second.at_s / MINUTE_S, second.p99_us))
        .collect();
    for of_minute in measured.chunk_by(|one, next| one.0 == next.0) {
        let p99_us = median(of_minute.iter().map(|(_, us)| *us));
        if let Some(((minute, _), us)) = of_minute.first().zip(p99_us) {
            minutes.push((*minute as f64, us as f64 / 1_000.0));
        }
    }
    minutes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(memory_mib: [u64; 4], outbox: [u64; 4]) -> Vec<Sample> {
        let quarters = memory_mib.into_iter().zip(outbox);
        let of_quarter = |(mib, outbox)| {
            let sample = Sample {
                at_s: 0.0,
                memory_bytes: mib * 1024 * 1024,
                outbox,
            };
            [sample; 5]
        };
        quarters.flat_map(of_quarter).collect()
    }

    #[test]
    fn what_grows_is_no_soak() {
        flat(&samples([20, 30, 31, 32], [0, 20, 400, 30])).unwrap();
        assert!(flat(&samples([20, 30, 35, 40], [0; 4])).is_err());
        assert!(flat(&[]).is_err());
        assert!(flat(&samples([30; 4], [0, 20, 2_000, 9_000])).is_err());
    }
}
