//! Tables, rights, migrations, partitions and the horizon on a real Postgres.

use crate::ledger::{Ledger, eventually, superuser};
use daybook::domain::UniqueKey;
use daybook::keeper;
use daybook::keeper::verify::verify;
use daybook::store::session::{self, Purpose};
use daybook::store::{self, horizon, migrate, partitions};
use daybook::telemetry::Metrics;
use std::sync::Arc;
use std::time::Duration;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

async fn runtime(ledger: &Ledger) -> Client {
    session::connect(&ledger.url, &ledger.name, Purpose::Read)
        .await
        .unwrap()
        .0
}

async fn owner(ledger: &Ledger) -> Client {
    session::connect(&ledger.owner_url, &ledger.name, Purpose::Owner)
        .await
        .unwrap()
        .0
}

#[tokio::test]
async fn every_statement_prepares_on_the_migrated_schema() {
    let ledger = Ledger::new().await;
    let client = runtime(&ledger).await;
    let mut names = std::collections::HashSet::new();
    for sql in store::statements() {
        let name = sql.lines().next().unwrap();
        assert!(
            name.starts_with("-- ") && names.insert(name),
            "{name} is no name, or stands twice"
        );
        client
            .prepare(sql)
            .await
            .unwrap_or_else(|error| panic!("{name}: {error:?}"));
    }
    ledger.finish().await;
}

#[tokio::test]
async fn d4_two_pods_migrate_at_once_and_an_edited_file_is_refused() {
    let ledger = Ledger::new().await;
    let name = format!("{}_b", ledger.name);
    let both = futures_util::join!(
        migrate::migrate(&ledger.owner_url, &ledger.url, &name),
        migrate::migrate(&ledger.owner_url, &ledger.url, &name)
    );
    let mut applied = [both.0.unwrap(), both.1.unwrap()];
    applied.sort_unstable();
    let latest = usize::try_from(migrate::version()).unwrap();
    assert_eq!(applied, [0, latest]);
    let edit =
        format!("UPDATE {name}.refinery_schema_history SET checksum = '1' WHERE version = 1");
    ledger.admin.batch_execute(&edit).await.unwrap();
    let error = migrate::migrate(&ledger.owner_url, &ledger.url, &name)
        .await
        .unwrap_err();
    assert!(
        matches!(error, migrate::MigrateError::Migration(_)),
        "{error}"
    );
    let same = migrate::migrate(&ledger.url, &ledger.url, &name)
        .await
        .unwrap_err();
    assert!(matches!(same, migrate::MigrateError::OneRole(_)), "{same}");
    ledger.finish().await;
}

#[tokio::test]
async fn r11_starting_twice_runs_no_ddl() {
    let ledger = Ledger::new().await;
    ledger
        .admin
        .batch_execute(
            "CREATE TABLE ddl (tag text);
             GRANT INSERT ON ddl TO PUBLIC;
             CREATE FUNCTION note_ddl() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
             AS $$ BEGIN INSERT INTO ddl VALUES (tg_tag); END $$;
             CREATE EVENT TRIGGER note_ddl ON ddl_command_start EXECUTE FUNCTION note_ddl()",
        )
        .await
        .unwrap();
    assert_eq!(
        migrate::migrate(&ledger.owner_url, &ledger.url, &ledger.name)
            .await
            .unwrap(),
        0
    );
    assert_eq!(
        partitions::ensure(&runtime(&ledger).await).await.unwrap(),
        0
    );
    let ddl: Vec<String> = ledger
        .admin
        .query("SELECT tag FROM ddl", &[])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(ddl, ["CREATE EVENT TRIGGER"; 0]);
    ledger
        .admin
        .batch_execute("DROP EVENT TRIGGER note_ddl; DROP FUNCTION note_ddl; DROP TABLE ddl")
        .await
        .unwrap();
    ledger.finish().await;
}

