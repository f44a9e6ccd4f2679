//! The commit against a real Postgres: lanes, locks, duplicates, faults.

use crate::ledger::Ledger;
use crate::proxy::{Loss, Proxy};
use daybook::commit::{Lanes, Outcome, Settings, Unavailable, record};
use daybook::domain::{
    Account, Address, Amount, AmountExpr, Asset, Draft, Guard, IdempotencyKey, Move, Portion,
    Principal, Rejection, Scope, Subject, Target, TypeName, Version,
};
use daybook::store::ledger::STATEMENTS;
use daybook::store::session::{self, Purpose};
use daybook::telemetry::Metrics;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// What lanes on this ledger need.
pub fn settings(ledger: &Ledger) -> Settings {
    Settings {
        database_url: ledger.url.clone(),
        ledger: ledger.name.clone(),
        lanes: 4,
        queue: 4_096,
        queue_bytes: 16 * 1024 * 1024,
        batch_max: 256,
        dedupe_days: 90,
        committed: daybook::store::handover::Handover::default(),
        metrics: Arc::new(Metrics::new()),
    }
}

fn user(name: &str) -> Account {
    Account {
        address: Address::from_segments(["users", name, "available"]).unwrap(),
        owner: Subject::parse(name),
        guard: Guard::Floor(Amount::ZERO),
        opened_by_credit: true,
    }
}

fn world() -> Account {
    Account {
        address: Address::parse("world").unwrap(),
        owner: None,
        guard: Guard::None,
        opened_by_credit: true,
    }
}

/// A draft of `subject` that moves `amount` from the first account to the others in equal parts.
fn draft(subject: &str, key: &str, amount: i128, from: Account, to: Vec<Account>) -> Draft {
    let euros = Asset::from_canonical("EUR/2");
    let each = Amount::new(amount / i128::try_from(to.len()).unwrap()).unwrap();
    let targets = to
        .into_iter()
        .enumerate()
        .map(|(index, account)| Target {
            account,
            portion: if index == 0 {
                Portion::Rest
            } else {
                Portion::Amount(AmountExpr::Known(each))
            },
        })
        .collect();
    Draft {
        subject: Subject::parse(subject).unwrap(),
        principal: Principal {
            subject: Subject::parse(subject).unwrap(),
            issuer: "test".into(),
            token_id: format!("token-{subject}").into(),
            issued_at: 1,
            expires_at: i64::MAX,
            scopes: [Scope::WriteAny].into_iter().collect(),
        },
        event_type: TypeName::parse("transfer").unwrap(),
        schema: Version::parse("1.0").unwrap(),
        input_schema: None,
        time: None,
        expected_sequence: None,
        key: IdempotencyKey::parse(key).unwrap(),
        fingerprint: record::hash(&format!("{subject}{amount}{targets:?}")),
        input: serde_json::value::RawValue::from_string("{}".to_owned()).unwrap(),
        passes_freeze: false,
        unknown_account: None,
        failed_check: None,
        moves: vec![Move {
            asset: euros,
            amount: AmountExpr::Known(Amount::new(amount).unwrap()),
            from: vec![from],
            to: targets,
        }],
        unique: Vec::new(),
        traceparent: None,
    }
}

/// A draft that pays from `world`.
pub fn deposit(subject: &str, key: &str, amount: i128) -> Draft {
    draft(subject, key, amount, world(), vec![user(subject)])
}

/// A deadline no test meets.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

#[tokio::test]
async fn an_event_is_stored_chained_and_replayed() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&settings(&ledger));
    let Outcome::Created(first) = lanes.submit(deposit("alice", "k1", 1_000), soon()).await else {
        panic!("not created")
    };
    let Outcome::Created(second) = lanes
        .submit(
            draft("alice", "k2", 300, user("alice"), vec![user("bob")]),
            soon(),
        )
        .await
    else {
        panic!("not created")
    };
    let folded = record::read(&second.record).unwrap();
    assert_eq!(folded.usersequence, "2");
    assert_eq!(
        folded.previoushash,
        hex::encode(record::hash(&first.record))
    );
    let Outcome::Replayed(again) = lanes.submit(deposit("alice", "k1", 1_000), soon()).await else {
        panic!("not replayed")
    };
    assert_eq!(
        (again.record, again.event_id),
        (first.record, first.event_id)
    );
    let reused = lanes.submit(deposit("alice", "k1", 2_000), soon()).await;
    assert_eq!(reused, Outcome::Rejected(Rejection::KeyReused));
    let poor = lanes
        .submit(
            draft("bob", "k1", 301, user("bob"), vec![user("alice")]),
            soon(),
        )
        .await;
    assert!(
        matches!(poor, Outcome::Rejected(Rejection::InsufficientFunds { .. })),
        "{poor:?}"
    );
    drain.finish().await;
    assert_eq!(ledger.value::<i64>("SELECT count(*) FROM outbox").await, 2);
    ledger.finish().await;
}

