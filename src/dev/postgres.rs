//! One private Postgres: made, started, adopted and stopped by its directory.
//!
//! Never listens beyond 127.0.0.1 and never touches another server: what it ends, it has recognised by the data directory.

use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::account::{Account, private_dir, private_file};
use super::find::{PostgresPrograms, Search};
use super::process::{self, Cancel};
use super::{Error, START_TRIES, at, secret};

/// Name of the superuser.
const USER: &str = "postgres";
/// Time to get ready; recovery after a crash is included.
const START_LIMIT: Duration = Duration::from_secs(60);
/// SIGINT is Postgres' fast shutdown, SIGQUIT its immediate one.
const STOP_STEPS: [(&str, Duration); 3] = [
    ("INT", Duration::from_secs(20)),
    ("QUIT", Duration::from_secs(5)),
    ("KILL", Duration::from_secs(5)),
];

/// How a Postgres is run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Gives up durability against a crash of the operating system (not of Postgres): for tests only.
    pub unsafe_but_fast: bool,
    /// Loads `pg_stat_statements`, which costs a little of every statement: for profiles only.
    pub statement_statistics: bool,
    /// Gives up the start.
    pub cancel: Cancel,
}

/// A running private Postgres. Dropping it leaves it running.
#[derive(Clone, Debug)]
pub struct Postgres {
    dir: PathBuf,
    bin: PathBuf,
    port: u16,
    password: String,
}

impl Postgres {
    /// Starts the Postgres of `dir`, made when there is none; one that is still running there is adopted.
    ///
    /// # Errors
    /// When no fitting programs are there, or it does not get ready in a minute; nothing is left running then.
    pub fn start(dir: &Path, options: &Options) -> Result<Self, Error> {
        let account = Account::to_drop_to("postgres")?;
        private_dir(dir, account.as_ref())?;
        let dir = &dir.canonicalize().map_err(at(dir))?;
        let data = dir.join("data");
        let programs = Search::machine()
            .postgres(data_version(&data))?
            .ok_or_else(|| Error::Refused("no Postgres 15 to 18 is installed".to_owned()))?;
        if !data.exists() {
            init(dir, &programs, account.as_ref())?;
        }
        let password = fs::read_to_string(dir.join("password")).map_err(at(dir))?;
        for _ in 0..START_TRIES {
            if let Some(port) = adopt(dir, options)? {
                return Ok(Self {
                    dir: dir.clone(),
                    bin: programs.bin,
                    port,
                    password,
                });
            }
            let port = process::free_port()?;
            launch(dir, port, &programs, account.as_ref(), options)?;
            match await_ready(dir, options) {
                Ok(Some(port)) => {
                    return Ok(Self {
                        dir: dir.clone(),
                        bin: programs.bin,
                        port,
                        password,
                    });
                }
                // Somebody was faster at the port.
                Ok(None) if !process::is_free(port) && pids(dir).is_empty() => {}
                Ok(None) => {
                    Self::stop_in(dir)?;
                    return Err(Error::NotReady {
                        service: "Postgres",
                        log: process::tail(&dir.join("log")),
                    });
                }
                Err(error) => {
                    Self::stop_in(dir)?;
                    return Err(error);
                }
            }
        }
        Err(Error::NotReady {
            service: "Postgres",
            log: "every port tried was taken by someone else".to_owned(),
        })
    }