#[tokio::test]
async fn d10_history_is_only_added_to() {
    let ledger = Ledger::new().await;
    let partition: String = ledger
        .value("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'events'::regclass ORDER BY 1 LIMIT 1")
        .await;
    let client = runtime(&ledger).await;
    for sql in [
        format!("INSERT INTO {partition} SELECT * FROM {partition}"),
        format!("UPDATE {partition} SET record = ''"),
        format!("DELETE FROM {partition}"),
        format!("TRUNCATE {partition}"),
        format!("SELECT FROM {partition}"),
        "UPDATE events SET record = ''".to_owned(),
        "DELETE FROM postings".to_owned(),
        "TRUNCATE events".to_owned(),
        "DELETE FROM balance_snapshots".to_owned(),
        "TRUNCATE balance_snapshots".to_owned(),
        "DELETE FROM snapshot_horizon".to_owned(),
        "INSERT INTO snapshot_horizon VALUES (false, 0, now(), 0)".to_owned(),
        "ALTER TABLE events DISABLE TRIGGER ALL".to_owned(),
        "DROP TABLE outbox".to_owned(),
        "CREATE TABLE mine (a int)".to_owned(),
    ] {
        let error = client.batch_execute(&sql).await.unwrap_err();
        assert_eq!(
            error.code().map(|state| state.code()),
            Some("42501"),
            "{sql}: {error:?}"
        );
    }
    ledger.finish().await;
}

#[tokio::test]
async fn d10_the_owner_meets_the_triggers_and_verify_sees_them_weakened() {
    let ledger = Ledger::new().await;
    store_one(&ledger).await;
    let owner = owner(&ledger).await;
    let current: String = ledger
        .value("SELECT tableoid::regclass::text FROM events")
        .await;
    for sql in [
        "UPDATE events SET record = ''".to_owned(),
        format!("DELETE FROM {current}"),
        format!("TRUNCATE {current}"),
        "TRUNCATE events".to_owned(),
    ] {
        let error = owner.batch_execute(&sql).await.unwrap_err();
        assert_eq!(
            error.code().map(|state| state.code()),
            Some("23001"),
            "{sql}: {error:?}"
        );
    }
    for (weaken, mend, word) in [
        (
            format!("GRANT INSERT ON {current} TO daybook"),
            format!("REVOKE ALL ON {current} FROM daybook"),
            "INSERT",
        ),
        (
            "GRANT DELETE ON postings TO daybook".to_owned(),
            "REVOKE DELETE ON postings FROM daybook".to_owned(),
            "table postings: the role daybook has DELETE",
        ),
        (
            "GRANT UPDATE (record) ON events TO daybook".to_owned(),
            "REVOKE UPDATE (record) ON events FROM daybook".to_owned(),
            "table events: the role daybook has UPDATE",
        ),
        (
            "GRANT UPDATE, DELETE ON accounts TO PUBLIC".to_owned(),
            "REVOKE UPDATE, DELETE ON accounts FROM PUBLIC".to_owned(),
            "table accounts: the role daybook has UPDATE",
        ),
        (
            "GRANT DELETE ON balance_snapshots TO daybook".to_owned(),
            "REVOKE DELETE ON balance_snapshots FROM daybook".to_owned(),
            "table balance_snapshots: the role daybook has DELETE",
        ),
        (
            "GRANT TRUNCATE ON users TO daybook".to_owned(),
            "REVOKE TRUNCATE ON users FROM daybook".to_owned(),
            "table users: the role daybook has TRUNCATE",
        ),
        (
            format!("ALTER TABLE {current} DISABLE TRIGGER no_truncate"),
            format!("ALTER TABLE {current} ENABLE TRIGGER no_truncate"),
            "triggers",
        ),
    ] {
        owner.batch_execute(&weaken).await.unwrap();
        let report = verify(&ledger.owner_url, &ledger.name, |_, _| {})
            .await
            .unwrap();
        assert!(
            report.faults.iter().any(|fault| fault.contains(word)),
            "{weaken}: {:?}",
            report.faults
        );
        owner.batch_execute(&mend).await.unwrap();
    }
    ledger.finish().await;
}

#[tokio::test]
async fn d10_verify_sees_what_the_runtime_role_owns() {
    let ledger = Ledger::new().await;
    let give = |role| format!("ALTER FUNCTION refuse_change() OWNER TO {role}");
    ledger.admin.batch_execute(&give("daybook")).await.unwrap();
    let report = verify(&ledger.owner_url, &ledger.name, |_, _| {})
        .await
        .unwrap();
    assert!(
        report.faults.contains(
            &"refuse_change: belongs to the role daybook, not to the owner of events".to_owned()
        ),
        "{:?}",
        report.faults
    );
    ledger
        .admin
        .batch_execute(&give("daybook_owner"))
        .await
        .unwrap();
    ledger.finish().await;
}