/// Drafts at random between ten users: one source, one to nine targets.
fn random_draft(worker: usize, round: usize) -> Draft {
    let name = |n: usize| format!("user-{n}");
    let from = rand::random_range(0..10);
    let mut to: Vec<usize> = (0..10).filter(|other| *other != from).collect();
    let count = rand::random_range(1..=9);
    for index in 0..count {
        let other = rand::random_range(index..to.len());
        to.swap(index, other);
    }
    to.truncate(count);
    let subject = name(rand::random_range(0..10));
    let amount = rand::random_range(10..500);
    draft(
        &subject,
        &format!("{worker}-{round}"),
        amount,
        user(&name(from)),
        to.into_iter().map(|other| user(&name(other))).collect(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn m9_no_deadlock_reaches_a_client() {
    let ledger = Ledger::new().await;
    let settings = settings(&ledger);
    let pods = [Lanes::start(&settings), Lanes::start(&settings)];
    for n in 0..10 {
        let outcome = pods[0]
            .0
            .submit(deposit(&format!("user-{n}"), "fund", 1_000_000), soon())
            .await;
        assert!(matches!(outcome, Outcome::Created(_)));
    }
    let workers = (0..64).map(|worker| {
        let lanes = pods[worker % 2].0.clone();
        tokio::spawn(async move {
            let mut created: i64 = 0;
            for round in 0..15 {
                let outcome = lanes
                    .submit(
                        random_draft(worker, round),
                        Instant::now() + Duration::from_secs(120),
                    )
                    .await;
                assert!(matches!(outcome, Outcome::Created(_)), "{outcome:?}");
                created += 1;
            }
            created
        })
    });
    let mut created = 10;
    for worker in workers.collect::<Vec<_>>() {
        created += worker.await.unwrap();
    }
    for (_, drain) in pods {
        drain.finish().await;
    }
    assert_eq!(
        ledger.value::<i64>("SELECT count(*) FROM events").await,
        created
    );
    let total: String = ledger.value("SELECT sum(amount)::text FROM balances").await;
    assert_eq!(total, "10000000");
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i3_a_hundred_parallel_posts_with_one_key_from_two_pods_are_one_event() {
    let ledger = Ledger::new().await;
    let settings = settings(&ledger);
    let pods = [Lanes::start(&settings), Lanes::start(&settings)];
    let posts = (0..100).map(|n: usize| {
        let lanes = pods[n % 2].0.clone();
        tokio::spawn(async move { lanes.submit(deposit("carol", "same", 700), soon()).await })
    });
    let (mut created, mut replayed) = (0, 0);
    for post in posts.collect::<Vec<_>>() {
        match post.await.unwrap() {
            Outcome::Created(_) => created += 1,
            Outcome::Replayed(_) => replayed += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((created, replayed), (1, 99));
    for (_, drain) in pods {
        drain.finish().await;
    }
    assert_eq!(ledger.value::<i64>("SELECT count(*) FROM events").await, 1);
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d7_first_events_and_first_credits_from_two_pods_all_count() {
    let ledger = Ledger::new().await;
    let settings = settings(&ledger);
    let pods = [Lanes::start(&settings), Lanes::start(&settings)];
    let mut posts = Vec::new();
    for n in 0..40_usize {
        let lanes = pods[n % 2].0.clone();
        // Twenty new writers, each from both pods at once, all paying into one new account.
        let mut draft = draft(
            &format!("new-{}", n / 2),
            &format!("k{}", n % 2),
            10,
            world(),
            vec![user("dora")],
        );
        draft.principal.token_id = "t".into();
        posts.push(tokio::spawn(
            async move { lanes.submit(draft, soon()).await },
        ));
    }
    for post in posts {
        let outcome = post.await.unwrap();
        assert!(matches!(outcome, Outcome::Created(_)), "{outcome:?}");
    }
    for (_, drain) in pods {
        drain.finish().await;
    }
    assert_eq!(
        ledger
            .value::<String>("SELECT sum(amount)::text FROM balances")
            .await,
        "400"
    );
    let forks: i64 = ledger
        .value("SELECT count(*) FROM (SELECT FROM events GROUP BY user_no, sequence HAVING count(*) > 1) AS forks")
        .await;
    assert_eq!(forks, 0);
    ledger.finish().await;
}

#[tokio::test]
async fn i2_a_refusal_does_not_burn_its_key() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&settings(&ledger));
    let pay = || draft("erin", "pay", 500, user("erin"), vec![user("frank")]);
    let refused = lanes.submit(pay(), soon()).await;
    assert!(matches!(
        refused,
        Outcome::Rejected(Rejection::InsufficientFunds { .. })
    ));
    assert!(matches!(
        lanes.submit(deposit("erin", "fund", 500), soon()).await,
        Outcome::Created(_)
    ));
    assert!(matches!(
        lanes.submit(pay(), soon()).await,
        Outcome::Created(_)
    ));
    drain.finish().await;
    ledger.finish().await;
}

#[tokio::test]
async fn i1_a_key_with_quotation_marks_of_its_own_is_found_again() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&settings(&ledger));
    let outcome = lanes.submit(deposit("olga", "\"\"x\"\"", 5), soon()).await;
    assert!(matches!(outcome, Outcome::Created(_)), "{outcome:?}");
    let outcome = lanes.submit(deposit("olga", "\"\"x\"\"", 5), soon()).await;
    assert!(matches!(outcome, Outcome::Replayed(_)), "{outcome:?}");
    let outcome = lanes.submit(deposit("olga", "x", 5), soon()).await;
    assert!(
        matches!(outcome, Outcome::Created(_)),
        "another key: {outcome:?}"
    );
    drain.finish().await;
    ledger.finish().await;
}

/// The world owes what all users hold together: more digits than one amount has. Verification, at the end, must bear it.
#[tokio::test]
async fn an_account_without_a_guard_may_owe_more_than_one_amount() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&settings(&ledger));
    let most = Amount::MAX.units();
    for subject in ["rich", "richer", "richest"] {
        let outcome = lanes.submit(deposit(subject, "all", most), soon()).await;
        assert!(matches!(outcome, Outcome::Created(_)), "{outcome:?}");
    }
    drain.finish().await;
    ledger.finish().await;
}

#[tokio::test]
async fn i5_ten_replays_leave_one_outbox_row() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&settings(&ledger));
    for n in 0..11 {
        let outcome = lanes.submit(deposit("gina", "once", 5), soon()).await;
        assert_eq!(
            matches!(outcome, Outcome::Created(_)),
            n == 0,
            "{outcome:?}"
        );
    }
    drain.finish().await;
    assert_eq!(ledger.value::<i64>("SELECT count(*) FROM outbox").await, 1);
    ledger.finish().await;
}

