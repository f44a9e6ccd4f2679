//! Sessions with Postgres: what every connection sets, by what it is for.
//!
//! The one place that connects. The ledger's schema is the search path, so no statement names it.

use rustls::ClientConfig;
use secrecy::{ExposeSecret, SecretString};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Config};
use tokio_postgres_rustls::MakeRustlsConnect;

/// What a session is for; decides its time-outs and plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The commit of a lane.
    Lane,
    /// Reads of requests, readiness.
    Read,
    /// The keeper, elected by a session lock.
    Keeper,
    /// The relay's scans and deletes, and its lease.
    Relay,
    /// Migrations, by the owner.
    Owner,
    /// Verification and other long readers.
    Batch,
}

impl Purpose {
    /// Settings a session starts with. The planner is kept on index look-ups where every statement is one: its guesses on
    /// young tables (no statistics yet) would be sequential scans and hash joins.
    const fn settings(self) -> &'static str {
        match self {
            Purpose::Lane => {
                "-c statement_timeout=10s -c lock_timeout=1s -c idle_in_transaction_session_timeout=10s \
                 -c enable_seqscan=off -c enable_hashjoin=off -c enable_mergejoin=off -c jit=off"
            }
            Purpose::Read => {
                "-c statement_timeout=5s -c lock_timeout=1s -c idle_in_transaction_session_timeout=10s \
                 -c enable_seqscan=off -c enable_bitmapscan=off -c jit=off"
            }
            // A node that vanished must not stay the keeper until TCP notices: that can take hours.
            Purpose::Keeper => {
                "-c statement_timeout=5s -c lock_timeout=1s -c idle_in_transaction_session_timeout=10s \
                 -c idle_session_timeout=15s -c enable_seqscan=off -c enable_bitmapscan=off -c jit=off"
            }
            Purpose::Relay => {
                "-c statement_timeout=5s -c lock_timeout=5s -c idle_in_transaction_session_timeout=10s \
                 -c enable_seqscan=off -c enable_bitmapscan=off -c enable_hashjoin=off -c enable_mergejoin=off -c jit=off"
            }
            Purpose::Owner => {
                "-c statement_timeout=0 -c lock_timeout=5s -c idle_in_transaction_session_timeout=60s"
            }
            Purpose::Batch => {
                "-c statement_timeout=0 -c lock_timeout=5s -c idle_in_transaction_session_timeout=10min"
            }
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Purpose::Lane => "daybook lane",
            Purpose::Read => "daybook read",
            Purpose::Keeper => "daybook keeper",
            Purpose::Relay => "daybook relay",
            Purpose::Owner => "daybook owner",
            Purpose::Batch => "daybook batch",
        }
    }
}

/// What the server does on its side of the connection: without it a pod whose node vanished keeps its locks for hours.
const SERVER_KEEPALIVES: &str =
    "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3";

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The URL does not parse, or Postgres cannot be reached.
    #[error("postgres: {0}")]
    Postgres(#[from] tokio_postgres::Error),
    /// No TLS settings can be made.
    #[error("tls: {0}")]
    Tls(#[from] rustls::Error),
    /// The pool cannot be made.
    #[error("pool: {0}")]
    Pool(#[from] deadpool_postgres::BuildError),
}

/// The parsed settings of a URL, for one purpose.
///
/// # Errors
/// When the URL does not parse.
pub fn settings(
    url: &SecretString,
    ledger: &str,
    purpose: Purpose,
) -> Result<Config, SessionError> {
    let mut config: Config = url.expose_secret().parse()?;
    let given = config.get_options().unwrap_or_default().to_owned();
    config
        .options(format!(
            "{given} -c search_path={ledger},pg_temp -c TimeZone=UTC {SERVER_KEEPALIVES} {}",
            purpose.settings()
        ))
        .application_name(purpose.name())
        .connect_timeout(Duration::from_secs(5))
        .keepalives_idle(Duration::from_secs(10))
        .keepalives_interval(Duration::from_secs(5))
        .keepalives_retries(3)
        .tcp_user_timeout(Duration::from_secs(25));
    Ok(config)
}

/// TLS with the system's root certificates; used when the URL's `sslmode` asks for it.
///
/// # Errors
/// When the protocol versions cannot be set.
pub fn tls() -> Result<MakeRustlsConnect, SessionError> {
    // Reading the certificates takes longer than connecting; once a process is enough.
    static CONNECT: std::sync::OnceLock<MakeRustlsConnect> = std::sync::OnceLock::new();
    if let Some(connect) = CONNECT.get() {
        return Ok(connect.clone());
    }
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(CONNECT
        .get_or_init(|| MakeRustlsConnect::new(config))
        .clone())
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
    let (client, connection) = settings(url, ledger, purpose)?.connect(tls()?).await?;
    let driver = tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, purpose = purpose.name(), "a database session ended");
        }
    });
    Ok((client, driver))
}

/// The pool for reads: bounded, every wait with a time-out, connections renewed so that their buffers do not keep a
/// high-water mark for ever.
///
/// # Errors
/// When the URL does not parse.
pub fn pool(
    url: &SecretString,
    ledger: &str,
    size: usize,
) -> Result<deadpool_postgres::Pool, SessionError> {
    let manager = deadpool_postgres::Manager::from_config(
        settings(url, ledger, Purpose::Read)?,
        tls()?,
        deadpool_postgres::ManagerConfig {
            // Reads never open a transaction, so there is nothing to clean; a dead connection must not be handed out.
            recycling_method: deadpool_postgres::RecyclingMethod::Verified,
        },
    );
    let wait = Some(Duration::from_secs(2));
    Ok(deadpool_postgres::Pool::builder(manager)
        .max_size(size)
        .wait_timeout(wait)
        .create_timeout(Some(Duration::from_secs(5)))
        .recycle_timeout(wait)
        .runtime(deadpool_postgres::Runtime::Tokio1)
        .build()?)
}