/// One event through the commit.
async fn store_one(ledger: &Ledger) {
    let (lanes, drain) = daybook::commit::Lanes::start(&crate::commit::settings(ledger));
    let outcome = lanes
        .submit(
            crate::commit::deposit("mia", "k", 10),
            crate::commit::soon(),
        )
        .await;
    assert!(matches!(outcome, daybook::commit::Outcome::Created(_)));
    drain.finish().await;
}

#[tokio::test]
async fn postings_that_do_not_sum_to_zero_are_refused_by_the_database_too() {
    let ledger = Ledger::new().await;
    let client = runtime(&ledger).await;
    let error = client
        .batch_execute("INSERT INTO postings (position, leg, account_no, asset, amount, recorded_at) VALUES (1, 0, 1, 'EUR/2', 5, now()), (1, 1, 2, 'EUR/2', -4, now())")
        .await
        .unwrap_err();
    assert_eq!(
        error.as_db_error().unwrap().constraint(),
        Some("postings_sum_zero")
    );
    ledger.finish().await;
}

#[tokio::test]
async fn a_position_or_a_sequence_that_is_there_is_refused_by_the_database_too() {
    let ledger = Ledger::new().await;
    store_some(&ledger).await;
    let client = runtime(&ledger).await;
    for (position, sequence, index) in [
        ("position", "sequence + 100", "_position"),
        (
            "nextval('events_position_seq')",
            "sequence",
            "_user_sequence",
        ),
    ] {
        // A moment later than the other, so that only the number is the same.
        let again = format!(
            "INSERT INTO events (position, user_no, sequence, event_id, type, writer, idempotency_key, fingerprint, record,
                                 recorded_at, effective_at)
             SELECT {position}, user_no, {sequence}, gen_random_uuid(), type, writer, idempotency_key || 'again', fingerprint, record,
                    recorded_at + interval '1 microsecond', effective_at FROM events LIMIT 1"
        );
        let error = client.batch_execute(&again).await.unwrap_err();
        let error = error.as_db_error().unwrap();
        assert_eq!(error.code(), &SqlState::UNIQUE_VIOLATION);
        assert!(error.constraint().unwrap().ends_with(index), "{error:?}");
    }
    ledger.finish().await;
}

/// Three events, two business keys, one parked event.
async fn store_some(ledger: &Ledger) {
    let (lanes, drain) = daybook::commit::Lanes::start(&crate::commit::settings(ledger));
    for (subject, key, amount, seconds) in [
        ("mia", "k1", 10, Some(None)),
        ("mia", "k2", 5, Some(Some(60))),
        ("leo", "k1", 7, None),
    ] {
        let mut draft = crate::commit::deposit(subject, key, amount);
        draft.unique.extend(seconds.map(|seconds| UniqueKey {
            namespace: "invoice".to_owned(),
            key: format!("invoice of {key}"),
            seconds,
            code: "invoice_taken".to_owned(),
        }));
        let outcome = lanes.submit(draft, crate::commit::soon()).await;
        assert!(matches!(outcome, daybook::commit::Outcome::Created(_)));
    }
    drain.finish().await;
    let park = "WITH gone AS (DELETE FROM outbox WHERE position = (SELECT max(position) FROM outbox) RETURNING *)
        INSERT INTO outbox_parked (position, user_no, recorded_at, reason, body)
        SELECT g.position, g.user_no, g.recorded_at, 'test', convert_to(e.record, 'UTF8')
        FROM gone g JOIN events e USING (position)";
    ledger.admin.batch_execute(park).await.unwrap();
}

