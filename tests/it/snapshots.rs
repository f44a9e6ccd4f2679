//! Balances of accounts that no write locks: snapshot and tail, beside the full sum.
//!
//! The keeper's folding is stepped by hand, but for the test that lets it run.

use crate::commit::{deposit, settings, soon};
use crate::ledger::{Ledger, eventually, superuser};
use daybook::commit::{Lanes, Outcome};
use daybook::keeper;
use daybook::keeper::snapshots::Folder;
use daybook::keeper::verify::verify;
use daybook::store::session::{self, Purpose};
use daybook::store::snapshots::{self, ROWS_MAX};
use daybook::store::{horizon, reads};
use daybook::telemetry::Metrics;
use std::sync::Arc;
use tokio_postgres::Client;

async fn session(ledger: &Ledger, purpose: Purpose) -> Client {
    session::connect(&ledger.url, &ledger.name, purpose)
        .await
        .unwrap()
        .0
}

async fn balances(reader: &Client, address: &str) -> Vec<reads::Balance> {
    let statement = reader.prepare(snapshots::SUMMED_BALANCES).await.unwrap();
    snapshots::summed_balances(reader, &statement, address)
        .await
        .unwrap()
}

/// Compares every account without a lock with the full sum, in one snapshot of the database.
async fn compare(reader: &Client) {
    reader
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        .await
        .unwrap();
    let accounts = reader
        .query(
            "SELECT a.address, array_agg(p.asset ORDER BY p.asset), array_agg(p.amount ORDER BY p.asset)
             FROM accounts a LEFT JOIN (SELECT account_no, asset, sum(amount)::text AS amount FROM postings GROUP BY 1, 2) p
                 USING (account_no)
             WHERE a.guard <> 'floor' GROUP BY a.address",
            &[],
        )
        .await
        .unwrap();
    for row in accounts {
        let (assets, amounts): (Vec<Option<String>>, Vec<Option<String>>) =
            (row.get(1), row.get(2));
        let full: Vec<_> = std::iter::zip(assets, amounts)
            .filter_map(|(asset, balance)| {
                Some(reads::Balance {
                    asset: asset?,
                    balance: balance?,
                })
            })
            .collect();
        let address: &str = row.get(0);
        let read = balances(reader, address).await;
        assert_eq!(read, full, "{address}");
    }
    reader.batch_execute("COMMIT").await.unwrap();
}

/// Moves the horizon to the last position drawn.
async fn settle(client: &Client) {
    let mark = horizon::mark(client).await.unwrap();
    eventually("it settles", async || {
        horizon::settled(client, mark).await.unwrap()
    })
    .await;
    horizon::settle(client, mark.position).await.unwrap();
}

/// Steps until everything is folded and claimed; returns how many steps that took.
async fn fold_all(folder: &mut Folder, client: &Client) -> usize {
    settle(client).await;
    for steps in 1..1_000 {
        folder.step(client).await.unwrap();
        let progress = snapshots::progress(client).await.unwrap();
        if progress.folded.position >= progress.settled {
            return steps;
        }
    }
    panic!("it never catches up")
}

/// Unlocked accounts by their addresses.
async fn open_accounts(ledger: &Ledger, addresses: &str) {
    let open = format!(
        "INSERT INTO accounts (address, guard) SELECT address, 'none' FROM ({addresses}) t(address)"
    );
    ledger.admin.batch_execute(&open).await.unwrap();
}

/// Postings without events, straight into the table: of many positions, spread over the months, each position with a leg of `world`
/// and three of another account. [`forget_bulk`] takes them away, since no record tells of them.
async fn bulk(ledger: &Ledger, positions: i64, other: &str) {
    let insert = format!(
        "INSERT INTO postings (position, leg, account_no, asset, amount, recorded_at)
         SELECT e.position, l.leg, (SELECT account_no FROM accounts WHERE address = l.address),
                CASE WHEN e.position % 3 = 0 THEN 'EUR/2' ELSE 'USD/2' END, l.amount, e.recorded_at
         FROM (SELECT nextval('events_position_seq') AS position,
                      now() - (({positions} - n) * 250.0 / {positions}) * interval '1 day' AS recorded_at
               FROM generate_series(1, {positions}) n) e,
              LATERAL (VALUES (0, 'world', -6), (1, '{other}', 1), (2, '{other}', 2), (3, '{other}', 3)) l(leg, address, amount)"
    );
    ledger.admin.batch_execute(&insert).await.unwrap();
}