#[tokio::test]
async fn numbers_do_not_outlive_their_session() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&Settings {
        lanes: 1,
        ..settings(&ledger)
    });
    for (subject, key) in [("nora", "a"), ("olaf", "b"), ("nora", "c"), ("olaf", "d")] {
        let outcome = lanes.submit(deposit(subject, key, 5), soon()).await;
        assert!(matches!(outcome, Outcome::Created(_)), "{outcome:?}");
    }
    // A failover that lost the latest commits, and a history that then went another way: the accounts have changed numbers.
    ledger
        .admin
        .batch_execute(
            "SET session_replication_role = replica;
             CREATE TEMP TABLE swapped AS SELECT a.account_no AS number, b.account_no AS other FROM accounts a, accounts b
             WHERE a.owner IS NOT NULL AND b.owner IS NOT NULL AND a.account_no <> b.account_no;
             UPDATE postings p SET account_no = other FROM swapped WHERE p.account_no = number;
             UPDATE accounts SET address = 'x' || address WHERE owner IS NOT NULL;
             UPDATE accounts SET (address, owner) = (
                 SELECT substr(o.address, 2), o.owner FROM accounts o JOIN swapped ON o.account_no = other
                 WHERE number = accounts.account_no)
             WHERE owner IS NOT NULL;
             SET session_replication_role = origin;
             SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE datname = current_database() AND application_name = 'daybook lane'",
        )
        .await
        .unwrap();
    let outcome = lanes.submit(deposit("nora", "e", 7), soon()).await;
    assert!(matches!(outcome, Outcome::Created(_)), "{outcome:?}");
    drain.finish().await;
    // Which verifies it.
    ledger.finish().await;
}