/// What a superuser changes with the triggers off, and what `verify` says of it.
const TAMPERED: &[(&str, &str)] = &[
    (
        "UPDATE balances SET amount = amount + 1",
        "users:mia:available EUR/2: balance 16, records 15",
    ),
    (
        "DELETE FROM balances",
        "has postings and a floor but no balance",
    ),
    (
        "UPDATE users SET head_hash = sha256(head_hash)",
        "mia: the head is not",
    ),
    (
        "UPDATE users SET last_at = last_at + interval '1 second'",
        "mia: the head is not",
    ),
    (
        "UPDATE events SET record = replace(record, '\"10\"', '\"11\"')",
        "mia 2: previoushash is not",
    ),
    (
        "UPDATE events SET record = replace(record, '\"balance\":\"15\"', '\"balance\":\"16\"')",
        "mia 2: users:mia:available EUR/2: the record shows the balance 16, the records sum to 15",
    ),
    (
        "UPDATE events SET type = 'gift' WHERE sequence = 2",
        "mia 2: type is not what the record says",
    ),
    (
        "UPDATE events SET writer = 'eve' WHERE sequence = 2",
        "mia 2: writer is not what the record says",
    ),
    (
        "UPDATE events SET idempotency_key = 'k3' WHERE sequence = 2",
        "mia 2: idempotency_key is not what the record says",
    ),
    (
        "UPDATE events SET recorded_at = recorded_at + interval '1 microsecond' WHERE sequence = 2",
        "mia 2: recorded_at is not what the record says",
    ),
    (
        "UPDATE events SET recorded_at = recorded_at + interval '1 millisecond' WHERE sequence = 2",
        "mia 2: event_id does not bear the milliseconds of recorded_at",
    ),
    (
        "UPDATE events SET recorded_at = recorded_at + interval '1 hour' WHERE sequence = 1",
        "before the event before it",
    ),
    (
        "UPDATE events SET effective_at = effective_at - interval '1 day' WHERE sequence = 2",
        "mia 2: effective_at is not what the record says",
    ),
    (
        "UPDATE events SET event_id = gen_random_uuid() WHERE sequence = 2",
        "mia 2: event_id is not what the record says",
    ),
    (
        "UPDATE events SET sequence = 3 WHERE sequence = 2",
        "mia 3: sequence is not what the record says",
    ),
    (
        "UPDATE events SET user_no = (SELECT user_no FROM users WHERE subject = 'leo') WHERE sequence = 2",
        "leo 2: user_no is not what the record says",
    ),
    (
        "UPDATE events SET user_no = 999 WHERE sequence = 2",
        "the event's user has no row",
    ),
    (
        "UPDATE events SET position = (SELECT max(position) + 5 FROM events) WHERE sequence = 2",
        "the last position drawn is",
    ),
    (
        "DELETE FROM events WHERE sequence = 2",
        "a posting without an event: ",
    ),
    // Sums per account stay what they were.
    (
        "UPDATE postings p SET position = CASE position WHEN first THEN second ELSE first END
         FROM (SELECT min(position) AS first, min(position) + 1 AS second FROM postings) t WHERE position IN (first, second)",
        "mia 1: leg 0: the posting is ",
    ),
    (
        "UPDATE postings SET amount = amount + sign(amount) * CASE position WHEN (SELECT min(position) FROM postings) THEN 1 ELSE -1 END
         WHERE position < (SELECT max(position) FROM postings)",
        "users:mia:available EUR/2 10",
    ),
    (
        "UPDATE postings SET leg = 1 - leg",
        "mia 1: leg 0: the posting is ",
    ),
    (
        "UPDATE postings SET asset = 'USD/2'",
        "the record's world EUR/2 -10",
    ),
    (
        "UPDATE postings SET account_no = 999 WHERE amount > 0",
        "an account without a row EUR/2 10",
    ),
    (
        "UPDATE postings SET recorded_at = recorded_at + interval '1 microsecond'",
        "mia 1: leg 0: the posting is ",
    ),
    (
        "DELETE FROM postings",
        "mia 1: leg 0: the posting is missing, the record's world EUR/2 -10",
    ),
    (
        "INSERT INTO postings (position, leg, account_no, asset, amount, recorded_at) SELECT position, leg + 2, account_no, asset, 0, recorded_at FROM postings",
        "mia 1: leg 2: the posting is ",
    ),
    (
        "UPDATE business_keys SET until_at = NULL",
        "business key invoice invoice of k2: ",
    ),
    (
        "UPDATE business_keys SET position = position + 1",
        "business key invoice invoice of k1: ",
    ),
    (
        "DELETE FROM business_keys",
        "a business key that the record took has no row",
    ),
    (
        "INSERT INTO business_keys VALUES ('invoice', 'o-9', 1)",
        "business key invoice o-9: ",
    ),
    (
        "UPDATE outbox SET recorded_at = recorded_at + interval '1 second'",
        "the row does not agree with an event",
    ),
    (
        "UPDATE outbox SET user_no = user_no + 16",
        "the row does not agree with an event",
    ),
    (
        "UPDATE outbox SET shard = (shard + 1) % 16",
        "the row does not agree with an event",
    ),
    (
        "UPDATE outbox_parked SET body = body || ' '",
        "outbox_parked ",
    ),
    ("UPDATE outbox_parked SET position = 999", "outbox_parked 999"),
    (
        "UPDATE horizon SET position = 1000",
        "horizon 1000: the last position drawn is",
    ),
];

