//! Starting, recognising and ending processes of the private services.
//!
//! Never signals a process that has not been recognised by its command line: a process id alone may have been given to someone else.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::account::Account;
use super::find::Search;
use super::{Error, at};

/// How often a wait looks again.
const POLL: Duration = Duration::from_millis(25);
/// Below the range that Linux and macOS take for outgoing connections: a stopped broker must find its port free again.
const PORTS: std::ops::Range<u16> = 15_000..30_000;
/// Ports tried before giving up.
const PORT_TRIES: u32 = 200;
/// Length in bytes of a log's end that is shown in an error.
const TAIL_BYTES_MAX: usize = 2_000;

/// Asks running starts to give up and clean up after themselves.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Asks for it. There is no way back.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was asked for.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Looks again until `check` gives something or the time is over (none).
///
/// # Errors
/// What `check` returns, or [`Error::Interrupted`].
pub fn wait_for<T>(
    limit: Duration,
    cancel: &Cancel,
    mut check: impl FnMut() -> Result<Option<T>, Error>,
) -> Result<Option<T>, Error> {
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = check()? {
            return Ok(Some(value));
        }
        if cancel.is_cancelled() {
            return Err(Error::Interrupted);
        }
        if Instant::now() >= end {
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

/// Starts a service in a session of its own, so that a Ctrl-C at the terminal reaches only its caller, with its output in `log`
/// (the log of the start before is kept beside it), and returns its process id. It is reaped by a thread.
///
/// # Errors
/// When the program or the log cannot be opened.
pub fn spawn_service(
    command: &mut Command,
    account: Option<&Account>,
    log: &Path,
) -> Result<u32, Error> {
    let previous = log.with_extension("log.1");
    if log.exists() {
        fs::rename(log, &previous).map_err(at(log))?;
    }
    let out = fs::File::create(log).map_err(at(log))?;
    let err = out.try_clone().map_err(at(log))?;
    command.stdin(Stdio::null()).stdout(out).stderr(err);
    if let Some(account) = account {
        command.uid(account.uid).gid(account.gid);
    }
    let mut child = command.spawn().map_err(at(command.get_program()))?;
    let pid = child.id();
    thread::spawn(move || child.wait());
    Ok(pid)
}

/// A command that runs `program` as the leader of a new session: through `setsid` (which keeps the process id), else, where that is
/// missing, in a process group of its own.
#[must_use]
pub fn session_command(program: &Path) -> Command {
    if let Some(setsid) = Search::machine().on_path("setsid") {
        let mut command = Command::new(setsid);
        command.arg(program);
        command
    } else {
        let mut command = Command::new(program);
        command.process_group(0);
        command
    }
}

/// Sends a signal (`TERM`, `KILL`, ...) to a process, or with `-pid` to its group. A process that is gone is no error.
pub fn signal(target: &str, name: &str) {
    // The shell's own `kill` exists everywhere; a `kill` program does not.
    let _ = Command::new("sh")
        .args(["-c", "kill -s \"$1\" -- \"$2\"", "sh", name, target])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
}

/// Whether the process exists and is more than an entry waiting to be reaped.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    if Path::new("/proc/self/stat").exists() {
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
            return false;
        };
        // The state follows the command name, which is in brackets and may hold anything.
        let state = stat
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.chars().next());
        return !matches!(state, None | Some('Z' | 'X'));
    }
    ps(pid, "state=").is_some_and(|state| !state.starts_with('Z'))
}

/// The process's command line, its arguments joined by spaces.
#[must_use]
pub fn command_line(pid: u32) -> Option<String> {
    if Path::new("/proc/self/stat").exists() {
        let bytes = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        return Some(String::from_utf8_lossy(&bytes).replace('\0', " "))
            .filter(|line| !line.is_empty());
    }
    ps(pid, "command=")
}

fn ps(pid: u32, column: &str) -> Option<String> {
    let output = Command::new("ps")
        .args(["-ww", "-o", column, "-p", &pid.to_string()])
        .stdin(Stdio::null())
        .output()
        .ok()?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned()).filter(|text| !text.is_empty())
}

/// The process id at the start of a file, if that process lives and its command line holds all of `marks`.
#[must_use]
pub fn recognised(pid_file: &Path, marks: &[&str]) -> Option<u32> {
    let pid: u32 = fs::read_to_string(pid_file)
        .ok()?
        .split_whitespace()
        .next()?
        .parse()
        .ok()?;
    let line = command_line(pid)?;
    (is_alive(pid) && marks.iter().all(|mark| line.contains(mark))).then_some(pid)
}

/// Ends processes: each signal in turn, with the time it is given to work.
///
/// # Errors
/// When one is still there after the last.
pub fn end(pids: &[u32], steps: &[(&str, Duration)]) -> Result<(), Error> {
    for (name, limit) in steps {
        for pid in pids.iter().filter(|pid| is_alive(**pid)) {
            signal(&pid.to_string(), name);
        }
        let gone = wait_for(*limit, &Cancel::default(), || {
            Ok(pids.iter().all(|pid| !is_alive(*pid)).then_some(()))
        })?;
        if gone.is_some() {
            return Ok(());
        }
    }
    Err(Error::Refused(format!(
        "processes {pids:?} do not end, not even on SIGKILL"
    )))
}

/// A port of 127.0.0.1 that nothing listens on at this moment.
///
/// # Errors
/// When none was found in a bounded number of tries.
pub fn free_port() -> Result<u16, Error> {
    (0..PORT_TRIES)
        .map(|_| rand::random_range(PORTS))
        .find(|port| is_free(*port))
        .ok_or_else(|| {
            Error::Refused(format!(
                "no free port found between {} and {}",
                PORTS.start, PORTS.end
            ))
        })
}

/// Whether the port could be bound now.
#[must_use]
pub fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// The end of a log, for an error message.
#[must_use]
pub fn tail(log: &Path) -> String {
    let bytes = fs::read(log).unwrap_or_default();
    let end = bytes
        .get(bytes.len().saturating_sub(TAIL_BYTES_MAX)..)
        .unwrap_or_default();
    String::from_utf8_lossy(end).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_recognised_by_its_command_line_only() {
        let file = std::env::temp_dir().join(format!("daybook-pid-{:016x}", rand::random::<u64>()));
        fs::write(&file, format!("{}\nmore\n", std::process::id())).unwrap();
        let own = command_line(std::process::id()).unwrap();
        let program = own.split(' ').next().unwrap();
        assert_eq!(recognised(&file, &[program]), Some(std::process::id()));
        assert_eq!(recognised(&file, &[program, "/no/such/data"]), None);
        fs::write(&file, "not a number").unwrap();
        assert_eq!(recognised(&file, &[]), None);
        fs::remove_file(&file).unwrap();
        assert_eq!(recognised(&file, &[]), None);
    }

    #[test]
    fn a_wait_ends_by_value_time_or_cancel() {
        let cancel = Cancel::default();
        assert_eq!(
            wait_for(Duration::ZERO, &cancel, || Ok(Some(1))).unwrap(),
            Some(1)
        );
        assert_eq!(
            wait_for::<()>(Duration::ZERO, &cancel, || Ok(None)).unwrap(),
            None
        );
        cancel.cancel();
        assert!(matches!(
            wait_for::<()>(Duration::from_secs(60), &cancel, || Ok(None)),
            Err(Error::Interrupted)
        ));
    }

    #[test]
    fn a_taken_port_is_not_free() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        assert!(!is_free(listener.local_addr().unwrap().port()));
    }
}
