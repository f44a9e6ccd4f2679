//! The relay under faults, against a real Postgres and a real RabbitMQ. Tests are named after the failures they keep away.

use crate::process::{program, signal};
use crate::relay_fixture::{Breakable, Fixture, append, metric};
use daybook::relay::{Relay, Source, tail};
use daybook::store::outbox::{self, Range};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

const HELD: &str = "SELECT count(*) FROM outbox WHERE held_since IS NOT NULL";
const WAITING: &str = "SELECT count(*) FROM outbox";
const PARKED: &str = "SELECT count(*) FROM outbox_parked";

#[tokio::test]
async fn every_statement_of_the_outbox_prepares() {
    let f = Fixture::new().await;
    for (name, sql) in outbox::STATEMENTS {
        assert!(sql.starts_with(&format!("-- {name}\n")), "{name}");
        f.client
            .prepare(sql)
            .await
            .unwrap_or_else(|error| panic!("{name}: {error:?}"));
    }
}

#[tokio::test]
async fn scans_and_look_ups_walk_their_indexes_on_tables_without_statistics() {
    let f = Fixture::new().await;
    let positions = f.append((0..500).map(|n| 1 + n % 100), "t").await;
    f.client
        .batch_execute(
            "SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off",
        )
        .await
        .unwrap();
    let sql = |name: &str| {
        let found = outbox::STATEMENTS.iter().find(|(this, _)| *this == name);
        format!("EXPLAIN {}", found.unwrap().1)
    };
    let shards: Vec<i16> = (0..16).collect();
    let (above, up_to) = (vec![0_i64; 16], vec![i64::MAX; 16]);
    let scan = [
        (&shards as &(dyn ToSql + Sync), Type::INT2_ARRAY),
        (&above, Type::INT8_ARRAY),
        (&up_to, Type::INT8_ARRAY),
        (&positions, Type::INT8_ARRAY),
        (&63_i64, Type::INT8),
    ];
    let plan = explain(&f.client, &sql("outbox_scan"), &scan).await;
    assert!(
        plan.contains("Index Scan using outbox_shard_position")
            && plan.contains("using outbox_put_off_user"),
        "{plan}"
    );
    let now = jiff::Timestamp::now();
    let times = vec![now; positions.len()];
    let records = [
        (&positions as &(dyn ToSql + Sync), Type::INT8_ARRAY),
        (&times, Type::TIMESTAMPTZ_ARRAY),
        (&now, Type::TIMESTAMPTZ),
        (&now, Type::TIMESTAMPTZ),
    ];
    let plan = explain(&f.client, &sql("outbox_records"), &records).await;
    assert!(
        plan.contains("_position on events_") && plan.contains("users_pkey"),
        "{plan}"
    );
}

#[tokio::test]
async fn few_held_rows_among_many_are_found_by_their_indexes() {
    let f = Fixture::new().await;
    f.client
        .batch_execute(
            "INSERT INTO outbox (position, shard, user_no, recorded_at)
             SELECT n, n % 16, n % 5000, now() FROM generate_series(1, 20000) n;
             UPDATE outbox SET held_since = now(), not_before = now() WHERE position % 2000 = 0",
        )
        .await
        .unwrap();
    let (above, up_to) = (vec![0_i64; 16], vec![i64::MAX; 16]);
    let shards: Vec<i16> = (0..16).collect();
    let users: Vec<i64> = (1..500).collect();
    let scan = [
        (&shards as &(dyn ToSql + Sync), Type::INT2_ARRAY),
        (&above, Type::INT8_ARRAY),
        (&up_to, Type::INT8_ARRAY),
        (&users, Type::INT8_ARRAY),
        (&63_i64, Type::INT8),
    ];
    let due = [
        (&shards as &(dyn ToSql + Sync), Type::INT2_ARRAY),
        (&users, Type::INT8_ARRAY),
        (&250_i64, Type::INT8),
    ];
    let held = [
        (&1_000_i64 as &(dyn ToSql + Sync), Type::INT8),
        (&1_000_000_i64, Type::INT8),
    ];
    for statistics in [false, true] {
        if statistics {
            f.client.batch_execute("ANALYZE outbox").await.unwrap();
        }
        for (name, parameters, index) in [
            ("outbox_held", &held[..], "outbox_held"),
            ("outbox_due", &due[..], "outbox_put_off_due"),
            ("outbox_scan", &scan[..], "outbox_put_off_user"),
            ("outbox_redriven", &[][..], "outbox_redriven"),
        ] {
            let found = outbox::STATEMENTS.iter().find(|(this, _)| *this == name);
            let sql = format!("EXPLAIN {}", found.unwrap().1);
            let plan = explain(&f.client, &sql, parameters).await;
            assert!(
                plan.contains(index) && !plan.contains("Seq Scan on outbox"),
                "{name}, statistics {statistics}: {plan}"
            );
        }
    }
}

