//! What writing and reading cost when the tables are large, beside the same with empty ones a moment earlier and later: a machine drifts,
//! so only neighbours are compared. And what an event takes on disk.
//!
//! The relay is paused. The control is measured last: what it writes belongs to no chain.

use super::Bench;
use super::stand::Stand;
use crate::control;
use crate::fill::{self, fill};
use crate::lab::Ledger;
use crate::load::{Kind, Measured, Plan, Reads, Tally, read};
use crate::report::{Axis, Cell, Findings, Plot, Scale, Series, Size, budget, grouped, millis};
use crate::server::Setup;
use anyhow::{Context, Result, anyhow};
use hdrhistogram::Histogram;

/// Events in the tables.
const SIZES: [u64; 3] = [1_000_000, 5_000_000, 20_000_000];
const SIZES_SHORT: [u64; 1] = [1_000_000];
/// Events of the ledger that is weighed, with as many to a user as the largest has.
const WEIGHED: u64 = 300_000;
const WEIGHED_USERS: u32 = 150;
const IN_FLIGHT: u32 = 64;
/// Places that reads go to, drawn from the whole ledger.
const PLACES: u64 = 2_000;
/// Seconds of the control.
const CONTROL_S: (u32, u32) = (5, 15);

/// What is read: its name in tables.
const READS: [&str; 3] = [
    "an event by id",
    "the first of a user's events",
    "a user's balance",
];

/// One ledger of a pair.
struct Side {
    events: u64,
    writes: Writes,
    /// As in [`READS`].
    reads: Vec<Measured>,
    /// The control's events a second.
    control: f64,
}

/// Two runs as one.
struct Writes {
    rate: f64,
    latency_us: Histogram<u64>,
}

/// A ledger of some size and the empty one beside it.
struct Step {
    empty: Side,
    filled: Side,
    filling: String,
}

/// Bytes of a table or an index.
struct Part {
    name: String,
    bytes: u64,
}

/// Runs it.
///
/// # Errors
/// When a run fails its gate.
pub async fn run(bench: &mut Bench) -> Result<Findings> {
    let parts = bench
        .lab
        .with_ledger("weight", async |ledger| weigh(ledger).await)
        .await
        .context("the weight of an event")?;
    let sizes: &[u64] = if bench.full { &SIZES } else { &SIZES_SHORT };
    let mut steps = Vec::new();
    for events in sizes {
        steps.push(
            step(bench, *events)
                .await
                .with_context(|| format!("{events} events"))?,
        );
    }
    let last = steps.last().context("nothing was measured")?;
    let bytes: u64 = parts.iter().map(|part| part.bytes).sum();
    let mut findings = Findings::default();
    findings.sized_row(
        &budget::SIZE,
        percent(last.filled.writes.rate, last.empty.writes.rate),
        Size {
            is: format!("{} events", grouped(last.filled.events)),
            is_full: bench.full,
        },
    );
    findings.row(&budget::BYTES, bytes as f64 / WEIGHED as f64);
    page(&mut findings, &steps);
    findings.text(format!(
        "Bytes per event: {} transfers of {} users with two postings each, a UUID as idempotency key and a record of a writer who is \
         not the subject, written with all indexes in place, users taking turns:",
        grouped(WEIGHED),
        grouped(WEIGHED_USERS.into())
    ));
    findings.table(
        ["part", "bytes an event"],
        parts
            .iter()
            .map(|part| {
                let each = part.bytes as f64 / WEIGHED as f64;
                [part.name.as_str().into(), format!("{each:.1}").into()]
            })
            .collect(),
    );
    findings.plot(plot(&steps));
    Ok(findings)
}

/// Fills a small ledger the slow way, so that its indexes have grown as they do in service, and weighs it.
async fn weigh(ledger: &Ledger) -> Result<Vec<Part>> {
    let plan = fill::Plan {
        keep_indexes: true,
        ..transfers(WEIGHED, WEIGHED_USERS)
    };
    fill(&ledger.database, &ledger.name, plan).await?;
    ledger.verify().await?;
    parts(ledger).await
}

