//! What verification reads: the whole ledger in one snapshot, streamed.

use super::numeric::Numeric;
use futures_util::{StreamExt, TryStreamExt};
use tokio_postgres::{Client, Error, Row, RowStream};

const BEGIN: &str = "-- begin_audit
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";

const COUNT: &str = "-- count_events
SELECT count(*) FROM events";

const EVENTS: &str = "-- audit_events
SELECT u.subject, e.sequence, e.event_id, e.record
FROM events e JOIN users u ON u.user_no = e.user_no ORDER BY e.user_no, e.sequence";

const ORPHANS: &str = "-- audit_orphans
SELECT count(*) FROM events e WHERE NOT EXISTS (SELECT FROM users u WHERE u.user_no = e.user_no)";

const HEADS: &str = "-- audit_heads
SELECT subject, sequence, head_hash FROM users";

const BALANCES: &str = "-- audit_balances
SELECT a.address, b.asset, b.amount, a.guard, a.floor FROM balances b LEFT JOIN accounts a ON a.account_no = b.account_no";

const POSTING_SUMS: &str = "-- audit_posting_sums
SELECT a.address, p.asset, sum(p.amount)::text, count(*)
FROM postings p LEFT JOIN accounts a ON a.account_no = p.account_no GROUP BY a.address, p.asset";

const MISSING_BALANCES: &str = "-- audit_missing_balances
SELECT DISTINCT a.address, p.asset FROM postings p JOIN accounts a ON a.account_no = p.account_no
WHERE a.guard = 'floor' AND NOT EXISTS (
    SELECT FROM balances b WHERE b.account_no = p.account_no AND b.asset = p.asset) LIMIT 20";

const UNBALANCED: &str = "-- audit_unbalanced
SELECT position, asset FROM postings GROUP BY position, asset HAVING sum(amount) <> 0 LIMIT 20";

const STRAY_OUTBOX: &str = "-- audit_stray_outbox
SELECT o.position FROM outbox o
WHERE NOT EXISTS (SELECT FROM events e WHERE e.position = o.position AND e.recorded_at = o.recorded_at) LIMIT 20";

