//! The outbox: what is still to be published, what is held, what is parked, and the locks that share it among relays.
//!
//! Never reads "position > last seen" as a promise: a lower position may still commit, so callers scan from a settled floor.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row};
use uuid::Uuid;

pub use super::tid::Tid;

/// Shards of the outbox; a user's is `user_no % SHARDS`.
pub const SHARDS: u8 = 16;
/// Rows a listing returns at most.
pub const LIST_MAX: i64 = 1_000;
/// Rows counted at most: more are reported as this many.
const COUNT_MAX: i64 = 1_000_000;

const HORIZON: &str = "-- outbox_horizon
SELECT position FROM horizon";

/// The row comparison and the order by both columns leave the planner one way, the index by shard: with `shard = s.shard` it takes
/// the primary key and walks all shards for each (measured: 15 ms instead of 1.5 for 20,000 rows). The scalar subquery stays a
/// look-up for each row walked; NOT EXISTS may become a join, and the order a sort of the whole outbox.
const SCAN: &str = "-- outbox_scan
SELECT o.position, o.shard, o.user_no, o.recorded_at, o.traceparent, o.tries, o.redriven, o.ctid
FROM unnest($1::smallint[], $2::bigint[], $3::bigint[]) AS s (shard, above, up_to)
CROSS JOIN LATERAL (
    SELECT w.*, w.ctid FROM outbox w
    WHERE (w.shard, w.position) > (s.shard, s.above) AND (w.shard, w.position) <= (s.shard, s.up_to) AND w.user_no <> ALL ($4::bigint[])
      AND (SELECT true FROM outbox p WHERE p.user_no = w.user_no AND p.not_before IS NOT NULL LIMIT 1) IS NULL
    ORDER BY w.shard, w.position LIMIT $5
) o
ORDER BY o.position";

const DUE: &str = "-- outbox_due
SELECT position, shard, user_no, recorded_at, traceparent, tries, redriven, ctid FROM outbox
WHERE not_before <= statement_timestamp() AND shard = ANY ($1::smallint[]) AND user_no <> ALL ($2::bigint[])
ORDER BY not_before LIMIT $3";

const REDRIVEN: &str = "-- outbox_redriven
SELECT position, shard, user_no FROM outbox w
WHERE redriven AND (SELECT true FROM outbox p WHERE p.user_no = w.user_no AND p.not_before IS NOT NULL LIMIT 1) IS NULL
ORDER BY position LIMIT 100";

const RECORDS: &str = "-- outbox_records
SELECT e.position, e.event_id, e.type, e.sequence, e.record, e.recorded_at, u.subject
FROM unnest($1::bigint[], $2::timestamptz[]) AS w (position, recorded_at)
CROSS JOIN LATERAL (
    SELECT * FROM events v
    WHERE v.position = w.position AND v.recorded_at = w.recorded_at AND v.recorded_at BETWEEN $3 AND $4
) e
CROSS JOIN LATERAL (SELECT subject FROM users WHERE user_no = e.user_no) u";

/// This and the next two find rows at the places where they were seen, and walk no index for it. An outbox that is mostly empty looks small to
/// the planner, and one index as good as another: it walked all of `outbox_shard_position`, with the dead rows that an old snapshot
/// keeps (measured: 112,000 pages for 275 rows). A place may have another row by now, so the position is compared as well, with `+ 0` to
/// keep it from being an index condition.
const DELETE: &str = "-- outbox_delete
DELETE FROM outbox o
USING unnest($1::tid[], $2::bigint[]) AS t (place, position)
WHERE o.ctid = t.place AND o.position + 0 = t.position";

/// Waits as long as the row has been held already (so the pause doubles), between one second and thirty, and not past the
/// end of the hold.
const HOLD: &str = "-- outbox_hold
UPDATE outbox o SET
    held_since = coalesce(held_since, clock_timestamp()),
    not_before = least(
        clock_timestamp() + least(interval '30 s', greatest(interval '1 s', clock_timestamp() - coalesce(held_since, clock_timestamp()))),
        greatest(clock_timestamp() + interval '1 s', coalesce(held_since, clock_timestamp()) + $3 * interval '1 s'))
FROM unnest($1::tid[], $2::bigint[]) AS t (place, position)
WHERE o.ctid = t.place AND o.position + 0 = t.position
RETURNING o.position, (extract(epoch FROM clock_timestamp() - held_since) * 1000)::bigint AS held_ms";

const POSTPONE: &str = "-- outbox_postpone
UPDATE outbox o SET tries = tries + $3, not_before = clock_timestamp() + $4 * interval '1 ms'
FROM unnest($1::tid[], $2::bigint[]) AS t (place, position)
WHERE o.ctid = t.place AND o.position + 0 = t.position
RETURNING o.position, tries";