/// Case R9.
#[tokio::test]
async fn r9_rows_are_changed_where_they_lie_however_many_dead_ones_an_old_snapshot_keeps() {
    const ROWS: i64 = 300;
    let f = Fixture::new().await;
    let old = f.session().await;
    old.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        .await
        .unwrap();
    // As a relay that keeps up leaves it to the planner: pages, and no row in them.
    let fill = format!(
        "SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off;
         INSERT INTO outbox (position, shard, user_no, recorded_at) SELECT n, n % 16, n, now() FROM generate_series(1, 30000) n;
         DELETE FROM outbox;
         ANALYZE outbox;
         INSERT INTO outbox (position, shard, user_no, recorded_at) SELECT n, n % 16, n, now() FROM generate_series(30001, 30000 + {ROWS}) n"
    );
    f.client.batch_execute(&fill).await.unwrap();
    let ranges: Vec<Range> = (0..16)
        .map(|shard| Range {
            shard,
            above: 30_000,
            up_to: i64::MAX,
        })
        .collect();
    let rows = outbox::scan(&f.client, &ranges, &[], ROWS).await.unwrap();
    assert_eq!(i64::try_from(rows.len()), Ok(ROWS));
    let (places, positions): (Vec<_>, Vec<_>) =
        rows.iter().map(|row| (row.place, row.position)).unzip();
    let parameters: [(&(dyn ToSql + Sync), Type); 4] = [
        (&places, Type::TID_ARRAY),
        (&positions, Type::INT8_ARRAY),
        (&60.0_f64, Type::FLOAT8),
        (&0_i32, Type::INT4),
    ];
    let [place, position, pause, tries] = parameters;
    for (name, parameters) in [
        ("outbox_delete", &[place.clone(), position.clone()][..]),
        (
            "outbox_hold",
            &[place.clone(), position.clone(), pause.clone()],
        ),
        ("outbox_postpone", &[place, position, tries, pause]),
    ] {
        let found = outbox::STATEMENTS.iter().find(|(this, _)| *this == name);
        let sql = format!("EXPLAIN (ANALYZE, BUFFERS) {}", found.unwrap().1);
        f.client.batch_execute("BEGIN").await.unwrap();
        let plan = explain(&f.client, &sql, parameters).await;
        f.client.batch_execute("ROLLBACK").await.unwrap();
        let touched = touched(&plan);
        // Its page twice, and for an update two indexes of three levels. An index of all rows, dead ones included, has 30,300 entries.
        assert!(touched < 20 * ROWS, "{name}: {touched} pages: {plan}");
        assert!(plan.contains("Tid Scan"), "{name}: {plan}");
    }
    // A relay that begins at the first position walks over the dead rows of a part at most.
    let shards: Vec<i16> = (0..16).collect();
    for (up_to, pages) in [(1_600, 0..1_000), (i64::MAX, 3_000..i64::MAX)] {
        let scan: [(&(dyn ToSql + Sync), Type); 5] = [
            (&shards, Type::INT2_ARRAY),
            (&vec![0_i64; 16], Type::INT8_ARRAY),
            (&vec![up_to; 16], Type::INT8_ARRAY),
            (&Vec::<i64>::new(), Type::INT8_ARRAY),
            (&ROWS, Type::INT8),
        ];
        let found = outbox::STATEMENTS
            .iter()
            .find(|(this, _)| *this == "outbox_scan");
        let sql = format!("EXPLAIN (ANALYZE, BUFFERS) {}", found.unwrap().1);
        let plan = explain(&f.client, &sql, &scan).await;
        assert!(pages.contains(&touched(&plan)), "up to {up_to}: {plan}");
    }
}