/// With many rows waiting of a user with a long history, the index by user means hours.
#[tokio::test]
async fn verify_looks_for_the_event_of_an_outbox_row_by_its_position() {
    let ledger = Ledger::new().await;
    let mut statements = store::statements();
    let sql = statements.find(|sql| sql.starts_with("-- audit_stray_outbox\n"));
    let explain = format!("EXPLAIN {}", sql.unwrap());
    // Statistics of a ledger in which each user has one event.
    let fill = "BEGIN; SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_hashjoin = off;
        INSERT INTO events (position, user_no, sequence, event_id, type, writer, idempotency_key, fingerprint, record, recorded_at,
                            effective_at)
        SELECT n, n, 1, gen_random_uuid(), 't', 'w', n::text, sha256(''), '{}', now() + n * interval '1 us', now()
        FROM generate_series(1, 10000) n";
    ledger.admin.batch_execute(fill).await.unwrap();
    let filled = "SELECT tableoid::regclass::text FROM events LIMIT 1";
    let filled: String = ledger.admin.query_one(filled, &[]).await.unwrap().get(0);
    for statistics in [false, true] {
        if statistics {
            ledger.admin.batch_execute("ANALYZE events").await.unwrap();
        }
        let rows = ledger.admin.query(&explain, &[]).await.unwrap();
        let plan: String = rows
            .iter()
            .map(|row| row.get::<_, String>(0) + "\n")
            .collect();
        // Of the empty partitions any index is as good.
        assert!(plan.contains(&format!("{filled}_position on")), "{plan}");
        assert!(!plan.contains(&format!("{filled}_user")), "{plan}");
    }
    ledger.admin.batch_execute("ROLLBACK").await.unwrap();
    ledger.finish().await;
}

#[tokio::test]
async fn verify_finds_what_was_tampered_with() {
    const TABLES: [&str; 9] = [
        "users",
        "accounts",
        "balances",
        "events",
        "postings",
        "outbox",
        "outbox_parked",
        "business_keys",
        "horizon",
    ];
    let ledger = Ledger::new().await;
    store_some(&ledger).await;
    let mut save = "SET session_replication_role = replica; CREATE SCHEMA saved;".to_owned();
    let mut mend = String::new();
    for table in TABLES {
        save += &format!("CREATE TABLE saved.{table} AS TABLE {table};");
        mend += &format!(
            "DELETE FROM {table}; INSERT INTO {table} OVERRIDING SYSTEM VALUE TABLE saved.{table};"
        );
    }
    ledger.admin.batch_execute(&save).await.unwrap();
    for (tamper, said) in TAMPERED {
        ledger.admin.batch_execute(tamper).await.unwrap();
        let report = verify(&ledger.owner_url, &ledger.name, |_, _| {})
            .await
            .unwrap();
        assert!(
            report.faults.iter().any(|fault| fault.contains(said)),
            "{tamper}: {:?}",
            report.faults
        );
        ledger.admin.batch_execute(&mend).await.unwrap();
    }
    ledger.finish().await;
}

/// What a partition's own unique indexes refuse, and the parent cannot: who attaches a partition without them hears of it.
#[tokio::test]
async fn verify_finds_a_partition_that_lets_numbers_in_twice() {
    let ledger = Ledger::new().await;
    store_some(&ledger).await;
    let faults = async || {
        let report = verify(&ledger.owner_url, &ledger.name, |_, _| {}).await;
        report.unwrap().faults
    };
    assert_eq!(faults().await, [""; 0]);
    let partition =
        "SELECT relname::text FROM pg_class WHERE oid = (SELECT tableoid FROM events LIMIT 1)";
    let partition: String = ledger.value(partition).await;
    for (index, columns, position, sequence, said) in [
        (
            "position",
            "position",
            "position",
            "sequence + 1",
            "follows position",
        ),
        (
            "user_sequence",
            "user_no, sequence",
            "nextval('events_position_seq')",
            "sequence",
            "mia 2: ",
        ),
    ] {
        ledger
            .admin
            .batch_execute(&format!("DROP INDEX {partition}_{index}"))
            .await
            .unwrap();
        let unindexed = format!("table {partition}: nothing keeps ({columns}) unique");
        assert_eq!(faults().await, [unindexed]);
        let twice = format!(
            "INSERT INTO events (position, user_no, sequence, event_id, type, writer, idempotency_key, fingerprint, record,
                                 recorded_at, effective_at)
             SELECT {position}, user_no, {sequence}, event_id, type, writer, idempotency_key, fingerprint, record, recorded_at,
                    effective_at FROM events WHERE idempotency_key = 'k2'"
        );
        ledger.admin.batch_execute(&twice).await.unwrap();
        let found = faults().await;
        assert!(found.iter().any(|fault| fault.contains(said)), "{found:?}");
        let mend = format!(
            "SET session_replication_role = replica;
             DELETE FROM {partition} a USING {partition} b WHERE a.idempotency_key = b.idempotency_key AND a.user_no = b.user_no AND a.ctid > b.ctid;
             CREATE UNIQUE INDEX {partition}_{index} ON {partition} ({columns})"
        );
        ledger.admin.batch_execute(&mend).await.unwrap();
    }
    ledger.finish().await;
}

