//! Saturation: a closed loop of transfers between random users over HTTP, and the proof that every 201 is a stored event.
//!
//! Never returns numbers that were not proved.

use crate::args::{Common, Service};
use crate::client::{Connection, Target};
use crate::database::Database;
use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

/// How long giving every user money may take.
const FUNDING_LIMIT: Duration = Duration::from_secs(300);
/// How long `daybook verify` may take.
const VERIFY_LIMIT: Duration = Duration::from_secs(900);
/// What each user gets: no run is long enough to spend it by ones.
const FUNDING_AMOUNT: u64 = 100_000_000;
/// Slowest latency that is told apart, in microseconds.
const LATENCY_MAX_US: u64 = 120_000_000;
/// How long a connection rests after 503.
const UNAVAILABLE_PAUSE: Duration = Duration::from_millis(100);
/// Characters kept of an answer that explains a failure.
const SAMPLE_CHARS_MAX: usize = 500;

const CREATED: u16 = 201;
/// Nothing was written and the service said so: allowed under load, counted, shown.
const UNAVAILABLE: u16 = 503;

/// What a proved run measured.
#[derive(Debug)]
pub struct Saturation {
    /// Connections, each with one request in flight.
    pub connections: u32,
    /// From the first request to the last answer.
    pub elapsed: Duration,
    /// How long a 201 took, in microseconds.
    pub latency_us: Histogram<u64>,
    /// Answers 503.
    pub unavailable: u64,
    /// Outbox rows left at the end: how far the relay is behind.
    pub outbox: u64,
}

impl Saturation {
    /// Events accepted.
    pub fn events(&self) -> u64 {
        self.latency_us.len()
    }
}

/// Finds out beforehand whether a run could succeed.
///
/// # Errors
/// When the service is not there or not on this machine, or the program that verifies is missing.
pub async fn check(service: &Service) -> Result<Target> {
    let target = Target::new(&service.url, &service.token)?;
    ensure!(
        service.program.is_file(),
        "{} is not there: cargo build --release --bin daybook",
        service.program.display()
    );
    Connection::open(&target).await?;
    Ok(target)
}

