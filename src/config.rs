//! Configuration as plain data: environment `DAYBOOK_*`, over a TOML file, over defaults.
//!
//! Unknown keys are errors. Reads the environment and files once, at start; nothing else does.

use secrecy::SecretString;
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Everything an operator can set. Durations are whole milliseconds or seconds, as their names say.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Name of the ledger: the Postgres schema, part of lock keys, of `source` and of the exchange.
    pub ledger: String,
    /// Postgres, as the runtime role.
    pub database_url: SecretString,
    /// Postgres, as the role that owns the schema; needed by `migrate` only.
    pub owner_database_url: Option<SecretString>,
    /// RabbitMQ.
    pub amqp_url: SecretString,
    /// Where the API listens.
    pub http_addr: SocketAddr,
    /// Where probes and metrics listen.
    pub ops_addr: SocketAddr,
    /// Issuers and their keys.
    pub keys_file: Option<PathBuf>,
    /// Types and accounts that the operator adds.
    pub schema_dir: Option<PathBuf>,
    /// Lanes a pod commits through.
    pub lanes: usize,
    /// Commands that wait for a lane at most.
    pub lane_queue: usize,
    /// Bytes of commands that are not answered yet, at most.
    pub lane_queue_bytes: usize,
    /// Commands of one transaction at most.
    pub batch_max: usize,
    /// Connections for reads, the keeper and readiness.
    pub pool_size: usize,
    /// How long a request may take before it is answered 503 or 504.
    pub request_timeout_ms: u64,
    /// How long a client may take to send its request's head.
    pub header_timeout_ms: u64,
    /// Open HTTP connections at most.
    pub connections_max: usize,
    /// How long an idempotency key is remembered.
    pub dedupe_days: u16,
    /// How long the service may take to finish after SIGTERM.
    pub shutdown_timeout_ms: u64,
    /// What the relay does with events nobody has bound a queue for.
    pub relay: RelayConfig,
    /// `text` or `json`.
    pub log_format: LogFormat,
    /// Filter of log lines, in the syntax of `tracing`.
    pub log: String,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// The relay's part of the configuration.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RelayConfig {
    /// Topic patterns (`*` one word, `#` any number) of routing keys that must have a queue.
    pub required: Vec<String>,
    /// How long an unroutable event that must have a queue holds its user back before it is parked, in seconds.
    pub hold_for_s: u64,
    /// Unconfirmed messages of one relay at most.
    pub window: usize,
    /// How long the broker may take to confirm a message, in milliseconds.
    pub confirm_timeout_ms: u64,
}

impl Default for RelayConfig {
    fn default() -> Self {
        RelayConfig {
            required: vec!["#".to_owned()],
            hold_for_s: 600,
            window: 500,
            confirm_timeout_ms: 10_000,
        }
    }
}

/// As many as the cores that this process may use (a container's limit counts), 1 to 4: while one waits for its flush another
/// works, and the fewer they are, the more commands share a transaction.
fn lanes_of_this_machine() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().clamp(1, 4))
}

impl Default for Config {
    fn default() -> Self {
        Config {
            ledger: "main".to_owned(),
            database_url: String::new().into(),
            owner_database_url: None,
            amqp_url: String::new().into(),
            http_addr: SocketAddr::from(([127, 0, 0, 1], 8080)),
            ops_addr: SocketAddr::from(([127, 0, 0, 1], 9090)),
            keys_file: None,
            schema_dir: None,
            lanes: lanes_of_this_machine(),
            lane_queue: 4_096,
            lane_queue_bytes: 16 * 1024 * 1024,
            batch_max: 256,
            pool_size: 8,
            request_timeout_ms: 10_000,
            header_timeout_ms: 10_000,
            connections_max: 10_000,
            dedupe_days: 90,
            shutdown_timeout_ms: 25_000,
            relay: RelayConfig::default(),
            log_format: LogFormat::Text,
            log: "info,lapin=off".to_owned(),
        }
    }
}

