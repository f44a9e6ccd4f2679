//! Migrations, the runtime role's rights, and the first partitions: all by the owner, under one advisory lock.
//!
//! Running it twice runs no DDL: each step looks first whether there is anything to do.

use super::session::{self, Purpose, SessionError};
use super::{lock_key, partitions};
use secrecy::SecretString;
use tokio_postgres::Client;

#[allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "made by the macro; the names of the files are checked at build time"
)]
mod embedded {
    refinery::embed_migrations!("migrations");
}

/// How long another pod's migration is waited for.
const LOCK_TIMEOUT_SQL: &str = "-- migrate_lock_timeout
SET lock_timeout = '60s'";

const LOCK: &str = "-- migrate_lock
SELECT pg_advisory_lock($1, $2)";

const SCHEMA_EXISTS: &str = "-- schema_exists
SELECT to_regnamespace($1) IS NOT NULL";

const HISTORY_EXISTS: &str = "-- history_exists
SELECT to_regclass('refinery_schema_history') IS NOT NULL";

/// Whether the runtime role lacks any right that `GRANTS` gives.
const LACKS_RIGHTS: &str = "-- lacks_rights
SELECT NOT has_schema_privilege($1, current_schema(), 'USAGE')
    OR NOT has_sequence_privilege($1, 'events_position_seq', 'USAGE')
    OR NOT has_sequence_privilege($1, 'events_position_seq', 'SELECT')
    OR NOT has_function_privilege($1, 'make_partition(text, timestamptz)', 'EXECUTE')
    OR EXISTS (
        SELECT FROM (VALUES
            (ARRAY['events', 'postings', 'accounts'], ARRAY['SELECT', 'INSERT']),
            (ARRAY['users', 'balances', 'business_keys', 'balance_snapshots'], ARRAY['SELECT', 'INSERT', 'UPDATE']),
            (ARRAY['horizon', 'snapshot_horizon'], ARRAY['SELECT', 'UPDATE']),
            (ARRAY['outbox', 'outbox_parked', 'revoked_tokens'], ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']),
            (ARRAY['refinery_schema_history'], ARRAY['SELECT'])) AS g(tables, privileges)
        CROSS JOIN unnest(g.tables) AS t(name) CROSS JOIN unnest(g.privileges) AS p(privilege)
        WHERE NOT has_table_privilege($1, t.name, p.privilege))";

/// The rights of the runtime role: on parents only, never on a partition, no ALL TABLES, no default privileges.
const GRANTS: &str = "-- grant_rights
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, INSERT ON events, postings, accounts TO {role};
GRANT SELECT, INSERT, UPDATE ON users, balances, business_keys, balance_snapshots TO {role};
GRANT SELECT, UPDATE ON horizon, snapshot_horizon TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox, outbox_parked, revoked_tokens TO {role};
GRANT SELECT ON refinery_schema_history TO {role};
GRANT USAGE, SELECT ON SEQUENCE events_position_seq TO {role};
GRANT EXECUTE ON FUNCTION make_partition(text, timestamptz) TO {role};";

const QUOTE: &str = "-- quote_names
SELECT quote_ident($1), quote_ident($2), EXISTS (SELECT FROM pg_roles WHERE rolname = $1)";

/// Every statement of this file that can be prepared.
pub const STATEMENTS: &[&str] = &[LOCK, SCHEMA_EXISTS, HISTORY_EXISTS, LACKS_RIGHTS, QUOTE];

/// Why a database could not be brought to this binary's version.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// No session.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// What Postgres says.
    #[error("postgres: {0}")]
    Postgres(#[from] tokio_postgres::Error),
    /// A migration failed, or an applied one differs from this binary's.
    #[error("migration: {0}")]
    Migration(#[from] refinery::Error),
    /// The runtime role is missing.
    #[error(
        "the role {0:?} of DAYBOOK_DATABASE_URL does not exist: CREATE ROLE {0} LOGIN PASSWORD '...'"
    )]
    NoRole(String),
    /// The runtime role owns the tables, so no right protects them from it.
    #[error(
        "DAYBOOK_DATABASE_URL and DAYBOOK_OWNER_DATABASE_URL name the same role {0:?}: the ledger needs two"
    )]
    OneRole(String),
    /// The URL of the runtime role names no user.
    #[error("DAYBOOK_DATABASE_URL names no user")]
    NoUser,
}

/// The version of the newest migration in this binary.
#[must_use]
pub fn version() -> i64 {
    embedded::migrations::runner()
        .get_migrations()
        .iter()
        .map(|m| i64::from(m.version()))
        .max()
        .unwrap_or(0)
}

/// Brings the ledger's schema to this binary's version and gives the runtime role its rights. Returns how many migrations
/// were applied.
///
/// # Errors
/// [`MigrateError`].
pub async fn migrate(
    owner_url: &SecretString,
    runtime_url: &SecretString,
    ledger: &str,
) -> Result<usize, MigrateError> {
    let runtime = session::settings(runtime_url, ledger, Purpose::Read)?;
    let role = runtime.get_user().ok_or(MigrateError::NoUser)?.to_owned();
    let owner = session::settings(owner_url, ledger, Purpose::Owner)?;
    if owner.get_user() == Some(&role) {
        return Err(MigrateError::OneRole(role));
    }
    let (mut client, driver) = session::connect(owner_url, ledger, Purpose::Owner).await?;
    let applied = run(&mut client, ledger, &role).await;
    drop(client);
    // The lock goes with the session; wait until it is closed.
    let _ = driver.await;
    applied
}

async fn run(client: &mut Client, ledger: &str, role: &str) -> Result<usize, MigrateError> {
    client.batch_execute(LOCK_TIMEOUT_SQL).await?;
    let (class, key) = lock_key(ledger, "migrate");
    client.execute(LOCK, &[&class, &key]).await?;
    let names = client.query_one(QUOTE, &[&role, &ledger]).await?;
    let (role_quoted, schema): (String, String) = (names.try_get(0)?, names.try_get(1)?);
    if !names.try_get::<_, bool>(2)? {
        return Err(MigrateError::NoRole(role.to_owned()));
    }
    if !client
        .query_one(SCHEMA_EXISTS, &[&schema])
        .await?
        .try_get::<_, bool>(0)?
    {
        client
            .batch_execute(&format!("CREATE SCHEMA {schema}"))
            .await?;
    }
    let runner = embedded::migrations::runner();
    let known: bool = client.query_one(HISTORY_EXISTS, &[]).await?.try_get(0)?;
    let current = known && {
        // A database that is ahead of this binary is none of its business: a rolling update has both for a while.
        let applied = runner.get_applied_migrations_async(client).await?;
        runner
            .get_migrations()
            .iter()
            .all(|ours| applied.contains(ours))
    };
    let applied = if current {
        0
    } else {
        runner.run_async(client).await?.applied_migrations().len()
    };
    partitions::ensure(client).await?;
    if client.query_one(LACKS_RIGHTS, &[&role]).await?.try_get(0)? {
        let grants = GRANTS
            .replace("{role}", &role_quoted)
            .replace("{schema}", &schema);
        client.batch_execute(&grants).await?;
    }
    Ok(applied)
}
