//! One server process of the measured program: started on free ports, watched, stopped by SIGTERM.
//!
//! Speaks to its operations port only; load is made elsewhere.

use crate::cgroup::{Cgroup, Limits, Usage};
use crate::lab::Ledger;
use anyhow::{Context, Result, bail, ensure};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStderr, Command};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

/// How long a server may take until its readiness answers 200.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// How often readiness is asked.
const READY_EVERY: Duration = Duration::from_millis(20);
/// How long a server may take to end after SIGTERM; it gives itself less.
const STOP_LIMIT: Duration = Duration::from_secs(40);
/// How long one answer of the operations port may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Lines of a server's log that are kept for the message when it fails.
const LOG_LINES_MAX: usize = 20;

/// How a server is run.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Its roles, separated by commas.
    pub roles: String,
    /// Settings besides those that every server of a lab has, as environment variables.
    pub variables: Vec<(String, String)>,
    /// What the process may use; None is all that the machine has.
    pub limits: Option<Limits>,
}

impl Setup {
    /// All roles in one process.
    pub fn everything() -> Self {
        Self::roles("api,relay,keeper")
    }

    /// Roles with default settings and no limits.
    pub fn roles(roles: &str) -> Self {
        Setup {
            roles: roles.to_owned(),
            variables: Vec::new(),
            limits: None,
        }
    }

    /// Whether it publishes.
    pub fn has_relay(&self) -> bool {
        self.roles.split(',').any(|role| role == "relay")
    }
}

/// A running server. Dropping it kills it.
#[derive(Debug)]
pub struct Server {
    child: Child,
    pid: u32,
    api: Option<SocketAddr>,
    ops: SocketAddr,
    cgroup: Option<Cgroup>,
    log: Log,
}

type Log = Arc<Mutex<VecDeque<String>>>;

