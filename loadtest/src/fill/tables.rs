//! The tables of a ledger that is filled: what is dropped before, made again after, and set to where the history ended.
//!
//! Knows nothing of events.

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use tokio_postgres::Client;

const FRESH: &str = "-- fill_is_fresh
SELECT NOT EXISTS (SELECT FROM events) AND NOT EXISTS (SELECT FROM users) AND NOT EXISTS (SELECT FROM accounts)";

/// Now, the begin of the month, and the names of the month's partitions.
const MONTH: &str = "-- fill_month
SELECT now, date_trunc('month', now AT TIME ZONE 'UTC') AT TIME ZONE 'UTC',
       'events' || to_char(now AT TIME ZONE 'UTC', '_YYYY_MM'), 'postings' || to_char(now AT TIME ZONE 'UTC', '_YYYY_MM')
FROM clock_timestamp() AS now";

/// The indexes of a table: name and definition.
const INDEXES: &str = "-- fill_indexes
SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = $1::text::regclass
ORDER BY 1";

/// Numbers go on where the history ends.
const NUMBERS: &str = "-- fill_numbers
SELECT setval('events_position_seq', $1::bigint),
       setval(pg_get_serial_sequence('users', 'user_no'), $2::bigint),
       setval(pg_get_serial_sequence('accounts', 'account_no'), $3::bigint)";

const HORIZON: &str = "-- fill_horizon
UPDATE horizon SET position = $1, settled_at = clock_timestamp()";

/// The month that is filled.
#[derive(Clone, Debug)]
pub struct Month {
    /// When it begins.
    pub begins: Timestamp,
    /// The database's clock.
    pub now: Timestamp,
    /// Its partition of events.
    pub events: String,
    /// Its partition of postings.
    pub postings: String,
}

/// Makes a session fit for it: in the ledger's schema, and patient. The name was checked when the ledger was made.
///
/// # Errors
/// What Postgres says.
pub async fn settle_in(client: &Client, ledger: &str) -> Result<()> {
    let settings = format!(
        "SET search_path = \"{ledger}\"; SET statement_timeout = 0; SET maintenance_work_mem = '1GB'; SET TimeZone = 'UTC'"
    );
    Ok(client.batch_execute(&settings).await?)
}

/// The current month, of a ledger that nobody has used.
///
/// # Errors
/// When it has been used.
pub async fn month(client: &Client) -> Result<Month> {
    let fresh: bool = client.query_one(FRESH, &[]).await?.try_get(0)?;
    ensure!(fresh, "only a ledger that nobody has used can be filled");
    let row = client.query_one(MONTH, &[]).await?;
    Ok(Month {
        now: row.try_get(0)?,
        begins: row.try_get(1)?,
        events: row.try_get(2)?,
        postings: row.try_get(3)?,
    })
}

/// Indexes that were dropped.
#[derive(Default)]
pub struct Dropped {
    partitions: Vec<String>,
    parents: Vec<String>,
}

/// Drops the indexes of both tables.
///
/// # Errors
/// What Postgres says.
pub async fn drop_indexes(client: &Client, month: &Month) -> Result<Dropped> {
    let mut dropped = Dropped::default();
    for (table, partition) in [("events", &month.events), ("postings", &month.postings)] {
        let own = client.query(INDEXES, &[partition]).await?;
        for row in client.query(INDEXES, &[&table]).await? {
            let name: String = row.try_get(0)?;
            client.batch_execute(&format!("DROP INDEX {name}")).await?;
            // Without ONLY it takes in the partitions' indexes, and makes those that are missing.
            let definition: String = row.try_get(1)?;
            dropped
                .parents
                .push(definition.replacen(" ON ONLY ", " ON ", 1));
        }
        for row in own {
            // Most have gone with their parents; a partition's unique ones have none.
            let name: String = row.try_get(0)?;
            let drop = format!("DROP INDEX IF EXISTS {name}");
            client.batch_execute(&drop).await?;
            dropped.partitions.push(row.try_get(1)?);
        }
    }
    Ok(dropped)
}

/// Makes them again, under the names that they had.
///
/// # Errors
/// What Postgres says.
pub async fn make_indexes(client: &Client, dropped: &Dropped) -> Result<()> {
    for definition in dropped.partitions.iter().chain(&dropped.parents) {
        client
            .batch_execute(definition)
            .await
            .with_context(|| definition.clone())?;
    }
    Ok(())
}

/// Begins a transaction that copies into a partition, and says how. Emptied in the same transaction, its rows are written
/// frozen: as a vacuum would leave them, without a second pass. TRUNCATE is refused by a trigger, which is off here.
///
/// # Errors
/// What Postgres says.
pub async fn begin_copy(client: &Client, partition: &str, columns: &str) -> Result<String> {
    let begin =
        format!("BEGIN; SET LOCAL session_replication_role = replica; TRUNCATE {partition}");
    client.batch_execute(&begin).await?;
    Ok(format!(
        "COPY {partition} ({columns}) FROM STDIN (FORMAT binary, FREEZE)"
    ))
}

/// Sets every counter to where the history ended, the horizon too: nothing of it can still be under way.
///
/// # Errors
/// What Postgres says.
pub async fn go_on_after(client: &Client, position: i64, user: i64, account: i64) -> Result<()> {
    client
        .query_one(NUMBERS, &[&position, &user, &account])
        .await?;
    let moved = client.execute(HORIZON, &[&position]).await?;
    ensure!(moved == 1, "the ledger has no horizon");
    Ok(())
}

/// Leaves the tables as autovacuum and a checkpoint would have.
///
/// # Errors
/// What Postgres says.
pub async fn tidy_up(client: &Client) -> Result<()> {
    for table in ["events", "postings", "users", "accounts", "balances"] {
        client
            .batch_execute(&format!("VACUUM (ANALYZE) {table}"))
            .await?;
    }
    Ok(client.batch_execute("CHECKPOINT").await?)
}
