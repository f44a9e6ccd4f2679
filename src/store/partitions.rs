//! Monthly partitions of events and postings, made ahead of time.
//!
//! Looks first: when nothing is missing, no DDL runs. The making itself is a function of the database that the runtime role
//! may only execute.

use tokio_postgres::{Client, Error};

/// How many months after the current one have their partitions.
pub const MONTHS_AHEAD: i32 = 3;

/// The months without a partition, of either table.
const MISSING: &str = "-- missing_partitions
SELECT t.parent, m.month
FROM unnest(ARRAY['events', 'postings']) AS t(parent),
     generate_series(date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC'),
                     date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC') + make_interval(months => $1::int),
                     interval '1 month') AS s(stamp),
     LATERAL (SELECT s.stamp AT TIME ZONE 'UTC') AS m(month)
WHERE NOT EXISTS (
    SELECT FROM pg_inherits i
    WHERE i.inhparent = to_regclass(t.parent)
      AND i.inhrelid = to_regclass(t.parent || '_' || to_char(s.stamp, 'YYYY_MM')))
ORDER BY m.month, t.parent";

const MAKE: &str = "-- make_partition
SELECT make_partition($1, $2)";

/// Every statement of this file.
pub const STATEMENTS: &[&str] = &[MISSING, MAKE];

/// Makes the partitions that are missing for this month and the next three; returns how many. Each is a transaction of its own
/// with a short lock time-out, so no writer waits behind it; call again after an error.
///
/// # Errors
/// What Postgres says, such as a lock time-out behind a long reader.
pub async fn ensure(client: &Client) -> Result<usize, Error> {
    let missing = client.query(MISSING, &[&MONTHS_AHEAD]).await?;
    for row in &missing {
        let (parent, month): (String, jiff::Timestamp) = (row.try_get(0)?, row.try_get(1)?);
        client.execute(MAKE, &[&parent, &month]).await?;
    }
    Ok(missing.len())
}
