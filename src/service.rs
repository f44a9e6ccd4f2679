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
use crate::store::migrate;
use crate::store::outbox::Waker;
use crate::store::session::{self, SessionError};
use crate::telemetry::Metrics;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What of the stop's time is left to lanes and relay after the API has drained.
const AFTER_DRAIN: Duration = Duration::from_secs(10);

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
        let needs = |missing: bool, name| {
            if missing {
                Err(StartError::Missing(name))
            } else {
                Ok(())
            }
        };
        needs(secret_is_empty(&config.database_url), "DATABASE_URL")?;
        needs(roles.relay && secret_is_empty(&config.amqp_url), "AMQP_URL")?;
        needs(roles.api && config.keys_file.is_none(), "KEYS_FILE")?;
        let metrics = Arc::new(Metrics::new());
        let config = Arc::new(config);
        let pool = session::pool(&config.database_url, &config.ledger, config.pool_size)?;
        let waker = Waker::default();
        let (stop, stopped) = watch::channel(false);
        let (ops_stop, ops_stopped) = watch::channel(false);
        let api_addr = listeners
            .api
            .as_ref()
            .map(TcpListener::local_addr)
            .transpose()?;
        let ops_addr = listeners.ops.local_addr()?;
        let limits = limits(&config);

        let api = match listeners.api {
            Some(listener) => {
                let keys = config
                    .keys_file
                    .as_deref()
                    .ok_or(StartError::Missing("KEYS_FILE"))?;
                let (lanes, drain) = Lanes::start(&lane_settings(&config, &metrics, &waker));
                let app = App {
                    registry: Arc::new(Registry::load(config.schema_dir.as_deref())?),
                    verifier: Arc::new(Verifier::load(keys)?),
                    config: config.clone(),
                    lanes,
                    pool: pool.clone(),
                    metrics: metrics.clone(),
                };
                let until = shutdown::wait(stopped.clone());
                let serving = http::serve(
                    listener,
                    http::router(app),
                    until,
                    limits,
                    metrics.connections.clone(),
                );
                Some((tokio::spawn(serving), drain))
            }
            None => None,
        };
        let relay = roles.relay.then(|| {
            Relay::start(RelaySettings {
                database_url: config.database_url.clone(),
                amqp_url: config.amqp_url.clone(),
                ledger: config.ledger.clone(),
                config: config.relay.clone(),
                metrics: metrics.clone(),
                waker,
            })
        });
        let keeper = roles.keeper.then(|| {
            let settings = keeper::Settings {
                database_url: config.database_url.clone(),
                ledger: config.ledger.clone(),
                metrics: metrics.clone(),
            };
            tokio::spawn(keeper::run(settings, stopped.clone()))
        });
        let ops = http::ops_router(Ops {
            pool,
            metrics: metrics.clone(),
            schema_version: migrate::version(),
            stopping: stopped,
        });
        let unseen = prometheus_client::metrics::gauge::Gauge::default();
        let ops = tokio::spawn(http::serve(
            listeners.ops,
            ops,
            shutdown::wait(ops_stopped),
            limits,
            unseen,
        ));
        Ok(Service {
            api_addr,
            ops_addr,
            stop,
            ops_stop,
            api,
            relay,
            keeper,
            ops,
        })
    }

    /// Stops it: every accepted command is answered first. Bounded by the configured time.
    pub async fn stop(self) {
        let _ = self.stop.send(true);
        if let Some((serving, drain)) = self.api {
            let _ = serving.await;
            drain.finish().await;
        }
        if let Some(relay) = self.relay {
            relay.stop().await;
        }
        if let Some(keeper) = self.keeper {
            let _ = keeper.await;
        }
        let _ = self.ops_stop.send(true);
        let _ = self.ops.await;
        tracing::info!("stopped");
    }
}

fn secret_is_empty(secret: &secrecy::SecretString) -> bool {
    secrecy::ExposeSecret::expose_secret(secret).is_empty()
}

fn limits(config: &Config) -> Limits {
    Limits {
        header_timeout: Duration::from_millis(config.header_timeout_ms),
        connections_max: config.connections_max,
        drain: Duration::from_millis(config.shutdown_timeout_ms)
            .saturating_sub(AFTER_DRAIN)
            .max(AFTER_DRAIN / 10),
    }
}

fn lane_settings(config: &Config, metrics: &Arc<Metrics>, waker: &Waker) -> commit::Settings {
    commit::Settings {
        database_url: config.database_url.clone(),
        ledger: config.ledger.clone(),
        lanes: config.lanes,
        queue: config.lane_queue,
        queue_bytes: config.lane_queue_bytes,
        batch_max: config.batch_max,
        dedupe_days: config.dedupe_days,
        committed: waker.clone(),
        metrics: metrics.clone(),
    }
}
