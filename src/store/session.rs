//! Sessions with Postgres: what every connection sets, by what it is for.
//!
//! The one place that connects. The ledger's schema is the search path, so no statement names it.

use secrecy::{ExposeSecret, SecretString};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Config, NoTls};

/// What a session is for; decides its time-outs and plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The relay's scans and deletes, and its lease.
    Relay,
}

impl Purpose {
    const fn settings(self) -> &'static str {
        match self {
            Purpose::Relay => {
                "-c statement_timeout=10s -c lock_timeout=5s -c idle_in_transaction_session_timeout=10s \
                 -c enable_seqscan=off -c enable_bitmapscan=off -c enable_hashjoin=off -c enable_mergejoin=off -c jit=off"
            }
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Purpose::Relay => "daybook relay",
        }
    }
}

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The URL does not parse, or Postgres cannot be reached.
    #[error("postgres: {0}")]
    Postgres(#[from] tokio_postgres::Error),
}

/// Opens one session. The task drives it and ends with it.
///
/// # Errors
/// When Postgres cannot be reached within the connect time-out.
pub async fn connect(
    url: &SecretString,
    ledger: &str,
    purpose: Purpose,
) -> Result<(Client, JoinHandle<()>), SessionError> {
    let mut config: Config = url.expose_secret().parse()?;
    config
        .options(format!(
            "-c search_path={ledger} -c TimeZone=UTC {}",
            purpose.settings()
        ))
        .application_name(purpose.name())
        .connect_timeout(Duration::from_secs(5))
        .keepalives_idle(Duration::from_secs(10))
        .keepalives_interval(Duration::from_secs(5))
        .keepalives_retries(3)
        .tcp_user_timeout(Duration::from_secs(25));
    let (client, connection) = config.connect(NoTls).await?;
    let driver = tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, purpose = purpose.name(), "a database session ended");
        }
    });
    Ok((client, driver))
}
