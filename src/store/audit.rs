//! What verification reads: the whole ledger in one snapshot, streamed.
//!
//! Never writes: both sessions are read only.

use super::numeric::Numeric;
use futures_util::{Stream, StreamExt, TryStreamExt};
use jiff::Timestamp;
use tokio_postgres::{Client, Error, Row, RowStream};

const BEGIN: &str = "-- begin_audit
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";

const EXPORT: &str = "-- export_snapshot
SELECT pg_export_snapshot()";

const BEGIN_SAME: &str = "-- begin_same_audit
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT '{snapshot}'";

const COUNT: &str = "-- count_events
SELECT count(*) FROM events";

const EVENTS: &str = "-- audit_events
SELECT e.position, e.user_no, u.subject, e.sequence, e.event_id, e.type, e.writer, e.idempotency_key, e.record,
       e.recorded_at, e.effective_at
FROM events e LEFT JOIN users u ON u.user_no = e.user_no ORDER BY e.position";

const POSTINGS: &str = "-- audit_postings
SELECT p.position, p.leg, a.address, p.asset, p.amount, p.recorded_at
FROM postings p LEFT JOIN accounts a ON a.account_no = p.account_no ORDER BY p.position, p.leg";

const HEADS: &str = "-- audit_heads
SELECT user_no, subject, sequence, head_hash, last_at FROM users";

const BALANCES: &str = "-- audit_balances
SELECT a.address, b.asset, b.amount, a.guard, a.floor FROM balances b LEFT JOIN accounts a ON a.account_no = b.account_no";

const SNAPSHOTS: &str = "-- audit_snapshots
SELECT s.position, s.account_no, a.address, s.asset, s.day::text, s.amount::text, a.guard
FROM balance_snapshots s LEFT JOIN accounts a ON a.account_no = s.account_no ORDER BY s.position";

/// What a read would leave out: postings that are claimed to be in a snapshot and are not; older ones than a tail is looked for in.
const LEFT_OUT: &str = "-- audit_left_out
(SELECT a.address, p.asset, min(p.position) AS position
 FROM snapshot_horizon f
 JOIN postings p ON p.position <= f.position
 JOIN accounts a ON a.account_no = p.account_no AND a.guard <> 'floor'
 LEFT JOIN (SELECT account_no, asset, max(position) AS position FROM balance_snapshots GROUP BY account_no, asset) s
     ON s.account_no = p.account_no AND s.asset = p.asset
 WHERE p.position > coalesce(s.position, 0) GROUP BY a.address, p.asset LIMIT 20)
UNION ALL
(SELECT a.address, p.asset, min(p.position)
 FROM snapshot_horizon f
 JOIN postings p ON p.position > f.position AND p.recorded_at < f.drawn_at - interval '1 day'
 JOIN accounts a ON a.account_no = p.account_no AND a.guard <> 'floor'
 GROUP BY a.address, p.asset LIMIT 20)";