/// Pages that a statement looked at, by its plan.
fn touched(plan: &str) -> i64 {
    let pages = plan.split_once("shared hit=").unwrap().1;
    let pages = pages.split(|c: char| !c.is_ascii_digit()).next().unwrap();
    pages.parse().unwrap()
}

/// Rather twice than never: what was confirmed could not be deleted where it had been seen.
#[tokio::test]
async fn a_row_that_has_moved_is_published_again_and_deleted() {
    let f = Fixture::new().await;
    let consumer = f.consumer("#").await;
    f.append([1, 2, 3], "t").await;
    let other = f.session().await;
    // Scans go on, deletes wait.
    other
        .batch_execute("BEGIN; LOCK TABLE outbox IN SHARE MODE")
        .await
        .unwrap();
    let settings = f.settings();
    let metrics = Arc::clone(&settings.metrics);
    let relay = Relay::start(settings);
    consumer.until(10, 3).await;
    other
        .batch_execute("UPDATE outbox SET tries = 0; COMMIT")
        .await
        .unwrap();
    f.until(20, WAITING, 0).await;
    // Once more each, or oftener where the machine is so slow that deletes were given up.
    let published = metric(&metrics, "published");
    assert!(published >= 6, "{published}");
    consumer.until(10, 3).await;
    relay.stop().await;
}

#[tokio::test]
async fn a_count_that_takes_too_long_costs_its_limit_and_not_the_session() {
    let f = Fixture::new().await;
    f.client
        .batch_execute(
            "INSERT INTO outbox (position, shard, user_no, recorded_at) SELECT n, n % 16, n, now() FROM generate_series(1, 200000) n",
        )
        .await
        .unwrap();
    let none = outbox::depth_within(&f.client, Duration::from_millis(1)).await;
    assert_eq!(none.unwrap(), None);
    let all = outbox::depth_within(&f.client, Duration::from_secs(60)).await;
    assert_eq!(all.unwrap().unwrap().waiting, 200_000);
}

async fn explain(client: &Client, sql: &str, parameters: &[(&(dyn ToSql + Sync), Type)]) -> String {
    let rows = client.query_typed(sql, parameters).await.unwrap();
    rows.iter()
        .map(|row| row.get::<_, String>(0) + "\n")
        .collect()
}

#[tokio::test]
async fn a_message_is_the_record_with_what_consumers_need() {
    let f = Fixture::new().await;
    let consumer = f.consumer("#").await;
    let position = append(&f.client, 17, "transfer").await;
    let row = f
        .client
        .query_one("SELECT event_id::text, record, encode(sha256(convert_to(record, 'UTF8')), 'hex') FROM events", &[])
        .await
        .unwrap();
    let relay = f.relay();
    consumer.until(10, 1).await;
    {
        let all = consumer.all();
        let message = &all[0];
        assert_eq!(message.message_id, row.get::<_, String>(0));
        assert_eq!(message.body, row.get::<_, String>(1).into_bytes());
        assert_eq!(message.routing_key, "transfer");
        let expected = [
            ("position", position.to_string()),
            ("sha256", row.get(2)),
            ("subject", "user17".to_owned()),
            ("traceparent", format!("00-{position}")),
            ("usersequence", "1".to_owned()),
        ];
        let headers: Vec<_> = message
            .headers
            .iter()
            .map(|(k, v)| (k.as_str(), v.clone()))
            .collect();
        assert_eq!(headers, expected);
    }
    f.until(5, WAITING, 0).await;
    relay.stop().await;
}

#[tokio::test]
async fn a_wake_is_published_at_once() {
    let f = Fixture::new().await;
    let consumer = f.consumer("#").await;
    let settings = f.settings();
    let handover = settings.handover.clone();
    let relay = Relay::start(settings);
    f.append([1], "t").await;
    handover.wake();
    consumer.until(10, 1).await;
    for n in 2..12 {
        f.append([n], "t").await;
        handover.wake();
        consumer.until(5, usize::try_from(n).unwrap()).await;
    }
    relay.stop().await;
}