const PARK: &str = "-- outbox_park
WITH gone AS (DELETE FROM outbox WHERE position = $1 RETURNING position, user_no, recorded_at)
INSERT INTO outbox_parked (position, user_no, recorded_at, reason, body)
SELECT g.position, g.user_no, g.recorded_at, $2, coalesce(convert_to(e.record, 'UTF8'), ''::bytea)
FROM gone g LEFT JOIN LATERAL (
    SELECT record FROM events v WHERE v.position = g.position AND v.recorded_at = g.recorded_at
) e ON true";

const REDRIVE: &str = "-- outbox_redrive
WITH back AS (DELETE FROM outbox_parked WHERE position = $1 RETURNING position, user_no, recorded_at)
INSERT INTO outbox (position, shard, user_no, recorded_at, redriven)
SELECT position, (user_no % 16)::smallint, user_no, recorded_at, true FROM back";

const DEPTH: &str = "-- outbox_depth
SELECT (SELECT count(*) FROM (SELECT FROM outbox LIMIT $1) w) AS waiting,
       (SELECT count(*) FROM (SELECT FROM outbox_parked LIMIT $1) p) AS parked,
       (SELECT greatest(0, extract(epoch FROM clock_timestamp() - recorded_at))::float8
        FROM outbox ORDER BY position LIMIT 1) AS oldest_seconds";

const HELD: &str = "-- outbox_held
SELECT e.type, count(*) AS events, min(o.held_since) AS since
FROM (SELECT position, recorded_at, held_since FROM outbox WHERE held_since IS NOT NULL ORDER BY held_since LIMIT $2) o
JOIN events e ON e.position = o.position AND e.recorded_at = o.recorded_at
GROUP BY e.type ORDER BY e.type LIMIT $1";

const PARKED: &str = "-- outbox_parked
SELECT p.position, p.parked_at, p.reason, e.event_id, e.type, u.subject
FROM (SELECT * FROM outbox_parked WHERE position > $1 ORDER BY position LIMIT $2) p
LEFT JOIN LATERAL (
    SELECT event_id, type FROM events v WHERE v.position = p.position AND v.recorded_at = p.recorded_at
) e ON true
LEFT JOIN users u ON u.user_no = p.user_no
ORDER BY p.position";

const LEASE_SESSION: &str = "-- relay_session
SET idle_session_timeout = '5s'";
const APPEAR: &str = "-- relay_appear
SELECT pg_try_advisory_lock_shared($1)";
const DISAPPEAR: &str = "-- relay_disappear
SELECT pg_advisory_unlock_shared($1)";
const LIVE: &str = "-- relay_live
SELECT count(*) FROM pg_locks
WHERE locktype = 'advisory' AND granted AND mode = 'ShareLock' AND objsubid = 1
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (classid::bigint << 32 | objid::bigint) = $1";
const LEASE: &str = "-- relay_lease
SELECT pg_try_advisory_lock($1)";
const RELEASE: &str = "-- relay_release
SELECT pg_advisory_unlock($1)";

/// Every statement of this file by name, for a test that prepares them all.
pub const STATEMENTS: &[(&str, &str)] = &[
    ("outbox_horizon", HORIZON),
    ("outbox_scan", SCAN),
    ("outbox_due", DUE),
    ("outbox_redriven", REDRIVEN),
    ("outbox_records", RECORDS),
    ("outbox_delete", DELETE),
    ("outbox_hold", HOLD),
    ("outbox_postpone", POSTPONE),
    ("outbox_park", PARK),
    ("outbox_redrive", REDRIVE),
    ("outbox_depth", DEPTH),
    ("outbox_held", HELD),
    ("outbox_parked", PARKED),
    ("relay_session", LEASE_SESSION),
    ("relay_appear", APPEAR),
    ("relay_disappear", DISAPPEAR),
    ("relay_live", LIVE),
    ("relay_lease", LEASE),
    ("relay_release", RELEASE),
];

/// Positions of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The shard.
    pub shard: u8,
    /// Those above this one,
    pub above: i64,
    /// up to this one.
    pub up_to: i64,
}

/// A row of the outbox, without the event it points at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Position of the event.
    pub position: i64,
    /// `user_no % SHARDS`.
    pub shard: u8,
    /// Whose event it is.
    pub user_no: i64,
    /// When it was recorded; finds the event's partition.
    pub recorded_at: Timestamp,
    /// Trace of the request that made it.
    pub traceparent: Option<String>,
    /// How often the broker refused this message when it was alone in flight.
    pub tries: i32,
    /// Whether an operator sent it again after it was parked.
    pub redriven: bool,
    /// Where it lay when it was read. It moves when it is put off, which is for its relay alone to do, and when somebody rewrites the
    /// table.
    pub place: Tid,
}

