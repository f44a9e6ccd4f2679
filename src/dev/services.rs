//! Sets of private services: one for `daybook dev`, whose data is kept, and one for the tests, made anew each time.
//!
//! Whatever way the work ends, everything that runs in the set's directories is stopped: also what a crashed run left there, and what
//! a test started again.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::account::{data_place, passable_dir};
use super::broker::Broker;
use super::find::Search;
use super::postgres::{self, Postgres};
use super::process::{self, Cancel};
use super::{Error, Session, at, install, say};

/// Time for a command that was told to end, before it is killed.
const COMMAND_STOP_LIMIT: Duration = Duration::from_secs(20);
/// Name of the database of `daybook dev`.
const DATABASE: &str = "daybook";

/// Which services a command gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kind {
    /// Gives up durability for speed: for tests, never for measuring.
    pub unsafe_but_fast: bool,
    /// Whether Postgres counts what its statements cost.
    pub statement_statistics: bool,
}

/// What `daybook dev` hands to the server.
#[derive(Clone, Debug)]
pub struct Ready {
    /// The empty or kept database, as its owner.
    pub database_url: String,
    /// The broker.
    pub amqp_url: String,
    /// Where `env` belongs.
    pub dir: PathBuf,
    /// Becomes true when the server has to stop (SIGINT, SIGTERM, SIGHUP). It may be true already.
    pub stop: watch::Receiver<bool>,
}

/// Starts the services of `dir`, runs `serve` until that ends (it has to watch [`Ready::stop`]), and stops the services. Data is kept.
///
/// # Errors
/// When the services cannot be started or stopped, and what `serve` returns.
pub async fn dev<F, Served, E>(dir: &Path, serve: F) -> Result<(), E>
where
    F: FnOnce(Ready) -> Served,
    Served: Future<Output = Result<(), E>>,
    E: From<Error>,
{
    let _lock = lock(dir)?;
    Session::remove(dir)?;
    let stop = stop_signal()?;
    let place = data_place(dir)?;
    let set = Set {
        postgres: place.join("postgres"),
        brokers: vec![place.join("rabbitmq")],
        scratch: None,
        kind: Kind::default(),
    };
    let outcome = match set.start(stop.clone()).await {
        Ok((postgres, brokers)) => {
            let database = blocking({
                let postgres = postgres.clone();
                move || postgres.create_database(DATABASE)
            });
            match database.await {
                Ok(()) => {
                    let amqp_url = brokers.first().map(Broker::url).unwrap_or_default();
                    serve(Ready {
                        database_url: postgres.url(DATABASE),
                        amqp_url,
                        dir: dir.to_owned(),
                        stop,
                    })
                    .await
                }
                Err(error) => Err(error.into()),
            }
        }
        Err(error) => Err(error.into()),
    };
    let removed = Session::remove(dir);
    say("Stopping PostgreSQL and RabbitMQ; their data is kept.");
    let stopped = set.stop().await;
    outcome?;
    removed?;
    Ok(stopped?)
}

/// Runs a command with services made anew, and returns its exit code. Its environment has `TEST_DATABASE_URL` (superuser),
/// `TEST_AMQP_URL`, and `TEST_SCRATCH_DIR`: in its subdirectories a test may start services of its own, which are stopped at the end if
/// the test did not. Services that are unsafe but fast are for tests, and some of these stop a broker: they get a second one by
/// `TEST_BROKER_DIR` and `TEST_BROKER_AMQP_URL`.
///
/// # Errors
/// When the services cannot be started or stopped, or the command cannot be run.
pub async fn run_with_services(dir: &Path, kind: Kind, command: &[String]) -> Result<u8, Error> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(Error::Refused("no command given".to_owned()));
    };
    let _lock = lock(dir)?;
    let stop = stop_signal()?;
    // Apart from where `daybook dev` keeps its data, even in the same directory: all of this is deleted.
    let place = data_place(dir)?.join("anew");
    let scratch = place.join("scratch");
    let mut set = Set {
        postgres: place.join("postgres"),
        brokers: vec![place.join("rabbitmq")],
        scratch: Some(scratch.clone()),
        kind,
    };
    if kind.unsafe_but_fast {
        set.brokers.push(place.join("broker"));
    }
    set.stop().await?;
    set.remove()?;
    passable_dir(&place)?;
    passable_dir(&scratch)?;
    let outcome = match set.start(stop.clone()).await {
        Ok((postgres, brokers)) => {
            let mut child = Command::new(program);
            child
                .args(arguments)
                .env("TEST_DATABASE_URL", postgres.url("postgres"))
                .env("TEST_SCRATCH_DIR", &scratch);
            if let Some(shared) = brokers.first() {
                child.env("TEST_AMQP_URL", shared.url());
            }
            if let Some(apart) = brokers.get(1) {
                child
                    .env("TEST_BROKER_AMQP_URL", apart.url())
                    .env("TEST_BROKER_DIR", apart.dir());
            }
            run(child, stop).await
        }
        Err(error) => Err(error),
    };
    let stopped = set.stop().await;
    let code = outcome?;
    stopped?;
    // Kept after a failure, for its logs.
    if code == 0 {
        set.remove()?;
    }
    Ok(code)
}