    /// The address of a database, as its superuser.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!(
            "postgres://{USER}:{}@127.0.0.1:{}/{database}",
            self.password, self.port
        )
    }

    /// Makes a database unless it is there.
    ///
    /// # Errors
    /// When `createdb` cannot make it.
    pub fn create_database(&self, name: &str) -> Result<(), Error> {
        let output = Command::new(self.bin.join("createdb"))
            .args([
                "--no-password",
                "--host=127.0.0.1",
                "--username",
                USER,
                "--port",
                &self.port.to_string(),
                "--maintenance-db=postgres",
                name,
            ])
            .env("PGPASSWORD", &self.password)
            .env("LC_ALL", "C")
            .env_remove("PGSERVICE")
            .env_remove("PGOPTIONS")
            .stdin(Stdio::null())
            .output()
            .map_err(at("createdb"))?;
        let message = String::from_utf8_lossy(&output.stderr);
        if output.status.success() || message.contains("already exists") {
            return Ok(());
        }
        Err(Error::Refused(format!(
            "createdb {name}: {}",
            message.trim()
        )))
    }

    /// Stops it. Data is kept.
    ///
    /// # Errors
    /// When it does not end.
    pub fn stop(self) -> Result<(), Error> {
        Self::stop_in(&self.dir)
    }

    /// Stops whatever Postgres runs in `dir`, started by whomever. Data is kept; nothing running is no error.
    ///
    /// # Errors
    /// When it does not end.
    pub fn stop_in(dir: &Path) -> Result<(), Error> {
        process::end(&pids(dir), &STOP_STEPS)
    }
}

/// The server of this directory, if it runs. Both files name the same process; the first is there earlier.
fn pids(dir: &Path) -> Vec<u32> {
    let Ok(dir) = dir.canonicalize() else {
        return Vec::new();
    };
    let data = dir.join("data");
    let data_mark = format!(" -D {} ", data.display());
    let mut pids: Vec<u32> = [dir.join("leader.pid"), data.join("postmaster.pid")]
        .iter()
        .filter_map(|file| process::recognised(file, &["postgres", &data_mark]))
        .collect();
    pids.dedup();
    pids
}

fn data_version(data: &Path) -> Option<u32> {
    fs::read_to_string(data.join("PG_VERSION"))
        .ok()?
        .trim()
        .parse()
        .ok()
}

/// Makes the data directory under another name first, so that one cut off half-way is never taken for a whole one.
fn init(dir: &Path, programs: &PostgresPrograms, account: Option<&Account>) -> Result<(), Error> {
    let unfinished = dir.join("data.unfinished");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).map_err(at(&unfinished))?;
    }
    let password_file = dir.join("password");
    private_file(&password_file, &secret(), 0o600, account)?;
    let mut command = process::session_command(&programs.bin.join("initdb"));
    command
        .args([
            "--locale=C",
            "--encoding=UTF8",
            "--auth=scram-sha-256",
            "--no-instructions",
            "--username",
            USER,
        ])
        .arg("--pwfile")
        .arg(&password_file)
        .arg("--pgdata")
        .arg(&unfinished)
        .current_dir(dir)
        .stdin(Stdio::null());
    drop_to(&mut command, account);
    let output = command.output().map_err(at("initdb"))?;
    if !output.status.success() {
        return Err(Error::NotReady {
            service: "initdb",
            log: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        });
    }
    let settings = unfinished.join("postgresql.conf");
    let generated = fs::read_to_string(&settings).map_err(at(&settings))?;
    fs::write(&settings, format!("{generated}\ninclude 'daybook.conf'\n"))
        .map_err(at(&settings))?;
    fs::rename(&unfinished, dir.join("data")).map_err(at(&unfinished))
}

fn drop_to(command: &mut Command, account: Option<&Account>) {
    use std::os::unix::process::CommandExt;
    if let Some(account) = account {
        command.uid(account.uid).gid(account.gid);
    }
}

/// In a file, not on the command line, so that `ALTER SYSTEM` can still change them.
fn settings(port: u16, options: &Options) -> String {
    let durability = if options.unsafe_but_fast { "off" } else { "on" };
    let libraries = if options.statement_statistics {
        "shared_preload_libraries = 'pg_stat_statements'\n"
    } else {
        ""
    };
    format!(
        "# Written at each start.\n\
         listen_addresses = '127.0.0.1'\nport = {port}\nunix_socket_directories = ''\n\
         password_encryption = scram-sha-256\nmax_connections = 200\nmax_prepared_transactions = 10\n\
         shared_buffers = 256MB\nmax_wal_size = 2GB\njit = off\ntimezone = 'UTC'\nlog_timezone = 'UTC'\nlogging_collector = off\n\
         fsync = {durability}\nfull_page_writes = {durability}\nsynchronous_commit = on\n{libraries}"
    )
}