/// Tables with what belongs to them, and each of their indexes, over all partitions.
async fn parts(ledger: &Ledger) -> Result<Vec<Part>> {
    let sql = "-- parts_of_history
WITH partitions AS (
    SELECT i.inhrelid AS id, p.relname AS parent, c.relname AS name
    FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhparent JOIN pg_class c ON c.oid = i.inhrelid
    WHERE p.relnamespace = current_schema()::regnamespace AND p.relkind = 'p'
)
SELECT part::text, sum(bytes)::bigint
FROM (SELECT parent AS part, pg_table_size(id) AS bytes FROM partitions
      UNION ALL
      SELECT coalesce(p.relname, t.parent || substr(c.relname, 1 + length(t.name))), pg_relation_size(x.indexrelid)
      FROM partitions t JOIN pg_index x ON x.indrelid = t.id JOIN pg_class c ON c.oid = x.indexrelid
      LEFT JOIN pg_inherits i ON i.inhrelid = c.oid LEFT JOIN pg_class p ON p.oid = i.inhparent) AS parts
GROUP BY part ORDER BY part";
    let rows = ledger.database.connect().await?.query(sql, &[]).await?;
    rows.iter()
        .map(|row| {
            Ok(Part {
                name: row.try_get(0)?,
                bytes: u64::try_from(row.try_get::<_, i64>(1)?)?,
            })
        })
        .collect()
}

fn transfers(events: u64, users: u32) -> fill::Plan {
    fill::Plan {
        events,
        users,
        kind: fill::Kind::Transfers,
        seed: 1,
        keep_indexes: false,
    }
}

/// Makes both ledgers and measures them in turn.
async fn step(bench: &Bench, events: u64) -> Result<Step> {
    let lab = &bench.lab;
    lab.with_ledger("size", async |filled| {
        let filling = fill(
            &filled.database,
            &filled.name,
            transfers(events, bench.users),
        )
        .await?;
        lab.with_ledger("empty", async |empty| {
            let plan = transfers(u64::from(bench.users), bench.users);
            fill(&empty.database, &empty.name, plan).await?;
            let (empty, filled) = pair(bench, empty, filled, events).await?;
            Ok(Step {
                empty,
                filled,
                filling: filling.to_string(),
            })
        })
        .await
    })
    .await
}

async fn pair(bench: &Bench, empty: &Ledger, filled: &Ledger, events: u64) -> Result<(Side, Side)> {
    let setup = Setup::roles("api,keeper");
    let mut one = Stand::raise_filled(bench, empty, &setup, bench.users).await?;
    let mut other = Stand::raise_filled(bench, filled, &setup, bench.users).await?;
    // What drifts one way in this order falls on both alike.
    let first = write(bench, &mut one).await?;
    let second = write(bench, &mut other).await?;
    let third = write(bench, &mut other).await?;
    let fourth = write(bench, &mut one).await?;
    let (mut of_empty, mut of_filled) = (Vec::new(), Vec::new());
    let (empty_paths, filled_paths) = (paths(empty).await?, paths(filled).await?);
    for (in_empty, in_filled) in empty_paths.into_iter().zip(filled_paths) {
        of_empty.push(read_paths(bench, &one, in_empty).await?);
        of_filled.push(read_paths(bench, &other, in_filled).await?);
    }
    one.finish().await.context("the empty ledger")?;
    other.finish().await.context("the filled ledger")?;
    let seconds = if bench.full { CONTROL_S.1 } else { CONTROL_S.0 };
    let controlled = async |ledger: &Ledger| {
        let pg_bin_dir = bench.pg_bin_dir.as_deref();
        control::run_filled(&ledger.database, bench.users, seconds, pg_bin_dir).await
    };
    let (in_empty, in_filled) = (controlled(empty).await?, controlled(filled).await?);
    Ok((
        Side {
            events: u64::from(bench.users),
            writes: Writes::of(&[first, fourth])?,
            reads: of_empty,
            control: in_empty.rate,
        },
        Side {
            events,
            writes: Writes::of(&[second, third])?,
            reads: of_filled,
            control: in_filled.rate,
        },
    ))
}

async fn write(bench: &Bench, stand: &mut Stand<'_>) -> Result<Tally> {
    let plan = Plan {
        in_flight: IN_FLIGHT,
        lasts: bench.seconds(4, 15),
        ..stand.plan(Kind::Transfer)?
    };
    stand.drive(plan).await
}

async fn read_paths(bench: &Bench, stand: &Stand<'_>, paths: Vec<String>) -> Result<Measured> {
    read(Reads {
        connections: IN_FLIGHT,
        lasts: bench.seconds(2, 8),
        ..stand.reads(paths)?
    })
    .await
}

