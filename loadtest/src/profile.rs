//! Where the time goes at saturation: processor time by program, a flame graph of the server by `perf`, and the dearest statements
//! by `pg_stat_statements`.
//!
//! Numbers of a profile are for finding causes: both ways of looking cost something, so they are never those of the report.

use crate::args::ProfileArgs;
use crate::load::{Kind, Plan};
use crate::processor::Times;
use crate::report::commit;
use crate::scenario::{Bench, Stand};
use anyhow::{Context, Result, bail, ensure};
use inferno::collapse::Collapse;
use inferno::collapse::perf::Folder;
use inferno::flamegraph;
use std::fmt::Write as _;
use std::io::Cursor;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::timeout;
use tokio_postgres::Client;

/// How long the server is looked at.
const LASTS: Duration = Duration::from_secs(10);
/// Samples a second; odd, so that they do not fall in with a timer.
const SAMPLES_PER_S: &str = "199";
/// The program has no frame pointers: stacks are copied and unwound afterwards.
const CALL_GRAPH: &str = "dwarf,8192";
/// How long unwinding may take.
const SCRIPT_LIMIT: Duration = Duration::from_secs(180);
const STATEMENTS_MAX: usize = 15;

const NO_PERF: &str = "perf is not there: apt-get install linux-perf (Debian), and as root or with kernel.perf_event_paranoid at most 1";
const NO_STATISTICS: &str =
    "Postgres does not count its statements: services run --statement-statistics";

const STATISTICS: &str = "-- dearest_statements
SELECT query, calls, total_exec_time, mean_exec_time, rows, wal_bytes::bigint FROM pg_stat_statements
WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY total_exec_time DESC LIMIT $1";

/// A statement and what it cost.
#[derive(Debug, PartialEq)]
struct Statement {
    name: String,
    calls: i64,
    total_ms: f64,
    mean_ms: f64,
    rows: i64,
    wal_bytes: i64,
}

/// Profiles the server and writes `flame.svg` and `profile.md` into the report's directory; returns the latter.
///
/// # Errors
/// When perf or the statistics are not there, or the run fails its gate.
pub async fn run(bench: &mut Bench, args: &ProfileArgs) -> Result<String> {
    let samples = bench.lab.scratch().join("perf.data");
    let work = bench.lab.with_ledger("profile", async |ledger| {
        let client = ledger.database.connect().await?;
        client
            .batch_execute("-- statistics\nCREATE EXTENSION pg_stat_statements")
            .await
            .context(NO_STATISTICS)?;
        let mut stand = Stand::raise(bench, ledger, &args.setup()).await?;
        client
            .batch_execute("-- forget\nSELECT pg_stat_statements_reset()")
            .await
            .context(NO_STATISTICS)?;
        let plan = |stand: &Stand<'_>| {
            Ok::<_, anyhow::Error>(Plan {
                in_flight: args.in_flight,
                lasts: LASTS,
                ..stand.plan(Kind::Transfer)?
            })
        };
        let before = Times::now()?;
        let tally = stand.drive(plan(&stand)?).await?;
        let used = Times::now()?.since(&before);
        let statements = dearest(&client).await?;
        // Only now: perf takes as much of the processor as everything else together.
        if args.graph() {
            let recording = record(stand.server.pid(), &samples)?;
            stand.drive(plan(&stand)?).await?;
            finish(recording).await?;
        }
        stand.finish().await?;
        let events = tally.created;
        let tables = programs(&used, events) + "\n" + &table(&statements, events);
        Ok(front(args, events, tally.rate()) + &tables)
    });
    let page = work.await?;
    let report = &args.report;
    std::fs::create_dir_all(report)?;
    if args.graph() {
        let graph = flame(&samples).await?;
        std::fs::write(report.join("flame.svg"), graph).context("flame.svg")?;
    }
    std::fs::write(report.join("profile.md"), &page).context("profile.md")?;
    Ok(page)
}