/// Rights on history that no role but its owner may have.
const RIGHTS: &str = "-- audit_rights
SELECT c.relname::text, r.rolname::text, p.privilege
FROM pg_class c
CROSS JOIN pg_roles r
CROSS JOIN unnest(ARRAY['INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) AS p(privilege)
WHERE c.relnamespace = current_schema()::regnamespace
  AND (c.relname IN ('events', 'postings') OR EXISTS (
        SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid
          AND i.inhparent IN (to_regclass('events'), to_regclass('postings'))))
  AND c.relkind IN ('r', 'p')
  AND NOT r.rolsuper AND NOT pg_has_role(r.oid, c.relowner, 'USAGE') AND r.rolname NOT LIKE 'pg\\_%'
  AND has_table_privilege(r.oid, c.oid, p.privilege)
  AND NOT (p.privilege = 'INSERT' AND c.relkind = 'p') LIMIT 20";

/// Tables of history that lack one of their triggers.
const TRIGGERS: &str = "-- audit_triggers
SELECT c.relname::text
FROM pg_class c
WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p')
  AND (c.relname IN ('events', 'postings') OR EXISTS (
        SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid
          AND i.inhparent IN (to_regclass('events'), to_regclass('postings'))))
  AND (SELECT count(*) FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgenabled IN ('O', 'A')
         AND t.tgfoid = to_regproc('refuse_change')) < 2 LIMIT 20";

/// Every statement of this file.
pub const STATEMENTS: &[&str] = &[
    COUNT,
    EVENTS,
    ORPHANS,
    HEADS,
    BALANCES,
    POSTING_SUMS,
    MISSING_BALANCES,
    UNBALANCED,
    STRAY_OUTBOX,
    RIGHTS,
    TRIGGERS,
];

/// One stored event.
pub struct StoredEvent {
    /// Whose.
    pub subject: String,
    /// Its place in his history.
    pub sequence: i64,
    /// Its id column.
    pub event_id: uuid::Uuid,
    /// Its bytes.
    pub record: String,
}

/// A user's head.
pub struct Head {
    /// Whose.
    pub subject: String,
    /// Number of events.
    pub sequence: i64,
    /// Hash of the latest record.
    pub hash: Vec<u8>,
}

/// A guarded balance.
pub struct StoredBalance {
    /// Of which account; None when its row is missing.
    pub address: Option<String>,
    /// In what.
    pub asset: String,
    /// How much.
    pub amount: Numeric,
    /// Its account's guard.
    pub guard: Option<String>,
    /// Its account's floor.
    pub floor: Option<Numeric>,
}

/// The sum of an account's postings.
pub struct PostingSum {
    /// Of which account; None when its row is missing.
    pub address: Option<String>,
    /// In what.
    pub asset: String,
    /// How much.
    pub amount: String,
    /// Number of postings.
    pub count: i64,
}

/// Begins the one snapshot that everything is read in.
///
/// # Errors
/// What Postgres says.
pub async fn begin(client: &Client) -> Result<(), Error> {
    client.batch_execute(BEGIN).await
}

/// Number of stored events.
///
/// # Errors
/// What Postgres says.
pub async fn count_events(client: &Client) -> Result<i64, Error> {
    client.query_one(COUNT, &[]).await?.try_get(0)
}

/// Every event, user by user, in the order of his history.
///
/// # Errors
/// What Postgres says.
pub async fn events(
    client: &Client,
) -> Result<impl futures_util::Stream<Item = Result<StoredEvent, Error>> + use<>, Error> {
    let rows = stream(client, EVENTS).await?;
    Ok(rows.map(|row| {
        let row = row?;
        Ok(StoredEvent {
            subject: row.try_get(0)?,
            sequence: row.try_get(1)?,
            event_id: row.try_get(2)?,
            record: row.try_get(3)?,
        })
    }))
}

async fn stream(client: &Client, sql: &str) -> Result<RowStream, Error> {
    client.query_raw(sql, std::iter::empty::<i64>()).await
}

async fn all<T>(
    client: &Client,
    sql: &str,
    read: impl Fn(Row) -> Result<T, Error>,
) -> Result<Vec<T>, Error> {
    stream(client, sql)
        .await?
        .map(|row| read(row?))
        .try_collect()
        .await
}

/// Events of users without a row.
///
/// # Errors
/// What Postgres says.
pub async fn orphans(client: &Client) -> Result<i64, Error> {
    client.query_one(ORPHANS, &[]).await?.try_get(0)
}

/// Every user's head.
///
/// # Errors
/// What Postgres says.
pub async fn heads(client: &Client) -> Result<Vec<Head>, Error> {
    all(client, HEADS, |row| {
        Ok(Head {
            subject: row.try_get(0)?,
            sequence: row.try_get(1)?,
            hash: row.try_get(2)?,
        })
    })
    .await
}

/// Every guarded balance.
///
/// # Errors
/// What Postgres says.
pub async fn balances(client: &Client) -> Result<Vec<StoredBalance>, Error> {
    all(client, BALANCES, |row| {
        Ok(StoredBalance {
            address: row.try_get(0)?,
            asset: row.try_get(1)?,
            amount: row.try_get(2)?,
            guard: row.try_get(3)?,
            floor: row.try_get(4)?,
        })
    })
    .await
}

/// The sum of postings of every account and asset.
///
/// # Errors
/// What Postgres says.
pub async fn posting_sums(client: &Client) -> Result<Vec<PostingSum>, Error> {
    all(client, POSTING_SUMS, |row| {
        Ok(PostingSum {
            address: row.try_get(0)?,
            asset: row.try_get(1)?,
            amount: row.try_get(2)?,
            count: row.try_get(3)?,
        })
    })
    .await
}

/// Guarded accounts with postings but no balances row: (address, asset), at most 20.
///
/// # Errors
/// What Postgres says.
pub async fn guarded_without_balance(client: &Client) -> Result<Vec<(String, String)>, Error> {
    all(client, MISSING_BALANCES, |row| {
        Ok((row.try_get(0)?, row.try_get(1)?))
    })
    .await
}

/// What is wrong with the tables themselves, one sentence each: events whose postings do not sum to zero, outbox rows
/// without an event, rights and triggers that are not as they must be. At most 20 a kind.
///
/// # Errors
/// What Postgres says.
pub async fn faults(client: &Client) -> Result<Vec<String>, Error> {
    let mut faults = all(client, UNBALANCED, |row| {
        Ok(format!(
            "position {}: postings in {} do not sum to zero",
            row.try_get::<_, i64>(0)?,
            row.try_get::<_, &str>(1)?
        ))
    })
    .await?;
    faults.extend(
        all(client, STRAY_OUTBOX, |row| {
            Ok(format!(
                "position {}: an outbox row without its event",
                row.try_get::<_, i64>(0)?
            ))
        })
        .await?,
    );
    faults.extend(
        all(client, RIGHTS, |row| {
            let (table, role, right): (&str, &str, &str) =
                (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
            Ok(format!("table {table}: the role {role} has {right}"))
        })
        .await?,
    );
    faults.extend(
        all(client, TRIGGERS, |row| {
            Ok(format!(
                "table {}: its append-only triggers are missing or disabled",
                row.try_get::<_, &str>(0)?
            ))
        })
        .await?,
    );
    Ok(faults)
}