/// An event, as far as its message needs it.
#[derive(Clone, Debug)]
pub struct Record {
    /// Its position.
    pub position: i64,
    /// Its id.
    pub event_id: Uuid,
    /// Its type: the routing key.
    pub event_type: Arc<str>,
    /// Its number in the user's history.
    pub sequence: i64,
    /// Its exact bytes.
    pub record: Arc<str>,
    /// When it was recorded.
    pub recorded_at: Timestamp,
    /// Its user's subject.
    pub subject: Arc<str>,
}

/// What became of a row that was to be held.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// The row.
    pub position: i64,
    /// How long it has been held.
    pub held: Duration,
}

/// Rows waiting and parked. Counts stop at one million.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Depth {
    /// Rows waiting.
    pub waiting: i64,
    /// Age in seconds of the lowest position waiting; 0 when there is none.
    pub oldest_seconds: f64,
    /// Events parked.
    pub parked: i64,
}

/// A routing key that should have a queue and has none.
#[derive(Clone, Debug)]
pub struct HeldKey {
    /// The event type.
    pub routing_key: String,
    /// Events held for it (each holds the later ones of its user).
    pub events: i64,
    /// Since when.
    pub since: Timestamp,
}

/// A parked event.
#[derive(Clone, Debug)]
pub struct Parked {
    /// Its position.
    pub position: i64,
    /// When it was parked.
    pub parked_at: Timestamp,
    /// Why.
    pub reason: String,
    /// The event's id, unless its partition is gone.
    pub event_id: Option<Uuid>,
    /// The event's type, unless its partition is gone.
    pub event_type: Option<String>,
    /// Its user's subject.
    pub subject: Option<String>,
}

fn millis(value: i64) -> Duration {
    Duration::from_millis(u64::try_from(value).unwrap_or(0))
}

/// The settled position. To be read BEFORE the scan whose floor it bounds.
///
/// # Errors
/// What Postgres answers.
pub async fn horizon(client: &Client) -> Result<i64, Error> {
    client.query_typed_one(HORIZON, &[]).await?.try_get(0)
}

fn waiting(row: &Row) -> Result<Waiting, Error> {
    Ok(Waiting {
        position: row.try_get("position")?,
        // The table's CHECK keeps it below 16.
        shard: u8::try_from(row.try_get::<_, i16>("shard")?).unwrap_or(0),
        user_no: row.try_get("user_no")?,
        recorded_at: row.try_get("recorded_at")?,
        traceparent: row.try_get("traceparent")?,
        tries: row.try_get("tries")?,
        redriven: row.try_get("redriven")?,
        place: row.try_get("ctid")?,
    })
}

/// Rows of each range, at most `limit` of each, but for the users given and those that have a row put off, due or not; by position.
///
/// # Errors
/// What Postgres answers.
pub async fn scan(
    client: &Client,
    ranges: &[Range],
    without_users: &[i64],
    limit: i64,
) -> Result<Vec<Waiting>, Error> {
    let shards: Vec<i16> = ranges.iter().map(|range| i16::from(range.shard)).collect();
    let above: Vec<i64> = ranges.iter().map(|range| range.above).collect();
    let up_to: Vec<i64> = ranges.iter().map(|range| range.up_to).collect();
    let rows = client
        .query_typed(
            SCAN,
            &[
                (&shards, Type::INT2_ARRAY),
                (&above, Type::INT8_ARRAY),
                (&up_to, Type::INT8_ARRAY),
                (&without_users, Type::INT8_ARRAY),
                (&limit, Type::INT8),
            ],
        )
        .await?;
    rows.iter().map(waiting).collect()
}

/// Rows of these shards that were put off and may be published again, longest due first, but for the users given.
///
/// # Errors
/// What Postgres answers.
pub async fn due(
    client: &Client,
    shards: &[u8],
    without_users: &[i64],
    limit: i64,
) -> Result<Vec<Waiting>, Error> {
    let shards: Vec<i16> = shards.iter().copied().map(i16::from).collect();
    let rows = client
        .query_typed(
            DUE,
            &[
                (&shards, Type::INT2_ARRAY),
                (&without_users, Type::INT8_ARRAY),
                (&limit, Type::INT8),
            ],
        )
        .await?;
    rows.iter().map(waiting).collect()
}

