//! The control: the ledger's own tables, written by pgbench in one transaction per event.
//!
//! Works in a schema of its own, which it makes and drops; never drops one that it did not make.

use crate::args::{Common, Pgbench};
use crate::database::Database;
use anyhow::{Context, Result, bail, ensure};
use std::env;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::time::timeout;
use tokio_postgres::Client;

/// The control's schema.
pub const SCHEMA: &str = "daybook_control";
/// On the schema, so that it is known again.
const MARK: &str = "made by daybook-loadtest, which drops it";

/// The ledger's migrations: the tables are the same by construction. A test holds the list complete.
const MIGRATIONS: &[(&str, &str)] = &[
    (
        "V1__ledger.sql",
        include_str!("../../migrations/V1__ledger.sql"),
    ),
    (
        "V2__append_only.sql",
        include_str!("../../migrations/V2__append_only.sql"),
    ),
    (
        "V3__partitions.sql",
        include_str!("../../migrations/V3__partitions.sql"),
    ),
];
const FILL: &str = include_str!("../control/fill.sql");
const TRANSFER: &str = include_str!("../control/transfer.sql");
const FAULTS: &str = include_str!("../control/faults.sql");
/// A record as long as a transfer's.
const RECORD: &str = include_str!("../control/record.json");

/// How long pgbench may take to connect and end, besides what it measures.
const PGBENCH_SPARE: Duration = Duration::from_secs(60);

/// What a proved run measured.
#[derive(Debug, PartialEq, Eq)]
pub struct Control {
    /// Connections of pgbench.
    pub clients: u32,
    /// Transactions, one event each.
    pub events: u64,
    /// Events a second, connecting not counted.
    pub rate: u64,
    /// Mean latency as pgbench prints it, in milliseconds.
    pub latency_mean_ms: String,
}

/// Makes the tables, measures, proves that they agree with what was counted, and drops them.
///
/// # Errors
/// When anything does not hold; there is nothing to report then.
pub async fn run(database: &Database, common: &Common, options: &Pgbench) -> Result<Control> {
    let pgbench = find_pgbench(options.pg_bin_dir.as_deref())?;
    let client = database.connect().await?;
    drop_schema(&client).await?;
    let outcome = measure(database, &client, &pgbench, common, options).await;
    let dropped = drop_schema(&client).await;
    let control = outcome?;
    dropped?;
    Ok(control)
}

async fn measure(
    database: &Database,
    client: &Client,
    pgbench: &Path,
    common: &Common,
    options: &Pgbench,
) -> Result<Control> {
    client
        .batch_execute(&format!(
            "-- make_schema
CREATE SCHEMA {SCHEMA};
COMMENT ON SCHEMA {SCHEMA} IS '{MARK}';
SET search_path = {SCHEMA}"
        ))
        .await
        .context("the control's schema")?;
    for (name, sql) in MIGRATIONS {
        client.batch_execute(sql).await.context(*name)?;
    }
    let fill = FILL.replace(":users", &common.users.to_string());
    client.batch_execute(&fill).await.context("fill.sql")?;
    database.checkpoint().await?;
    let report = pgbench_report(database, pgbench, common, options).await?;
    let control = parse_report(&report, options.clients)?;
    let events = i64::try_from(control.events)?;
    let faults = client.query(FAULTS, &[&events]).await.context("faults")?;
    if let Some(fault) = faults.first() {
        bail!("the control: {}", fault.try_get::<_, &str>(0)?);
    }
    Ok(control)
}

/// Drops the schema if it is there.
async fn drop_schema(client: &Client) -> Result<()> {
    let sql = "-- schema_mark
SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = $1";
    let Some(row) = client.query_opt(sql, &[&SCHEMA]).await? else {
        return Ok(());
    };
    ensure!(
        row.try_get::<_, Option<&str>>(0)? == Some(MARK),
        "the schema {SCHEMA} was not made by this program: drop or rename it"
    );
    client
        .batch_execute(&format!("-- drop_schema\nDROP SCHEMA {SCHEMA} CASCADE"))
        .await
        .context("dropping the control's schema")
}

