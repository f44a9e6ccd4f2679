//! The safe horizon: up to which position nothing can still be committed.
//!
//! Sequence order is not commit order. Read the sequence first; take a transaction id in a LATER statement; once the oldest
//! running transaction is not older than that id, every position drawn before is settled for ever, because each batch takes
//! its transaction id before it draws a position. On the primary only.

use tokio_postgres::{Client, Error};

const READ_SEQUENCE: &str = "-- read_sequence
SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM events_position_seq";

const TAKE_ID: &str = "-- take_transaction_id
SELECT pg_current_xact_id()::text::bigint";

const READ_OLDEST: &str = "-- read_oldest_transaction
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint";

/// Never moves back, whoever writes it.
const SETTLE: &str = "-- settle
UPDATE horizon SET position = $1, settled_at = clock_timestamp() WHERE position < $1";

const READ: &str = "-- read_horizon
SELECT position FROM horizon";

const AGE: &str = "-- horizon_age
SELECT greatest(0, extract(epoch FROM clock_timestamp() - settled_at))::float8 FROM horizon";

/// Every statement of this file.
pub const STATEMENTS: &[&str] = &[READ_SEQUENCE, TAKE_ID, READ_OLDEST, SETTLE, READ, AGE];

/// Positions up to `position` are settled once no transaction older than `transaction` runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The last position drawn before the mark.
    pub position: i64,
    /// A transaction id taken after that.
    pub transaction: i64,
}

/// The last position drawn so far.
///
/// # Errors
/// What Postgres says.
pub async fn drawn(client: &Client) -> Result<i64, Error> {
    client.query_one(READ_SEQUENCE, &[]).await?.try_get(0)
}

/// Sets a mark: the sequence, then, in a later statement, a transaction id.
///
/// # Errors
/// What Postgres says.
pub async fn mark(client: &Client) -> Result<Mark, Error> {
    let position = drawn(client).await?;
    let transaction = client.query_one(TAKE_ID, &[]).await?.try_get(0)?;
    Ok(Mark {
        position,
        transaction,
    })
}

/// Whether all transactions older than the mark have ended.
///
/// # Errors
/// What Postgres says.
pub async fn settled(client: &Client, mark: Mark) -> Result<bool, Error> {
    let oldest: i64 = client.query_one(READ_OLDEST, &[]).await?.try_get(0)?;
    Ok(oldest >= mark.transaction)
}

/// Stores a settled position for every list and for the relay.
///
/// # Errors
/// What Postgres says.
pub async fn settle(client: &Client, position: i64) -> Result<(), Error> {
    client.execute(SETTLE, &[&position]).await.map(drop)
}

/// The stored horizon.
///
/// # Errors
/// What Postgres says.
pub async fn read(client: &Client) -> Result<i64, Error> {
    client.query_one(READ, &[]).await?.try_get(0)
}

/// Seconds since the horizon moved last, whoever moved it.
///
/// # Errors
/// What Postgres says.
pub async fn age(client: &Client) -> Result<f64, Error> {
    client.query_one(AGE, &[]).await?.try_get(0)
}
