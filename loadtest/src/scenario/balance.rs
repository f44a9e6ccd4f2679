//! Balances of accounts with few and with many postings, read at a steady rate while the ledger goes on: of each guard, beside a full
//! sum of the same account.
//!
//! Each ledger is filled beforehand, and read once the keeper has folded it.

use super::Bench;
use super::stand::Stand;
use crate::lab::Ledger;
use crate::load::{Arrivals, Kind, Measured, Pace, Plan, Reader, Reads, read};
use crate::report::{Axis, Cell, Findings, Plot, Scale, Series, Size, budget, grouped, millis};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Postings of each account that is read.
const POSTINGS: [u64; 4] = [200_000, 1_000_000, 5_000_000, 20_000_000];
const POSTINGS_SHORT: [u64; 2] = [200_000, 1_000_000];
/// The accounts: their guard and address. Every event of the ledger has one leg on each.
const ACCOUNTS: [(&str, &str); 2] = [("floor", "users:u-1:available"), ("none", "world")];
/// Reads a second.
const RATE: u32 = 100;
/// Reads in flight at most.
const CONNECTIONS: u32 = 16;
/// Events a second meanwhile, so that there always is something after the last snapshot.
const WRITES_PER_SECOND: f64 = 20.0;
/// How long the keeper may take to fold a ledger that it has never seen.
const FOLD_LIMIT: Duration = Duration::from_secs(3_600);
/// How often it is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Times the full sum is computed; the fastest counts.
const SUMS: u32 = 3;

/// What was measured on one ledger.
struct Step {
    postings: u64,
    /// Until every posting of the filled ledger was folded.
    folding: Duration,
    /// By account.
    reads: Vec<Measured>,
    /// Full sums, by account.
    sums: Vec<Duration>,
}

/// Runs it.
///
/// # Errors
/// When a run fails its gate.
pub async fn run(bench: &mut Bench) -> Result<Findings> {
    let postings: &[u64] = if bench.full {
        &POSTINGS
    } else {
        &POSTINGS_SHORT
    };
    let mut steps = Vec::new();
    for postings in postings {
        let work = bench.lab.with_ledger("balance", async |ledger| {
            measure(bench, ledger, *postings).await
        });
        steps.push(work.await.with_context(|| format!("{postings} postings"))?);
    }
    let largest = steps.last().context("nothing was measured")?.postings;
    let reads = steps.iter().flat_map(|step| &step.reads);
    let worst = reads.map(|reads| reads.millis(0.99)).fold(0.0, f64::max);
    let mut findings = Findings::default();
    let size = Size {
        is: format!("up to {} postings", grouped(largest)),
        is_full: bench.full,
    };
    findings.sized_row(&budget::BALANCE, worst, size);
    findings.text(format!(
        "`GET /v1/accounts/{{address}}` {RATE} times a second, counted from when each read should have begun, while \
         {WRITES_PER_SECOND} events a second go on; beside it SQL that sums all postings \
         of the account. A `floor` account has its balance in a row. Folding is what the keeper took for a ledger that it had never seen."
    ));
    findings.table(
        [
            "postings of the account",
            "guard",
            "p50 ms",
            "p99 ms",
            "max ms",
            "full sum, ms",
            "folding, s",
        ],
        steps.iter().flat_map(lines).collect(),
    );
    findings.plot(plot(&steps));
    Ok(findings)
}

async fn measure(bench: &Bench, ledger: &Ledger, postings: u64) -> Result<Step> {
    let mut stand = Stand::raise_one_user(bench, ledger, postings).await?;
    let began = Instant::now();
    await_folded(ledger).await?;
    let folding = began.elapsed();
    let (mut reads, mut sums) = (Vec::new(), Vec::new());
    for (_, address) in ACCOUNTS {
        reads.push(read_and_write(bench, &mut stand, address).await?);
    }
    for (_, address) in ACCOUNTS {
        let (sum, took) = full_sum(ledger, address).await?;
        let answered = answered(&stand, address).await?;
        ensure!(
            sum == answered,
            "{address} is answered to have {answered:?}, its postings sum to {sum:?}"
        );
        sums.push(took);
    }
    stand.finish().await?;
    Ok(Step {
        postings,
        folding,
        reads,
        sums,
    })
}