async fn pgbench_report(
    database: &Database,
    pgbench: &Path,
    common: &Common,
    options: &Pgbench,
) -> Result<String> {
    let threads = cores().min(options.clients);
    let mut command = Command::new(pgbench);
    // Whatever else libpq would take from the environment could lead elsewhere.
    for (name, _) in env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"PG") {
            command.env_remove(name);
        }
    }
    command
        .args(["--no-vacuum", "--protocol=prepared", "--file=-"])
        .arg(format!("--client={}", options.clients))
        .arg(format!("--jobs={threads}"))
        .arg(format!("--time={}", common.seconds))
        .arg(format!("--define=users={}", common.users))
        .arg(format!("--define=record={}", RECORD.trim_end()))
        .envs(database.variables())
        .env("PGOPTIONS", format!("-c search_path={SCHEMA}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command
        .spawn()
        .with_context(|| pgbench.display().to_string())?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(TRANSFER.as_bytes()).await?;
    }
    let limit = Duration::from_secs(u64::from(common.seconds)) + PGBENCH_SPARE;
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

fn parse_report(report: &str, clients: u32) -> Result<Control> {
    let value = |name: &str| {
        report
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|rest| rest.split_whitespace().next())
            .with_context(|| format!("pgbench does not say {name:?}:\n{report}"))
    };
    let failed = value("number of failed transactions:")?;
    ensure!(failed == "0", "{failed} transactions of the control failed");
    let tps = value("tps =")?;
    Ok(Control {
        clients,
        events: value("number of transactions actually processed:")?.parse()?,
        rate: tps.split('.').next().unwrap_or(tps).parse()?,
        latency_mean_ms: value("latency average =")?.to_owned(),
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
        assert_eq!(
            parse_report(REPORT, 32).unwrap(),
            Control {
                clients: 32,
                events: 24_581,
                rate: 1_638,
                latency_mean_ms: "19.527".to_owned(),
            }
        );
    }

    #[test]
    fn a_report_with_failures_or_gaps_is_refused() {
        let failures = REPORT.replace("transactions: 0 (0.000%)", "transactions: 3 (0.012%)");
        assert!(parse_report(&failures, 32).is_err());
        assert!(parse_report(&REPORT.replace("tps", "x"), 32).is_err());
        assert!(parse_report("", 32).is_err());
    }

    #[test]
    fn every_migration_of_the_ledger_is_in_the_control() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../migrations");
        let mut names: Vec<String> = std::fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(".sql"))
            .collect();
        names.sort();
        let known: Vec<&str> = MIGRATIONS.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, known);
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

    /// A database of the test services; without them there is nothing to run against.
    #[tokio::test]
    async fn the_control_runs_and_leaves_nothing() {
        let url = env::var("TEST_DATABASE_URL")
            .expect("TEST_DATABASE_URL: run the tests with `make test`");
        let database = Database::at(&url).unwrap();
        let common = Common {
            database_url: url,
            users: 50,
            seconds: 1,
        };
        let options = Pgbench {
            clients: 4,
            pg_bin_dir: env::var_os("PG_BIN_DIR").map(PathBuf::from),
        };
        let control = run(&database, &common, &options).await.unwrap();
        assert!(control.events > 0);
        let client = database.connect().await.unwrap();
        let sql = "-- is_there\nSELECT to_regnamespace($1)::text";
        let left = client.query_one(sql, &[&SCHEMA]).await.unwrap();
        assert_eq!(left.get::<_, Option<String>>(0), None);

        client
            .batch_execute(&format!("CREATE SCHEMA {SCHEMA}"))
            .await
            .unwrap();
        let why = run(&database, &common, &options).await.unwrap_err();
        assert!(why.to_string().contains("not made by this program"));
        client
            .batch_execute(&format!("DROP SCHEMA {SCHEMA}"))
            .await
            .unwrap();
    }
}