async fn forget_bulk(ledger: &Ledger) {
    ledger
        .admin
        .batch_execute(
            "SET session_replication_role = replica;
             DELETE FROM postings p WHERE NOT EXISTS (SELECT FROM events e WHERE e.position = p.position);
             RESET session_replication_role;
             DELETE FROM balance_snapshots",
        )
        .await
        .unwrap();
}

/// Partitions of the last year, which a ledger of today does not have.
async fn past_partitions(ledger: &Ledger) {
    ledger
        .admin
        .batch_execute(
            "SELECT make_partition('postings', now() - n * interval '1 month') FROM generate_series(1, 12) n",
        )
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn balances_are_right_while_writers_write_and_the_keeper_folds() {
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
    let (lanes, drain) = Lanes::start(&settings(&ledger));
    let lanes = Arc::new(lanes);
    let writers: Vec<_> = (0..8)
        .map(|writer| {
            let lanes = lanes.clone();
            tokio::spawn(async move {
                for event in 0..150 {
                    let draft = deposit(&format!("user-{writer}"), &format!("k-{event}"), 7);
                    let outcome = lanes.submit(draft, soon()).await;
                    assert!(matches!(outcome, Outcome::Created(_)), "{outcome:?}");
                }
            })
        })
        .collect();
    let reader = session(&ledger, Purpose::Read).await;
    let folded = "SELECT position FROM snapshot_horizon";
    // At least until a snapshot was read with a tail behind it, however fast the writers are.
    while ledger.value::<i64>(folded).await == 0
        || writers.iter().any(|writer| !writer.is_finished())
    {
        compare(&reader).await;
    }
    for writer in writers {
        writer.await.unwrap();
    }
    eventually("all is folded", async || {
        let all = "SELECT f.position = s.last_value FROM snapshot_horizon f, events_position_seq s";
        ledger.value::<bool>(all).await
    })
    .await;
    compare(&reader).await;
    let snapshot = "SELECT amount::text FROM balance_snapshots ORDER BY day DESC LIMIT 1";
    assert_eq!(ledger.value::<String>(snapshot).await, "-8400");
    stop.send(true).unwrap();
    keeper.await.unwrap();
    drain.finish().await;
    ledger.finish().await;
}

#[tokio::test]
async fn r1_a_posting_that_commits_late_is_not_lost() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&settings(&ledger));
    lanes.submit(deposit("mia", "k1", 10), soon()).await;
    let (keeper, reader) = (
        session(&ledger, Purpose::Keeper).await,
        session(&ledger, Purpose::Read).await,
    );
    let mut folder = Folder::default();
    fold_all(&mut folder, &keeper).await;
    // A batch that has its transaction id and its position, and is slow to commit.
    let late = superuser(&ledger.name).await;
    late.batch_execute(&format!(
        "SET search_path = {}; BEGIN; SELECT pg_current_xact_id();
         WITH event AS MATERIALIZED (SELECT nextval('events_position_seq') AS position)
         INSERT INTO postings (position, leg, account_no, asset, amount, recorded_at)
         SELECT position, 0, account_no, asset, CASE address WHEN 'world' THEN 5 ELSE -5 END, now()
         FROM event, accounts, (VALUES ('EUR/2'), ('USD/2')) a(asset)",
        ledger.name
    ))
    .await
    .unwrap();
    lanes.submit(deposit("mia", "k2", 20), soon()).await;
    let before = snapshots::progress(&keeper).await.unwrap();
    for _ in 0..5 {
        let mark = horizon::mark(&keeper).await.unwrap();
        assert!(!horizon::settled(&keeper, mark).await.unwrap());
        folder.step(&keeper).await.unwrap();
        compare(&reader).await;
    }
    let held = snapshots::progress(&keeper).await.unwrap();
    assert_eq!(held.folded.position, before.folded.position);
    late.batch_execute("COMMIT").await.unwrap();
    // A new asset among them is read at once.
    compare(&reader).await;
    let read = balances(&reader, "world").await;
    assert_eq!(read.len(), 2, "{read:?}");
    fold_all(&mut folder, &keeper).await;
    compare(&reader).await;
    assert_eq!(
        ledger
            .value::<i64>("SELECT count(*) FROM balance_snapshots WHERE position = 3")
            .await,
        2
    );
    forget_bulk(&ledger).await;
    fold_all(&mut folder, &keeper).await;
    drain.finish().await;
    ledger.finish().await;
}