impl Server {
    /// Starts one and waits until it is ready.
    ///
    /// # Errors
    /// When the limits cannot be set, or it does not get ready in time; it is killed then.
    pub async fn start(ledger: &Ledger, setup: &Setup) -> Result<Self> {
        let cgroup = setup.limits.map(Cgroup::make).transpose()?;
        let mut command = match &cgroup {
            Some(cgroup) => confined(ledger, cgroup),
            None => ledger.command(),
        };
        command
            .args(["serve", "--roles", &setup.roles])
            .env("DAYBOOK_LOG", "warn,daybook=info,lapin=off")
            .envs(setup.variables.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = command.spawn().context("starting the server")?;
        let pid = child.id().context("the server has no process id")?;
        let stderr = child.stderr.take().context("the server has no log")?;
        let log = Log::default();
        let (serving, said) = oneshot::channel();
        tokio::spawn(follow(stderr, Arc::clone(&log), serving));
        let Ok(Ok((api, ops))) = timeout(READY_LIMIT, said).await else {
            bail!("the server does not say where it serves:\n{}", tail(&log));
        };
        let mut server = Server {
            child,
            pid,
            api,
            ops,
            cgroup,
            log,
        };
        server.await_ready().await?;
        Ok(server)
    }

    async fn await_ready(&mut self) -> Result<()> {
        let end = Instant::now() + READY_LIMIT;
        loop {
            let answer = get(self.ops, "/readyz").await;
            if matches!(answer, Ok((200, _))) {
                return Ok(());
            }
            ensure!(
                self.child.try_wait()?.is_none() && Instant::now() < end,
                "the server does not get ready ({answer:?}):\n{}",
                tail(&self.log)
            );
            sleep(READY_EVERY).await;
        }
    }

    /// Where its API listens.
    ///
    /// # Errors
    /// When it does not have that role.
    pub fn url(&self) -> Result<String> {
        let api = self.api.context("the server has no API")?;
        Ok(format!("http://{api}"))
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Memory that it has in use now and had at most, in bytes.
    ///
    /// # Errors
    /// When it has ended.
    pub fn memory(&self) -> Result<Memory> {
        Memory::of(self.pid)
    }

    /// Stops it in good order; what it used comes back when it was limited.
    ///
    /// # Errors
    /// When it does not end in time (it is killed then), or ends with a failure.
    pub async fn stop(mut self) -> Result<Option<Usage>> {
        daybook::dev::process::signal(&self.pid.to_string(), "TERM");
        let Ok(status) = timeout(STOP_LIMIT, self.child.wait()).await else {
            bail!(
                "the server does not end after SIGTERM:\n{}",
                tail(&self.log)
            );
        };
        let status = status?;
        ensure!(
            status.success(),
            "the server ended with {status}:\n{}",
            tail(&self.log)
        );
        self.cgroup.as_ref().map(Cgroup::usage).transpose()
    }
}

/// The command, in a shell that puts itself into the group first: what the program does at start counts, too. It runs a copy that was
/// made in there: pages of a file are charged to whoever read them first, and others have read the program before.
fn confined(ledger: &Ledger, cgroup: &Cgroup) -> Command {
    let plain = ledger.command();
    let mut command = Command::new("/bin/sh");
    command
        .args([
            "-c",
            &format!(
                "{} copy=$1 && shift && cp \"$0\" \"$copy\" && exec \"$copy\" \"$@\"",
                cgroup.join_script()
            ),
        ])
        .arg(ledger.program())
        .arg(ledger.new_file("program"))
        .stdin(Stdio::null())
        .kill_on_drop(true);
    for (name, value) in plain.as_std().get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

/// Reads the log to its end, keeps its last lines, and tells where the server serves as soon as that is said.
async fn follow(
    stderr: ChildStderr,
    log: Log,
    serving: oneshot::Sender<(Option<SocketAddr>, SocketAddr)>,
) {
    let mut serving = Some(serving);
    let mut lines = BufReader::new(stderr).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if let Some(addresses) = addresses(&line)
            && let Some(serving) = serving.take()
        {
            // Nobody waits any more when the time was over.
            let _ = serving.send(addresses);
        }
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.len() == LOG_LINES_MAX {
            log.pop_front();
        }
        log.push_back(line);
    }
}

fn tail(log: &Log) -> String {
    let log = log.lock().unwrap_or_else(PoisonError::into_inner);
    log.iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join("\n")
}

/// The addresses in the line that a server writes when it serves: `serving api=Some(127.0.0.1:1) ops=127.0.0.1:2 roles=...`.
fn addresses(line: &str) -> Option<(Option<SocketAddr>, SocketAddr)> {
    let (_, said) = line.split_once(" serving ")?;
    let value = |name: &str| {
        said.split_whitespace()
            .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    };
    let api = value("api")?
        .strip_prefix("Some(")
        .and_then(|rest| rest.strip_suffix(')'))
        .map(str::parse)
        .transpose()
        .ok()?;
    Some((api, value("ops")?.parse().ok()?))
}

/// Status and body of one GET.
///
/// # Errors
/// When nobody answers in time.
pub async fn get(address: SocketAddr, path: &str) -> Result<(u16, String)> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let answer = timeout(ANSWER_LIMIT, exchange)
        .await
        .context("no answer in time")??;
    let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    let status = head
        .split_whitespace()
        .nth(1)
        .context("an answer without a status")?;
    Ok((status.parse()?, body.to_owned()))
}

/// Memory of a process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Resident now.
    pub now: u64,
    /// Resident at most, since it was started.
    pub most: u64,
}

impl Memory {
    /// That of a running process.
    ///
    /// # Errors
    /// When it has ended.
    pub fn of(pid: u32) -> Result<Self> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))
            .context("the server has ended")?;
        Memory::read(&status).context("the system does not say how much memory the server has")
    }

    fn read(status: &str) -> Option<Self> {
        let bytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
            kib.checked_mul(1024)
        };
        Some(Memory {
            now: bytes("VmRSS:")?,
            most: bytes("VmHWM:")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_that_says_where_is_read() {
        let line = "2026-11-30T11:00:00Z  INFO daybook: serving api=Some(127.0.0.1:4711) ops=127.0.0.1:4712 roles=Roles { api: true }";
        let expected = (
            Some("127.0.0.1:4711".parse().unwrap()),
            "127.0.0.1:4712".parse().unwrap(),
        );
        assert_eq!(addresses(line), Some(expected));
        let relay = "INFO daybook: serving api=None ops=127.0.0.1:4712 roles=Roles { relay: true }";
        assert_eq!(
            addresses(relay),
            Some((None, "127.0.0.1:4712".parse().unwrap()))
        );
        for other in [
            "INFO daybook: stopping",
            " serving ",
            " serving api=Some(x) ops=127.0.0.1:1",
        ] {
            assert_eq!(addresses(other), None, "{other}");
        }
    }

    #[test]
    fn memory_is_read_in_bytes() {
        let status = "Name:\tdaybook\nVmHWM:\t   20480 kB\nVmRSS:\t   10240 kB\n";
        let expected = Memory {
            now: 10 * 1024 * 1024,
            most: 20 * 1024 * 1024,
        };
        assert_eq!(Memory::read(status), Some(expected));
        assert_eq!(Memory::read("Name:\tdaybook\n"), None);
    }
}