/// Gives every user money, measures, and proves what was measured.
///
/// # Errors
/// When anything does not hold; there is nothing to report then.
pub async fn run(
    database: &Database,
    target: &Target,
    common: &Common,
    service: &Service,
) -> Result<Saturation> {
    let load = Load {
        target: target.clone(),
        run: format!("{:016x}", rand::random::<u64>()),
        kind: Kind::Deposit,
        users: common.users,
        count: u64::from(common.users),
        limit: FUNDING_LIMIT,
    };
    let funded = load.clone().drive(service.connections).await?;
    funded.holds()?;
    ensure!(
        funded.created() == u64::from(common.users),
        "only {} of {} users got their money",
        funded.created(),
        common.users
    );
    database.checkpoint().await?;

    let (before, _) = database.stored(&service.ledger).await?;
    let transfers = Load {
        kind: Kind::Transfer,
        count: service.events_max,
        limit: Duration::from_secs(u64::from(common.seconds)),
        ..load
    };
    let tally = transfers.drive(service.connections).await?;
    let (after, outbox) = database.stored(&service.ledger).await?;
    tally.proves(after.saturating_sub(before))?;
    verify(&service.program, database.url(), &service.ledger).await?;
    Ok(Saturation {
        connections: service.connections,
        elapsed: tally.elapsed,
        unavailable: tally.others.get(&UNAVAILABLE).copied().unwrap_or(0),
        latency_us: tally.latency_us,
        outbox,
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// To user number `index`, from the world.
    Deposit,
    /// Between two different random users.
    Transfer,
}

/// What is to be sent.
#[derive(Clone)]
struct Load {
    target: Target,
    /// In every idempotency key, so that a second run is not taken for a replay of the first.
    run: String,
    kind: Kind,
    users: u32,
    count: u64,
    limit: Duration,
}

impl Load {
    fn request(&self, index: u64) -> (String, String) {
        match self.kind {
            Kind::Deposit => (
                format!("load-{}-d{index}", self.run),
                format!(
                    r#"{{"type":"deposit","schema":"1.7","subject":"u-{}","data":{{"asset":"EUR/2","amount":"{FUNDING_AMOUNT}"}}}}"#,
                    index + 1
                ),
            ),
            Kind::Transfer => {
                let from = rand::random_range(0..self.users);
                let to = (from + rand::random_range(1..self.users)) % self.users;
                (
                    format!("load-{}-t{index}", self.run),
                    format!(
                        r#"{{"type":"transfer","schema":"1.7","subject":"u-{}","data":{{"to":"u-{}","asset":"EUR/2","amount":"1"}}}}"#,
                        from + 1,
                        to + 1
                    ),
                )
            }
        }
    }

    /// Opens every connection, then lets all of them send until the count or the time is reached.
    async fn drive(self, connections: u32) -> Result<Tally> {
        let mut opened = Vec::new();
        for _ in 0..connections {
            opened.push(Connection::open(&self.target).await?);
        }
        let start = Instant::now();
        let shared = Arc::new(Shared {
            end: start + self.limit,
            load: self,
            next: AtomicU64::new(0),
            tally: Mutex::new(Tally::new()?),
        });
        let mut workers = JoinSet::new();
        for connection in opened {
            workers.spawn(Arc::clone(&shared).work(connection));
        }
        while let Some(ended) = workers.join_next().await {
            ended??;
        }
        let mut tally = Tally::new()?;
        std::mem::swap(&mut tally, &mut shared.tally());
        tally.elapsed = start.elapsed();
        Ok(tally)
    }
}

struct Shared {
    load: Load,
    end: Instant,
    next: AtomicU64,
    tally: Mutex<Tally>,
}

impl Shared {
    fn tally(&self) -> std::sync::MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn work(self: Arc<Self>, mut connection: Connection) -> Result<()> {
        while Instant::now() < self.end {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.load.count {
                break;
            }
            let (key, body) = self.load.request(index);
            let sent = Instant::now();
            let (status, answer) = connection.post(&key, &body).await?;
            self.tally().add(status, answer, sent.elapsed())?;
            if status == UNAVAILABLE {
                sleep(UNAVAILABLE_PAUSE).await;
            }
        }
        Ok(())
    }
}

/// Answers, counted.
struct Tally {
    latency_us: Histogram<u64>,
    others: BTreeMap<u16, u64>,
    /// The first answer that should not have been.
    sample: Option<String>,
    elapsed: Duration,
}

impl Tally {
    fn new() -> Result<Self> {
        Ok(Tally {
            latency_us: Histogram::new_with_bounds(1, LATENCY_MAX_US, 3)?,
            others: BTreeMap::new(),
            sample: None,
            elapsed: Duration::ZERO,
        })
    }

    fn add(&mut self, status: u16, answer: &[u8], took: Duration) -> Result<()> {
        if status == CREATED {
            let took = u64::try_from(took.as_micros())?.max(1);
            self.latency_us.record(took)?;
            return Ok(());
        }
        *self.others.entry(status).or_default() += 1;
        if status != UNAVAILABLE && self.sample.is_none() {
            let text = String::from_utf8_lossy(answer);
            self.sample = Some(text.chars().take(SAMPLE_CHARS_MAX).collect());
        }
        Ok(())
    }

    fn created(&self) -> u64 {
        self.latency_us.len()
    }

    /// That there were only answers that may be, and some that count.
    fn holds(&self) -> Result<()> {
        if let Some(sample) = &self.sample {
            bail!(
                "answers that should not have been, by status: {:?}; the first: {sample}",
                self.others
            );
        }
        ensure!(
            self.created() > 0,
            "no event was accepted; by status: {:?}",
            self.others
        );
        Ok(())
    }

    /// That, and as many 201s as the ledger grew by.
    fn proves(&self, grown: u64) -> Result<()> {
        self.holds()?;
        ensure!(
            self.created() == grown,
            "{} answers 201, but {grown} more events are stored",
            self.created()
        );
        Ok(())
    }
}

/// Lets the service's own program read the whole ledger again.
async fn verify(program: &Path, database_url: &str, ledger: &str) -> Result<()> {
    let mut command = Command::new(program);
    // The configuration refuses variables that it does not know, and this process has some that are not the service's.
    for (name, _) in std::env::vars_os() {
        if is_settings(&name) {
            command.env_remove(name);
        }
    }
    command
        .arg("verify")
        .env("DAYBOOK_DATABASE_URL", database_url)
        .env("DAYBOOK_LEDGER", ledger)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = timeout(VERIFY_LIMIT, command.output())
        .await
        .context("daybook verify does not end")?
        .with_context(|| program.display().to_string())?;
    ensure!(
        output.status.success(),
        "daybook verify failed, {}:\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn is_settings(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b"DAYBOOK_")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::os::unix::fs::PermissionsExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    type Seen = Arc<Mutex<Vec<(String, serde_json::Value)>>>;

    /// A server that answers each request by `statuses` in turn, in two pieces, and keeps what it was sent.
    async fn fake(statuses: &'static [u16]) -> (Target, Seen) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Seen::default();
        let kept = Arc::clone(&seen);
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(serve(stream, statuses, Arc::clone(&kept)));
            }
        });
        (
            Target::new(&format!("http://{address}"), "a.b.c").unwrap(),
            seen,
        )
    }

    async fn serve(mut stream: TcpStream, statuses: &'static [u16], seen: Seen) {
        let mut bytes = Vec::new();
        loop {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let Some((head, body)) = text.split_once("\r\n\r\n") else {
                if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
                    return;
                }
                continue;
            };
            let header = |name: &str| {
                let start = head.find(name).unwrap() + name.len();
                head[start..].lines().next().unwrap().trim().to_owned()
            };
            if body.len() < header("Content-Length:").parse().unwrap() {
                stream.read_buf(&mut bytes).await.unwrap();
                continue;
            }
            assert!(head.starts_with("POST /v1/events HTTP/1.1\r\n"));
            assert_eq!(header("Authorization:"), "Bearer a.b.c");
            let status = {
                let mut seen = seen.lock().unwrap();
                seen.push((
                    header("Idempotency-Key:"),
                    serde_json::from_str(body).unwrap(),
                ));
                statuses[(seen.len() - 1) % statuses.len()]
            };
            bytes.clear();
            let head =
                format!("HTTP/1.1 {status} X\r\ncontent-length: 7\r\nServer: fake\r\n\r\nthe");
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.flush().await.unwrap();
            tokio::task::yield_now().await;
            stream.write_all(b"body").await.unwrap();
        }
    }

    fn load(target: Target, kind: Kind, count: u64) -> Load {
        Load {
            target,
            run: "r".to_owned(),
            kind,
            users: 5,
            count,
            limit: Duration::from_secs(30),
        }
    }

    #[tokio::test]
    async fn every_user_gets_money_once() {
        let (target, seen) = fake(&[201]).await;
        let tally = load(target, Kind::Deposit, 5).drive(3).await.unwrap();
        tally.proves(5).unwrap();
        let seen = seen.lock().unwrap();
        let subjects: HashSet<_> = seen
            .iter()
            .map(|(_, body)| body["subject"].as_str().unwrap())
            .collect();
        assert_eq!(subjects, HashSet::from(["u-1", "u-2", "u-3", "u-4", "u-5"]));
    }

    #[tokio::test]
    async fn transfers_are_counted_up_to_the_limit_with_keys_of_their_own() {
        let (target, seen) = fake(&[201, 201, 503]).await;
        let tally = load(target, Kind::Transfer, 30).drive(4).await.unwrap();
        assert_eq!(tally.created(), 20);
        assert_eq!(tally.others, BTreeMap::from([(503, 10)]));
        tally.proves(20).unwrap();
        let seen = seen.lock().unwrap();
        let keys: HashSet<_> = seen.iter().map(|(key, _)| key).collect();
        assert_eq!(keys.len(), 30);
        assert!(
            seen.iter()
                .all(|(_, body)| body["subject"] != body["data"]["to"])
        );
    }

    #[tokio::test]
    async fn the_time_ends_it_too() {
        let (target, _) = fake(&[201]).await;
        let mut load = load(target, Kind::Transfer, u64::MAX);
        load.limit = Duration::from_millis(50);
        let tally = load.drive(2).await.unwrap();
        assert!(tally.created() > 0);
        assert!(tally.elapsed >= Duration::from_millis(50));
    }

    #[tokio::test]
    async fn a_wrong_answer_or_a_missing_event_proves_nothing() {
        let (target, _) = fake(&[201, 422]).await;
        let wrong = load(target, Kind::Transfer, 4).drive(1).await.unwrap();
        let why = wrong.proves(2).unwrap_err().to_string();
        assert!(why.contains("422: 2") && why.contains("thebody"), "{why}");

        let (target, _) = fake(&[201]).await;
        let right = load(target, Kind::Transfer, 4).drive(1).await.unwrap();
        right.proves(4).unwrap();
        assert!(right.proves(3).is_err());
        assert!(right.proves(5).is_err());

        let (target, _) = fake(&[503]).await;
        let none = load(target, Kind::Transfer, 2).drive(2).await.unwrap();
        assert!(none.proves(0).is_err());
    }

    #[tokio::test]
    async fn a_closed_connection_ends_the_run() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                drop(listener.accept().await);
            }
        });
        let target = Target::new(&format!("http://{address}"), "t").unwrap();
        assert!(load(target, Kind::Transfer, 4).drive(1).await.is_err());
    }

    #[tokio::test]
    async fn verification_counts_by_its_exit_code() {
        let dir = std::env::temp_dir().join(format!("daybook-load-{:016x}", rand::random::<u64>()));
        std::fs::create_dir(&dir).unwrap();
        let program = dir.join("daybook");
        let script = "#!/bin/sh\necho \"$1 $DAYBOOK_LEDGER $DAYBOOK_DATABASE_URL\"; [ \"$DAYBOOK_LEDGER\" = good ]\n";
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
        verify(&program, "postgres://x", "good").await.unwrap();
        let why = verify(&program, "postgres://x", "bad").await.unwrap_err();
        assert!(why.to_string().contains("verify bad postgres://x"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