#[tokio::test]
async fn catching_up_goes_in_steps_and_cuts_no_event_in_two() {
    let ledger = Ledger::new().await;
    past_partitions(&ledger).await;
    open_accounts(&ledger, "VALUES ('world'), ('platform:fees')").await;
    bulk(&ledger, 2 * ROWS_MAX + 7, "platform:fees").await;
    let (keeper, reader) = (
        session(&ledger, Purpose::Keeper).await,
        session(&ledger, Purpose::Read).await,
    );
    compare(&reader).await;
    settle(&keeper).await;
    let progress = snapshots::progress(&keeper).await.unwrap();
    let accounts = snapshots::unlocked_accounts(&keeper, 0, 10).await.unwrap();
    let mut pairs = snapshots::unfolded(&keeper, &accounts, &progress)
        .await
        .unwrap();
    assert_eq!(pairs.len(), 4);
    let mut folds = 0;
    while !pairs.is_empty() {
        let folded = snapshots::fold(&keeper, &pairs, &progress).await.unwrap();
        assert_eq!(folded.len(), pairs.len());
        assert!(folded.iter().all(|(_, rows)| *rows <= ROWS_MAX));
        // Of `platform:fees` an event has legs of 1, 2 and 3, of which a limit of 2,000 cuts one in two.
        let halves = "SELECT count(*) FROM balance_snapshots s JOIN accounts a USING (account_no)
                      WHERE a.address = 'platform:fees' AND s.amount % 6 <> 0";
        assert_eq!(ledger.value::<i64>(halves).await, 0);
        compare(&reader).await;
        pairs = snapshots::unfolded(&keeper, &accounts, &progress)
            .await
            .unwrap();
        folds += 1;
    }
    // 2 of 3 positions are in dollars, each with three legs: 8,014 rows, 1,998 a fold.
    assert_eq!(folds, 5);
    let mut folder = Folder::default();
    fold_all(&mut folder, &keeper).await;
    compare(&reader).await;
    // Deleted, it is made anew, over all partitions.
    ledger
        .admin
        .batch_execute("TRUNCATE balance_snapshots")
        .await
        .unwrap();
    compare(&reader).await;
    fold_all(&mut folder, &keeper).await;
    compare(&reader).await;
    assert_eq!(
        ledger
            .value::<i64>("SELECT count(*) FROM balance_snapshots")
            .await,
        4
    );
    forget_bulk(&ledger).await;
    ledger.finish().await;
}

#[tokio::test]
async fn many_accounts_have_their_turns_and_busy_ones_do_not_wait() {
    let ledger = Ledger::new().await;
    past_partitions(&ledger).await;
    open_accounts(
        &ledger,
        "SELECT 'shop:' || n FROM generate_series(1, 600) n UNION ALL VALUES ('world'), ('platform:fees')",
    )
    .await;
    bulk(&ledger, 600, "platform:fees").await;
    ledger
        .admin
        .batch_execute(
            "INSERT INTO postings (position, leg, account_no, asset, amount, recorded_at)
             SELECT n, 9, account_no, 'EUR/2', 0, now()
             FROM accounts, generate_series(1, 600) n WHERE address = 'shop:' || n",
        )
        .await
        .unwrap();
    let (keeper, reader) = (
        session(&ledger, Purpose::Keeper).await,
        session(&ledger, Purpose::Read).await,
    );
    let mut folder = Folder::default();
    // 250, 250 and 102 accounts; a step that runs out of time is one more.
    assert!(fold_all(&mut folder, &keeper).await >= 3);
    compare(&reader).await;
    let snapshots_of = |address: &str, position: i64| {
        format!(
            "SELECT count(*) FROM balance_snapshots JOIN accounts USING (account_no)
             WHERE address LIKE '{address}' AND position = {position}"
        )
    };
    assert_eq!(ledger.value::<i64>(&snapshots_of("shop:%", 600)).await, 600);
    // `world` and `platform:fees` have the highest numbers, and were busy last time.
    bulk(&ledger, 300, "platform:fees").await;
    settle(&keeper).await;
    folder.step(&keeper).await.unwrap();
    assert_eq!(ledger.value::<i64>(&snapshots_of("%", 900)).await, 4);
    // What was claimed is taken back while a turn is under way: the rest of it claims nothing.
    let owner = session::connect(&ledger.owner_url, &ledger.name, Purpose::Owner)
        .await
        .unwrap()
        .0;
    owner
        .batch_execute("DELETE FROM balance_snapshots")
        .await
        .unwrap();
    compare(&reader).await;
    folder.step(&keeper).await.unwrap();
    assert_eq!(
        ledger
            .value::<i64>("SELECT position FROM snapshot_horizon")
            .await,
        0
    );
    fold_all(&mut folder, &keeper).await;
    compare(&reader).await;
    forget_bulk(&ledger).await;
    ledger.finish().await;
}