/// A row lock that another session holds.
async fn hold(ledger: &Ledger, sql: &str) -> tokio_postgres::Client {
    let holder = crate::ledger::superuser(&ledger.name).await;
    holder
        .batch_execute(&format!("SET search_path = {}; BEGIN; {sql}", ledger.name))
        .await
        .unwrap();
    holder
}

#[tokio::test]
async fn m13_what_a_lock_protects_is_read_after_the_wait_for_it() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&settings(&ledger));
    let first = lanes.submit(deposit("mona", "first", 5), soon()).await;
    assert!(matches!(first, Outcome::Created(_)), "{first:?}");
    // Another pod is about to commit an event under the key `late`, and has the user's lock.
    let other = hold(
        &ledger,
        "SELECT FROM users WHERE subject = 'mona' FOR NO KEY UPDATE;
         INSERT INTO events (position, user_no, sequence, event_id, type, writer, idempotency_key, fingerprint, record, recorded_at,
                             effective_at)
         SELECT nextval('events_position_seq'), user_no, 2, gen_random_uuid(), type, writer, 'late',
             fingerprint, record, clock_timestamp(), effective_at FROM events",
    )
    .await;
    let waiting = tokio::spawn(async move {
        let outcome = lanes.submit(deposit("mona", "late", 5), soon()).await;
        (lanes, outcome)
    });
    let blocked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    crate::ledger::eventually("the lane waits for the lock", async || {
        ledger.value::<i64>(blocked).await == 1
    })
    .await;
    other.batch_execute("COMMIT").await.unwrap();
    let (lanes, outcome) = waiting.await.unwrap();
    assert!(matches!(outcome, Outcome::Replayed(_)), "{outcome:?}");
    drop(lanes);
    drain.finish().await;
    ledger
        .admin
        .batch_execute(
            "SET session_replication_role = replica; DELETE FROM events WHERE idempotency_key = 'late'",
        )
        .await
        .unwrap();
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn m10_a_locked_user_is_refused_alone_and_in_bounded_time() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&Settings {
        lanes: 1,
        ..settings(&ledger)
    });
    for subject in ["slow", "quick"] {
        assert!(matches!(
            lanes.submit(deposit(subject, "a", 5), soon()).await,
            Outcome::Created(_)
        ));
    }
    let holder = hold(
        &ledger,
        "SELECT FROM users WHERE subject = 'slow' FOR UPDATE",
    )
    .await;
    let posts = ["slow", "quick", "hugo", "ida"].map(|subject| {
        let lanes = lanes.clone();
        tokio::spawn(async move { lanes.submit(deposit(subject, "b", 5), soon()).await })
    });
    for (post, stuck) in posts.into_iter().zip([true, false, false, false]) {
        let outcome = post.await.unwrap();
        if stuck {
            assert_eq!(outcome, Outcome::Unavailable(Unavailable::Database));
        } else {
            assert!(matches!(outcome, Outcome::Created(_)), "{outcome:?}");
        }
    }
    holder.batch_execute("ROLLBACK").await.unwrap();
    assert!(matches!(
        lanes.submit(deposit("slow", "b", 5), soon()).await,
        Outcome::Created(_)
    ));
    drain.finish().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_locked_elsewhere_holds_up_only_who_needs_it() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&Settings {
        lanes: 2,
        ..settings(&ledger)
    });
    let first = lanes.submit(deposit("slow", "a", 500), soon()).await;
    assert!(matches!(first, Outcome::Created(_)), "{first:?}");
    let lock = "SELECT FROM users WHERE subject = 'slow' FOR UPDATE";
    let holder = hold(&ledger, lock).await;
    let submit = |draft: Draft| {
        let lanes = lanes.clone();
        tokio::spawn(async move { lanes.submit(draft, soon()).await })
    };
    let mut held = vec![submit(deposit("slow", "b", 5))];
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
    crate::ledger::eventually("the batch waits", async || {
        ledger.value::<i64>(waiting).await > 0
    })
    .await;
    // More of the same, behind it; a lane that took one of them would wait as well.
    for number in 0..5 {
        let key = format!("more-{number}");
        let slow = vec![user("slow")];
        held.push(submit(deposit("slow", &key, 5)));
        held.push(submit(draft("rich", &key, 5, world(), slow)));
    }
    let others = (0..20).map(|number| {
        let name = format!("other-{number}");
        lanes.submit(deposit(&name, "k", 5), soon())
    });
    for outcome in futures_util::future::join_all(others).await {
        assert!(matches!(outcome, Outcome::Created(_)), "{outcome:?}");
    }
    let of_slow = "SELECT sequence FROM users WHERE subject = 'slow'";
    assert_eq!(ledger.value::<i64>(of_slow).await, 1, "it is still locked");
    holder.batch_execute("ROLLBACK").await.unwrap();
    let mut created = 1;
    for command in held {
        match command.await.unwrap() {
            Outcome::Created(_) => created += 1,
            // It may have waited for the lock for as long as one does.
            Outcome::Unavailable(Unavailable::Database) => {}
            outcome => panic!("{outcome:?}"),
        }
    }
    let stored = "SELECT count(*) FROM events WHERE type = 'transfer' AND user_no IN
                  (SELECT user_no FROM users WHERE subject IN ('slow', 'rich'))";
    assert_eq!(ledger.value::<i64>(stored).await, created);
    drain.finish().await;
    ledger.finish().await;
}