/// Starts perf for as long as the load lasts.
fn record(pid: u32, into: &Path) -> Result<tokio::process::Child> {
    Command::new("perf")
        .args([
            "record",
            "--quiet",
            "-F",
            SAMPLES_PER_S,
            "--call-graph",
            CALL_GRAPH,
        ])
        .args(["-p", &pid.to_string(), "-o"])
        .arg(into)
        .args(["--", "sleep", &LASTS.as_secs().to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context(NO_PERF)
}

async fn finish(recording: tokio::process::Child) -> Result<()> {
    let output = timeout(2 * LASTS, recording.wait_with_output())
        .await
        .context("perf record does not end")??;
    ensure!(
        output.status.success(),
        "perf record: {} ({NO_PERF})",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// The flame graph of recorded samples.
async fn flame(samples: &Path) -> Result<Vec<u8>> {
    // Without --no-inline every address is looked up by another program, which takes minutes.
    let mut script = Command::new("perf");
    script
        .args(["script", "--no-inline", "-i"])
        .arg(samples)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = timeout(SCRIPT_LIMIT, script.output())
        .await
        .context("perf script does not end")?
        .context(NO_PERF)?;
    ensure!(
        output.status.success(),
        "perf script: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    draw(&output.stdout)
}

/// Folds the stacks of `perf script` and draws them.
fn draw(stacks: &[u8]) -> Result<Vec<u8>> {
    let mut folded = Vec::new();
    Folder::default()
        .collapse(stacks, &mut folded)
        .context("folding stacks")?;
    if folded.is_empty() {
        bail!("perf has no samples");
    }
    let mut options = flamegraph::Options::default();
    options.title = "daybook serve at saturation".to_owned();
    let mut graph = Vec::new();
    flamegraph::from_reader(&mut options, Cursor::new(folded), &mut graph)
        .context("drawing the flame graph")?;
    Ok(graph)
}

async fn dearest(client: &Client) -> Result<Vec<Statement>> {
    let limit = i64::try_from(STATEMENTS_MAX)?;
    let rows = client
        .query(STATISTICS, &[&limit])
        .await
        .context(NO_STATISTICS)?;
    rows.iter()
        .map(|row| {
            Ok(Statement {
                name: name(row.try_get(0)?),
                calls: row.try_get(1)?,
                total_ms: row.try_get(2)?,
                mean_ms: row.try_get(3)?,
                rows: row.try_get(4)?,
                wal_bytes: row.try_get(5)?,
            })
        })
        .collect()
}

/// What a statement is called in the source, or how it begins.
fn name(query: &str) -> String {
    let first = query.lines().next().unwrap_or_default();
    let name = first.strip_prefix("-- ").unwrap_or(first);
    name.chars()
        .take(60)
        .collect::<String>()
        .replace('|', "\\|")
}

fn front(args: &ProfileArgs, events: u64, per_second: f64) -> String {
    let graph = match args.graph() {
        true => format!(
            " [Flame graph of the server](flame.svg), from another {} s: {SAMPLES_PER_S} samples a second.",
            LASTS.as_secs()
        ),
        false => String::new(),
    };
    format!(
        "# Where the time goes\n\n{} requests in flight for {} s with the roles {}, at commit `{}`: {events} events, \
         {per_second:.0} a second.{graph}\n\n",
        args.in_flight,
        LASTS.as_secs(),
        args.roles,
        commit()
    )
}

fn programs(used: &[(String, Duration)], events: u64) -> String {
    let mut text =
        "| program | processor time, s | an event, microseconds |\n|---|---|---|\n".to_owned();
    for (name, used) in used {
        let _ = writeln!(
            text,
            "| {name} | {:.1} | {:.1} |",
            used.as_secs_f64(),
            used.as_secs_f64() * 1e6 / events.max(1) as f64
        );
    }
    text
}

fn table(statements: &[Statement], events: u64) -> String {
    let mut text = "| statement | calls | total ms | mean ms | rows | microseconds an event | WAL bytes an event |\n\
                    |---|---|---|---|---|---|---|\n"
        .to_owned();
    let each = |whole: f64| whole / events.max(1) as f64;
    for statement in statements {
        let _ = writeln!(
            text,
            "| {} | {} | {:.0} | {:.3} | {} | {:.1} | {:.0} |",
            statement.name,
            statement.calls,
            statement.total_ms,
            statement.mean_ms,
            statement.rows,
            each(statement.total_ms * 1_000.0),
            each(statement.wal_bytes as f64)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const STACKS: &[u8] = b"daybook 100 1.000000:   5025125 cpu-clock:
\t    55d0 daybook::commit::lane::Lane::run+0x10 (/x/daybook)
\t    55c0 main+0x1 (/x/daybook)

";

    #[test]
    fn stacks_become_a_graph() {
        let graph = String::from_utf8(draw(STACKS).unwrap()).unwrap();
        assert!(
            graph.contains("<svg") && graph.contains("Lane::run"),
            "{graph}"
        );
        assert!(draw(b"").is_err());
    }

    #[test]
    fn a_statement_has_the_name_that_the_source_gave_it() {
        assert_eq!(
            name("-- insert_events\nINSERT INTO events"),
            "insert_events"
        );
        assert_eq!(name("COMMIT"), "COMMIT");
        assert_eq!(name("SELECT a || b"), "SELECT a \\|\\| b");
        let statement = Statement {
            name: "insert_events".to_owned(),
            calls: 10,
            total_ms: 12.5,
            mean_ms: 1.25,
            rows: 1_000,
            wal_bytes: 500_000,
        };
        let text = table(&[statement], 1_000);
        assert!(
            text.contains("| insert_events | 10 | 12 | 1.250 | 1000 | 12.5 | 500 |"),
            "{text}"
        );
        let text = programs(&[("postgres".to_owned(), Duration::from_secs(2))], 10_000);
        assert!(text.contains("| postgres | 2.0 | 200.0 |"), "{text}");
    }
}