/// Redriven rows, as (position, shard, user): they lie below the floors. At most 100; none of a user that has a row put off.
///
/// # Errors
/// What Postgres answers.
pub async fn redriven(client: &Client) -> Result<Vec<(i64, u8, i64)>, Error> {
    let rows = client.query_typed(REDRIVEN, &[]).await?;
    rows.iter()
        .map(|row| {
            let shard: i16 = row.try_get(1)?;
            Ok((
                row.try_get(0)?,
                u8::try_from(shard).unwrap_or(0),
                row.try_get(2)?,
            ))
        })
        .collect()
}

/// The events that rows point at, in no order; one that does not exist is left out.
///
/// # Errors
/// What Postgres answers.
pub async fn records(client: &Client, rows: &[&Waiting]) -> Result<Vec<Record>, Error> {
    let positions: Vec<i64> = rows.iter().map(|row| row.position).collect();
    let times: Vec<Timestamp> = rows.iter().map(|row| row.recorded_at).collect();
    let (Some(first), Some(last)) = (times.iter().min(), times.iter().max()) else {
        return Ok(Vec::new());
    };
    let found = client
        .query_typed(
            RECORDS,
            &[
                (&positions, Type::INT8_ARRAY),
                (&times, Type::TIMESTAMPTZ_ARRAY),
                (first, Type::TIMESTAMPTZ),
                (last, Type::TIMESTAMPTZ),
            ],
        )
        .await?;
    found
        .iter()
        .map(|row| {
            Ok(Record {
                position: row.try_get("position")?,
                event_id: row.try_get("event_id")?,
                event_type: row.try_get::<_, &str>("type")?.into(),
                sequence: row.try_get("sequence")?,
                record: row.try_get::<_, &str>("record")?.into(),
                recorded_at: row.try_get("recorded_at")?,
                subject: row.try_get::<_, &str>("subject")?.into(),
            })
        })
        .collect()
}

/// Places and positions, in one order for all: should two relays ever change the same rows, neither waits for the other for ever.
fn places(rows: &[Waiting]) -> (Vec<Tid>, Vec<i64>) {
    let mut rows: Vec<&Waiting> = rows.iter().collect();
    rows.sort_unstable_by_key(|row| row.position);
    rows.iter().map(|row| (row.place, row.position)).unzip()
}

/// Deletes rows whose messages the broker has confirmed; returns how many were where they had been seen. Of the others nothing is
/// known: they may lie elsewhere now.
///
/// # Errors
/// What Postgres answers.
pub async fn delete(client: &Client, rows: &[Waiting]) -> Result<u64, Error> {
    let (places, positions) = places(rows);
    let parameters: &[(&(dyn ToSql + Sync), Type)] =
        &[(&places, Type::TID_ARRAY), (&positions, Type::INT8_ARRAY)];
    client.execute_typed(DELETE, parameters).await
}

/// Holds rows whose messages nobody has bound a queue for; returns those that were where they had been seen. `hold_for` only bounds
/// the pause.
///
/// # Errors
/// What Postgres answers.
pub async fn hold(
    client: &Client,
    rows: &[Waiting],
    hold_for: Duration,
) -> Result<Vec<Held>, Error> {
    let (places, positions) = places(rows);
    let rows = client
        .query_typed(
            HOLD,
            &[
                (&places, Type::TID_ARRAY),
                (&positions, Type::INT8_ARRAY),
                (&hold_for.as_secs_f64(), Type::FLOAT8),
            ],
        )
        .await?;
    rows.iter()
        .map(|row| {
            Ok(Held {
                position: row.try_get("position")?,
                held: millis(row.try_get("held_ms")?),
            })
        })
        .collect()
}

/// Puts rows off for a while, counting a try or not; returns position and tries of those that were where they had been seen.
///
/// # Errors
/// What Postgres answers.
pub async fn postpone(
    client: &Client,
    rows: &[Waiting],
    count_try: bool,
    pause: Duration,
) -> Result<Vec<(i64, i32)>, Error> {
    let (places, positions) = places(rows);
    let rows = client
        .query_typed(
            POSTPONE,
            &[
                (&places, Type::TID_ARRAY),
                (&positions, Type::INT8_ARRAY),
                (&i32::from(count_try), Type::INT4),
                (&(pause.as_secs_f64() * 1000.0), Type::FLOAT8),
            ],
        )
        .await?;
    rows.iter()
        .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
        .collect()
}

/// Moves a row to the parked ones, with the record's bytes, in one statement; false when it is not there any more.
///
/// # Errors
/// What Postgres answers.
pub async fn park(client: &Client, position: i64, reason: &str) -> Result<bool, Error> {
    let moved = client
        .execute_typed(PARK, &[(&position, Type::INT8), (&reason, Type::TEXT)])
        .await?;
    Ok(moved == 1)
}