/// Waits until the snapshots have come as far as the ledger.
async fn await_folded(ledger: &Ledger) -> Result<()> {
    let sql = "-- is_folded
SELECT f.position >= h.position FROM snapshot_horizon f CROSS JOIN horizon h";
    let client = ledger.database.connect().await?;
    let end = Instant::now() + FOLD_LIMIT;
    while !client.query_one(sql, &[]).await?.try_get::<_, bool>(0)? {
        ensure!(
            Instant::now() < end,
            "the keeper has not folded the ledger in {FOLD_LIMIT:?}"
        );
        sleep(LOOK_EVERY).await;
    }
    Ok(())
}

async fn read_and_write(bench: &Bench, stand: &mut Stand<'_>, address: &str) -> Result<Measured> {
    let lasts = bench.seconds(5, 30);
    let warm_up = Duration::from_secs(1);
    let reads = Reads {
        connections: CONNECTIONS,
        pace: Pace::PerSecond(RATE),
        warm_up,
        lasts,
        ..stand.reads(vec![format!("/v1/accounts/{address}")])?
    };
    let writes = Plan {
        arrivals: Arrivals::Constant {
            per_second: WRITES_PER_SECOND,
        },
        warm_up,
        lasts,
        progress: false,
        ..stand.plan(Kind::Deposit)?
    };
    let (written, measured) = tokio::try_join!(stand.drive(writes), read(reads))?;
    written.all_answered()?;
    Ok(measured)
}

/// Amounts by asset.
type Amounts = BTreeMap<String, String>;

/// What all postings of an account sum to, and how long that takes.
async fn full_sum(ledger: &Ledger, address: &str) -> Result<(Amounts, Duration)> {
    let sql = "-- full_sum
SELECT p.asset, sum(p.amount)::text FROM accounts a JOIN postings p USING (account_no) WHERE a.address = $1 GROUP BY p.asset";
    let client = ledger.database.connect().await?;
    let mut fastest = Duration::MAX;
    let mut amounts = Amounts::new();
    for _ in 0..SUMS {
        let began = Instant::now();
        let rows = client.query(sql, &[&address]).await?;
        fastest = fastest.min(began.elapsed());
        for row in rows {
            amounts.insert(row.try_get(0)?, row.try_get(1)?);
        }
    }
    Ok((amounts, fastest))
}

/// What the service says.
async fn answered(stand: &Stand<'_>, address: &str) -> Result<Amounts> {
    let path = format!("/v1/accounts/{address}");
    let by = stand.reads(Vec::new())?;
    let mut reader = Reader::open(&by.target, &by.token).await?;
    let body: Value = serde_json::from_slice(reader.get(&path).await?)?;
    let balances = body["balances"].as_array().context("no balances")?;
    let amounts = balances.iter().map(|of_asset| {
        let text = |name: &str| of_asset[name].as_str().map(str::to_owned);
        text("asset").zip(text("balance"))
    });
    amounts
        .collect::<Option<_>>()
        .context("a balance of another form")
}

fn lines(step: &Step) -> Vec<[Cell; 7]> {
    let accounts = ACCOUNTS.iter().zip(&step.reads).zip(&step.sums);
    accounts
        .map(|(((guard, _), reads), sum)| {
            let folding = match *guard {
                "none" => format!("{:.1}", step.folding.as_secs_f64()).into(),
                _ => "".into(),
            };
            [
                step.postings.into(),
                (*guard).into(),
                millis(reads.millis(0.5)),
                millis(reads.millis(0.99)),
                millis(reads.millis(1.0)),
                millis(sum.as_secs_f64() * 1_000.0),
                folding,
            ]
        })
        .collect()
}

fn plot(steps: &[Step]) -> Plot {
    let line = |name: String, ms: &dyn Fn(&Step) -> Option<f64>| Series {
        name,
        points: steps
            .iter()
            .filter_map(|step| Some((step.postings as f64, ms(step)?)))
            .collect(),
    };
    let mut series = Vec::new();
    for (index, (guard, _)) in ACCOUNTS.iter().enumerate() {
        series.push(line(format!("a `{guard}` account, p99"), &|step| {
            Some(step.reads.get(index)?.millis(0.99))
        }));
        series.push(line(format!("its full sum, `{guard}`"), &|step| {
            Some(step.sums.get(index)?.as_secs_f64() * 1_000.0)
        }));
    }
    Plot {
        file: "balance".to_owned(),
        title: "Reading a balance, by the account's number of postings".to_owned(),
        x: Axis {
            label: "postings of the account",
            scale: Scale::Log10,
        },
        y: Axis {
            label: "ms",
            scale: Scale::Log10,
        },
        series,
    }
}
