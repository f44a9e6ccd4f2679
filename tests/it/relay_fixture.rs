//! What the relay's tests stand on: a database with the ledger's tables, events written straight into them, and a consumer.
//!
//! Never uses the commit: these tests hold the relay alone.

use crate::ledger::{Ledger, superuser};
use daybook::config::RelayConfig;
use daybook::dev::Broker;
use daybook::relay::{Received, Relay, RelaySettings, Source, declare_queue, tail};
use daybook::store::handover::Handover;
use daybook::telemetry::{Kind, Metrics};
use secrecy::SecretString;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio_postgres::Client;

/// Events as the commit would write them: transaction id, user lock, position, event, outbox row.
const APPEND: &str = "
CREATE FUNCTION append(who bigint, what text, body text DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE seq bigint; pos bigint; id uuid := gen_random_uuid(); at timestamptz;
BEGIN
    PERFORM pg_current_xact_id();
    INSERT INTO users (user_no, subject, sequence, head_hash, last_at) OVERRIDING SYSTEM VALUE
        VALUES (who, 'user' || who, 0, sha256(''), now()) ON CONFLICT DO NOTHING;
    UPDATE users SET sequence = sequence + 1 WHERE user_no = who RETURNING sequence INTO seq;
    pos := nextval('events_position_seq');
    at := clock_timestamp();
    INSERT INTO events (position, user_no, sequence, event_id, type, writer, idempotency_key, fingerprint, record, recorded_at,
                        effective_at)
    VALUES (pos, who, seq, id, what, 'w', id::text, sha256(''),
        coalesce(body, format('{\"id\":\"%s\",\"subject\":\"user%s\",\"note\":\"\u{e4}\u{1f600}\"}', id, who)), at, at);
    INSERT INTO outbox (position, shard, user_no, recorded_at, traceparent)
        VALUES (pos, who % 16, who, at, '00-' || pos);
    RETURN pos;
END $$";

/// A test's own ledger. Its database is dropped with the services.
pub struct Fixture {
    pub client: Client,
    pub ledger: String,
    pub database_url: SecretString,
    pub amqp_url: SecretString,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

fn env(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run `make test`"))
}

impl Fixture {
    pub async fn new() -> Self {
        Self::at(&env("TEST_AMQP_URL")).await
    }

    pub async fn at(amqp_url: &str) -> Self {
        let ledger = Ledger::new().await;
        ledger.admin.batch_execute(APPEND).await.unwrap();
        let mut fixture = Fixture {
            client: ledger.admin,
            ledger: ledger.name,
            database_url: ledger.url,
            amqp_url: amqp_url.to_owned().into(),
            tasks: Vec::new(),
        };
        let keeper = fixture.session().await;
        fixture.tasks.push(tokio::spawn(keep_horizon(keeper)));
        fixture
    }

    /// A superuser's session in the ledger.
    pub async fn session(&self) -> Client {
        let client = superuser(&self.ledger).await;
        client
            .batch_execute(&format!("SET search_path = {}", self.ledger))
            .await
            .unwrap();
        client
    }

    pub fn settings(&self) -> RelaySettings {
        RelaySettings {
            database_url: self.database_url.clone(),
            amqp_url: self.amqp_url.clone(),
            ledger: self.ledger.clone(),
            config: RelayConfig::default(),
            metrics: Arc::new(Metrics::new()),
            handover: Handover::default(),
        }
    }

    pub fn relay(&self) -> Relay {
        Relay::start(self.settings())
    }

    /// One event of each of the users, in one transaction a user.
    pub async fn append(&self, users: impl IntoIterator<Item = i64>, what: &str) -> Vec<i64> {
        let mut positions = Vec::new();
        for user in users {
            positions.push(append(&self.client, user, what).await);
        }
        positions
    }

    pub async fn waiting(&self) -> i64 {
        self.number("SELECT count(*) FROM outbox").await
    }

    pub async fn number(&self, sql: &str) -> i64 {
        self.client.query_one(sql, &[]).await.unwrap().get(0)
    }

    /// Waits until the query's number is the wanted one.
    pub async fn until(&self, limit_s: u64, sql: &str, wanted: i64) {
        let began = Instant::now();
        loop {
            let got = self.number(sql).await;
            if got == wanted {
                return;
            }
            assert!(
                began.elapsed() < Duration::from_secs(limit_s),
                "{sql}: {got}, wanted {wanted}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn queue(&self, pattern: &str) -> String {
        let queue = format!("{}.{:08x}", self.ledger, rand::random::<u32>());
        declare_queue(&self.amqp_url, &self.ledger, &queue, pattern)
            .await
            .unwrap();
        queue
    }

    /// Takes all messages out of a new queue, for ever, also over restarts of the broker.
    pub async fn consumer(&self, pattern: &str) -> Consumer {
        let name = self.queue(pattern).await;
        let received = Arc::new(Mutex::new(Vec::new()));
        let (url, into) = (self.amqp_url.clone(), Arc::clone(&received));
        let task = tokio::spawn(async move {
            loop {
                let source = Source::Queue {
                    name: name.clone(),
                    acknowledge: true,
                };
                let _ = tail(&url, source, |message| into.lock().unwrap().push(message)).await;
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
        });
        Consumer { received, task }
    }
}

pub async fn append(client: &Client, user: i64, what: &str) -> i64 {
    client
        .query_one("SELECT append($1, $2)", &[&user, &what])
        .await
        .unwrap()
        .get(0)
}

/// The keeper's part: L, then X, then wait until nothing older than X runs.
async fn keep_horizon(client: Client) {
    loop {
        let settled: i64 = client
            .query_one("SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM events_position_seq", &[])
            .await
            .unwrap()
            .get(0);
        let next: String = client
            .query_one("SELECT pg_current_xact_id()::text", &[])
            .await
            .unwrap()
            .get(0);
        loop {
            let reached: bool = client
                .query_one(
                    "SELECT pg_snapshot_xmin(pg_current_snapshot()) >= $1::text::xid8",
                    &[&next],
                )
                .await
                .unwrap()
                .get(0);
            if reached {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        client
            .execute(
                "UPDATE horizon SET position = $1, settled_at = now()",
                &[&settled],
            )
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

pub struct Consumer {
    received: Arc<Mutex<Vec<Received>>>,
    task: JoinHandle<()>,
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Consumer {
    pub fn all(&self) -> MutexGuard<'_, Vec<Received>> {
        self.received.lock().unwrap()
    }

    pub fn different(&self) -> usize {
        let all = self.all();
        all.iter()
            .map(|message| &message.message_id)
            .collect::<HashSet<_>>()
            .len()
    }

    pub async fn until(&self, limit_s: u64, wanted: usize) {
        let began = Instant::now();
        while self.different() < wanted {
            assert!(
                began.elapsed() < Duration::from_secs(limit_s),
                "{} of {wanted} messages",
                self.different()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(self.different(), wanted);
    }

    /// Messages that came, for the first time, after a later one of the same user.
    pub fn inversions(&self) -> usize {
        let mut seen = HashSet::new();
        let mut heads: HashMap<String, u64> = HashMap::new();
        let mut inversions = 0;
        for message in self.all().iter() {
            if !seen.insert(message.message_id.clone()) {
                continue;
            }
            let sequence: u64 = message.headers["usersequence"].parse().unwrap();
            let head = heads.entry(message.headers["subject"].clone()).or_default();
            inversions += usize::from(sequence < *head);
            *head = sequence.max(*head);
        }
        inversions
    }
}

pub fn metric(metrics: &Metrics, kind: &'static str) -> u64 {
    metrics.relay.get_or_create(&Kind { kind }).get()
}

/// The broker that tests may stop; one at a time.
pub struct Breakable {
    dir: PathBuf,
    port: u16,
    pub url: String,
    _turn: tokio::sync::MutexGuard<'static, ()>,
}

static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

impl Breakable {
    pub async fn take() -> Self {
        let turn = TURN.lock().await;
        let dir = PathBuf::from(env("TEST_BROKER_DIR"));
        let port = Broker::attach(&dir).unwrap().port();
        let broker = Breakable {
            dir,
            port,
            url: env("TEST_BROKER_AMQP_URL"),
            _turn: turn,
        };
        // Whatever the test before left.
        broker.configure(None).await;
        broker.start().await;
        broker
    }

    pub async fn stop(&self) {
        let dir = self.dir.clone();
        tokio::task::spawn_blocking(move || Broker::attach(&dir).unwrap().stop().unwrap())
            .await
            .unwrap();
    }

    pub async fn start(&self) {
        let (dir, port) = (self.dir.clone(), self.port);
        tokio::task::spawn_blocking(move || Broker::start_on(&dir, port).map(|_| ()).unwrap())
            .await
            .unwrap();
    }

    /// Limits the size of a message, or no longer; a restart when that is a change.
    pub async fn configure(&self, bytes_max: Option<u32>) {
        let file = self.dir.join("advanced.config");
        match bytes_max {
            Some(bytes) => {
                let text = format!("[{{rabbit, [{{max_message_size, {bytes}}}]}}].\n");
                std::fs::write(&file, text).unwrap();
            }
            None if !file.exists() => return,
            None => std::fs::remove_file(&file).unwrap(),
        }
        self.stop().await;
        self.start().await;
    }
}
