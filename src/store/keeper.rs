//! What the keeper asks of the database besides partitions and the horizon.

use tokio_postgres::{Client, Error};

const TRY_LOCK: &str = "-- keeper_try_lock
SELECT pg_try_advisory_lock($1, $2)";

const PURGE_REVOCATIONS: &str = "-- purge_revocations
DELETE FROM revoked_tokens WHERE expires_at < clock_timestamp() - interval '1 hour'";

/// Every statement of this file.
pub const STATEMENTS: &[&str] = &[TRY_LOCK, PURGE_REVOCATIONS];

/// Whether this session is the keeper now; it stays so until it ends.
///
/// # Errors
/// What Postgres says.
pub async fn try_lock(client: &Client, ledger: &str) -> Result<bool, Error> {
    let (class, key) = super::lock_key(ledger, "keeper");
    client
        .query_one(TRY_LOCK, &[&class, &key])
        .await?
        .try_get(0)
}

/// Forgets revocations of tokens that have expired an hour ago; returns how many.
///
/// # Errors
/// What Postgres says.
pub async fn purge_revocations(client: &Client) -> Result<u64, Error> {
    client.execute(PURGE_REVOCATIONS, &[]).await
}