/// Paths of events that lie all over the ledger, of lists and of balances of their users: as in [`READS`].
async fn paths(ledger: &Ledger) -> Result<[Vec<String>; 3]> {
    let sql = "-- places_to_read
SELECT e.event_id::text, u.subject FROM events e JOIN users u USING (user_no)
WHERE e.position IN (SELECT (random() * h.position)::bigint FROM horizon h, generate_series(1, $1::bigint)) ORDER BY random()";
    let rows = ledger
        .database
        .connect()
        .await?
        .query(sql, &[&i64::try_from(PLACES)?])
        .await?;
    let mut paths = [Vec::new(), Vec::new(), Vec::new()];
    for row in &rows {
        let (id, subject): (&str, &str) = (row.try_get(0)?, row.try_get(1)?);
        let of_row = [
            format!("/v1/events/{id}"),
            // One: users of the empty ledger have few.
            format!("/v1/events?subject={subject}&limit=1"),
            format!("/v1/accounts/users:{subject}:available"),
        ];
        for (paths, path) in paths.iter_mut().zip(of_row) {
            paths.push(path);
        }
    }
    Ok(paths)
}

impl Writes {
    fn of(tallies: &[Tally]) -> Result<Self> {
        let first = tallies.first().ok_or_else(|| anyhow!("no run"))?;
        let mut latency_us = first.latency_us.clone();
        for tally in tallies.iter().skip(1) {
            latency_us.add(&tally.latency_us)?;
        }
        let sum: f64 = tallies.iter().map(Tally::rate).sum();
        Ok(Writes {
            rate: sum / tallies.len() as f64,
            latency_us,
        })
    }
}

fn percent(part: f64, whole: f64) -> f64 {
    100.0 * part / whole
}

fn page(findings: &mut Findings, steps: &[Step]) {
    findings.text(format!(
        "Each size beside an empty ledger of the same users, measured in the order empty, filled, filled, empty. Closed loops with \
         {IN_FLIGHT} in flight. The control is `pgbench` on the very same two ledgers, and bound by flushes."
    ));
    writes(findings, steps);
    reads(findings, steps);
    for step in steps {
        findings.text(format!("Filled with {}.", step.filling));
    }
}

fn writes(findings: &mut Findings, steps: &[Step]) {
    let mut lines = Vec::new();
    for step in steps {
        for side in [&step.empty, &step.filled] {
            let ms = |at| millis(side.writes.latency_us.value_at_quantile(at) as f64 / 1_000.0);
            lines.push([
                side.events.into(),
                format!("{:.0}", side.writes.rate).into(),
                share(side.writes.rate, step.empty.writes.rate),
                ms(0.5),
                ms(0.99),
                format!("{:.0}", side.control).into(),
                share(side.control, step.empty.control),
            ]);
        }
    }
    findings.table(
        [
            "events before",
            "writes/s",
            "of empty",
            "p50 ms",
            "p99 ms",
            "control, writes/s",
            "of empty",
        ],
        lines,
    );
}

fn reads(findings: &mut Findings, steps: &[Step]) {
    let mut lines = Vec::new();
    for step in steps {
        for (index, name) in READS.iter().enumerate() {
            let pair = step
                .empty
                .reads
                .get(index)
                .zip(step.filled.reads.get(index));
            let Some((empty, filled)) = pair else {
                continue;
            };
            lines.push([
                step.filled.events.into(),
                (*name).into(),
                format!("{:.0}", filled.rate()).into(),
                share(filled.rate(), empty.rate()),
                millis(filled.millis(0.5)),
                millis(filled.millis(0.99)),
            ]);
        }
    }
    findings.table(
        [
            "events before",
            "read",
            "reads/s",
            "of empty",
            "p50 ms",
            "p99 ms",
        ],
        lines,
    );
}

fn share(part: f64, whole: f64) -> Cell {
    format!("{:.0} %", percent(part, whole)).into()
}

/// Costs in microseconds of the whole machine: the time of a run over what was done in it.
fn plot(steps: &[Step]) -> Plot {
    let line = |name: &str, rate: &dyn Fn(&Side) -> Option<f64>| Series {
        name: name.to_owned(),
        points: steps
            .iter()
            .take(1)
            .map(|step| &step.empty)
            .chain(steps.iter().map(|step| &step.filled))
            .filter_map(|side| Some((side.events as f64, 1e6 / rate(side)?)))
            .collect(),
    };
    let mut series = vec![
        line("an event written", &|side| Some(side.writes.rate)),
        line("the control's", &|side| Some(side.control)),
    ];
    for (index, name) in READS.iter().enumerate() {
        series.push(line(name, &|side| Some(side.reads.get(index)?.rate())));
    }
    Plot {
        file: "size".to_owned(),
        title: "Cost by table size: time of the machine for each, 64 in flight".to_owned(),
        x: Axis {
            label: "events in the tables",
            scale: Scale::Log10,
        },
        y: Axis {
            label: "microseconds",
            scale: Scale::Linear,
        },
        series,
    }
}
