//! The time a first test takes: 25 users, each with a first deposit, then 25 transfers, one request after the other.
//!
//! Each repetition begins with an empty ledger and a server that has just started.

use super::Bench;
use crate::gate::Gate;
use crate::load::{self, Kind, Mix, Plan, Tally, Target};
use crate::report::{Findings, grouped, percentiles};
use crate::server::Setup;
use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use std::time::Duration;

const USERS: u32 = 25;
const TRANSFERS: u64 = 25;
/// Enough for any transfers of these.
const FUNDS: u64 = 100_000;
const LIMIT: Duration = Duration::from_secs(60);

struct Repetition {
    deposits: Tally,
    transfers: Tally,
}

impl Repetition {
    fn ms(&self) -> f64 {
        (self.deposits.elapsed + self.transfers.elapsed).as_secs_f64() * 1_000.0
    }
}

/// Runs it.
///
/// # Errors
/// When a repetition fails its gate.
pub async fn run(bench: &mut Bench) -> Result<Findings> {
    let mut repetitions = Vec::new();
    for _ in 0..bench.seconds(5, 20).as_secs() {
        repetitions.push(repeat(bench).await?);
    }
    let mut deposits_us = histogram()?;
    let mut transfers_us = histogram()?;
    for repetition in &repetitions {
        deposits_us.add(&repetition.deposits.latency_us)?;
        transfers_us.add(&repetition.transfers.latency_us)?;
    }
    let mut total_ms: Vec<f64> = repetitions.iter().map(Repetition::ms).collect();
    total_ms.sort_by(f64::total_cmp);
    let median = total_ms.get(total_ms.len() / 2).context("no repetition")?;
    let mut findings = Findings::default();
    findings.text(format!(
        "{} repetitions; all 50 requests of one take {median:.0} ms in the median, {:.0} to {:.0} ms.",
        grouped(u64::try_from(repetitions.len())?),
        total_ms.first().unwrap_or(median),
        total_ms.last().unwrap_or(median)
    ));
    let line = |name: &str, latency_us: &Histogram<u64>| {
        let [p50, p90, p99, _, max] = percentiles(latency_us);
        [name.into(), latency_us.len().into(), p50, p90, p99, max]
    };
    findings.table(
        [
            "one request",
            "requests",
            "p50 ms",
            "p90 ms",
            "p99 ms",
            "max ms",
        ],
        vec![
            line("a new user's first deposit", &deposits_us),
            line("a transfer", &transfers_us),
        ],
    );
    Ok(findings)
}

fn histogram() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, 120_000_000, 3)?)
}

async fn repeat(bench: &Bench) -> Result<Repetition> {
    let work = bench.lab.with_ledger("create", async |ledger| {
        let server = ledger.serve(&Setup::roles("api,keeper")).await?;
        let target = Target::new(&server.url()?)?;
        let mut gate = Gate::open(ledger).await?;
        let plan = |kind, count_max| {
            let tokens = bench.lab.tokens().writers().to_vec();
            let mut mix = Mix::new(kind, USERS, tokens);
            if kind == Kind::DepositEach {
                mix.amounts = FUNDS..=FUNDS;
            }
            Plan {
                count_max,
                progress: false,
                ..Plan::closed(target.clone(), 1, LIMIT, mix)
            }
        };
        let deposits = load::drive(plan(Kind::DepositEach, u64::from(USERS))).await?;
        let transfers = load::drive(plan(Kind::Transfer, TRANSFERS)).await?;
        gate.add(&deposits)?;
        gate.add(&transfers)?;
        ensure!(
            deposits.created == u64::from(USERS) && transfers.created == TRANSFERS,
            "{} deposits and {} transfers were accepted",
            deposits.created,
            transfers.created
        );
        server.stop().await?;
        gate.prove(ledger).await?;
        Ok(Repetition {
            deposits,
            transfers,
        })
    });
    work.await
}