fn launch(
    dir: &Path,
    port: u16,
    programs: &PostgresPrograms,
    account: Option<&Account>,
    options: &Options,
) -> Result<(), Error> {
    let data = dir.join("data");
    // Whoever it names is not this Postgres (that would have been adopted), and Postgres would refuse to start beside it.
    match fs::remove_file(data.join("postmaster.pid")) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(at(&data)(error)),
        _ => {}
    }
    private_file(
        &data.join("daybook.conf"),
        &settings(port, options),
        0o600,
        account,
    )?;
    let mut command = process::session_command(&programs.bin.join("postgres"));
    // The argument after it ends the directory's name in the command line.
    command
        .arg("-D")
        .arg(&data)
        .args(["-c", "cluster_name=daybook"])
        .current_dir(dir);
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PG"))
    {
        command.env_remove(name);
    }
    let pid = process::spawn_service(&mut command, account, &dir.join("log"))?;
    private_file(&dir.join("leader.pid"), &format!("{pid}\n"), 0o600, None)
}

/// The port of a Postgres that runs here already, once it is ready. One that does not get ready is ended.
fn adopt(dir: &Path, options: &Options) -> Result<Option<u16>, Error> {
    if pids(dir).is_empty() {
        return Ok(None);
    }
    let ready = await_ready(dir, options)?;
    if ready.is_none() {
        Postgres::stop_in(dir)?;
    }
    Ok(ready)
}

/// Waits until the server says that it is ready and its port answers; none when it ended or the time is over.
fn await_ready(dir: &Path, options: &Options) -> Result<Option<u16>, Error> {
    let state = dir.join("data/postmaster.pid");
    let outcome = process::wait_for(START_LIMIT, &options.cancel, || {
        if let Some(port) = ready_port(&fs::read_to_string(&state).unwrap_or_default())
            && TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
            && !pids(dir).is_empty()
        {
            return Ok(Some(Some(port)));
        }
        Ok(has_ended(dir).then_some(None))
    })?;
    Ok(outcome.flatten())
}

/// The moment between fork and exec shows another command line, so a process that is merely not recognised has not ended.
fn has_ended(dir: &Path) -> bool {
    let leader = fs::read_to_string(dir.join("leader.pid"))
        .ok()
        .and_then(|text| text.trim().parse().ok());
    pids(dir).is_empty() && leader.is_none_or(|pid| !process::is_alive(pid))
}

/// The port in a `postmaster.pid` (line 4) whose status (line 8) is ready.
fn ready_port(text: &str) -> Option<u16> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    if *lines.get(7)? != "ready" {
        return None;
    }
    lines.get(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_ready_server_has_a_port() {
        let text = "4711\n/data\n1764500000\n15432\n\n127.0.0.1\n  123 456\nready   \n";
        assert_eq!(ready_port(text), Some(15432));
        assert_eq!(ready_port(&text.replace("ready   ", "starting")), None);
        assert_eq!(ready_port("4711\n/data\n"), None);
    }

    #[test]
    fn durability_is_given_up_for_tests_only() {
        let durable = Options::default();
        let fast = Options {
            unsafe_but_fast: true,
            ..Options::default()
        };
        assert!(settings(1, &durable).contains("fsync = on\n"));
        assert!(settings(1, &fast).contains("fsync = off\n"));
        assert!(settings(1, &fast).contains("synchronous_commit = on\n"));
    }

    #[test]
    fn statements_are_counted_on_request_only() {
        let counting = Options {
            statement_statistics: true,
            ..Options::default()
        };
        assert!(
            settings(1, &counting).contains("shared_preload_libraries = 'pg_stat_statements'\n")
        );
        assert!(!settings(1, &Options::default()).contains("shared_preload_libraries"));
    }
}
