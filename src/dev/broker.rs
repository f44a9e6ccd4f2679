//! One private RabbitMQ with an Erlang port mapper and a cookie of its own: started, adopted, stopped and killed by its directory.
//!
//! Never listens beyond 127.0.0.1 and never reads the machine's RabbitMQ configuration.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::account::{Account, private_dir, private_file};
use super::find::Search;
use super::process::{self, Cancel};
use super::{Error, START_TRIES, at, secret};

/// Name of the only user.
const USER: &str = "daybook";
/// Erlang starts slowly where the processors are busy.
const START_LIMIT: Duration = Duration::from_secs(120);
/// Time for one connect and one answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// SIGTERM stops RabbitMQ in good order.
const STOP_STEPS: [(&str, Duration); 2] = [
    ("TERM", Duration::from_secs(30)),
    ("KILL", Duration::from_secs(5)),
];
/// A broker that is only starting may not heed SIGTERM, and has nothing to lose.
const ABORT_STEPS: [(&str, Duration); 2] = [
    ("TERM", Duration::from_secs(2)),
    ("KILL", Duration::from_secs(5)),
];
/// The way of a crash.
const KILL_STEPS: [(&str, Duration); 1] = [("KILL", Duration::from_secs(5))];

/// A private RabbitMQ. Dropping it leaves it running.
#[derive(Clone, Debug)]
pub struct Broker {
    dir: PathBuf,
    port: u16,
    password: String,
}

/// Ports of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ports {
    amqp: u16,
    epmd: u16,
    distribution: u16,
}

impl Broker {
    /// Starts the broker of `dir` on a free port, made when there is none; one that is still running there is adopted.
    ///
    /// # Errors
    /// When RabbitMQ is not there, or does not answer in two minutes; nothing is left running then.
    pub fn start(dir: &Path, cancel: &Cancel) -> Result<Self, Error> {
        Self::start_at(dir, None, cancel)
    }

    /// Starts it on this very port: the one it had before ([`Broker::port`]).
    ///
    /// # Errors
    /// As [`Broker::start`]; also when the port is taken.
    pub fn start_on(dir: &Path, port: u16) -> Result<Self, Error> {
        Self::start_at(dir, Some(port), &Cancel::default())
    }

    /// A broker that was started in `dir` before, running or not.
    ///
    /// # Errors
    /// When none was.
    pub fn attach(dir: &Path) -> Result<Self, Error> {
        let dir = dir.canonicalize().map_err(at(dir))?;
        let ports = Ports::read(&dir).ok_or_else(|| {
            Error::Refused(format!("no broker was ever started in {}", dir.display()))
        })?;
        let password = fs::read_to_string(dir.join("password")).map_err(at(&dir))?;
        Ok(Self {
            dir,
            port: ports.amqp,
            password,
        })
    }

    fn start_at(dir: &Path, fixed: Option<u16>, cancel: &Cancel) -> Result<Self, Error> {
        let account = Account::to_drop_to("rabbitmq")?;
        private_dir(dir, account.as_ref())?;
        let dir = &dir.canonicalize().map_err(at(dir))?;
        let script = Search::machine()
            .rabbitmq()?
            .ok_or_else(|| Error::Refused("no RabbitMQ 3.10 or newer is installed".to_owned()))?;
        if !dir.join("password").exists() {
            private_file(&dir.join("password"), &secret(), 0o600, account.as_ref())?;
        }
        if adopt(dir, fixed, cancel)? {
            return Self::attach(dir);
        }
        for _ in 0..START_TRIES {
            if let Some(port) = fixed.filter(|port| !process::is_free(*port)) {
                return Err(Error::Refused(format!(
                    "port {port} is taken by someone else"
                )));
            }
            let ports = Ports {
                amqp: fixed.map_or_else(process::free_port, Ok)?,
                epmd: process::free_port()?,
                distribution: process::free_port()?,
            };
            let started = launch(dir, ports, &script, account.as_ref())
                .and_then(|()| await_answer(dir, ports.amqp, cancel));
            if matches!(started, Ok(true)) {
                return Self::attach(dir);
            }
            let mut log = process::tail(&dir.join("rabbitmq.log"));
            end_all(dir, &ABORT_STEPS)?;
            started?;
            // Somebody was faster at a port: that is worth another try.
            let taken = [ports.amqp, ports.epmd, ports.distribution]
                .into_iter()
                .find(|port| !process::is_free(*port));
            if taken.is_none() {
                log.push_str(&format!("\n(data of an older RabbitMQ may not fit: then delete {}; its log is in {0}/logs)", dir.display()));
                return Err(Error::NotReady {
                    service: "RabbitMQ",
                    log,
                });
            }
        }
        Err(Error::NotReady {
            service: "RabbitMQ",
            log: "every port tried was taken by someone else".to_owned(),
        })
    }

    /// The broker's address, with its user.
    #[must_use]
    pub fn url(&self) -> String {
        format!(
            "amqp://{USER}:{}@127.0.0.1:{}/%2f",
            self.password, self.port
        )
    }

