//! One user with a long history: what a further event of his costs, and what reading of him costs, stays where it was.
//!
//! Each length is a ledger of its own, filled beforehand. The relay is paused.

use super::Bench;
use super::stand::Stand;
use crate::lab::Ledger;
use crate::load::{Kind, Measured, Plan, Reader, Reads, Tally, read};
use crate::report::{Axis, Cell, Findings, Plot, Scale, Series, grouped, millis, quantile_ms};
use anyhow::{Context, Result, anyhow};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// Events of the user before it is measured.
const LENGTHS: [u64; 4] = [1, 10_000, 100_000, 1_000_000];
const LENGTHS_SHORT: [u64; 2] = [1, 1_000_000];
/// Requests in flight of many writers that want the same user.
const MANY: u32 = 16;
/// Events of a page.
const PAGE: u64 = 100;
/// Keys that are looked for.
const KEYS: u64 = 200;

/// What was measured after so many events.
struct Step {
    events: u64,
    /// By one writer, and by many.
    writes: [Tally; 2],
    first_page: Measured,
    last_page: Measured,
    by_key: Measured,
}

/// Runs it.
///
/// # Errors
/// When a run fails its gate.
pub async fn run(bench: &mut Bench) -> Result<Findings> {
    let lengths: &[u64] = if bench.full { &LENGTHS } else { &LENGTHS_SHORT };
    let mut steps = Vec::new();
    for events in lengths {
        let work = bench.lab.with_ledger("one_subject", async |ledger| {
            measure(bench, ledger, *events).await
        });
        steps.push(work.await.with_context(|| format!("{events} events"))?);
    }
    let mut findings = Findings::default();
    findings.text(
        "All events of a ledger are one user's; he goes on paying others. Closed loop, relay paused, after a short while that only tells \
         the planner that the tables are in use; latency of answers 201:",
    );
    findings.table(
        [
            "events before",
            "1 writer, events/s",
            "p50 ms",
            "p99 ms",
            "16 writers, events/s",
            "p50 ms",
            "p99 ms",
        ],
        steps.iter().map(written).collect(),
    );
    findings.text("One reader, p50 and p99 in ms of a list of the user's events: the first page of 100, the last one, and by key:");
    findings.table(
        [
            "events before",
            "first p50",
            "p99",
            "last p50",
            "p99",
            "by key p50",
            "p99",
        ],
        steps.iter().map(read_back).collect(),
    );
    findings.plot(plot(&steps));
    Ok(findings)
}

async fn measure(bench: &Bench, ledger: &Ledger, events: u64) -> Result<Step> {
    let mut stand = Stand::raise_one_user(bench, ledger, events).await?;
    let lasts = bench.seconds(2, 8);
    let first = "/v1/events?subject=u-1&limit=100".to_owned();
    let last = last_page(&stand.reads(Vec::new())?, &first).await?;
    let keys = keys(ledger, events).await?;
    let mut measured = Vec::new();
    for paths in [vec![first], vec![last], keys] {
        let lasts = bench.seconds(1, 4);
        measured.push(
            read(Reads {
                lasts,
                ..stand.reads(paths)?
            })
            .await?,
        );
    }
    let [first_page, last_page, by_key] = measured
        .try_into()
        .map_err(|_| anyhow!("three reads were not three"))?;
    let writers = async |stand: &mut Stand<'_>, in_flight| {
        let plan = Plan {
            in_flight,
            lasts,
            ..stand.plan(Kind::TransferFrom(1))?
        };
        stand.drive(plan).await
    };
    // What the planner knows of an empty table is not true any more once there is one second's work in it; autovacuum tells it
    // within a minute. Without that the shortest history is the dearest.
    writers(&mut stand, MANY).await?;
    ledger.database.analyze().await?;
    let writes = [
        writers(&mut stand, 1).await?,
        writers(&mut stand, MANY).await?,
    ];
    stand.finish().await?;
    Ok(Step {
        events,
        writes,
        first_page,
        last_page,
        by_key,
    })
}