#[tokio::test]
async fn r1_d9_the_horizon_waits_for_an_insert_that_is_held_open() {
    let ledger = Ledger::new().await;
    let observer = runtime(&ledger).await;
    // A batch takes its transaction id, then draws its position, then waits before it commits.
    let held = superuser(&ledger.name).await;
    held.batch_execute(&format!(
        "SET search_path = {}; BEGIN; SELECT pg_current_xact_id()",
        ledger.name
    ))
    .await
    .unwrap();
    let position: i64 = held
        .query_one("SELECT nextval('events_position_seq')", &[])
        .await
        .unwrap()
        .get(0);
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let keeper = tokio::spawn(keeper::run(
        keeper::Settings {
            database_url: ledger.url.clone(),
            ledger: ledger.name.clone(),
            metrics: Arc::new(Metrics::new()),
        },
        stopped,
    ));
    store_one(&ledger).await;
    for _ in 0..200 {
        let mark = horizon::mark(&observer).await.unwrap();
        assert!(mark.position > position);
        assert!(!horizon::settled(&observer, mark).await.unwrap());
        assert!(horizon::read(&observer).await.unwrap() < position);
    }
    held.batch_execute("COMMIT").await.unwrap();
    eventually("the horizon passes", async || {
        horizon::read(&observer).await.unwrap() > position
    })
    .await;
    stop.send(true).unwrap();
    keeper.await.unwrap();
    ledger.finish().await;
}

#[tokio::test]
async fn r1_the_horizon_moves_though_some_batch_is_always_running() {
    let ledger = Ledger::new().await;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let keeper = tokio::spawn(keeper::run(
        keeper::Settings {
            database_url: ledger.url.clone(),
            ledger: ledger.name.clone(),
            metrics: Arc::new(Metrics::new()),
        },
        stopped,
    ));
    // Two lanes at work: each begins its next batch while the other's is still running.
    let lanes = [superuser(&ledger.name).await, superuser(&ledger.name).await];
    let begin = format!(
        "BEGIN; SET LOCAL search_path = {}; SELECT pg_current_xact_id(); SELECT nextval('events_position_seq')",
        ledger.name
    );
    lanes[0].batch_execute(&begin).await.unwrap();
    let mut moved = false;
    for turn in 1..100 {
        lanes[turn % 2].batch_execute(&begin).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        lanes[(turn + 1) % 2].batch_execute("COMMIT").await.unwrap();
        moved = moved || ledger.value::<i64>("SELECT position FROM horizon").await > 0;
    }
    assert!(moved, "the horizon stood still under load");
    lanes[1].batch_execute("COMMIT").await.unwrap();
    stop.send(true).unwrap();
    keeper.await.unwrap();
    ledger.finish().await;
}

