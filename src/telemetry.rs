//! Log lines and metrics: what the service tells of itself.
//!
//! Label values come from closed sets only; no subject, key or token ever becomes a label.

use crate::config::{Config, LogFormat};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::sync::atomic::{AtomicI64, AtomicU64};
use tracing_subscriber::EnvFilter;

/// Labels of a finished request.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RequestLabels {
    /// Path pattern of the route table, or `none`.
    pub route: &'static str,
    /// HTTP method, or `other`.
    pub method: &'static str,
    /// Status code.
    pub status: u16,
}

/// One label out of a closed set.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct Kind {
    /// Which one.
    pub kind: &'static str,
}

/// A gauge of fractions.
pub type FloatGauge = Gauge<f64, AtomicU64>;

/// Every metric of the service; one instance a process, passed as a value.
#[derive(Debug)]
pub struct Metrics {
    /// What `/metrics` encodes.
    pub registry: Registry,
    /// Finished requests.
    pub requests: Family<RequestLabels, Counter>,
    /// From the request's head to the answer, seconds.
    pub request_seconds: Histogram,
    /// Open HTTP connections.
    pub connections: Gauge,
    /// Commands of one transaction.
    pub batch_size: Histogram,
    /// From the first statement to COMMIT's answer, seconds.
    pub commit_seconds: Histogram,
    /// Commands waiting for a lane.
    pub lane_queue: Gauge,
    /// Batches run again, by reason.
    pub retries: Family<Kind, Counter>,
    /// Outcomes of commands.
    pub outcomes: Family<Kind, Counter>,
    /// Valid events on which a type's own expression failed.
    pub type_errors: Counter,
    /// Rows waiting in the outbox.
    pub outbox_rows: Gauge,
    /// Age of the oldest of them, seconds.
    pub outbox_oldest_seconds: FloatGauge,
    /// Events parked.
    pub outbox_parked: Gauge,
    /// Messages: `published`, `confirmed`, `returned`, `refused`, `parked`, `deleted`.
    pub relay: Family<Kind, Counter>,
    /// Shards this pod publishes.
    pub relay_leases: Gauge,
    /// Age of the safe horizon, seconds.
    pub horizon_age_seconds: FloatGauge,
    /// Connections of the read pool: `size`, `available`, `waiting`.
    pub pool: Family<Kind, Gauge<i64, AtomicI64>>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Registers every metric under the prefix `daybook`.
    #[must_use]
    pub fn new() -> Self {
        let seconds = || Histogram::new(exponential_buckets(0.000_5, 2.0, 16));
        let mut metrics = Metrics {
            registry: Registry::with_prefix("daybook"),
            requests: Family::default(),
            request_seconds: seconds(),
            connections: Gauge::default(),
            batch_size: Histogram::new(exponential_buckets(1.0, 2.0, 9)),
            commit_seconds: seconds(),
            lane_queue: Gauge::default(),
            retries: Family::default(),
            outcomes: Family::default(),
            type_errors: Counter::default(),
            outbox_rows: Gauge::default(),
            outbox_oldest_seconds: FloatGauge::default(),
            outbox_parked: Gauge::default(),
            relay: Family::default(),
            relay_leases: Gauge::default(),
            horizon_age_seconds: FloatGauge::default(),
            pool: Family::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let r = &mut self.registry;
        r.register("http_requests", "Finished requests", self.requests.clone());
        r.register(
            "http_request_seconds",
            "Time to answer a request",
            self.request_seconds.clone(),
        );
        r.register(
            "http_connections",
            "Open HTTP connections",
            self.connections.clone(),
        );
        r.register(
            "commit_batch_size",
            "Commands of one transaction",
            self.batch_size.clone(),
        );
        r.register(
            "commit_seconds",
            "Time of one transaction",
            self.commit_seconds.clone(),
        );
        r.register(
            "lane_queue",
            "Commands waiting for a lane",
            self.lane_queue.clone(),
        );
        r.register("commit_retries", "Batches run again", self.retries.clone());
        r.register(
            "commit_outcomes",
            "Outcomes of commands",
            self.outcomes.clone(),
        );
        r.register(
            "type_errors",
            "Valid events on which a type's expression failed",
            self.type_errors.clone(),
        );
        r.register(
            "outbox_rows",
            "Rows waiting in the outbox",
            self.outbox_rows.clone(),
        );
        r.register(
            "outbox_oldest_seconds",
            "Age of the oldest waiting row",
            self.outbox_oldest_seconds.clone(),
        );
        r.register("outbox_parked", "Events parked", self.outbox_parked.clone());
        r.register(
            "relay_messages",
            "Messages by what became of them",
            self.relay.clone(),
        );
        r.register(
            "relay_leases",
            "Shards this pod publishes",
            self.relay_leases.clone(),
        );
        r.register(
            "horizon_age_seconds",
            "Age of the safe horizon",
            self.horizon_age_seconds.clone(),
        );
        r.register(
            "pool_connections",
            "Connections of the read pool",
            self.pool.clone(),
        );
    }
}

/// Log lines that wait to be written at most; more are dropped. The room for them is taken at start: the library's own limit of
/// 128,000 would take 4 MiB.
const LOG_LINES_MAX: usize = 4_096;

/// Sends log lines to standard error through a writer that drops lines rather than block a request. The guard flushes
/// when it is dropped.
///
/// # Errors
/// When the filter does not parse.
pub fn log(config: &Config) -> Result<tracing_appender::non_blocking::WorkerGuard, String> {
    let filter = EnvFilter::try_new(&config.log).map_err(|error| format!("log: {error}"))?;
    let (writer, guard) = tracing_appender::non_blocking::NonBlockingBuilder::default()
        .buffered_lines_limit(LOG_LINES_MAX)
        .finish(std::io::stderr());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer);
    match config.log_format {
        LogFormat::Text => builder.with_ansi(false).init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
    Ok(guard)
}