#[tokio::test]
async fn rows_are_locked_in_order_from_the_end_of_their_entries_and_updated_where_they_lie() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&settings(&ledger));
    for number in 0..50 {
        let outcome = lanes.submit(deposit(&format!("user-{number}"), "k", 5), soon());
        assert!(matches!(outcome.await, Outcome::Created(_)));
    }
    drain.finish().await;
    let (client, _driver) = session::connect(&ledger.url, &ledger.name, Purpose::Lane)
        .await
        .unwrap();
    for (name, values, wanted) in [
        (
            "lock_users",
            "'{2,1}'",
            &[
                "Nested Loop",
                "Sort Key: t",
                "LockRows",
                "Index Scan Backward using users_pkey",
                "Index Cond: ((user_no >= t.user_no) AND (user_no <= t.user_no))",
            ][..],
        ),
        (
            "lock_balances",
            "'{2,1}', '{EUR/2,EUR/2}'",
            &[
                "Nested Loop",
                "Sort Key: t.account_no, t.asset COLLATE \"C\"",
                "LockRows",
                "Index Scan Backward using balances_pkey",
                "Index Cond: ((ROW(account_no, asset) >= ROW(t.account_no, t.asset)) AND (ROW(account_no, asset) <= ROW(t.account_no, t.asset)))",
            ],
        ),
        (
            "update_users",
            "'{\"(0,1)\"}', '{1}', '{1}', '{2}', '{\"\\\\x00\"}', '{epoch}'",
            &["Tid Scan on"],
        ),
        (
            "update_balances",
            "'{\"(0,1)\"}', '{1}', '{1}', '{2}'",
            &["Tid Scan on"],
        ),
    ] {
        let begin = format!("-- {name}\n");
        let mut statements = STATEMENTS.iter();
        let sql = statements.find(|sql| sql.starts_with(&begin)).unwrap();
        let prepare = format!("PREPARE {name} AS {sql}");
        client.batch_execute(&prepare).await.unwrap();
        for statistics in [false, true] {
            if statistics {
                ledger.admin.batch_execute("ANALYZE").await.unwrap();
            }
            let explain = format!("EXPLAIN EXECUTE {name} ({values})");
            let rows = client.query(&explain, &[]).await.unwrap();
            let plan: String = rows
                .iter()
                .map(|row| row.get::<_, String>(0) + "\n")
                .collect();
            for part in wanted {
                assert!(plan.contains(part), "{name}: no {part} in {plan}");
            }
        }
    }
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_counts_once_for_a_row_that_it_needs_twice() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&Settings {
        lanes: 1,
        queue: 8,
        ..settings(&ledger)
    });
    let funded = lanes.submit(deposit("slow", "a", 500), soon()).await;
    assert!(matches!(funded, Outcome::Created(_)), "{funded:?}");
    let lock = "SELECT FROM users WHERE subject = 'slow' FOR UPDATE";
    let holder = hold(&ledger, lock).await;
    // The subject is also the owner of what is debited.
    let pay = |key: &str| draft("slow", key, 5, user("slow"), vec![user("other")]);
    let begun = {
        let (lanes, first) = (lanes.clone(), pay("b"));
        tokio::spawn(async move { lanes.submit(first, soon()).await })
    };
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
    crate::ledger::eventually("the batch waits", async || {
        ledger.value::<i64>(waiting).await > 0
    })
    .await;
    // A quarter of eight may wait for one row.
    let (c, d, e) = futures_util::join!(
        lanes.submit(pay("c"), soon()),
        lanes.submit(pay("d"), soon()),
        async {
            let refused = lanes.submit(pay("e"), soon()).await;
            holder.batch_execute("ROLLBACK").await.unwrap();
            refused
        },
    );
    let full = Outcome::Unavailable(Unavailable::QueueFull);
    assert_eq!(e, full);
    assert!(c != full && d != full, "{c:?}, {d:?}");
    begun.await.unwrap();
    drain.finish().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_and_a_passed_deadline_are_503_and_write_nothing() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&Settings {
        lanes: 1,
        queue: 1,
        ..settings(&ledger)
    });
    assert!(matches!(
        lanes.submit(deposit("slow", "a", 5), soon()).await,
        Outcome::Created(_)
    ));
    let holder = hold(
        &ledger,
        "SELECT FROM users WHERE subject = 'slow' FOR UPDATE",
    )
    .await;
    let begun = {
        let lanes = lanes.clone();
        tokio::spawn(async move { lanes.submit(deposit("slow", "b", 5), soon()).await })
    };
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
    crate::ledger::eventually("the batch waits", async || {
        ledger.value::<i64>(waiting).await > 0
    })
    .await;
    let queued = lanes.submit(
        deposit("slow", "c", 5),
        Instant::now() + Duration::from_millis(50),
    );
    let full = lanes.submit(deposit("slow", "d", 5), soon());
    let (queued, full) = futures_util::join!(queued, full);
    assert_eq!(queued, Outcome::Unavailable(Unavailable::DeadlinePassed));
    assert_eq!(full, Outcome::Unavailable(Unavailable::QueueFull));
    holder.batch_execute("ROLLBACK").await.unwrap();
    begun.await.unwrap();
    drain.finish().await;
    let stored: i64 = ledger
        .value("SELECT count(*) FROM events WHERE idempotency_key IN ('c', 'd')")
        .await;
    assert_eq!(stored, 0);
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d1_one_command_the_database_refuses_fails_alone() {
    let ledger = Ledger::new().await;
    ledger
        .admin
        .batch_execute(
            "CREATE FUNCTION refuse_bad() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               IF NEW.idempotency_key = 'bad' THEN RAISE EXCEPTION 'bad'; END IF;
               RETURN NEW; END $$;
             CREATE TRIGGER refuse_bad BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION refuse_bad()",
        )
        .await
        .unwrap();
    let (lanes, drain) = Lanes::start(&Settings {
        lanes: 1,
        ..settings(&ledger)
    });
    let posts: Vec<_> = (0..20)
        .map(|n| {
            let key = if n == 7 {
                "bad".to_owned()
            } else {
                format!("k{n}")
            };
            let lanes = lanes.clone();
            tokio::spawn(async move { lanes.submit(deposit("jack", &key, 1), soon()).await })
        })
        .collect();
    for (n, post) in posts.into_iter().enumerate() {
        let outcome = post.await.unwrap();
        if n == 7 {
            assert_eq!(outcome, Outcome::Failed);
        } else {
            assert!(matches!(outcome, Outcome::Created(_)), "{outcome:?}");
        }
    }
    drain.finish().await;
    assert_eq!(ledger.value::<i64>("SELECT count(*) FROM events").await, 19);
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_killed_in_the_middle_of_a_batch_costs_no_answer() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&Settings {
        lanes: 1,
        ..settings(&ledger)
    });
    assert!(matches!(
        lanes.submit(deposit("kim", "a", 5), soon()).await,
        Outcome::Created(_)
    ));
    let holder = hold(
        &ledger,
        "SELECT FROM users WHERE subject = 'kim' FOR UPDATE",
    )
    .await;
    let post = {
        let lanes = lanes.clone();
        tokio::spawn(async move { lanes.submit(deposit("kim", "b", 5), soon()).await })
    };
    let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                WHERE wait_event_type = 'Lock' AND application_name = 'daybook lane' AND datname = current_database()";
    crate::ledger::eventually("a waiting backend was killed", async || {
        ledger.value::<i64>(kill).await > 0
    })
    .await;
    holder.batch_execute("ROLLBACK").await.unwrap();
    assert!(matches!(post.await.unwrap(), Outcome::Created(_)));
    drain.finish().await;
    assert_eq!(ledger.value::<i64>("SELECT count(*) FROM events").await, 2);
    ledger.finish().await;
}