/// Stops the broker of the `daybook dev` that runs in `dir`, as an outage would.
///
/// # Errors
/// When no `daybook dev` runs there, or the broker does not end.
pub fn broker_stop(dir: &Path) -> Result<(), Error> {
    in_use(dir)?;
    Broker::attach(&data_place(dir)?.join("rabbitmq"))?.stop()
}

/// Starts that broker again, on the port it had.
///
/// # Errors
/// When no `daybook dev` runs there (nobody would stop the broker again), or the broker does not answer in time.
pub fn broker_start(dir: &Path) -> Result<(), Error> {
    in_use(dir)?;
    let dir = data_place(dir)?.join("rabbitmq");
    let port = Broker::attach(&dir)?.port();
    Broker::start_on(&dir, port).map(|_| ())
}

/// Services that are started and stopped together.
#[derive(Clone, Debug)]
struct Set {
    postgres: PathBuf,
    brokers: Vec<PathBuf>,
    /// Its subdirectories may hold services that tests start.
    scratch: Option<PathBuf>,
    kind: Kind,
}

impl Set {
    /// Starts all at once; when one fails or `stop` becomes true, the others give up too and nothing is left running.
    async fn start(
        &self,
        mut stop: watch::Receiver<bool>,
    ) -> Result<(Postgres, Vec<Broker>), Error> {
        let cancel = Cancel::default();
        let on_stop = tokio::spawn({
            let cancel = cancel.clone();
            async move {
                if stop.wait_for(|stop| *stop).await.is_ok() {
                    cancel.cancel();
                }
            }
        });
        let set = self.clone();
        let outcome = blocking(move || {
            install::ensure(&Search::machine())?;
            say("Starting a private PostgreSQL and RabbitMQ (about ten seconds) ...");
            set.start_all(&cancel)
        })
        .await;
        on_stop.abort();
        outcome
    }

    fn start_all(&self, cancel: &Cancel) -> Result<(Postgres, Vec<Broker>), Error> {
        let options = postgres::Options {
            unsafe_but_fast: self.kind.unsafe_but_fast,
            statement_statistics: self.kind.statement_statistics,
            cancel: cancel.clone(),
        };
        let (postgres, brokers) = thread::scope(|scope| {
            let postgres = scope.spawn(|| {
                Postgres::start(&self.postgres, &options).inspect_err(|_| cancel.cancel())
            });
            let brokers: Vec<_> = self
                .brokers
                .iter()
                .map(|dir| {
                    scope.spawn(|| Broker::start(dir, cancel).inspect_err(|_| cancel.cancel()))
                })
                .collect();
            (
                joined(postgres),
                brokers.into_iter().map(joined).collect::<Vec<_>>(),
            )
        });
        let mut failures = Vec::new();
        let mut running = Vec::new();
        for broker in brokers {
            broker.map_or_else(|error| failures.push(error), |broker| running.push(broker));
        }
        match postgres {
            Ok(postgres) if failures.is_empty() => return Ok((postgres, running)),
            Ok(_) => {}
            Err(error) => failures.push(error),
        }
        self.stop_all()?;
        // The others were only told to give up: the reason is the one that says more.
        let reason = failures
            .iter()
            .position(|error| !matches!(error, Error::Interrupted))
            .unwrap_or(0);
        Err(failures.swap_remove(reason))
    }