/// The page that a reader comes to at the end. Anybody may write a cursor; this one is made of one that the service gave, with
/// another place.
async fn last_page(by: &Reads, first: &str) -> Result<String> {
    let mut reader = Reader::open(&by.target, &by.token).await?;
    let page: serde_json::Value = serde_json::from_slice(reader.get(first).await?)?;
    let Some(next) = page.get("next").and_then(serde_json::Value::as_str) else {
        return Ok(first.to_owned());
    };
    let user: serde_json::Value = serde_json::from_slice(reader.get("/v1/users/u-1").await?)?;
    let sequence = user.get("sequence").and_then(serde_json::Value::as_u64);
    let sequence = sequence.context("the user has no sequence")?;
    let cursor = String::from_utf8(URL_SAFE_NO_PAD.decode(next)?)?;
    let (list, _) = cursor
        .rsplit_once(' ')
        .context("a cursor of another form")?;
    let place = sequence.saturating_sub(PAGE);
    let cursor = URL_SAFE_NO_PAD.encode(format!("{list} {place}"));
    Ok(format!("{first}&after={cursor}"))
}

/// Lists by the keys of events that lie all over the history.
async fn keys(ledger: &Ledger, events: u64) -> Result<Vec<String>> {
    let sql = "-- keys_of_some
SELECT idempotency_key FROM events WHERE position = ANY($1)";
    let step = (events / KEYS).max(1);
    let positions: Vec<i64> = (1..=events.min(KEYS))
        .map(|index| i64::try_from(index * step))
        .collect::<Result<_, _>>()?;
    let rows = ledger
        .database
        .connect()
        .await?
        .query(sql, &[&positions])
        .await?;
    let path = |key: &str| format!("/v1/events?subject=u-1&idempotency_key={key}");
    rows.iter().map(|row| Ok(path(row.try_get(0)?))).collect()
}

fn written(step: &Step) -> [Cell; 7] {
    let [[a, b, c], [d, e, f]] = step.writes.each_ref().map(|tally| {
        [
            Cell::Rate(tally.rate()),
            millis(quantile_ms(&tally.latency_us, 0.5)),
            millis(quantile_ms(&tally.latency_us, 0.99)),
        ]
    });
    [step.events.into(), a, b, c, d, e, f]
}

fn read_back(step: &Step) -> [Cell; 7] {
    let cells = |measured: &Measured| [0.5, 0.99].map(|at| millis(measured.millis(at)));
    let [a, b] = cells(&step.first_page);
    let [c, d] = cells(&step.last_page);
    let [e, f] = cells(&step.by_key);
    [step.events.into(), a, b, c, d, e, f]
}

fn plot(steps: &[Step]) -> Plot {
    let line = |name: &str, ms: &dyn Fn(&Step) -> Option<f64>| Series {
        name: name.to_owned(),
        points: steps
            .iter()
            .filter_map(|step| Some((step.events as f64, ms(step)?)))
            .collect(),
    };
    let written = |tally: &Tally| Some(quantile_ms(&tally.latency_us, 0.5));
    let most = steps.iter().map(|step| step.events).max().unwrap_or(0);
    Plot {
        file: "one-subject".to_owned(),
        title: format!(
            "What one user's event costs, up to {} events of his",
            grouped(most)
        ),
        x: Axis {
            label: "events of the user",
            scale: Scale::Log10,
        },
        y: Axis {
            label: "p50, ms",
            scale: Scale::Linear,
        },
        series: vec![
            line("an event, 1 writer", &|step| written(&step.writes[0])),
            line("an event, 16 writers", &|step| written(&step.writes[1])),
            line("the first page", &|step| Some(step.first_page.millis(0.5))),
            line("the last page", &|step| Some(step.last_page.millis(0.5))),
            line("by key", &|step| Some(step.by_key.millis(0.5))),
        ],
    }
}