/// Posts once for a known and once for a new user through a proxy that loses the COMMIT.
async fn lose_commit(loss: Loss) {
    for known in [true, false] {
        let ledger = Ledger::new().await;
        let proxy = Proxy::start(&ledger.url, loss).await;
        let (lanes, drain) = Lanes::start(&Settings {
            database_url: proxy.url.clone(),
            lanes: 1,
            ..settings(&ledger)
        });
        let warm_up = if known { "lou" } else { "other" };
        assert!(matches!(
            lanes.submit(deposit(warm_up, "a", 5), soon()).await,
            Outcome::Created(_)
        ));
        proxy.arm();
        let post = {
            let lanes = lanes.clone();
            tokio::spawn(async move { lanes.submit(deposit("lou", "b", 5), soon()).await })
        };
        proxy.lost.notified().await;
        if loss == Loss::Delayed {
            // The second run meets what the first still holds: the user's lock, or his uncommitted row.
            let waiting = "SELECT count(*) FROM pg_stat_activity
                           WHERE wait_event_type = 'Lock' AND datname = current_database()";
            crate::ledger::eventually("the second run waits", async || {
                ledger.value::<i64>(waiting).await > 0
            })
            .await;
            proxy.release();
        }
        let outcome = post.await.unwrap();
        assert!(
            matches!(outcome, Outcome::Created(_)),
            "{loss:?} known={known}: {outcome:?}"
        );
        let again = lanes.submit(deposit("lou", "b", 5), soon()).await;
        assert!(matches!(again, Outcome::Replayed(_)), "{again:?}");
        drain.finish().await;
        assert_eq!(ledger.value::<i64>("SELECT count(*) FROM events").await, 2);
        ledger.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn d8_a_commit_whose_answer_is_lost_is_found_again() {
    lose_commit(Loss::Answer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d8_a_commit_that_is_still_on_its_way_is_waited_for() {
    lose_commit(Loss::Delayed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d8_a_commit_that_never_arrived_is_run_again() {
    lose_commit(Loss::Request).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d8_a_refusal_behind_a_lost_commit_claims_nothing() {
    let ledger = Ledger::new().await;
    ledger
        .admin
        .batch_execute(
            "CREATE TABLE broken (at timestamptz);
             CREATE FUNCTION refuse_b() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
             AS $$ BEGIN
               IF NEW.idempotency_key = 'b' AND EXISTS (SELECT FROM broken) THEN RAISE EXCEPTION 'broken'; END IF;
               RETURN NEW; END $$;
             CREATE TRIGGER refuse_b BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION refuse_b()",
        )
        .await
        .unwrap();
    let proxy = Proxy::start(&ledger.url, Loss::Delayed).await;
    let (lanes, drain) = Lanes::start(&Settings {
        database_url: proxy.url.clone(),
        lanes: 1,
        ..settings(&ledger)
    });
    assert!(matches!(
        lanes.submit(deposit("lou", "a", 5), soon()).await,
        Outcome::Created(_)
    ));
    proxy.arm();
    let post = {
        let lanes = lanes.clone();
        tokio::spawn(async move { lanes.submit(deposit("lou", "b", 5), soon()).await })
    };
    proxy.lost.notified().await;
    // The second run waits for the first one's lock; the first one then ends without a COMMIT, and the second cannot write.
    ledger
        .admin
        .batch_execute("INSERT INTO broken VALUES (now())")
        .await
        .unwrap();
    let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                WHERE state = 'idle in transaction' AND application_name = 'daybook lane'
                  AND datname = current_database()";
    crate::ledger::eventually("the first run ends", async || {
        ledger.value::<i64>(kill).await > 0
    })
    .await;
    assert_eq!(post.await.unwrap(), Outcome::Unknown);
    drain.finish().await;
    ledger.finish().await;
}
