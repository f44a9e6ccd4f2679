//! The service: starts the roles of one process and stops them in order.
//!
//! The order of a stop: readiness turns, the API finishes what it has accepted, the lanes answer what is queued, the relay
//! drains its confirms, probes and metrics end last.

use crate::auth::{KeysError, Verifier};
use crate::commit::{self, Drain, Lanes};
use crate::config::Config;
use crate::http::{self, App, Limits, Ops};
use crate::keeper;
use crate::relay::{Relay, RelaySettings};
use crate::schema::{LoadError, Registry};
use crate::shutdown;
use crate::store::handover::Handover;
use crate::store::migrate;
use crate::store::session::{self, SessionError};
use crate::telemetry::Metrics;
use secrecy::ExposeSecret;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

/// What of the stop's time is left to lanes and relay after the API has drained.
const AFTER_DRAIN: Duration = Duration::from_secs(10);

/// How long a connection of the read pool lives: its buffers keep their high-water mark.
const CONNECTION_LIFE: Duration = Duration::from_secs(30 * 60);
/// How often the pool is looked through.
const RENEWAL_EVERY: Duration = Duration::from_secs(60);

/// Which parts of the service a process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Roles {
    /// Answers requests and commits.
    pub api: bool,
    /// Publishes.
    pub relay: bool,
    /// Keeps house.
    pub keeper: bool,
}

impl Roles {
    /// All of them.
    pub const ALL: Roles = Roles {
        api: true,
        relay: true,
        keeper: true,
    };
}

impl std::str::FromStr for Roles {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut roles = Roles {
            api: false,
            relay: false,
            keeper: false,
        };
        for name in text.split(',') {
            match name.trim() {
                "api" => roles.api = true,
                "relay" => roles.relay = true,
                "keeper" => roles.keeper = true,
                other => {
                    return Err(format!(
                        "{other:?} is no role; there are api, relay and keeper"
                    ));
                }
            }
        }
        Ok(roles)
    }
}

/// Where a process listens: values, so that a test binds port 0.
#[derive(Debug)]
pub struct Listeners {
    /// The API; needed by that role only.
    pub api: Option<TcpListener>,
    /// Probes and metrics.
    pub ops: TcpListener,
}

impl Listeners {
    /// Binds what the configuration says.
    ///
    /// # Errors
    /// What the system says, with the address.
    pub async fn bind(config: &Config, roles: Roles) -> Result<Self, StartError> {
        let bind = async |address: SocketAddr| {
            TcpListener::bind(address)
                .await
                .map_err(|source| StartError::Listen { address, source })
        };
        let api = if roles.api {
            Some(bind(config.http_addr).await?)
        } else {
            None
        };
        Ok(Listeners {
            api,
            ops: bind(config.ops_addr).await?,
        })
    }
}