#[tokio::test]
async fn r1_an_event_that_commits_late_is_not_skipped() {
    let f = Fixture::new().await;
    let consumer = f.consumer("#").await;
    let relay = f.relay();
    let mut late = f.session().await;
    let open = late.transaction().await.unwrap();
    let first = open
        .query_one("SELECT append(1, 't')", &[])
        .await
        .unwrap()
        .get::<_, i64>(0);
    let later = f
        .append((2..=1_001).chain((0..500).map(|n| 17 + n % 3)), "t")
        .await;
    assert!(first < later[0]);
    consumer.until(30, 1_500).await;
    open.commit().await.unwrap();
    consumer.until(10, 1_501).await;
    f.until(5, WAITING, 0).await;
    assert_eq!(consumer.inversions(), 0);
    relay.stop().await;
}

#[tokio::test]
async fn records_of_many_frames_arrive_whole() {
    let f = Fixture::new().await;
    let consumer = f.consumer("#").await;
    let relay = f.relay();
    // Around one frame, and the longest record; more of them together than the connection's buffer holds.
    let lengths = [16_375, 16_376, 16_377, 32_752, 64 * 1024];
    for (user, length) in (1_i64..).zip(lengths.into_iter().cycle().take(50)) {
        let record = format!("\"{}\"", "x".repeat(length - 2));
        f.client
            .query_one("SELECT append($1, 't', $2)", &[&user, &record])
            .await
            .unwrap();
    }
    consumer.until(30, 50).await;
    for message in consumer.all().iter() {
        assert!(lengths.contains(&message.body.len()));
        let hash = hex::encode(Sha256::digest(&message.body));
        assert_eq!(message.headers["sha256"], hash);
    }
    f.until(10, WAITING, 0).await;
    relay.stop().await;
}

#[tokio::test]
async fn a_url_that_does_not_parse_is_not_repeated() {
    let source = Source::New {
        ledger: "main".to_owned(),
        pattern: "#".to_owned(),
    };
    let url = "amqp://guest:hunter2@host:port/%2f".to_owned().into();
    let error = tail(&url, source, |_| {}).await.unwrap_err();
    assert_eq!(error.to_string(), "broker: AMQP_URL is no AMQP URL");
}

#[tokio::test]
async fn r3_what_waited_for_the_broker_is_drained_without_a_restart() {
    let broker = Breakable::take().await;
    let f = Fixture::at(&broker.url).await;
    let consumer = f.consumer("#").await;
    let relay = f.relay();
    f.append(1..=10, "t").await;
    consumer.until(10, 10).await;
    broker.stop().await;
    f.append((0..1_000).map(|n| 1 + n % 200), "t").await;
    assert_eq!(f.waiting().await, 1_000);
    broker.start().await;
    f.until(30, WAITING, 0).await;
    consumer.until(30, 1_010).await;
    assert_eq!(consumer.inversions(), 0);
    relay.stop().await;
}

#[tokio::test]
async fn r4_published_before_a_queue_is_bound_stays_until_one_is() {
    let f = Fixture::new().await;
    f.append([1, 2, 1], "t").await;
    let relay = f.relay();
    f.until(10, HELD, 2).await;
    assert_eq!(f.waiting().await, 3);
    let held = outbox::held(&f.client).await.unwrap();
    assert_eq!((held[0].routing_key.as_str(), held[0].events), ("t", 2));
    let consumer = f.consumer("#").await;
    consumer.until(20, 3).await;
    f.until(5, WAITING, 0).await;
    assert_eq!(consumer.all().len(), 3, "each once");
    assert_eq!(consumer.inversions(), 0);
    relay.stop().await;
}

#[tokio::test]
async fn r5_one_unroutable_among_a_thousand_is_exactly_the_one_held() {
    let f = Fixture::new().await;
    let consumer = f.consumer("good.#").await;
    f.append(1..=500, "good.a").await;
    let bad = f.append([501], "bad").await;
    f.append(502..=1_000, "good.b").await;
    let mut settings = f.settings();
    settings.config.window = 1_000;
    let metrics = Arc::clone(&settings.metrics);
    let relay = Relay::start(settings);
    consumer.until(30, 999).await;
    f.until(10, WAITING, 1).await;
    f.until(5, HELD, 1).await;
    assert_eq!(f.number("SELECT position FROM outbox").await, bad[0]);
    assert_eq!(metric(&metrics, "confirmed"), 999);
    // Its user is held back; others flow.
    f.append([501, 7], "good.c").await;
    consumer.until(10, 1_000).await;
    f.until(5, WAITING, 2).await;
    relay.stop().await;
}

