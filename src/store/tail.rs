//! Events across users as they settle, for `daybook events tail`.

use tokio_postgres::{Client, Error};

/// Events of one page.
const PAGE: i64 = 100;

const LATEST: &str = "-- tail_latest
SELECT position FROM horizon";

const AFTER: &str = "-- tail_after
SELECT position, record FROM events
WHERE position > $1 AND position <= $2 ORDER BY position LIMIT $3";

/// Every statement of this file.
pub const STATEMENTS: &[&str] = &[LATEST, AFTER];

/// The settled position now.
///
/// # Errors
/// What Postgres says.
pub async fn latest(client: &Client) -> Result<i64, Error> {
    client.query_one(LATEST, &[]).await?.try_get(0)
}

/// The next settled events after a position, with their positions; at most 100.
///
/// # Errors
/// What Postgres says.
pub async fn after(client: &Client, position: i64) -> Result<Vec<(i64, String)>, Error> {
    // Read in a statement of its own: what is settled then is visible to the next one.
    let settled = latest(client).await?;
    let rows = client.query(AFTER, &[&position, &settled, &PAGE]).await?;
    rows.iter()
        .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
        .collect()
}