/// Why the service does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address cannot be listened on.
    #[error("listening on {address}: {source}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// What the system says.
        source: std::io::Error,
    },
    /// The types are broken.
    #[error(transparent)]
    Types(#[from] LoadError),
    /// The keys are broken.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// A URL is broken.
    #[error(transparent)]
    Database(#[from] SessionError),
    /// A needed setting is missing.
    #[error("DAYBOOK_{0} is not set")]
    Missing(&'static str),
    /// The system refuses something else.
    #[error("starting: {0}")]
    System(#[from] std::io::Error),
}

/// A running service.
#[derive(Debug)]
pub struct Service {
    /// Where the API listens, if it does.
    pub api_addr: Option<SocketAddr>,
    /// Where probes and metrics listen.
    pub ops_addr: SocketAddr,
    stop_within: Duration,
    stop: watch::Sender<bool>,
    ops_stop: watch::Sender<bool>,
    api: Option<(JoinHandle<()>, Drain)>,
    relay: Option<Relay>,
    keeper: Option<JoinHandle<()>>,
    ops: JoinHandle<()>,
}

impl Service {
    /// Starts the roles. The database and the broker need not be there yet; readiness says when they are.
    ///
    /// # Errors
    /// [`StartError`] for what an operator must mend: a broken type, key file, URL or address.
    pub async fn start(
        config: Config,
        roles: Roles,
        listeners: Listeners,
    ) -> Result<Self, StartError> {
        check(&config, roles)?;
        let stop_within = Duration::from_millis(config.shutdown_timeout_ms);
        let parts = Parts {
            pool: session::pool(&config.database_url, &config.ledger, config.pool_size)?,
            probe: session::pool(&config.database_url, &config.ledger, 1)?,
            config: Arc::new(config),
            metrics: Arc::new(Metrics::new()),
            handover: Handover::default(),
        };
        let (stop, stopped) = watch::channel(false);
        let (ops_stop, ops_stopped) = watch::channel(false);
        let api_addr = listeners
            .api
            .as_ref()
            .map(TcpListener::local_addr)
            .transpose()?;
        let ops_addr = listeners.ops.local_addr()?;
        let api = match listeners.api {
            Some(listener) => Some(parts.api(listener, stopped.clone())?),
            None => None,
        };
        for pool in [&parts.pool, &parts.probe] {
            tokio::spawn(renew(pool.clone(), stopped.clone()));
        }
        let relay = roles.relay.then(|| parts.relay());
        let keeper = roles.keeper.then(|| parts.keeper(stopped.clone()));
        let ops = parts.ops(listeners.ops, stopped, ops_stopped);
        Ok(Service {
            api_addr,
            ops_addr,
            stop_within,
            stop,
            ops_stop,
            api,
            relay,
            keeper,
            ops,
        })
    }

    /// Stops it: every accepted command is answered first. Each step has what is left of the configured time; what is not done
    /// by then is cut off (an event that is in the ledger stays in the outbox, and another pod publishes it).
    pub async fn stop(self) {
        let deadline = Instant::now() + self.stop_within;
        let _ = self.stop.send(true);
        let stopping = async {
            if let Some((serving, drain)) = self.api {
                let _ = serving.await;
                drain.finish().await;
            }
        };
        let answered = timeout_at(deadline, stopping).await.is_ok();
        let published = match self.relay {
            Some(relay) => timeout_at(deadline, relay.stop()).await.is_ok(),
            None => true,
        };
        if let Some(keeper) = self.keeper {
            let _ = timeout_at(deadline, keeper).await;
        }
        let _ = self.ops_stop.send(true);
        let _ = timeout_at(deadline, self.ops).await;
        if answered && published {
            tracing::info!("stopped");
        } else {
            tracing::warn!(answered, published, "stopped at the end of the time for it");
        }
    }
}

fn check(config: &Config, roles: Roles) -> Result<(), StartError> {
    let empty = |secret: &secrecy::SecretString| secret.expose_secret().is_empty();
    let needed = [
        (empty(&config.database_url), "DATABASE_URL"),
        (roles.relay && empty(&config.amqp_url), "AMQP_URL"),
        (roles.api && config.keys_file.is_none(), "KEYS_FILE"),
    ];
    match needed.into_iter().find(|(missing, _)| *missing) {
        Some((_, name)) => Err(StartError::Missing(name)),
        None => Ok(()),
    }
}

/// Ends old connections of the pool while they are idle, until the service stops.
async fn renew(pool: deadpool_postgres::Pool, stopped: watch::Receiver<bool>) {
    let renewing = async {
        loop {
            tokio::time::sleep(RENEWAL_EVERY).await;
            pool.retain(|_, metrics| metrics.age() < CONNECTION_LIFE);
        }
    };
    tokio::select! {
        () = renewing => {}
        () = shutdown::wait(stopped) => {}
    }
}

/// What the roles share.
struct Parts {
    config: Arc<Config>,
    metrics: Arc<Metrics>,
    pool: deadpool_postgres::Pool,
    /// One connection, for readiness alone.
    probe: deadpool_postgres::Pool,
    handover: Handover,
}

impl Parts {
    fn api(
        &self,
        listener: TcpListener,
        stopped: watch::Receiver<bool>,
    ) -> Result<(JoinHandle<()>, Drain), StartError> {
        let config = &self.config;
        let keys = config
            .keys_file
            .as_deref()
            .ok_or(StartError::Missing("KEYS_FILE"))?;
        let registry = Arc::new(Registry::load(config.schema_dir.as_deref())?);
        let verifier = Arc::new(Verifier::load(keys)?);
        let (lanes, drain) = Lanes::start(&commit::Settings {
            database_url: config.database_url.clone(),
            ledger: config.ledger.clone(),
            lanes: config.lanes,
            queue: config.lane_queue,
            queue_bytes: config.lane_queue_bytes,
            batch_max: config.batch_max,
            dedupe_days: config.dedupe_days,
            committed: self.handover.clone(),
            metrics: self.metrics.clone(),
        });
        let app = App {
            config: config.clone(),
            registry,
            verifier,
            lanes,
            pool: self.pool.clone(),
            sums: http::sums(config.pool_size),
            metrics: self.metrics.clone(),
        };
        let open = self.metrics.connections.clone();
        let until = shutdown::wait(stopped);
        let serving = http::serve(listener, http::router(app), until, self.limits(), open);
        Ok((tokio::spawn(serving), drain))
    }

    fn relay(&self) -> Relay {
        Relay::start(RelaySettings {
            database_url: self.config.database_url.clone(),
            amqp_url: self.config.amqp_url.clone(),
            ledger: self.config.ledger.clone(),
            config: self.config.relay.clone(),
            metrics: self.metrics.clone(),
            handover: self.handover.clone(),
        })
    }

    fn keeper(&self, stopped: watch::Receiver<bool>) -> JoinHandle<()> {
        let settings = keeper::Settings {
            database_url: self.config.database_url.clone(),
            ledger: self.config.ledger.clone(),
            metrics: self.metrics.clone(),
        };
        tokio::spawn(keeper::run(settings, stopped))
    }

    fn ops(
        &self,
        listener: TcpListener,
        stopping: watch::Receiver<bool>,
        stopped: watch::Receiver<bool>,
    ) -> JoinHandle<()> {
        let router = http::ops_router(Ops {
            pool: self.pool.clone(),
            probe: self.probe.clone(),
            metrics: self.metrics.clone(),
            schema_version: migrate::version(),
            stopping,
        });
        // Probes are no clients: their connections are not counted.
        let unseen = prometheus_client::metrics::gauge::Gauge::default();
        tokio::spawn(http::serve(
            listener,
            router,
            shutdown::wait(stopped),
            self.limits(),
            unseen,
        ))
    }

    fn limits(&self) -> Limits {
        let stop = Duration::from_millis(self.config.shutdown_timeout_ms);
        Limits {
            header_timeout: Duration::from_millis(self.config.header_timeout_ms),
            write_stall: http::WRITE_STALL_MAX,
            stream_stall: http::WRITE_STALL_MAX + self.config.request_timeout(),
            connections_max: self.config.connections_max,
            drain: stop.saturating_sub(AFTER_DRAIN).max(AFTER_DRAIN / 10),
        }
    }
}