    /// Its directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The AMQP port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Stops it in good order. Its directory can be started again.
    ///
    /// # Errors
    /// When it does not end.
    pub fn stop(self) -> Result<(), Error> {
        Self::stop_in(&self.dir)
    }

    /// Ends it at once, by SIGKILL, as a crash would.
    ///
    /// # Errors
    /// When it does not end.
    pub fn kill(self) -> Result<(), Error> {
        end_all(&self.dir, &KILL_STEPS)
    }

    /// Stops whatever broker runs in `dir`, and its port mapper. Nothing running is no error.
    ///
    /// # Errors
    /// When one does not end.
    pub fn stop_in(dir: &Path) -> Result<(), Error> {
        end_all(dir, &STOP_STEPS)
    }
}

impl Ports {
    fn read(dir: &Path) -> Option<Self> {
        let text = fs::read_to_string(dir.join("ports")).ok()?;
        let mut ports = text.split_whitespace().map(str::parse);
        Some(Self {
            amqp: ports.next()?.ok()?,
            epmd: ports.next()?.ok()?,
            distribution: ports.next()?.ok()?,
        })
    }
}

/// Erlang's virtual machine and the start script that waits for it: both have the directory among their arguments.
fn pids(dir: &Path) -> Vec<u32> {
    let mark = format!("-daybook {} end", dir.display());
    let mut pids: Vec<u32> = [dir.join("rabbitmq.pid"), dir.join("leader.pid")]
        .iter()
        .filter_map(|file| process::recognised(file, &[&mark]))
        .collect();
    pids.dedup();
    pids
}

fn end_all(dir: &Path, steps: &[(&str, Duration)]) -> Result<(), Error> {
    let Ok(dir) = dir.canonicalize() else {
        return Ok(());
    };
    let pids = pids(&dir);
    // The start script passes SIGTERM on and ends with the virtual machine; a second one to that would be of no use.
    let broker = process::end(pids.get(..1).unwrap_or_default(), steps)
        .and_then(|()| process::end(&pids, steps));
    let mapper = Ports::read(&dir).and_then(|ports| {
        process::recognised(
            &dir.join("epmd.pid"),
            &["epmd", &format!("-port {} ", ports.epmd)],
        )
    });
    let mapper = process::end(mapper.as_slice(), steps);
    broker.and(mapper)
}

/// Whether a broker runs here already and answers; one that does not (or not on the wanted port) is ended.
fn adopt(dir: &Path, fixed: Option<u16>, cancel: &Cancel) -> Result<bool, Error> {
    let ports = Ports::read(dir).filter(|ports| fixed.is_none_or(|port| port == ports.amqp));
    if let Some(ports) = ports
        && !pids(dir).is_empty()
        && await_answer(dir, ports.amqp, cancel)?
    {
        return Ok(true);
    }
    Broker::stop_in(dir)?;
    Ok(false)
}

fn launch(dir: &Path, ports: Ports, script: &Path, account: Option<&Account>) -> Result<(), Error> {
    for name in ["home", "data", "logs", "schema", "plugins", "generated"] {
        private_dir(&dir.join(name), account)?;
    }
    let cookie = dir.join("home/.erlang.cookie");
    if !cookie.exists() {
        private_file(&cookie, &secret(), 0o400, account)?;
    }
    private_file(
        &dir.join("ports"),
        &format!("{} {} {}\n", ports.amqp, ports.epmd, ports.distribution),
        0o600,
        None,
    )?;
    let password = fs::read_to_string(dir.join("password")).map_err(at(dir))?;
    private_file(
        &dir.join("rabbitmq.conf"),
        &settings(&password),
        0o600,
        account,
    )?;
    private_file(&dir.join("enabled_plugins"), "[].\n", 0o600, account)?;
    // Without a file of its own the script would read the machine's /etc/rabbitmq/rabbitmq-env.conf.
    private_file(&dir.join("rabbitmq-env.conf"), "", 0o600, account)?;
    let _ = fs::remove_file(dir.join("rabbitmq.pid"));

    // In the foreground: started by Erlang itself it would be a daemon that nobody knows.
    let mut mapper = process::session_command(&Search::machine().epmd()?);
    mapper
        .args(["-port", &ports.epmd.to_string(), "-address", "127.0.0.1"])
        .current_dir(dir)
        .env_clear()
        .env("LANG", "C");
    let mapper = process::spawn_service(&mut mapper, account, &dir.join("epmd.log"))?;
    private_file(&dir.join("epmd.pid"), &format!("{mapper}\n"), 0o600, None)?;

    let mut server = process::session_command(script);
    // A flag that Erlang ignores and `pids` looks for.
    server
        .arg("-daybook")
        .arg(dir)
        .arg("end")
        .current_dir(dir)
        .env_clear()
        .envs(environment(dir, ports));
    let leader = process::spawn_service(&mut server, account, &dir.join("rabbitmq.log"))?;
    private_file(&dir.join("leader.pid"), &format!("{leader}\n"), 0o600, None)
}

