//! The control: the ledger's own tables, written by pgbench. One transaction per event is what the service is compared with; many
//! events per transaction is the ceiling of these tables on this machine.
//!
//! Works in a ledger of its own, which is dropped; nothing is reported that the tables do not agree with.

use crate::database::Database;
use crate::lab::Lab;
use anyhow::{Context, Result, bail, ensure};
use std::env;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::time::timeout;

const FILL: &str = include_str!("../control/fill.sql");
const BATCH: &str = include_str!("../control/batch.sql");
const FAULTS: &str = include_str!("../control/faults.sql");
/// A record as long as a transfer's.
const RECORD: &str = include_str!("../control/record.json");

/// One transaction per event.
const TRANSFER: Script = Script {
    sql: include_str!("../control/transfer.sql"),
    clients: 32,
    events: 1,
};
/// Batches of random users meet: more clients would only wait for each other.
const CEILING: Script = Script {
    sql: include_str!("../control/ceiling.sql"),
    clients: 4,
    events: 400,
};

/// What a transaction changes in a ledger that has others already, as far as that is quickly counted.
const COUNTS: &str = "-- control_counts
SELECT (SELECT last_value FROM events_position_seq) AS last, (SELECT count(*) FROM outbox) AS outbox,
       (SELECT sum(sequence)::bigint FROM users) AS sequences, (SELECT sum(amount)::bigint FROM balances) AS money";

/// What is later than a position.
const LATER: &str = "-- control_later
SELECT (SELECT count(*) FROM events WHERE position > $1) AS events,
       (SELECT count(*) FROM postings WHERE position > $1) AS postings";

/// How long pgbench may take to connect and end, besides what it measures.
const PGBENCH_SPARE: Duration = Duration::from_secs(60);

/// What pgbench runs.
#[derive(Clone, Copy, Debug)]
struct Script {
    sql: &'static str,
    /// Connections.
    clients: u32,
    /// Events of one transaction.
    events: u64,
}

/// How the control runs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Users to choose from at random.
    pub users: u32,
    /// Seconds that the comparison is measured for.
    pub seconds: u32,
    /// Seconds that the ceiling is measured for.
    pub ceiling_seconds: u32,
    /// Where pgbench is, if not beside the newest installed Postgres or on the PATH.
    pub pg_bin_dir: Option<PathBuf>,
}

/// What a proved script reached.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reached {
    /// Connections of pgbench.
    pub clients: u32,
    /// Events of one transaction.
    pub batch: u64,
    /// Events written.
    pub events: u64,
    /// Events a second, connecting not counted.
    pub rate: f64,
    /// Mean time of a transaction, in milliseconds.
    pub latency_mean_ms: f64,
}

/// What a proved run measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Control {
    /// One transaction per event.
    pub single: Reached,
    /// Four hundred events per transaction.
    pub ceiling: Reached,
}

/// Makes a ledger, measures both scripts, and proves that the tables agree with what was counted.
///
/// # Errors
/// When anything does not hold; there is nothing to report then.
pub async fn run(lab: &Lab, settings: &Settings) -> Result<Control> {
    let pgbench = find_pgbench(settings.pg_bin_dir.as_deref())?;
    lab.with_ledger("control", async |ledger| {
        let database = &ledger.database;
        let client = database.connect().await?;
        let fill = FILL.replace(":users", &settings.users.to_string());
        client.batch_execute(&fill).await.context("fill.sql")?;
        client.batch_execute(BATCH).await.context("batch.sql")?;
        let single = measure(
            database,
            &pgbench,
            TRANSFER,
            settings.users,
            settings.seconds,
        )
        .await?;
        prove(database, single.events).await?;
        let seconds = settings.ceiling_seconds;
        let ceiling = measure(database, &pgbench, CEILING, settings.users, seconds).await?;
        prove(database, single.events + ceiling.events).await?;
        Ok(Control { single, ceiling })
    })
    .await
    .context("the control")
}

