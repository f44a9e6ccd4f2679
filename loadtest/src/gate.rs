//! The gate: after a run the ledger has to hold exactly what was answered, and nothing else.
//!
//! Never lets a number through that it did not prove: what does not agree is an error, and an error has no numbers.

use crate::consumer::Consumer;
use crate::lab::Ledger;
use crate::load::{Moved, Tally};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use tokio_postgres::Client;

/// How long the relay may take to publish what is left, besides the time that its size explains.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);
/// Messages a second that a relay always manages.
const DRAIN_RATE_MIN: u64 = 200;
/// How often the outbox is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Discrepancies that a message shows.
const SHOWN_MAX: usize = 5;

/// Keys of one user and writer that have more than one event. No run is so long that a key may be used again.
const TWICE: &str = "-- keys_used_twice
SELECT count(*) FROM (SELECT FROM events GROUP BY user_no, writer, idempotency_key HAVING count(*) > 1) AS used";

/// Balances by address, in minor units.
type Balances = BTreeMap<String, i128>;

/// What a ledger held before, and what was answered since.
#[derive(Debug)]
pub struct Gate {
    events_before: u64,
    balances_before: Balances,
    answered: Answered,
    /// Whether keys were sent more than once.
    keys_repeat: bool,
}

/// The sum of the tallies of a ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Answered {
    created: u64,
    unknown: u64,
    moved: Balances,
}

impl Answered {
    /// Adds a tally that has only answers which may be.
    fn add(&mut self, tally: &Tally) -> Result<()> {
        ensure!(
            tally.unexpected == 0,
            "answers that should not have been: {}",
            tally.trouble()
        );
        self.created += tally.created;
        self.unknown += tally.unknown;
        for (address, amount) in addresses(&tally.moved) {
            *self.moved.entry(address).or_default() += amount;
        }
        Ok(())
    }
}

/// What moved, by address; accounts of which nothing moved are left out.
fn addresses(moved: &Moved) -> impl Iterator<Item = (String, i128)> {
    let users = moved
        .users
        .iter()
        .zip(1_u64..)
        .map(|(amount, number)| (format!("users:u-{number}:available"), *amount));
    let others = [
        ("world".to_owned(), moved.world),
        ("platform:fees".to_owned(), moved.fees),
    ];
    users.chain(others).filter(|(_, amount)| *amount != 0)
}

/// What the ledger holds after a run, beside what it held before.
#[derive(Debug)]
struct Grown {
    events: u64,
    moved: Balances,
}

impl Gate {
    /// Notes what the ledger holds. Everything that is posted from now on has to be [added](Gate::add).
    ///
    /// # Errors
    /// What Postgres says.
    pub async fn open(ledger: &Ledger) -> Result<Self> {
        let client = ledger.database.connect().await?;
        Ok(Gate {
            events_before: events(&client).await?,
            balances_before: balances(&client).await?,
            answered: Answered::default(),
            keys_repeat: false,
        })
    }

    /// Keys are sent more than once from now on.
    pub fn keys_repeat(&mut self) {
        self.keys_repeat = true;
    }

    /// Counts the answers of a run.
    ///
    /// # Errors
    /// When there are answers that should not have been.
    pub fn add(&mut self, tally: &Tally) -> Result<()> {
        self.answered.add(tally)
    }

    /// Waits until everything stored is published and was received. A relay has to be running.
    ///
    /// # Errors
    /// When the outbox does not empty in time, or the consumer has not exactly one message for each event.
    pub async fn drained(&self, ledger: &Ledger, consumer: &Consumer) -> Result<()> {
        let client = ledger.database.connect().await?;
        let stored = events(&client).await? - self.events_before;
        let limit = DRAIN_LIMIT + Duration::from_secs(stored / DRAIN_RATE_MIN);
        let end = Instant::now() + limit;
        // First what costs the database nothing: counting an outbox walks over all that is dead in it, and would slow the relay down.
        consumer.await_distinct(stored, limit).await?;
        loop {
            let left = outbox(&client).await?;
            if left == 0 {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "the relay has {left} events left after {} s",
                limit.as_secs()
            );
            sleep(LOOK_EVERY).await;
        }
    }

    /// Proves the ledger. Servers may still run, but nothing may be posted any more.
    ///
    /// # Errors
    /// When anything does not agree.
    pub async fn prove(self, ledger: &Ledger) -> Result<()> {
        let client = ledger.database.connect().await?;
        let grown = Grown {
            events: events(&client).await? - self.events_before,
            moved: difference(&self.balances_before, &balances(&client).await?),
        };
        compare(&self.answered, &grown)?;
        if self.keys_repeat {
            // Two events of one key, both answered with 201, would agree with everything else.
            let twice = count(&client, TWICE).await?;
            ensure!(twice == 0, "{twice} idempotency keys have several events");
        }
        ledger.verify().await
    }
}