#[tokio::test]
async fn a_read_opens_the_partitions_of_its_tail_only() {
    let ledger = Ledger::new().await;
    past_partitions(&ledger).await;
    open_accounts(&ledger, "VALUES ('world'), ('platform:fees')").await;
    bulk(&ledger, 1_000, "platform:fees").await;
    let (keeper, reader) = (
        session(&ledger, Purpose::Keeper).await,
        session(&ledger, Purpose::Read).await,
    );
    let sql = snapshots::SUMMED_BALANCES;
    reader
        .batch_execute(&format!(
            "SET plan_cache_mode = force_generic_plan; PREPARE read AS {sql}"
        ))
        .await
        .unwrap();
    // Partitions that a plan for any bound has left when it runs for this one.
    let opened = async |drawn_at: &str| {
        let hoped: jiff::Timestamp = ledger
            .value(&format!(
                "SELECT greatest({drawn_at}, 'epoch'::timestamptz)"
            ))
            .await;
        let since = snapshots::since(hoped);
        let run = format!("EXPLAIN (ANALYZE) EXECUTE read ('world', '{hoped}', '{since}', 10)");
        let plan: Vec<String> = reader
            .query(&run, &[])
            .await
            .unwrap()
            .iter()
            .map(|row| row.get(0))
            .collect();
        let plan = plan.join("\n");
        let named = plan.split_whitespace().filter(|word| {
            word.len() == "postings_2026_11".len() && word.starts_with("postings_2")
        });
        let named: std::collections::BTreeSet<String> = named.map(str::to_owned).collect();
        (
            i64::try_from(named.len()).unwrap(),
            named.first().unwrap().clone(),
        )
    };
    // Never folded: all partitions, a year back and three months ahead.
    assert_eq!(opened("'epoch'").await.0, 16);
    fold_all(&mut Folder::default(), &keeper).await;
    let since: (i64, String) = {
        let row = ledger
            .admin
            .query_one(
                "SELECT count(*), min(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'postings'::regclass
                   AND inhrelid::regclass::text >= to_char((now() - interval '2 days') AT TIME ZONE 'UTC', '\"postings_\"YYYY_MM')",
                &[],
            )
            .await
            .unwrap();
        (row.get(0), row.get(1))
    };
    assert!((4..=5).contains(&since.0));
    assert_eq!(opened("now() - interval '1 day'").await, since);
    // A keeper that has been away for two months: the tail is looked for where it can be.
    ledger
        .admin
        .batch_execute("UPDATE snapshot_horizon SET drawn_at = drawn_at - interval '65 days'")
        .await
        .unwrap();
    let away = opened("now() - interval '65 days'").await.0;
    assert!((since.0 + 1..=since.0 + 4).contains(&away), "{away}");
    compare(&reader).await;
    forget_bulk(&ledger).await;
    ledger.finish().await;
}

#[tokio::test]
async fn plans_of_read_and_fold_use_the_index_whatever_the_statistics_say() {
    let ledger = Ledger::new().await;
    past_partitions(&ledger).await;
    open_accounts(&ledger, "VALUES ('world'), ('platform:fees')").await;
    bulk(&ledger, 100, "platform:fees").await;
    ledger.admin.batch_execute("ANALYZE").await.unwrap();
    let reader = session(&ledger, Purpose::Read).await;
    let statements: [(&str, &[&str]); 3] = [
        ("summed_balances", &["'world'", "'epoch'", "'epoch'", "10"]),
        ("unfolded_pairs", &["'{1,2}'", "1000", "'epoch'"]),
        (
            "fold_snapshots",
            &["'{1,2}'", "'{EUR/2,USD/2}'", "1000", "'epoch'", "2000", "0"],
        ),
    ];
    for (name, values) in statements {
        let begin = format!("-- {name}\n");
        let found = snapshots::STATEMENTS
            .iter()
            .find(|sql| sql.starts_with(&begin));
        let mut sql = (*found.unwrap()).to_owned();
        for (index, value) in values.iter().enumerate() {
            sql = sql.replace(&format!("${}", index + 1), value);
        }
        let plan: Vec<String> = reader
            .query(&format!("EXPLAIN {sql}"), &[])
            .await
            .unwrap_or_else(|error| panic!("{sql}: {error:?}"))
            .iter()
            .map(|row| row.get(0))
            .collect();
        let plan = plan.join("\n");
        assert!(plan.contains("postings_"), "{plan}");
        for bad in ["Seq Scan on postings", "Bitmap", "Hash Join", "Merge Join"] {
            assert!(!plan.contains(bad), "{name}: {plan}");
        }
    }
    forget_bulk(&ledger).await;
    ledger.finish().await;
}