    async fn stop(&self) -> Result<(), Error> {
        let set = self.clone();
        blocking(move || set.stop_all()).await
    }

    fn stop_all(&self) -> Result<(), Error> {
        thread::scope(|scope| {
            let postgres = scope.spawn(|| Postgres::stop_in(&self.postgres));
            let brokers: Vec<_> = self
                .brokers
                .iter()
                .map(|dir| scope.spawn(|| Broker::stop_in(dir)))
                .collect();
            let scratch = scope.spawn(|| self.stop_scratch());
            let outcomes: Vec<_> = [postgres, scratch]
                .into_iter()
                .chain(brokers)
                .map(joined)
                .collect();
            outcomes.into_iter().collect()
        })
    }

    fn stop_scratch(&self) -> Result<(), Error> {
        let entries = self
            .scratch
            .iter()
            .filter_map(|dir| fs::read_dir(dir).ok())
            .flatten()
            .flatten();
        entries
            .map(|entry| entry.path())
            .try_for_each(|dir| Postgres::stop_in(&dir).and(Broker::stop_in(&dir)))
    }

    /// Deletes all data.
    fn remove(&self) -> Result<(), Error> {
        let dirs = std::iter::once(&self.postgres)
            .chain(&self.brokers)
            .chain(&self.scratch);
        for dir in dirs.filter(|dir| dir.exists()) {
            fs::remove_dir_all(dir).map_err(at(dir))?;
        }
        Ok(())
    }
}

fn joined<T>(thread: thread::ScopedJoinHandle<'_, Result<T, Error>>) -> Result<T, Error> {
    thread.join().unwrap_or_else(|_| {
        Err(Error::Refused(
            "a thread of the development environment panicked".to_owned(),
        ))
    })
}

/// Runs blocking work (processes, files) beside the async runtime, to its end.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| {
            Err(Error::Refused(format!(
                "a task of the development environment: {error}"
            )))
        })
}

/// One run per directory. The lock goes with the process, however that ends.
fn lock(dir: &Path) -> Result<File, Error> {
    fs::create_dir_all(dir).map_err(at(dir))?;
    let path = dir.join("lock");
    let file = File::options()
        .create(true)
        .append(true)
        .open(&path)
        .map_err(at(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::Refused(format!(
            "another run uses {} already: stop it first, or give this one a directory of its own with --dir",
            dir.display()
        ))),
        Err(TryLockError::Error(error)) => Err(at(&path)(error)),
    }
}

/// Refuses when no run holds the directory's lock.
fn in_use(dir: &Path) -> Result<(), Error> {
    let file = File::open(dir.join("lock")).ok();
    match file.map(|file| file.try_lock_shared()) {
        Some(Err(TryLockError::WouldBlock)) => Ok(()),
        _ => Err(Error::Refused(format!(
            "no 'daybook dev' runs in {}",
            dir.display()
        ))),
    }
}

/// Becomes true on SIGINT, SIGTERM or SIGHUP.
fn stop_signal() -> Result<watch::Receiver<bool>, Error> {
    let listen = |kind: SignalKind| signal(kind).map_err(at("signal handler"));
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hangup = listen(SignalKind::hangup())?;
    let (sender, receiver) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
        sender.send_replace(true);
        // Kept, so that receivers go on seeing it.
        sender.closed().await;
    });
    Ok(receiver)
}

/// Runs the command in a process group of its own, so that a stop reaches its children too (cargo does not pass signals on).
async fn run(mut command: Command, mut stop: watch::Receiver<bool>) -> Result<u8, Error> {
    let mut child = command
        .stdin(std::process::Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(at(command.as_std().get_program()))?;
    let group = child.id().map(|pid| format!("-{pid}"));
    let status = tokio::select! {
        status = child.wait() => status,
        _ = stop.wait_for(|stop| *stop) => {
            let group = group.unwrap_or_default();
            process::signal(&group, "TERM");
            let ended = tokio::time::timeout(COMMAND_STOP_LIMIT, child.wait()).await;
            process::signal(&group, "KILL");
            match ended {
                Ok(status) => status,
                Err(_) => child.wait().await,
            }
        }
    }
    .map_err(at("command"))?;
    Ok(exit_code(status))
}

/// As a shell would say it: 128 and the signal's number for a command that a signal ended.
fn exit_code(status: std::process::ExitStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt;
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| signal + 128));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}
