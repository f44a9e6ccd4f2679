//! Monthly partitions of events and postings, made ahead of time.
//!
//! Looks first: when nothing is missing, no DDL runs. The making itself is a function of the database that the runtime role
//! may only execute.

use jiff::Timestamp;
use jiff::tz::TimeZone;
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

/// The beginning of the month that a time is in: where its partition begins. A bound of `recorded_at` that only spares older
/// partitions stands there, so that it refuses no row of those that are read.
#[must_use]
pub fn begins(at: Timestamp) -> Timestamp {
    let month = at.to_zoned(TimeZone::UTC).date().first_of_month();
    // The month before the calendar's first one is never asked for; the first instant refuses no row either.
    month
        .to_zoned(TimeZone::UTC)
        .map_or(Timestamp::MIN, |begin| begin.timestamp())
}

/// Makes the partitions that are missing for this month and the next three; returns how many. Each is a transaction of its own
/// with a short lock time-out, so no writer waits behind it; call again after an error.
///
/// # Errors
/// What Postgres says, such as a lock time-out behind a long reader.
pub async fn ensure(client: &Client) -> Result<usize, Error> {
    let missing = client.query(MISSING, &[&MONTHS_AHEAD]).await?;
    for row in &missing {
        let (parent, month): (String, Timestamp) = (row.try_get(0)?, row.try_get(1)?);
        client.execute(MAKE, &[&parent, &month]).await?;
    }
    Ok(missing.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_begins_with_its_month() {
        for (at, begin) in [
            ("2026-11-30T23:59:59.999999Z", "2026-11-01T00:00:00Z"),
            ("2026-11-01T00:00:00Z", "2026-11-01T00:00:00Z"),
            ("2024-02-29T12:00:00Z", "2024-02-01T00:00:00Z"),
            ("1970-01-01T00:00:00Z", "1970-01-01T00:00:00Z"),
        ] {
            let at: Timestamp = at.parse().unwrap();
            assert_eq!(begins(at).to_string(), begin);
        }
    }
}