/// Accounts and assets of which an earlier day has a later position than the latest one, which is what is read.
const DISORDERED: &str = "-- audit_disordered_snapshots
SELECT s.account_no, s.asset, s.day::text
FROM (SELECT account_no, asset, day, position, max(position) OVER (PARTITION BY account_no, asset ORDER BY day
             ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS earlier FROM balance_snapshots) s
WHERE s.position <= s.earlier LIMIT 20";

const KEYS: &str = "-- audit_business_keys
SELECT namespace, key, position, until_at FROM business_keys";

const MISSING_BALANCES: &str = "-- audit_missing_balances
SELECT DISTINCT a.address, p.asset FROM postings p JOIN accounts a ON a.account_no = p.account_no
WHERE a.guard = 'floor' AND NOT EXISTS (
    SELECT FROM balances b WHERE b.account_no = p.account_no AND b.asset = p.asset) LIMIT 20";

/// Outbox rows that do not agree with an event, parked ones included. `+ 0` keeps the planner from looking through all events of the
/// row's user for it: without statistics the index by user seems as good as the one by position (measured with one user's 200,000 events
/// and as many rows: not done after seven minutes).
const STRAY_OUTBOX: &str = "-- audit_stray_outbox
(SELECT 'outbox' AS place, o.position FROM outbox o
 WHERE o.shard <> o.user_no % 16 OR NOT EXISTS (
    SELECT FROM events e
    WHERE e.position = o.position AND e.recorded_at = o.recorded_at AND e.user_no + 0 = o.user_no) LIMIT 20)
UNION ALL
(SELECT 'outbox_parked', o.position FROM outbox_parked o
 WHERE NOT EXISTS (
    SELECT FROM events e
    WHERE e.position = o.position AND e.recorded_at = o.recorded_at AND e.user_no + 0 = o.user_no
      AND convert_to(e.record, 'UTF8') = o.body) LIMIT 20)";

/// Positions beyond the last one drawn.
const UNDRAWN: &str = "-- audit_undrawn
SELECT t.place, t.position, s.drawn
FROM (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS drawn FROM events_position_seq) s,
     (SELECT 'horizon' AS place, position FROM horizon
      UNION ALL SELECT 'snapshot_horizon', position FROM snapshot_horizon
      UNION ALL SELECT 'balance_snapshots', max(position) FROM balance_snapshots
      UNION ALL SELECT 'events', max(position) FROM events) t
WHERE t.position > s.drawn";

/// Partitions of events that let in a position, or a sequence of a user, which is there already: the parent cannot hold them to it.
const UNINDEXED: &str = "-- audit_unindexed
SELECT c.relname::text, wanted.columns
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
CROSS JOIN (VALUES ('position'), ('user_no, sequence')) AS wanted(columns)
WHERE i.inhparent = to_regclass('events') AND NOT EXISTS (
    SELECT FROM pg_index x
    WHERE x.indrelid = c.oid AND x.indisunique AND x.indisvalid AND x.indpred IS NULL AND x.indexprs IS NULL
      AND (SELECT string_agg(a.attname, ', ' ORDER BY k.n)
           FROM unnest(x.indkey::int2[]) WITH ORDINALITY AS k(number, n)
           JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number WHERE k.n <= x.indnkeyatts) = wanted.columns)
ORDER BY 1, 2 LIMIT 20";

/// Rights that no role but the owner may have: to change history, or to delete what is only added to or updated. A right on
/// one column counts as one on its table.
const RIGHTS: &str = "-- audit_rights
SELECT c.relname::text, r.rolname::text, p.privilege
FROM pg_class c
CROSS JOIN pg_roles r
CROSS JOIN unnest(ARRAY['INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) AS p(privilege)
WHERE c.relnamespace = current_schema()::regnamespace
  AND (c.relname IN ('events', 'postings', 'accounts', 'users', 'balances', 'business_keys', 'horizon', 'balance_snapshots',
                     'snapshot_horizon') OR EXISTS (
        SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid
          AND i.inhparent IN (to_regclass('events'), to_regclass('postings'))))
  AND c.relkind IN ('r', 'p')
  AND NOT r.rolsuper AND NOT pg_has_role(r.oid, c.relowner, 'USAGE') AND r.rolname NOT LIKE 'pg\\_%'
  AND CASE WHEN p.privilege IN ('INSERT', 'UPDATE') THEN has_any_column_privilege(r.oid, c.oid, p.privilege)
           ELSE has_table_privilege(r.oid, c.oid, p.privilege) END
  AND NOT (p.privilege = 'INSERT' AND (c.relkind = 'p' OR c.relname IN ('accounts', 'users', 'balances', 'business_keys',
           'balance_snapshots')))
  AND NOT (p.privilege = 'UPDATE' AND c.relname IN ('users', 'balances', 'business_keys', 'horizon', 'balance_snapshots',
           'snapshot_horizon')) LIMIT 20";

/// What belongs to another role than history does: an owner needs no right.
const OWNERS: &str = "-- audit_owners
SELECT o.name, r.rolname::text
FROM (SELECT relname::text AS name, relowner AS owner FROM pg_class WHERE relnamespace = current_schema()::regnamespace
      UNION ALL
      SELECT proname::text, proowner FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
      UNION ALL
      SELECT nspname::text, nspowner FROM pg_namespace WHERE nspname = current_schema()) o
JOIN pg_roles r ON r.oid = o.owner
WHERE NOT r.rolsuper AND r.oid <> (SELECT relowner FROM pg_class WHERE oid = to_regclass('events')) LIMIT 20";

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
    EXPORT,
    COUNT,
    EVENTS,
    POSTINGS,
    HEADS,
    BALANCES,
    SNAPSHOTS,
    LEFT_OUT,
    DISORDERED,
    KEYS,
    MISSING_BALANCES,
    STRAY_OUTBOX,
    UNDRAWN,
    UNINDEXED,
    RIGHTS,
    OWNERS,
    TRIGGERS,
];

/// One stored event.
pub struct StoredEvent {
    /// Its place among all events.
    pub position: i64,
    /// Number of the user.
    pub user_no: i64,
    /// Whose; None when the user's row is missing.
    pub subject: Option<String>,
    /// Its place in his history.
    pub sequence: i64,
    /// Its id column.
    pub event_id: uuid::Uuid,
    /// Its type column.
    pub event_type: String,
    /// Who wrote it.
    pub writer: String,
    /// The writer's key.
    pub idempotency_key: String,
    /// Its bytes.
    pub record: String,
    /// When it was recorded.
    pub recorded_at: Timestamp,
    /// When it took effect.
    pub effective_at: Timestamp,
}

/// One stored leg.
#[derive(Debug, PartialEq, Eq)]
pub struct StoredPosting {
    /// Position of its event.
    pub position: i64,
    /// Its place in the event, from 0.
    pub leg: i16,
    /// Of which account; None when its row is missing.
    pub address: Option<String>,
    /// In what.
    pub asset: String,
    /// How much; negative is a debit.
    pub amount: Numeric,
    /// When its event was recorded.
    pub recorded_at: Timestamp,
}

/// A business key's row.
pub struct StoredKey {
    /// Of which kind.
    pub namespace: String,
    /// The key.
    pub key: String,
    /// Position of the event that took it.
    pub position: i64,
    /// Until when; None is for ever.
    pub until: Option<Timestamp>,
}

/// A user's head.
pub struct Head {
    /// Number of the user.
    pub user_no: i64,
    /// Whose.
    pub subject: String,
    /// Number of events.
    pub sequence: i64,
    /// Hash of the latest record.
    pub hash: Vec<u8>,
    /// When that was recorded.
    pub last_at: Timestamp,
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

/// A balance snapshot.
pub struct StoredSnapshot {
    /// The last position in it.
    pub position: i64,
    /// Number of the account.
    pub account_no: i64,
    /// Its address; None when its row is missing.
    pub address: Option<String>,
    /// In what.
    pub asset: String,
    /// On which day it was last moved.
    pub day: String,
    /// What the postings sum to, as Postgres writes it: it may have more digits than an amount.
    pub amount: String,
    /// The account's guard.
    pub guard: Option<String>,
}

/// Begins the one snapshot that everything is read in.
///
/// # Errors
/// What Postgres says.
pub async fn begin(client: &Client) -> Result<(), Error> {
    client.batch_execute(BEGIN).await
}

/// Begins on `second` too, in the snapshot of `first`: a session streams one statement at a time.
///
/// # Errors
/// What Postgres says.
pub async fn begin_same(first: &Client, second: &Client) -> Result<(), Error> {
    let snapshot: &str = &first
        .query_one(EXPORT, &[])
        .await?
        .try_get::<_, String>(0)?;
    second
        .batch_execute(&BEGIN_SAME.replace("{snapshot}", snapshot))
        .await
}

/// Number of stored events.
///
/// # Errors
/// What Postgres says.
pub async fn count_events(client: &Client) -> Result<i64, Error> {
    client.query_one(COUNT, &[]).await?.try_get(0)
}

/// Every event, by position.
///
/// # Errors
/// What Postgres says.
pub async fn events(
    client: &Client,
) -> Result<impl Stream<Item = Result<StoredEvent, Error>> + use<>, Error> {
    let rows = stream(client, EVENTS).await?;
    Ok(rows.map(|row| {
        let row = row?;
        Ok(StoredEvent {
            position: row.try_get(0)?,
            user_no: row.try_get(1)?,
            subject: row.try_get(2)?,
            sequence: row.try_get(3)?,
            event_id: row.try_get(4)?,
            event_type: row.try_get(5)?,
            writer: row.try_get(6)?,
            idempotency_key: row.try_get(7)?,
            record: row.try_get(8)?,
            recorded_at: row.try_get(9)?,
            effective_at: row.try_get(10)?,
        })
    }))
}

/// Every posting, by position and leg.
///
/// # Errors
/// What Postgres says.
pub async fn postings(
    client: &Client,
) -> Result<impl Stream<Item = Result<StoredPosting, Error>> + use<>, Error> {
    let rows = stream(client, POSTINGS).await?;
    Ok(rows.map(|row| {
        let row = row?;
        Ok(StoredPosting {
            position: row.try_get(0)?,
            leg: row.try_get(1)?,
            address: row.try_get(2)?,
            asset: row.try_get(3)?,
            amount: row.try_get(4)?,
            recorded_at: row.try_get(5)?,
        })
    }))
}

/// Every balance snapshot, by position.
///
/// # Errors
/// What Postgres says.
pub async fn snapshots(
    client: &Client,
) -> Result<impl Stream<Item = Result<StoredSnapshot, Error>> + use<>, Error> {
    let rows = stream(client, SNAPSHOTS).await?;
    Ok(rows.map(|row| {
        let row = row?;
        Ok(StoredSnapshot {
            position: row.try_get(0)?,
            account_no: row.try_get(1)?,
            address: row.try_get(2)?,
            asset: row.try_get(3)?,
            day: row.try_get(4)?,
            amount: row.try_get(5)?,
            guard: row.try_get(6)?,
        })
    }))
}

/// Every business key.
///
/// # Errors
/// What Postgres says.
pub async fn business_keys(
    client: &Client,
) -> Result<impl Stream<Item = Result<StoredKey, Error>> + use<>, Error> {
    let rows = stream(client, KEYS).await?;
    Ok(rows.map(|row| {
        let row = row?;
        Ok(StoredKey {
            namespace: row.try_get(0)?,
            key: row.try_get(1)?,
            position: row.try_get(2)?,
            until: row.try_get(3)?,
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

/// Every user's head.
///
/// # Errors
/// What Postgres says.
pub async fn heads(client: &Client) -> Result<Vec<Head>, Error> {
    all(client, HEADS, |row| {
        Ok(Head {
            user_no: row.try_get(0)?,
            subject: row.try_get(1)?,
            sequence: row.try_get(2)?,
            hash: row.try_get(3)?,
            last_at: row.try_get(4)?,
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

/// What is wrong with the tables themselves, one sentence each: outbox rows that do not agree with their events, positions
/// that were never drawn, postings that a balance would leave out, partitions without their indexes, rights, owners and triggers that
/// are not as they must be. At most 40 a kind.
///
/// # Errors
/// What Postgres says.
pub async fn faults(client: &Client) -> Result<Vec<String>, Error> {
    let mut faults = all(client, STRAY_OUTBOX, |row| {
        let (place, position): (&str, i64) = (row.try_get(0)?, row.try_get(1)?);
        Ok(format!(
            "{place} {position}: the row does not agree with an event"
        ))
    })
    .await?;
    faults.extend(
        all(client, UNDRAWN, |row| {
            let (place, position, drawn): (&str, i64, i64) =
                (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
            Ok(format!(
                "{place} {position}: the last position drawn is {drawn}"
            ))
        })
        .await?,
    );
    faults.extend(snapshot_faults(client).await?);
    faults.extend(
        all(client, UNINDEXED, |row| {
            let (table, columns): (&str, &str) = (row.try_get(0)?, row.try_get(1)?);
            Ok(format!("table {table}: nothing keeps ({columns}) unique"))
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
        all(client, OWNERS, |row| {
            let (name, role): (&str, &str) = (row.try_get(0)?, row.try_get(1)?);
            Ok(format!(
                "{name}: belongs to the role {role}, not to the owner of events"
            ))
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

async fn snapshot_faults(client: &Client) -> Result<Vec<String>, Error> {
    let mut faults = all(client, LEFT_OUT, |row| {
        let (address, asset, position): (&str, &str, i64) =
            (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        Ok(format!(
            "{address} {asset}: the balance leaves out the posting of position {position}"
        ))
    })
    .await?;
    faults.extend(
        all(client, DISORDERED, |row| {
            let (account_no, asset, day): (i64, &str, &str) =
                (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
            Ok(format!(
                "account {account_no} {asset}: the snapshot of {day} is not later than the one before it"
            ))
        })
        .await?,
    );
    Ok(faults)
}