/// Puts a parked event back into the outbox; false when it is not parked.
///
/// # Errors
/// What Postgres answers.
pub async fn redrive(client: &Client, position: i64) -> Result<bool, Error> {
    let moved = client
        .execute_typed(REDRIVE, &[(&position, Type::INT8)])
        .await?;
    Ok(moved == 1)
}

/// How much waits and how long.
///
/// # Errors
/// What Postgres answers.
pub async fn depth(client: &Client) -> Result<Depth, Error> {
    let row = client
        .query_typed_one(DEPTH, &[(&COUNT_MAX, Type::INT8)])
        .await?;
    Ok(Depth {
        waiting: row.try_get("waiting")?,
        oldest_seconds: row
            .try_get::<_, Option<f64>>("oldest_seconds")?
            .unwrap_or(0.0),
        parked: row.try_get("parked")?,
    })
}

/// [`depth`], if it takes no longer than `limit`: it walks rows that are dead and cannot be removed as well.
///
/// # Errors
/// What Postgres answers.
pub async fn depth_within(client: &Client, limit: Duration) -> Result<Option<Depth>, Error> {
    let begin = format!("BEGIN; SET LOCAL statement_timeout = {}", limit.as_millis());
    client.batch_execute(&begin).await?;
    let depth = depth(client).await;
    client.batch_execute("ROLLBACK").await?;
    match depth {
        Err(error) if error.code() == Some(&SqlState::QUERY_CANCELED) => Ok(None),
        depth => depth.map(Some),
    }
}

/// Routing keys that hold users back, at most [`LIST_MAX`]; of the events, the million held longest count.
///
/// # Errors
/// What Postgres answers.
pub async fn held(client: &Client) -> Result<Vec<HeldKey>, Error> {
    let rows = client
        .query_typed(HELD, &[(&LIST_MAX, Type::INT8), (&COUNT_MAX, Type::INT8)])
        .await?;
    rows.iter()
        .map(|row| {
            Ok(HeldKey {
                routing_key: row.try_get("type")?,
                events: row.try_get("events")?,
                since: row.try_get("since")?,
            })
        })
        .collect()
}

/// Parked events after a position, by position; `limit` is cut to [`LIST_MAX`].
///
/// # Errors
/// What Postgres answers.
pub async fn parked(client: &Client, after: i64, limit: i64) -> Result<Vec<Parked>, Error> {
    let rows = client
        .query_typed(
            PARKED,
            &[
                (&after, Type::INT8),
                (&limit.clamp(0, LIST_MAX), Type::INT8),
            ],
        )
        .await?;
    rows.iter()
        .map(|row| {
            Ok(Parked {
                position: row.try_get("position")?,
                parked_at: row.try_get("parked_at")?,
                reason: row.try_get("reason")?,
                event_id: row.try_get("event_id")?,
                event_type: row.try_get("type")?,
                subject: row.try_get("subject")?,
            })
        })
        .collect()
}

/// Makes a session one that Postgres ends (and with it its leases) when it is silent for five seconds.
///
/// # Errors
/// What Postgres answers.
pub async fn lease_session(client: &Client) -> Result<(), Error> {
    client.batch_execute(LEASE_SESSION).await
}

/// Shows the other relays that this one is there, or no longer.
///
/// # Errors
/// What Postgres answers.
pub async fn appear(client: &Client, key: i64, there: bool) -> Result<(), Error> {
    let sql = if there { APPEAR } else { DISAPPEAR };
    client.query_typed_one(sql, &[(&key, Type::INT8)]).await?;
    Ok(())
}

/// How many relays show themselves under the key. Is the ping of the lease session, too.
///
/// # Errors
/// What Postgres answers.
pub async fn live(client: &Client, key: i64) -> Result<i64, Error> {
    client
        .query_typed_one(LIVE, &[(&key, Type::INT8)])
        .await?
        .try_get(0)
}

/// Tries to lock a shard for this session. Calls for a shard that it has already would stack.
///
/// # Errors
/// What Postgres answers.
pub async fn lease(client: &Client, key: i64) -> Result<bool, Error> {
    client
        .query_typed_one(LEASE, &[(&key, Type::INT8)])
        .await?
        .try_get(0)
}

/// Gives a shard's lock back.
///
/// # Errors
/// What Postgres answers.
pub async fn release(client: &Client, key: i64) -> Result<(), Error> {
    client
        .query_typed_one(RELEASE, &[(&key, Type::INT8)])
        .await?;
    Ok(())
}