fn settings(password: &str) -> String {
    format!(
        "# Written at each start.\n\
         default_user = {USER}\ndefault_pass = {password}\n\
         disk_free_limit.absolute = 50MB\nvm_memory_high_watermark.absolute = 512MB\n\
         raft.wal_max_size_bytes = 67108864\n\
         log.file = rabbit.log\nlog.file.level = info\nlog.file.rotation.size = 10485760\nlog.file.rotation.count = 2\nlog.console = false\n"
    )
}

/// Half of the cores: Postgres, the service and a load share them. One scheduler for each core, which is Erlang's own choice, spends half
/// of its time on handing work to the other.
fn schedulers() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).max(1))
}

fn environment(dir: &Path, ports: Ports) -> Vec<(String, String)> {
    let schedulers = schedulers();
    let own = |name: &str| dir.join(name).display().to_string();
    let path = std::env::join_paths(Search::machine().path).unwrap_or_default();
    let mut pairs = vec![
        ("PATH", path.to_string_lossy().into_owned()),
        ("HOME", own("home")),
        ("LANG", "C.UTF-8".to_owned()),
        ("ERL_EPMD_PORT", ports.epmd.to_string()),
        ("ERL_EPMD_ADDRESS", "127.0.0.1".to_owned()),
        ("RABBITMQ_NODENAME", "daybook@localhost".to_owned()),
        ("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1".to_owned()),
        ("RABBITMQ_NODE_PORT", ports.amqp.to_string()),
        ("RABBITMQ_DIST_PORT", ports.distribution.to_string()),
        (
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS",
            format!("-kernel inet_dist_use_interface {{127,0,0,1}} +S {schedulers}:{schedulers}"),
        ),
    ];
    pairs.extend(
        [
            ("RABBITMQ_MNESIA_BASE", "data"),
            ("RABBITMQ_LOG_BASE", "logs"),
            ("RABBITMQ_SCHEMA_DIR", "schema"),
            ("RABBITMQ_PLUGINS_EXPAND_DIR", "plugins"),
            ("RABBITMQ_GENERATED_CONFIG_DIR", "generated"),
            ("RABBITMQ_CONFIG_FILE", "rabbitmq.conf"),
            ("RABBITMQ_ADVANCED_CONFIG_FILE", "advanced.config"),
            ("RABBITMQ_CONF_ENV_FILE", "rabbitmq-env.conf"),
            ("RABBITMQ_ENABLED_PLUGINS_FILE", "enabled_plugins"),
            ("RABBITMQ_FEATURE_FLAGS_FILE", "feature_flags"),
            ("RABBITMQ_PID_FILE", "rabbitmq.pid"),
        ]
        .map(|(name, file)| (name, own(file))),
    );
    pairs
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

/// Waits until the broker speaks AMQP; false when it ended or the time is over.
fn await_answer(dir: &Path, port: u16, cancel: &Cancel) -> Result<bool, Error> {
    let outcome = process::wait_for(START_LIMIT, cancel, || {
        if speaks_amqp(port) && !pids(dir).is_empty() {
            return Ok(Some(true));
        }
        Ok(has_ended(dir).then_some(false))
    })?;
    Ok(outcome == Some(true))
}

/// The moment between fork and exec shows another command line, so a process that is merely not recognised has not ended.
fn has_ended(dir: &Path) -> bool {
    let leader = fs::read_to_string(dir.join("leader.pid"))
        .ok()
        .and_then(|text| text.trim().parse().ok());
    pids(dir).is_empty() && leader.is_none_or(|pid| !process::is_alive(pid))
}

/// Sends AMQP's protocol header and looks for the `Connection.Start` method that answers it.
fn speaks_amqp(port: u16) -> bool {
    let handshake = || -> std::io::Result<[u8; 11]> {
        let mut stream = TcpStream::connect_timeout(
            &SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            ANSWER_LIMIT,
        )?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        stream.set_write_timeout(Some(ANSWER_LIMIT))?;
        stream.write_all(b"AMQP\x00\x00\x09\x01")?;
        let mut frame = [0; 11];
        stream.read_exact(&mut frame)?;
        Ok(frame)
    };
    // Frame type 1 (method) on channel 0, four bytes of length, class 10, method 10.
    handshake().is_ok_and(|frame| frame.starts_with(&[1, 0, 0]) && frame.ends_with(&[0, 10, 0, 10]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_has_a_place_of_its_own() {
        let dir = Path::new("/somewhere/broker");
        let environment = environment(
            dir,
            Ports {
                amqp: 1,
                epmd: 2,
                distribution: 3,
            },
        );
        for (name, value) in &environment {
            let is_place = ["_BASE", "_DIR", "_FILE"]
                .iter()
                .any(|end| name.ends_with(end));
            assert!(
                !is_place || value.starts_with("/somewhere/broker/"),
                "{name}={value}"
            );
        }
        assert!(environment.contains(&("ERL_EPMD_PORT".to_owned(), "2".to_owned())));
    }

    #[test]
    fn a_closed_port_does_not_speak_amqp() {
        assert!(!speaks_amqp(process::free_port().unwrap()));
    }
}