/// Why the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file, a variable or a value is wrong.
    #[error("configuration: {0}")]
    Read(#[from] config::ConfigError),
    /// A `*_FILE` variable names a file that cannot be read.
    #[error("configuration: {variable}: {source}")]
    SecretFile {
        /// The variable.
        variable: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// A value is out of its range.
    #[error("configuration: {0}")]
    Range(String),
}

/// Settings whose value may come from a file named by `<NAME>_FILE`.
const SECRETS: [&str; 3] = ["DATABASE_URL", "OWNER_DATABASE_URL", "AMQP_URL"];
const PREFIX: &str = "DAYBOOK_";
/// What `daybook dev` writes for clients: no settings of a server, and no mistake when a shell has exported them.
const OF_CLIENTS: [&str; 5] = ["URL", "OPS_URL", "TOKEN", "ADMIN_TOKEN", "DEMO_QUEUE"];

impl Config {
    /// Reads the file, if one is named, and the environment on top of it.
    ///
    /// # Errors
    /// [`ConfigError`] for an unknown key, a value of the wrong form, an unreadable file, a value out of range.
    pub fn load(file: Option<&Path>) -> Result<Self, ConfigError> {
        let mut variables = config::Map::new();
        for (name, value) in std::env::vars() {
            let Some(key) = name
                .strip_prefix(PREFIX)
                .filter(|key| !OF_CLIENTS.contains(key))
            else {
                continue;
            };
            match key
                .strip_suffix("_FILE")
                .filter(|secret| SECRETS.contains(secret))
            {
                Some(secret) => {
                    let text = std::fs::read_to_string(&value).map_err(|source| {
                        ConfigError::SecretFile {
                            variable: name.clone(),
                            source,
                        }
                    })?;
                    variables.insert(format!("{PREFIX}{secret}"), text.trim_end().to_owned());
                }
                None => {
                    variables.insert(name, value);
                }
            }
        }
        let mut builder = config::Config::builder();
        if let Some(file) = file {
            builder = builder.add_source(config::File::from(file).format(config::FileFormat::Toml));
        }
        let environment = config::Environment::with_prefix("DAYBOOK")
            .separator("__")
            .prefix_separator("_")
            .list_separator(",")
            .with_list_parse_key("relay.required")
            .try_parsing(true)
            .source(Some(variables));
        let config: Config = builder.add_source(environment).build()?.try_deserialize()?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let name = self.ledger.as_bytes();
        let named = name.first().is_some_and(u8::is_ascii_lowercase)
            && name.len() <= 32
            && name
                .iter()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'_')
            && !self.ledger.starts_with("pg_");
        let ranges = [
            (named, "ledger: [a-z][a-z0-9_]*, at most 32, not pg_*"),
            ((1..=64).contains(&self.lanes), "lanes: 1 to 64"),
            (
                (1..=1_000_000).contains(&self.lane_queue),
                "lane_queue: 1 to 1000000",
            ),
            (
                self.lane_queue_bytes >= 1024 * 1024,
                "lane_queue_bytes: at least 1 MiB",
            ),
            (
                (1..=1_000).contains(&self.batch_max),
                "batch_max: 1 to 1000",
            ),
            ((1..=500).contains(&self.pool_size), "pool_size: 1 to 500"),
            (
                (100..=120_000).contains(&self.request_timeout_ms),
                "request_timeout_ms: 100 to 120000",
            ),
            (
                (100..=120_000).contains(&self.header_timeout_ms),
                "header_timeout_ms: 100 to 120000",
            ),
            (
                (1..=1_000_000).contains(&self.connections_max),
                "connections_max: 1 to 1000000",
            ),
            (
                (1..=3_650).contains(&self.dedupe_days),
                "dedupe_days: 1 to 3650",
            ),
            (
                (1..=1_000).contains(&self.relay.window),
                "relay.window: 1 to 1000",
            ),
            (
                (100..=120_000).contains(&self.relay.confirm_timeout_ms),
                "relay.confirm_timeout_ms: 100 to 120000",
            ),
        ];
        match ranges.iter().find(|(holds, _)| !holds) {
            Some((_, rule)) => Err(ConfigError::Range((*rule).to_owned())),
            None => Ok(()),
        }
    }

    /// The request deadline.
    #[must_use]
    pub fn request_timeout(&self) -> Duration {
        Duration::from_millis(self.request_timeout_ms)
    }
}