/// One transaction per event on a ledger that was filled, whose users and accounts have the numbers that the script counts on. Its
/// records belong to no chain, so that the ledger is of no further use.
///
/// # Errors
/// When pgbench fails, or the tables did not grow by what it counted.
pub async fn run_filled(
    database: &Database,
    users: u32,
    seconds: u32,
    pg_bin_dir: Option<&Path>,
) -> Result<Reached> {
    let pgbench = find_pgbench(pg_bin_dir)?;
    let client = database.connect().await?;
    let before = client.query_one(COUNTS, &[]).await?;
    let last: i64 = before.try_get("last")?;
    let reached = measure(database, &pgbench, TRANSFER, users, seconds).await?;
    let after = client.query_one(COUNTS, &[]).await?;
    let events = i64::try_from(reached.events)?;
    for (what, each) in [("outbox", 1), ("sequences", 1), ("money", 0)] {
        let grown = after.try_get::<_, i64>(what)? - before.try_get::<_, i64>(what)?;
        ensure!(
            grown == each * events,
            "{what} grew by {grown} with {events} transactions"
        );
    }
    let later = client.query_one(LATER, &[&last]).await?;
    for (what, each) in [("events", 1), ("postings", 2)] {
        let grown: i64 = later.try_get(what)?;
        ensure!(
            grown == each * events,
            "{grown} {what} came with {events} transactions"
        );
    }
    Ok(reached)
}

async fn measure(
    database: &Database,
    pgbench: &Path,
    script: Script,
    users: u32,
    seconds: u32,
) -> Result<Reached> {
    database.checkpoint().await?;
    let report = pgbench_report(database, pgbench, script, users, seconds).await?;
    parse_report(&report, script)
}

async fn prove(database: &Database, events: u64) -> Result<()> {
    let client = database.connect().await?;
    let events = i64::try_from(events)?;
    let faults = client
        .query(FAULTS, &[&events])
        .await
        .context("faults.sql")?;
    match faults.first() {
        Some(fault) => bail!("{}", fault.try_get::<_, &str>(0)?),
        None => Ok(()),
    }
}

async fn pgbench_report(
    database: &Database,
    pgbench: &Path,
    script: Script,
    users: u32,
    seconds: u32,
) -> Result<String> {
    let mut command = Command::new(pgbench);
    // Whatever else libpq would take from the environment could lead elsewhere.
    for (name, _) in env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"PG") {
            command.env_remove(name);
        }
    }
    command
        .args(["--no-vacuum", "--protocol=prepared", "--file=-"])
        .arg(format!("--client={}", script.clients))
        .arg(format!("--jobs={}", cores().min(script.clients)))
        .arg(format!("--time={seconds}"))
        .arg(format!("--define=users={users}"))
        .arg(format!("--define=record={}", RECORD.trim_end()))
        .envs(database.variables())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command
        .spawn()
        .with_context(|| pgbench.display().to_string())?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(script.sql.as_bytes()).await?;
    }
    let limit = Duration::from_secs(u64::from(seconds)) + PGBENCH_SPARE;
    let output = timeout(limit, child.wait_with_output())
        .await
        .context("pgbench does not end")??;
    ensure!(
        output.status.success(),
        "pgbench failed, {}:\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Processors that this process may use.
pub fn cores() -> u32 {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    u32::try_from(cores).unwrap_or(u32::MAX)
}

fn parse_report(report: &str, script: Script) -> Result<Reached> {
    let value = |name: &str| {
        report
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|rest| rest.split_whitespace().next())
            .with_context(|| format!("pgbench does not say {name:?}:\n{report}"))
    };
    let failed = value("number of failed transactions:")?;
    ensure!(failed == "0", "{failed} transactions failed");
    let transactions: u64 = value("number of transactions actually processed:")?.parse()?;
    let rate: f64 = value("tps =")?.parse()?;
    Ok(Reached {
        clients: script.clients,
        batch: script.events,
        events: transactions * script.events,
        rate: rate * script.events as f64,
        latency_mean_ms: value("latency average =")?.parse()?,
    })
}

