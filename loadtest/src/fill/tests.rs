//! A filled ledger is a ledger: proved by `verify`, with the schema it was migrated to, and open for more.

use super::*;
use daybook::commit::{Lanes, Outcome, Settings};
use daybook::domain::{IdempotencyKey, Principal, Scope, Scopes};
use daybook::keeper::verify::verify;
use daybook::schema::Registry;
use daybook::store::{bootstrap, migrate};
use jiff::Timestamp;
use secrecy::{ExposeSecret, SecretString};
use std::sync::Arc;

/// A migrated ledger called `filled`, in a database of its own.
struct Ledger {
    name: String,
    superuser: SecretString,
    urls: bootstrap::Urls,
    database: Database,
    client: Client,
}

const LEDGER: &str = "filled";
/// The tests of this program share the roles, so that they have to agree on it.
const PASSWORD: &str = "test";

impl Ledger {
    async fn new() -> Self {
        // One at a time: Postgres refuses to change a role twice at once.
        static ONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
        let _one = ONE.lock().await;
        let superuser: SecretString = std::env::var("TEST_DATABASE_URL")
            .expect("TEST_DATABASE_URL is set by `make test`")
            .into();
        let name = format!("fill_{:016x}", rand::random::<u64>());
        let server = Database::at(superuser.expose_secret()).unwrap();
        let create = format!("CREATE DATABASE {name}");
        let client = server.connect().await.unwrap();
        client.batch_execute(&create).await.unwrap();
        let urls = bootstrap::bootstrap(&superuser, &name, PASSWORD)
            .await
            .unwrap();
        migrate::migrate(&urls.owner, &urls.runtime, LEDGER)
            .await
            .unwrap();
        let url = superuser.expose_secret();
        let url = format!("{}/{name}", url.rsplit_once('/').unwrap().0);
        let database = Database::at(&url).unwrap();
        let client = database.connect().await.unwrap();
        let path = format!("SET search_path = {LEDGER}");
        client.batch_execute(&path).await.unwrap();
        Ledger {
            name,
            superuser,
            urls,
            database,
            client,
        }
    }

    async fn text(&self, sql: &str) -> String {
        self.client.query_one(sql, &[]).await.unwrap().get(0)
    }

    /// Every index, with its table, definition and state.
    async fn indexes(&self) -> String {
        self.text(
            "SELECT string_agg(concat_ws(' ', pg_get_indexdef(indexrelid), relkind, indisvalid, reloptions, \
                 pg_get_userbyid(relowner)), E'\\n' ORDER BY relname)
             FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid WHERE relnamespace = 'filled'::regnamespace",
        )
        .await
    }

    async fn proved(&self, events: u64) {
        let report = verify(&self.urls.owner, LEDGER, |_, _| {}).await.unwrap();
        assert_eq!(report.faults, Vec::<String>::new());
        assert_eq!(report.events, events);
    }

    async fn finish(self) {
        drop(self.client);
        let server = Database::at(self.superuser.expose_secret()).unwrap();
        let drop = format!("DROP DATABASE {} WITH (FORCE)", self.name);
        let client = server.connect().await.unwrap();
        client.batch_execute(&drop).await.unwrap();
    }
}

fn plan(kind: Kind, users: u32) -> Plan {
    Plan {
        events: 2_000,
        users,
        kind,
        seed: 7,
    }
}

/// Posts what the service would be sent.
async fn submit(lanes: &Lanes, key: &str, body: &str) -> Outcome {
    let principal = Principal {
        subject: Subject::parse("admin").unwrap(),
        issuer: "test".into(),
        token_id: "test".into(),
        issued_at: 0,
        expires_at: i64::MAX,
        scopes: Scopes::from_iter(Scope::ALL),
    };
    let key = IdempotencyKey::exact(key).unwrap();
    let registry = Registry::load(None).unwrap();
    let draft = registry
        .draft(&principal, key, None, body.as_bytes())
        .unwrap();
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    lanes.submit(draft, deadline).await
}

