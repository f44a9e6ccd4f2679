//! A filled ledger is a ledger: proved by `verify`, with the schema it was migrated to, and open for more.

use super::*;
use crate::lab::{Lab, Ledger};
use daybook::commit::{Lanes, Outcome, Settings};
use daybook::domain::{IdempotencyKey, Principal, Scope, Scopes};
use daybook::schema::Registry;
use jiff::Timestamp;
use std::sync::Arc;

/// One value, as text.
async fn text(ledger: &Ledger, sql: &str) -> String {
    let client = ledger.database.connect().await.unwrap();
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Every index, with its definition, owner and state.
async fn indexes(ledger: &Ledger) -> String {
    let sql = "SELECT string_agg(concat_ws(' ', pg_get_indexdef(indexrelid), relkind, indisvalid, reloptions, \
             pg_get_userbyid(relowner)), E'\\n' ORDER BY relname)
         FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid WHERE relnamespace = current_schema()::regnamespace";
    text(ledger, sql).await
}

fn plan(kind: Kind, users: u32) -> Plan {
    Plan {
        events: 2_000,
        users,
        kind,
        seed: 7,
        keep_indexes: false,
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

/// The address of the ledger's database.
fn url(ledger: &Ledger) -> String {
    let variables = ledger.database.variables();
    let [host, port, user, password, name] =
        ["PGHOST", "PGPORT", "PGUSER", "PGPASSWORD", "PGDATABASE"].map(|name| {
            let mut values = variables.iter();
            values.find(|(known, _)| *known == name).unwrap().1.clone()
        });
    format!("postgres://{user}:{password}@{host}:{port}/{name}")
}

/// The ledger takes an event of a user with a history, and knows the keys of that history.
async fn goes_on(ledger: &Ledger) {
    let (lanes, drain) = Lanes::start(&Settings {
        database_url: url(ledger).into(),
        ledger: ledger.name.clone(),
        lanes: 1,
        queue: 8,
        queue_bytes: 1 << 20,
        batch_max: 8,
        dedupe_days: 90,
        committed: Default::default(),
        metrics: Arc::default(),
    });
    let one = "SELECT idempotency_key FROM events WHERE position = 1990";
    let key = text(ledger, one).await;
    let record = text(ledger, "SELECT record FROM events WHERE position = 1990").await;
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
    let lab = Lab::for_test().await;
    let work = lab.with_ledger("fill", async |ledger| {
        let before = indexes(ledger).await;
        let filled = fill(&ledger.database, &ledger.name, plan.clone()).await?;
        assert_eq!(filled.events, 2_000);
        assert_eq!(indexes(ledger).await, before);
        ledger.verify().await?;
        goes_on(ledger).await;
        ledger.verify().await?;
        // The replay drew a position, too, and left a gap.
        let counters = "SELECT concat_ws(' ', (SELECT count(*) FROM events), (SELECT max(position) FROM events), \
             (SELECT position FROM horizon), (SELECT count(*) FROM outbox))";
        assert_eq!(text(ledger, counters).await, "2001 2002 2000 1");
        let again = fill(&ledger.database, &ledger.name, plan).await.unwrap_err();
        assert!(again.to_string().contains("nobody has used"), "{again}");
        Ok(())
    });
    work.await.unwrap();
    lab.close().await.unwrap();
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

#[tokio::test]
async fn indexes_that_stay_are_as_good() {
    filled(Plan {
        keep_indexes: true,
        ..plan(Kind::Transfers, 50)
    })
    .await;
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
        let mut history = History::new(plan, "filled", span).unwrap();
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
    assert!(History::new(plan(Kind::Transfers, 1), "filled", span).is_err());
    assert!(History::new(plan(Kind::Deposits, 0), "filled", span).is_err());
    assert!(History::new(plan(Kind::Deposits, 1), "filled", span).is_ok());
}