/// What a superuser does to the snapshots with the triggers off, and what `verify` says of it.
const LIES: &[(&str, &str)] = &[
    (
        "UPDATE balance_snapshots SET amount = amount - 1",
        "up to position 3 is -31, the records sum to -30",
    ),
    (
        "UPDATE balance_snapshots SET position = 1",
        "up to position 1 is -30, the records sum to -10",
    ),
    (
        "UPDATE balance_snapshots SET asset = 'USD/2'",
        "world USD/2: the snapshot of ",
    ),
    (
        "UPDATE balance_snapshots SET account_no = 999",
        "a balance snapshot in EUR/2 of account 999, which has no row",
    ),
    (
        "UPDATE balance_snapshots SET position = 4",
        "balance_snapshots 4: the last position drawn is 3",
    ),
    (
        "INSERT INTO balance_snapshots SELECT account_no, 'EUR/2', now(), 3, 30 FROM accounts WHERE guard = 'floor'",
        "users:mia:available EUR/2: a balance snapshot of an account that has a floor",
    ),
    (
        "INSERT INTO balance_snapshots SELECT account_no, asset, day - 1, position, amount FROM balance_snapshots",
        "is not later than the one before it",
    ),
    (
        "DELETE FROM balance_snapshots",
        "world EUR/2: the balance leaves out the posting of position 1",
    ),
    (
        "UPDATE snapshot_horizon SET position = 2, drawn_at = now() + interval '2 days'",
        "world EUR/2: the balance leaves out the posting of position 3",
    ),
    (
        "UPDATE snapshot_horizon SET position = 4",
        "snapshot_horizon 4: the last position drawn is 3",
    ),
];

#[tokio::test]
async fn verify_finds_a_snapshot_that_lies() {
    let ledger = Ledger::new().await;
    let (lanes, drain) = Lanes::start(&settings(&ledger));
    for key in ["k1", "k2", "k3"] {
        lanes.submit(deposit("mia", key, 10), soon()).await;
    }
    drain.finish().await;
    let keeper = session(&ledger, Purpose::Keeper).await;
    fold_all(&mut Folder::default(), &keeper).await;
    ledger
        .admin
        .batch_execute(
            "SET session_replication_role = replica; CREATE SCHEMA saved;
             CREATE TABLE saved.balance_snapshots AS TABLE balance_snapshots;
             CREATE TABLE saved.snapshot_horizon AS TABLE snapshot_horizon",
        )
        .await
        .unwrap();
    for (lie, said) in LIES {
        ledger.admin.batch_execute(lie).await.unwrap();
        let report = verify(&ledger.owner_url, &ledger.name, |_, _| {})
            .await
            .unwrap();
        assert!(
            report.faults.iter().any(|fault| fault.contains(said)),
            "{lie}: {:?}",
            report.faults
        );
        ledger
            .admin
            .batch_execute(
                "DELETE FROM balance_snapshots; INSERT INTO balance_snapshots TABLE saved.balance_snapshots;
                 DELETE FROM snapshot_horizon; INSERT INTO snapshot_horizon TABLE saved.snapshot_horizon",
            )
            .await
            .unwrap();
    }
    ledger.finish().await;
}

#[tokio::test]
async fn what_was_opened_with_a_floor_is_summed_in_full() {
    let ledger = Ledger::new().await;
    past_partitions(&ledger).await;
    open_accounts(&ledger, "VALUES ('world')").await;
    ledger
        .admin
        .batch_execute(
            "INSERT INTO accounts (address, guard, floor) VALUES ('platform:fees', 'floor', 0)",
        )
        .await
        .unwrap();
    bulk(&ledger, 100, "platform:fees").await;
    let (keeper, reader) = (
        session(&ledger, Purpose::Keeper).await,
        session(&ledger, Purpose::Read).await,
    );
    fold_all(&mut Folder::default(), &keeper).await;
    // The chart of today says that it has none, and so it is read as one of those.
    let read = balances(&reader, "platform:fees").await;
    let sums: Vec<&str> = read.iter().map(|sum| sum.balance.as_str()).collect();
    assert_eq!(sums, ["198", "402"]);
    assert_eq!(balances(&reader, "nobody").await, []);
    ledger
        .admin
        .batch_execute("DELETE FROM accounts WHERE address = 'platform:fees'")
        .await
        .unwrap();
    forget_bulk(&ledger).await;
    ledger.finish().await;
}