#[tokio::test]
async fn r5_more_held_users_than_the_relay_remembers_hold_back_nobody_else() {
    const USERS: i64 = 12_000;
    let f = Fixture::new().await;
    let good = f.consumer("good").await;
    for every in [1_i64, 10] {
        let sql = "SELECT append(n, 'bad') FROM generate_series(1, $1::bigint) n WHERE n % $2::bigint = 0";
        f.client.execute(sql, &[&USERS, &every]).await.unwrap();
    }
    f.append(USERS + 1..=USERS + 100, "good").await;
    let relay = f.relay();
    good.until(60, 100).await;
    f.until(30, HELD, USERS).await;
    f.append((USERS + 1)..=(USERS + 100), "good").await;
    good.until(10, 200).await;
    f.until(5, WAITING, USERS + USERS / 10).await;
    // Once there is a queue and their time has come, all of them flow, in order.
    let bad = f.consumer("bad").await;
    f.client
        .execute(
            "UPDATE outbox SET not_before = now() WHERE not_before IS NOT NULL",
            &[],
        )
        .await
        .unwrap();
    bad.until(60, usize::try_from(USERS + USERS / 10).unwrap())
        .await;
    f.until(5, WAITING, 0).await;
    assert_eq!(bad.inversions(), 0);
    relay.stop().await;
}

#[tokio::test]
async fn r6_many_returns_under_load_are_all_matched() {
    let f = Fixture::new().await;
    let consumer = f.consumer("good").await;
    let (mut good, mut bad) = (0, 0);
    for round in 0..20_i64 {
        for user in 1..=50_i64 {
            let unroutable = (round * 7 + user) % 5 == 0;
            append(&f.client, user, if unroutable { "bad" } else { "good" }).await;
            if unroutable {
                bad += 1;
            } else {
                good += 1;
            }
        }
    }
    let mut settings = f.settings();
    settings.config.required = vec!["good".to_owned()];
    let metrics = Arc::clone(&settings.metrics);
    let relay = Relay::start(settings);
    f.until(30, WAITING, 0).await;
    consumer.until(5, good).await;
    assert_eq!(metric(&metrics, "returned"), bad);
    assert_eq!(metric(&metrics, "confirmed"), good as u64);
    assert_eq!(consumer.inversions(), 0);
    relay.stop().await;
}

#[tokio::test]
async fn r7_an_unroutable_event_is_parked_in_the_end_and_can_be_redriven() {
    let f = Fixture::new().await;
    let good = f.consumer("good").await;
    let parked = f.append([1], "bad").await[0];
    f.append([1, 2], "good").await;
    let mut settings = f.settings();
    settings.config.hold_for_s = 2;
    let relay = Relay::start(settings);
    good.until(10, 1).await;
    f.until(20, PARKED, 1).await;
    good.until(10, 2).await;
    f.until(5, WAITING, 0).await;
    let list = outbox::parked(&f.client, 0, 10).await.unwrap();
    assert_eq!(list[0].position, parked);
    assert_eq!(list[0].reason, "unroutable");
    assert_eq!(list[0].subject.as_deref(), Some("user1"));
    let same = "SELECT count(*) FROM outbox_parked p JOIN events e USING (position) WHERE p.body = convert_to(e.record, 'UTF8')";
    assert_eq!(f.number(same).await, 1);

    let bad = f.consumer("bad").await;
    assert!(outbox::redrive(&f.client, parked).await.unwrap());
    assert!(!outbox::redrive(&f.client, parked).await.unwrap());
    bad.until(20, 1).await;
    assert_eq!(bad.all()[0].headers["redriven"], "true");
    f.until(5, WAITING, 0).await;
    assert_eq!(f.number(PARKED).await, 0);
    relay.stop().await;
}