/// pgbench of the directory given; else of the newest Postgres in the usual place; else on the PATH.
fn find_pgbench(only: Option<&Path>) -> Result<PathBuf> {
    let mut dirs = Vec::new();
    if let Some(dir) = only.filter(|dir| !dir.as_os_str().is_empty()) {
        dirs.push(dir.to_owned());
    } else {
        let mut versions: Vec<(u32, PathBuf)> = std::fs::read_dir("/usr/lib/postgresql")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| {
                let major = entry.file_name().to_str()?.parse().ok()?;
                Some((major, entry.path().join("bin")))
            })
            .collect();
        versions.sort_by_key(|(major, _)| std::cmp::Reverse(*major));
        dirs.extend(versions.into_iter().map(|(_, dir)| dir));
        dirs.extend(
            env::var_os("PATH")
                .iter()
                .flat_map(|path| env::split_paths(path).collect::<Vec<_>>()),
        );
    }
    dirs.into_iter()
        .map(|dir| dir.join("pgbench"))
        .find(|file| file.is_file())
        .context("pgbench is not there: it comes with Postgres' own programs (PG_BIN_DIR)")
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "pgbench (15.14)
transaction type: -
latency average = 19.527 ms
number of transactions actually processed: 24581
number of failed transactions: 0 (0.000%)
latency average = 19.527 ms
initial connection time = 41.005 ms
tps = 1638.724991 (without initial connection time)
";

    #[test]
    fn the_report_of_pgbench_is_read() {
        let read = parse_report(REPORT, TRANSFER).unwrap();
        assert_eq!((read.clients, read.events), (32, 24_581));
        assert!((read.rate - 1_638.72).abs() < 0.01);
        assert!((read.latency_mean_ms - 19.527).abs() < 0.001);
        let many = parse_report(REPORT, CEILING).unwrap();
        assert_eq!(many.events, 400 * 24_581);
        assert!((many.rate - 655_490.0).abs() < 1.0);
    }

    #[test]
    fn a_report_with_failures_or_gaps_is_refused() {
        let failures = REPORT.replace("transactions: 0 (0.000%)", "transactions: 3 (0.012%)");
        assert!(parse_report(&failures, TRANSFER).is_err());
        assert!(parse_report(&REPORT.replace("tps", "x"), TRANSFER).is_err());
        assert!(parse_report("", TRANSFER).is_err());
    }

    #[test]
    fn the_record_is_one_as_the_ledger_writes_it() {
        let record: serde_json::Value = serde_json::from_str(RECORD).unwrap();
        assert_eq!(record["data"]["postings"].as_array().unwrap().len(), 2);
        assert!(!RECORD.trim_end().contains('\n'));
    }

    #[test]
    fn a_given_directory_is_the_only_place() {
        assert!(find_pgbench(Some(Path::new("/nonexistent"))).is_err());
    }

    #[tokio::test]
    async fn both_scripts_run_and_agree_with_the_tables() {
        let lab = Lab::for_test().await;
        let settings = Settings {
            users: 64,
            seconds: 1,
            ceiling_seconds: 1,
            pg_bin_dir: env::var_os("PG_BIN_DIR").map(PathBuf::from),
        };
        let control = run(&lab, &settings).await.unwrap();
        assert!(control.single.events > 0 && control.single.rate > 0.0);
        assert!(control.ceiling.events >= 400);
        lab.close().await.unwrap();
    }

    #[tokio::test]
    async fn tables_that_do_not_agree_are_no_control() {
        let lab = Lab::for_test().await;
        let work = lab.with_ledger("control", async |ledger| {
            let client = ledger.database.connect().await?;
            client.batch_execute(&FILL.replace(":users", "2")).await?;
            prove(&ledger.database, 0).await?;
            prove(&ledger.database, 1).await
        });
        let why = format!("{:#}", work.await.unwrap_err());
        assert!(why.contains("events differ from the transactions"), "{why}");
        lab.close().await.unwrap();
    }
}