/// Neither an advisory lock nor a reader stalls the horizon; a forgotten writer does, and its age does not begin anew with the pod.
#[tokio::test]
async fn r2_only_writers_hold_the_horizon_and_its_age_outlives_the_keeper() {
    let ledger = Ledger::new().await;
    let idle = superuser(&ledger.name).await;
    idle.batch_execute("SELECT pg_advisory_lock(1)")
        .await
        .unwrap();
    let reader = superuser(&ledger.name).await;
    reader
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        .await
        .unwrap();
    let metrics = Arc::new(Metrics::new());
    let start = || {
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let settings = keeper::Settings {
            database_url: ledger.url.clone(),
            ledger: ledger.name.clone(),
            metrics: metrics.clone(),
        };
        (stop, tokio::spawn(keeper::run(settings, stopped)))
    };
    let (stop, keeper) = start();
    store_one(&ledger).await;
    eventually("the horizon passes", async || {
        ledger.value::<i64>("SELECT position FROM horizon").await > 0
    })
    .await;
    stop.send(true).unwrap();
    keeper.await.unwrap();
    let writer = superuser(&ledger.name).await;
    writer
        .batch_execute("BEGIN; SELECT pg_current_xact_id()")
        .await
        .unwrap();
    let past = "SELECT nextval('events_position_seq'); UPDATE horizon SET settled_at = settled_at - interval '1 hour'";
    ledger.admin.batch_execute(past).await.unwrap();
    let (stop, keeper) = start();
    eventually("the age tells of the stall", async || {
        metrics.horizon_age_seconds.get() > 3_600.0
    })
    .await;
    writer.batch_execute("COMMIT").await.unwrap();
    eventually("the age falls", async || {
        metrics.horizon_age_seconds.get() < 60.0
    })
    .await;
    stop.send(true).unwrap();
    keeper.await.unwrap();
    ledger.finish().await;
}

#[tokio::test]
async fn r10_a_partition_is_made_behind_a_long_reader_and_before_writers() {
    let ledger = Ledger::new().await;
    store_one(&ledger).await;
    let reader = superuser(&ledger.name).await;
    reader
        .batch_execute(&format!(
            "SET search_path = {}; BEGIN; DECLARE long CURSOR FOR SELECT * FROM events; FETCH 1 FROM long",
            ledger.name
        ))
        .await
        .unwrap();
    let client = runtime(&ledger).await;
    let made: bool = client
        .query_one(
            "SELECT make_partition('events', now() + interval '1 year')",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert!(made);
    let again: bool = client
        .query_one(
            "SELECT make_partition('events', now() + interval '1 year')",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert!(!again);
    reader.batch_execute("ROLLBACK").await.unwrap();
    ledger.finish().await;
}

#[tokio::test]
async fn a_missing_partition_is_503_and_readiness_says_so() {
    let ledger = Ledger::new().await;
    ledger
        .admin
        .batch_execute(
            "DO $$ DECLARE part regclass; BEGIN
               FOR part IN SELECT inhrelid::regclass FROM pg_inherits WHERE inhparent = 'events'::regclass LOOP
                 EXECUTE format('ALTER TABLE events DETACH PARTITION %s', part);
               END LOOP; END $$",
        )
        .await
        .unwrap();
    let (lanes, drain) = daybook::commit::Lanes::start(&crate::commit::settings(&ledger));
    let outcome = lanes
        .submit(
            crate::commit::deposit("mia", "k", 10),
            crate::commit::soon(),
        )
        .await;
    assert_eq!(
        outcome,
        daybook::commit::Outcome::Unavailable(daybook::commit::Unavailable::Database)
    );
    drain.finish().await;
    let pool = session::pool(&ledger.url, &ledger.name, 1).unwrap();
    let found = store::reads::readiness(&pool.get().await.unwrap())
        .await
        .unwrap();
    assert!(found.partitions < store::reads::PARTITIONS_NEEDED);
    ledger.finish().await;
}

#[tokio::test]
async fn a_database_that_is_ahead_is_left_alone_and_lost_rights_are_given_again() {
    let ledger = Ledger::new().await;
    ledger
        .admin
        .batch_execute(
            "INSERT INTO refinery_schema_history SELECT version + 100, 'later', applied_on, checksum
             FROM refinery_schema_history LIMIT 1;
             REVOKE SELECT ON users FROM daybook; REVOKE USAGE ON SEQUENCE events_position_seq FROM daybook",
        )
        .await
        .unwrap();
    assert_eq!(
        migrate::migrate(&ledger.owner_url, &ledger.url, &ledger.name)
            .await
            .unwrap(),
        0
    );
    store_one(&ledger).await;
    ledger.finish().await;
}

#[tokio::test]
async fn partitions_far_away_are_refused() {
    let ledger = Ledger::new().await;
    let client = runtime(&ledger).await;
    for month in [
        "now() + interval '3 years'",
        "now() - interval '3 years'",
        "'infinity'",
    ] {
        let sql = format!("SELECT make_partition('events', {month})");
        assert!(client.batch_execute(&sql).await.is_err(), "{month}");
    }
    ledger.finish().await;
}