/// That every 201 is a stored event, that nothing else is, and that money moved by exactly what was accepted.
fn compare(answered: &Answered, grown: &Grown) -> Result<()> {
    let most = answered.created + answered.unknown;
    ensure!(answered.created > 0, "no event was accepted");
    ensure!(
        (answered.created..=most).contains(&grown.events),
        "{} answers 201 and {} of unknown outcome, but {} more events are stored",
        answered.created,
        answered.unknown,
        grown.events
    );
    // An unknown outcome moved money or did not. `verify` still proves balances against records then.
    if grown.events == answered.created && answered.unknown == 0 {
        let wrong = difference(&answered.moved, &grown.moved);
        ensure!(
            wrong.is_empty(),
            "{} balances did not move by what was accepted: {:?}",
            wrong.len(),
            wrong.iter().take(SHOWN_MAX).collect::<Vec<_>>()
        );
    }
    Ok(())
}

/// `after - before`, without what is the same.
fn difference(before: &Balances, after: &Balances) -> Balances {
    let mut difference = after.clone();
    for (address, amount) in before {
        *difference.entry(address.clone()).or_default() -= amount;
    }
    difference.retain(|_, amount| *amount != 0);
    difference
}

async fn events(client: &Client) -> Result<u64> {
    count(client, "-- events_stored\nSELECT count(*) FROM events").await
}

/// Outbox rows of a ledger: how far its relay is behind.
///
/// # Errors
/// What Postgres says.
pub async fn outbox(client: &Client) -> Result<u64> {
    count(client, "-- outbox_depth\nSELECT count(*) FROM outbox").await
}

async fn count(client: &Client, sql: &str) -> Result<u64> {
    let row = client.query_one(sql, &[]).await?;
    Ok(u64::try_from(row.try_get::<_, i64>(0)?)?)
}

/// The balances of all accounts, read from what the service itself goes by: rows of guarded accounts, postings of the others.
async fn balances(client: &Client) -> Result<Balances> {
    let sql = "-- balances_of_all
SELECT a.address, sum(b.amount)::text FROM balances b JOIN accounts a USING (account_no) GROUP BY a.address
UNION ALL
SELECT a.address, sum(p.amount)::text FROM accounts a JOIN postings p USING (account_no) WHERE a.guard = 'none' GROUP BY a.address";
    let rows = client.query(sql, &[]).await?;
    rows.iter()
        .map(|row| {
            let amount: &str = row.try_get(1)?;
            let amount = amount.parse().context("a balance")?;
            Ok((row.try_get(0)?, amount))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, i128)]) -> Balances {
        pairs
            .iter()
            .map(|(address, amount)| ((*address).to_owned(), *amount))
            .collect()
    }

    fn answered() -> Answered {
        Answered {
            created: 3,
            unknown: 0,
            moved: of(&[("users:u-1:available", -5), ("users:u-2:available", 5)]),
        }
    }

    fn grown() -> Grown {
        Grown {
            events: 3,
            moved: answered().moved,
        }
    }

    #[test]
    fn what_agrees_passes() {
        compare(&answered(), &grown()).unwrap();
    }

    #[test]
    fn a_lost_or_an_extra_event_fails() {
        for events in [2, 4] {
            let why = compare(&answered(), &Grown { events, ..grown() }).unwrap_err();
            assert!(why.to_string().contains("more events are stored"), "{why}");
        }
        let nothing = Answered::default();
        let still = Grown {
            events: 0,
            moved: Balances::new(),
        };
        assert!(compare(&nothing, &still).is_err());
    }

    #[test]
    fn a_lost_doubled_or_misled_posting_fails() {
        for moved in [
            of(&[("users:u-1:available", -5)]),
            of(&[("users:u-1:available", -10), ("users:u-2:available", 10)]),
            of(&[("users:u-1:available", -5), ("users:u-3:available", 5)]),
            of(&[]),
        ] {
            let why = compare(&answered(), &Grown { moved, ..grown() }).unwrap_err();
            assert!(why.to_string().contains("did not move by"), "{why}");
        }
    }

    #[test]
    fn an_unknown_outcome_is_an_event_or_none() {
        let unknown = Answered {
            unknown: 2,
            ..answered()
        };
        let more = of(&[("users:u-1:available", -6), ("users:u-2:available", 6)]);
        for events in 3..=5 {
            let moved = more.clone();
            compare(&unknown, &Grown { events, moved }).unwrap();
        }
        for events in [2, 6] {
            assert!(compare(&unknown, &Grown { events, ..grown() }).is_err());
        }
    }

    #[test]
    fn what_moved_is_named_by_its_address() {
        let moved = Moved {
            users: vec![0, 7],
            world: -8,
            fees: 1,
        };
        let expected = of(&[
            ("users:u-2:available", 7),
            ("world", -8),
            ("platform:fees", 1),
        ]);
        assert_eq!(addresses(&moved).collect::<Balances>(), expected);
    }
}