#[tokio::test]
async fn an_event_nobody_has_to_receive_counts_as_delivered() {
    let f = Fixture::new().await;
    f.append([1, 1, 2], "other").await;
    let mut settings = f.settings();
    settings.config.required = vec!["payments.#".to_owned()];
    let relay = Relay::start(settings);
    f.until(10, WAITING, 0).await;
    assert_eq!(f.number(PARKED).await, 0);
    relay.stop().await;
}

/// A runtime of its own, as another process would have.
fn other_process(settings: daybook::relay::RelaySettings) -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    runtime.spawn(async move {
        let _relay = Relay::start(settings);
        std::future::pending::<()>().await;
    });
    runtime
}

async fn leases(metrics: &daybook::telemetry::Metrics, wanted: i64, limit_s: u64) {
    let began = Instant::now();
    while metrics.relay_leases.get() != wanted {
        assert!(
            began.elapsed() < Duration::from_secs(limit_s),
            "{} leases, wanted {wanted}",
            metrics.relay_leases.get()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn r8_a_killed_relay_is_replaced_within_ten_seconds() {
    let f = Fixture::new().await;
    let consumer = f.consumer("#").await;
    let (first, second) = (f.settings(), f.settings());
    let (first_metrics, second_metrics) = (Arc::clone(&first.metrics), Arc::clone(&second.metrics));
    let killed = other_process(first);
    leases(&first_metrics, 16, 10).await;
    let survivor = Relay::start(second);
    leases(&first_metrics, 8, 10).await;
    leases(&second_metrics, 8, 10).await;
    f.append((0..300).map(|n| 1 + n % 64), "t").await;
    // Its sockets close, as the kernel closes those of a killed process.
    killed.shutdown_background();
    f.append((0..300).map(|n| 1 + n % 64), "t").await;
    f.until(10, WAITING, 0).await;
    leases(&second_metrics, 16, 5).await;
    consumer.until(5, 600).await;
    assert_eq!(consumer.inversions(), 0);
    survivor.stop().await;
}

#[tokio::test]
async fn r8_a_frozen_relay_is_replaced_and_reorders_nothing_when_it_wakes() {
    let f = Fixture::new().await;
    let consumer = f.consumer("#").await;
    f.append((0..400).map(|n| 1 + n % 64), "t").await;
    // Deletes wait, so that it has one message of each user out, and keeps them out.
    let other = f.session().await;
    other
        .batch_execute("BEGIN; LOCK TABLE outbox IN SHARE MODE")
        .await
        .unwrap();
    let frozen = program(&f.ledger, &f.database_url)
        .args(["serve", "--roles", "relay"])
        .spawn()
        .unwrap();
    consumer.until(30, 64).await;
    // Its sockets stay open, and nobody pings.
    signal(&frozen, "-STOP").await;
    other.batch_execute("COMMIT").await.unwrap();
    let settings = f.settings();
    let metrics = Arc::clone(&settings.metrics);
    let survivor = Relay::start(settings);
    f.until(30, WAITING, 0).await;
    consumer.until(5, 400).await;
    leases(&metrics, 16, 15).await;
    signal(&frozen, "-CONT").await;
    // That it is back among the relays shows that it has been through all it had.
    leases(&metrics, 8, 30).await;
    f.append((0..200).map(|n| 1 + n % 64), "t").await;
    f.until(15, WAITING, 0).await;
    consumer.until(5, 600).await;
    assert_eq!(consumer.inversions(), 0);
    survivor.stop().await;
    signal(&frozen, "-TERM").await;
    let output = frozen.wait_with_output().await.unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Accepts connections, closes them, and counts.
async fn closed_door() -> (u16, Arc<std::sync::atomic::AtomicUsize>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let visits = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = Arc::clone(&visits);
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            counter.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            drop(socket);
        }
    });
    (port, visits)
}

/// Waits for the third visit, and holds all visits against the time that has passed: at most one for each pause of a second, of
/// each of the visitors.
async fn few_visits(visits: &std::sync::atomic::AtomicUsize, visitors: u64, began: Instant) {
    let count = || visits.load(std::sync::atomic::Ordering::SeqCst);
    while count() < 3 {
        assert!(began.elapsed() < Duration::from_secs(60), "{}", count());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let most = visitors * (1 + began.elapsed().as_secs());
    assert!(
        count() <= usize::try_from(most).unwrap(),
        "{} of {most}",
        count()
    );
}

#[tokio::test]
async fn r12_a_dead_broker_or_database_is_not_hammered_by_the_relay() {
    let f = Fixture::new().await;
    let (amqp_port, amqp_visits) = closed_door().await;
    let (database_port, database_visits) = closed_door().await;
    let mut settings = f.settings();
    settings.amqp_url = format!("amqp://a:b@127.0.0.1:{amqp_port}/%2f").into();
    settings.database_url = format!("postgres://a:b@127.0.0.1:{database_port}/x").into();
    let began = Instant::now();
    let relay = Relay::start(settings);
    few_visits(&amqp_visits, 1, began).await;
    few_visits(&database_visits, 1, began).await;
    relay.stop().await;
}

#[tokio::test]
async fn r12_a_dead_database_is_not_hammered_by_the_keeper() {
    let (port, visits) = closed_door().await;
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    let began = Instant::now();
    let keeper = tokio::spawn(daybook::keeper::run(
        daybook::keeper::Settings {
            database_url: format!("postgres://a:b@127.0.0.1:{port}/x").into(),
            ledger: "x".to_owned(),
            metrics: Arc::default(),
        },
        stopped,
    ));
    few_visits(&visits, 1, began).await;
    keeper.abort();
}

#[tokio::test]
async fn r12_a_dead_database_is_not_hammered_by_lanes_that_are_asked_all_the_time() {
    let (port, visits) = closed_door().await;
    let settings = daybook::commit::Settings {
        database_url: format!("postgres://a:b@127.0.0.1:{port}/x").into(),
        ledger: "x".to_owned(),
        lanes: 1,
        ..crate::commit::settings(&crate::ledger::Ledger::new().await)
    };
    let began = Instant::now();
    let (lanes, drain) = daybook::commit::Lanes::start(&settings);
    let asking = tokio::spawn(async move {
        for n in 0_u64.. {
            let deadline = tokio::time::Instant::now() + Duration::from_secs(5);
            let draft = crate::commit::deposit("alice", &format!("k{n}"), 1);
            let outcome = lanes.submit(draft, deadline).await;
            assert!(matches!(outcome, daybook::commit::Outcome::Unavailable(_)));
        }
    });
    few_visits(&visits, 1, began).await;
    asking.abort();
    drain.finish().await;
}

#[tokio::test]
async fn r15_two_relays_and_interleaved_commits_make_no_inversion() {
    let f = Fixture::new().await;
    let consumer = f.consumer("#").await;
    let relays = [f.relay(), f.relay()];
    let mut writers = Vec::new();
    for writer in 0..8_i64 {
        let client = f.session().await;
        writers.push(tokio::spawn(async move {
            for n in 0..150_i64 {
                let user = 1 + (n * 7 + writer * 13) % 40;
                // The position is drawn well before the commit, so positions and commits cross between users.
                let sql = format!(
                    "BEGIN; SELECT append({user}, 't'); SELECT pg_sleep(random() * 0.01); COMMIT"
                );
                client.batch_execute(&sql).await.unwrap();
            }
        }));
    }
    // Relays come and go meanwhile, so that shards change hands.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let third = f.relay();
    for writer in writers {
        writer.await.unwrap();
    }
    third.stop().await;
    f.until(30, WAITING, 0).await;
    consumer.until(10, 1_200).await;
    assert_eq!(consumer.inversions(), 0);
    for relay in relays {
        relay.stop().await;
    }
}

#[tokio::test]
async fn r16_one_refused_message_is_parked_and_the_others_are_delivered() {
    let broker = Breakable::take().await;
    broker.configure(Some(4_000)).await;
    let f = Fixture::at(&broker.url).await;
    let consumer = f.consumer("#").await;
    f.append(1..=200, "t").await;
    let refused: i64 = f
        .client
        .query_one("SELECT append(201, 't', repeat('x', 5000))", &[])
        .await
        .unwrap()
        .get(0);
    f.append(202..=400, "t").await;
    f.append([201], "t").await;
    let settings = f.settings();
    let metrics = Arc::clone(&settings.metrics);
    let relay = Relay::start(settings);
    consumer.until(60, 400).await;
    f.until(10, WAITING, 0).await;
    let parked = outbox::parked(&f.client, 0, 10).await.unwrap();
    assert_eq!(parked.len(), 1);
    assert_eq!(parked[0].position, refused);
    assert!(
        parked[0].reason.contains("PRECONDITION"),
        "{}",
        parked[0].reason
    );
    assert_eq!(metric(&metrics, "refused"), 5);
    relay.stop().await;
    broker.configure(None).await;
}

#[tokio::test]
async fn leases_are_shared_fairly_and_given_up_at_the_stop() {
    let f = Fixture::new().await;
    let consumer = f.consumer("#").await;
    let all = [f.settings(), f.settings(), f.settings()];
    let metrics = all.clone().map(|settings| settings.metrics);
    let [a, b, c] = all.map(Relay::start);
    let shares = || {
        metrics
            .iter()
            .map(|m| m.relay_leases.get())
            .collect::<Vec<_>>()
    };
    let began = Instant::now();
    while shares().iter().sum::<i64>() != 16 || shares().iter().any(|share| *share > 6) {
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", shares());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    f.append((0..320).map(|n| 1 + n % 64), "t").await;
    b.stop().await;
    c.stop().await;
    leases(&metrics[0], 16, 5).await;
    consumer.until(10, 320).await;
    f.until(5, WAITING, 0).await;
    assert_eq!(consumer.inversions(), 0);
    assert_eq!(consumer.all().len(), 320, "a stop repeats nothing");
    a.stop().await;
}

#[tokio::test]
async fn lost_database_sessions_lose_and_reorder_nothing() {
    let f = Fixture::new().await;
    let consumer = f.consumer("#").await;
    let relays = [f.relay(), f.relay()];
    for round in 0..3 {
        f.append((0..400).map(|n| 1 + (n + round) % 64), "t").await;
        f.client
            .execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                 WHERE datname = current_database() AND application_name = 'daybook relay'",
                &[],
            )
            .await
            .unwrap();
    }
    f.until(30, WAITING, 0).await;
    consumer.until(5, 1_200).await;
    assert_eq!(consumer.inversions(), 0);
    for relay in relays {
        relay.stop().await;
    }
}

#[tokio::test]
async fn a_tail_shows_what_is_there_and_leaves_it_there() {
    let f = Fixture::new().await;
    let queue = f.queue("#").await;
    f.append([1, 2, 1], "t").await;
    let relay = f.relay();
    f.until(10, WAITING, 0).await;
    for acknowledge in [false, false, true] {
        let source = Source::Queue {
            name: queue.clone(),
            acknowledge,
        };
        assert_eq!(
            shown(&f, source, 3, PATIENCE).await.len(),
            3,
            "{acknowledge}"
        );
    }
    let source = Source::Queue {
        name: queue,
        acknowledge: false,
    };
    assert_eq!(
        shown(&f, source, 1, Duration::from_secs(2)).await.len(),
        0,
        "taken out before"
    );
    let new = Source::New {
        ledger: f.ledger.clone(),
        pattern: "a.*".to_owned(),
    };
    // Again and again: what is published before the tail has bound its queue is not for it.
    let late = async {
        loop {
            f.append([4], "b").await;
            f.append([3], "a.b").await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let new = tokio::select! {
        new = shown(&f, new, 1, PATIENCE) => new,
        () = late => unreachable!("it never ends"),
    };
    assert_eq!(new, ["a.b"]);
    relay.stop().await;
}

/// How long a tail may take to show what is there.
const PATIENCE: Duration = Duration::from_secs(60);

/// Routing keys of the messages that a tail shows within a time, or until there are enough.
async fn shown(f: &Fixture, source: Source, enough: usize, patience: Duration) -> Vec<String> {
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let url = f.amqp_url.clone();
    let task = tokio::spawn(async move {
        tail(&url, source, |message| {
            let _ = sender.send(message.routing_key);
        })
        .await
    });
    let mut keys = Vec::new();
    let deadline = tokio::time::Instant::now() + patience;
    while keys.len() < enough
        && let Ok(Some(key)) = tokio::time::timeout_at(deadline, receiver.recv()).await
    {
        keys.push(key);
    }
    // The last acknowledgement is on its way.
    tokio::time::sleep(Duration::from_millis(100)).await;
    task.abort();
    keys
}
