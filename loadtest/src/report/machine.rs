//! What a number was measured on: the machine, the servers and their settings, the commit.
//!
//! Says nothing by which a machine could be found: no names, addresses or paths.

use crate::database::{Database, Settings};
use anyhow::{Context, Result, ensure};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long the broker may take to say its version.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// The broker's first frame is a few hundred bytes.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// The machine and its servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Model of the processor.
    pub cpu: String,
    /// Cores that may be used.
    pub cores: u32,
    /// Memory, in mebibytes.
    pub memory_mib: u64,
    /// Release of the kernel.
    pub kernel: String,
    /// Settings of Postgres.
    pub postgres: Settings,
    /// Version of RabbitMQ.
    pub rabbitmq: String,
}

impl Machine {
    /// Asks the system and the servers.
    ///
    /// # Errors
    /// When a server does not answer.
    pub async fn ask(postgres: &Database, amqp_url: &SecretString) -> Result<Self> {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Ok(Machine {
            cpu: cpu(&read("/proc/cpuinfo")),
            cores: crate::control::cores(),
            memory_mib: memory_mib(&read("/proc/meminfo")),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            postgres: postgres.settings().await?,
            rabbitmq: rabbitmq(amqp_url).await.context("RabbitMQ's version")?,
        })
    }

    /// As the summary keeps it.
    pub fn json(&self) -> Value {
        let postgres: serde_json::Map<String, Value> = self
            .postgres
            .0
            .iter()
            .map(|(name, value)| (name.clone(), json!(value)))
            .collect();
        json!({
            "cpu": self.cpu, "cores": self.cores, "memory_mib": self.memory_mib, "kernel": self.kernel,
            "postgres": postgres, "rabbitmq": self.rabbitmq,
        })
    }
}

/// The commit of the tree that this program was built from, by the last released version before it. The report itself may differ from
/// it: each scenario changes it.
pub fn commit() -> String {
    let named = git(&["describe", "--always", "--tags", "--match=v*"]);
    let changed = git(&["status", "--porcelain", "--", ".", ":!loadtest/report"]);
    match (named, changed) {
        (Some(name), Some(changed)) if changed.is_empty() => name,
        (Some(name), _) => format!("{name}-dirty"),
        (None, _) => "unknown".to_owned(),
    }
}

/// What git says in the project's folder; None when it fails.
fn git(args: &[&str]) -> Option<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?;
    let output = Command::new("git")
        .args(args)
        .current_dir(folder)
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn cpu(info: &str) -> String {
    info.lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned())
}

fn memory_mib(info: &str) -> u64 {
    info.lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB"))
        .and_then(|kib| kib.trim().parse::<u64>().ok())
        .map_or(0, |kib| kib / 1024)
}

/// The version in the greeting of an AMQP 0.9.1 broker, which needs no password.
async fn rabbitmq(url: &SecretString) -> Result<String> {
    let address: SocketAddr = url
        .expose_secret()
        .rsplit_once('@')
        .and_then(|(_, rest)| rest.split('/').next())
        .context("the broker's address")?
        .parse()
        .context("the broker's address")?;
    ensure!(address.ip().is_loopback(), "the broker is not loopback");
    let greeting = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(b"AMQP\x00\x00\x09\x01").await?;
        let mut bytes = Vec::new();
        while bytes.len() < ANSWER_BYTES_MAX && stream.read_buf(&mut bytes).await? > 0 {
            if let Some(version) = version(&bytes) {
                return Ok(version);
            }
        }
        anyhow::bail!("the broker does not say its version")
    };
    timeout(ANSWER_LIMIT, greeting).await.context("no answer")?
}

/// The field `version` of a field table: its name with its length, S, four bytes of length, the text.
fn version(bytes: &[u8]) -> Option<String> {
    const NAME: &[u8] = b"\x07versionS";
    let start = bytes.windows(NAME.len()).position(|part| part == NAME)? + NAME.len();
    let (length, rest) = bytes.get(start..)?.split_first_chunk::<4>()?;
    let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
    String::from_utf8(rest.get(..length)?.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_is_read() {
        let info = "processor\t: 0\nmodel name\t: Some CPU @ 2.5GHz\nmodel name\t: other\n";
        assert_eq!(cpu(info), "Some CPU @ 2.5GHz");
        assert_eq!(cpu(""), "unknown");
        assert_eq!(
            memory_mib("MemTotal:       16384000 kB\nMemFree: 1 kB\n"),
            16_000
        );
        assert_eq!(memory_mib(""), 0);
    }

    #[test]
    fn the_version_is_in_the_greeting() {
        let greeting =
            b"...\x07productS\x00\x00\x00\x08RabbitMQ\x07versionS\x00\x00\x00\x063.10.8rest";
        assert_eq!(version(greeting).as_deref(), Some("3.10.8"));
        assert_eq!(version(&greeting[..40]), None);
        assert_eq!(version(b"\x07versionS\x00\x00\x00\xff3"), None);
    }
}