/// The ledger takes an event of a user with a history, and knows the keys of that history.
async fn goes_on(ledger: &Ledger) {
    let (lanes, drain) = Lanes::start(&Settings {
        database_url: ledger.urls.runtime.clone(),
        ledger: LEDGER.to_owned(),
        lanes: 1,
        queue: 8,
        queue_bytes: 1 << 20,
        batch_max: 8,
        dedupe_days: 90,
        committed: Default::default(),
        metrics: Arc::default(),
    });
    let known = "SELECT idempotency_key FROM events WHERE position = 1990";
    let key = ledger.text(known).await;
    let record: String = ledger
        .text("SELECT record FROM events WHERE position = 1990")
        .await;
    let parsed: serde_json::Value = serde_json::from_str(&record).unwrap();
    let (kind, subject) = (&parsed["type"], &parsed["subject"]);
    let input = &parsed["data"]["input"];
    let body = format!(r#"{{"type":{kind},"schema":"1.7","subject":{subject},"data":{input}}}"#);
    match submit(&lanes, &key, &body).await {
        Outcome::Replayed(stored) => assert_eq!(&*stored.record, record),
        other => panic!("{other:?}"),
    }
    let new = submit(&lanes, "another", &body).await;
    assert!(matches!(new, Outcome::Created(_)), "{new:?}");
    drain.finish().await;
}

async fn filled(plan: Plan) {
    let ledger = Ledger::new().await;
    let before = ledger.indexes().await;
    let filled = fill(&ledger.database, LEDGER, plan.clone()).await.unwrap();
    assert_eq!(filled.events, 2_000);
    assert_eq!(ledger.indexes().await, before);
    ledger.proved(2_000).await;
    goes_on(&ledger).await;
    ledger.proved(2_001).await;
    // The replay drew a position, too, and left a gap.
    let counters = "SELECT concat_ws(' ', (SELECT max(position) FROM events), (SELECT position FROM horizon), \
         (SELECT count(*) FROM outbox))";
    assert_eq!(ledger.text(counters).await, "2002 2000 1");
    let again = fill(&ledger.database, LEDGER, plan).await.unwrap_err();
    assert!(again.to_string().contains("nobody has used"), "{again}");
    ledger.finish().await;
}

#[tokio::test]
async fn transfers_between_many_are_proved() {
    filled(plan(Kind::Transfers, 50)).await;
}

#[tokio::test]
async fn payments_from_one_account_are_proved() {
    filled(plan(Kind::Deposits, 50)).await;
}

#[tokio::test]
async fn the_history_of_one_user_is_proved() {
    filled(plan(Kind::Deposits, 1)).await;
}

#[test]
fn a_history_is_its_seed_and_its_users_take_turns() {
    let span = (
        Timestamp::UNIX_EPOCH,
        Timestamp::from_second(2_000).unwrap(),
    );
    let records = |seed| {
        let plan = Plan {
            seed,
            ..plan(Kind::Transfers, 50)
        };
        let mut history = History::new(plan, LEDGER, span).unwrap();
        let (mut records, mut users) = (Vec::new(), Vec::new());
        while let Some(event) = history.next().unwrap() {
            records.push(event.record.clone());
            users.push(event.user_no);
        }
        (records, users)
    };
    let (first, users) = records(1);
    assert_eq!(first, records(1).0);
    assert_ne!(first, records(2).0);
    let runs = users.windows(2).filter(|pair| pair[0] == pair[1]).count();
    assert!(
        runs < 100,
        "{runs} of 2,000 events follow one of the same user"
    );
    let mut times: Vec<u32> = vec![0; 51];
    for user in users {
        times[usize::try_from(user).unwrap()] += 1;
    }
    assert!(
        times[1..].iter().all(|times| (10..=90).contains(times)),
        "{times:?}"
    );
}

#[test]
fn a_plan_without_sense_is_refused() {
    let span = (Timestamp::UNIX_EPOCH, Timestamp::UNIX_EPOCH);
    assert!(History::new(plan(Kind::Transfers, 1), LEDGER, span).is_err());
    assert!(History::new(plan(Kind::Deposits, 0), LEDGER, span).is_err());
    assert!(History::new(plan(Kind::Deposits, 1), LEDGER, span).is_ok());
}
