//! Verification: reads every record again and proves that all other tables agree with it.
//!
//! Changes nothing. Everything is read in one snapshot, so the ledger may serve meanwhile: events, postings and balance snapshots
//! side by side in one pass by position, which rises along every history, every balance and every business key.

use crate::commit::record::{self, Folded, FoldedPosting, FoldedUnique};
use crate::domain::{Amount, time};
use crate::store::audit::{self, StoredEvent, StoredPosting, StoredSnapshot};
use crate::store::session::{self, Purpose, SessionError};
use futures_util::{Stream, StreamExt, TryStreamExt};
use jiff::Timestamp;
use secrecy::SecretString;
use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use tokio_postgres::Client;

/// Faults reported at most.
const FAULTS_MAX: usize = 1_000;

/// What was read and what was found.
#[derive(Debug, Default)]
pub struct Report {
    /// Events read.
    pub events: u64,
    /// Users read.
    pub users: u64,
    /// Postings in the records.
    pub postings: u64,
    /// Account and asset pairs compared.
    pub balances: u64,
    /// What does not agree, one sentence each; empty is proof.
    pub faults: Vec<String>,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// No session.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// What Postgres says.
    #[error("postgres: {0}")]
    Postgres(#[from] tokio_postgres::Error),
}

/// A sum of amounts. That of an account without a guard may have more digits than one amount.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Sum {
    high: i128,
    /// From 0 to below [`Sum::BASE`].
    low: i128,
}

impl Sum {
    const BASE: i128 = 10_i128.pow(19);

    fn add(&mut self, amount: Amount) {
        let low = self.low + amount.units().rem_euclid(Self::BASE);
        self.low = low % Self::BASE;
        self.high += amount.units().div_euclid(Self::BASE) + low / Self::BASE;
    }

    fn of(amount: Amount) -> Self {
        let mut sum = Sum::default();
        sum.add(amount);
        sum
    }
}

impl std::fmt::Display for Sum {
    /// As Postgres writes a NUMERIC without a fraction.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (high, low) = match (self.high < 0, self.low) {
            (false, low) => (self.high, low),
            (true, 0) => (-self.high, 0),
            (true, low) => (-self.high - 1, Self::BASE - low),
        };
        let sign = if self.high < 0 { "-" } else { "" };
        match high {
            0 => write!(f, "{sign}{low}"),
            _ => write!(f, "{sign}{high}{low:019}"),
        }
    }
}

/// The end of a history so far.
#[derive(Clone, Copy)]
struct Head {
    sequence: i64,
    hash: [u8; 32],
    recorded_at: Timestamp,
}

/// The state that the records alone give.
#[derive(Default)]
struct Fold {
    report: Report,
    position: i64,
    /// By the user's number.
    heads: HashMap<i64, Head>,
    /// By account and asset.
    sums: HashMap<(String, String), Sum>,
    /// By the name's hash, since there may be as many as events: who took it last, and until when.
    keys: HashMap<[u8; 32], (i64, Option<Timestamp>)>,
}

impl Fold {
    fn fault(&mut self, fault: String) {
        if self.report.faults.len() < FAULTS_MAX {
            self.report.faults.push(fault);
        }
    }

    fn event(&mut self, event: &StoredEvent, legs: &[StoredPosting]) {
        let at = match &event.subject {
            Some(subject) => format!("{subject} {}", event.sequence),
            None => format!("position {}", event.position),
        };
        self.report.events += 1;
        if event.position <= self.position {
            self.fault(format!(
                "{at}: position {} follows position {}",
                event.position, self.position
            ));
        }
        self.position = event.position;
        if event.subject.is_none() {
            self.fault(format!("{at}: the event's user has no row"));
        }
        let previous = self.link(&at, event);
        match record::read(&event.record) {
            Ok(folded) => {
                if folded.previoushash != hex::encode(previous) {
                    self.fault(format!(
                        "{at}: previoushash is not the hash of the record before it"
                    ));
                }
                self.columns(&at, event, &folded);
                self.legs(&at, event, legs, &folded.data.postings);
                self.take(&at, event.position, &folded.data.effects.unique);
                self.add(&at, folded.data.postings);
            }
            Err(error) => self.fault(format!("{at}: the record does not parse: {error}")),
        }
    }

    /// Moves the user's head to this event; returns the hash of the record before it.
    fn link(&mut self, at: &str, event: &StoredEvent) -> [u8; 32] {
        let head = Head {
            sequence: event.sequence,
            hash: record::hash(&event.record),
            recorded_at: event.recorded_at,
        };
        let before = self.heads.insert(event.user_no, head).unwrap_or(Head {
            sequence: 0,
            hash: [0; 32],
            recorded_at: Timestamp::MIN,
        });
        if event.sequence != before.sequence + 1 {
            self.fault(format!("{at}: follows sequence {}", before.sequence));
        }
        if event.recorded_at < before.recorded_at {
            self.fault(format!(
                "{at}: recorded at {}, before the event before it",
                event.recorded_at
            ));
        }
        before.hash
    }

    fn columns(&mut self, at: &str, event: &StoredEvent, folded: &Folded) {
        let writer = folded.authid.as_ref().unwrap_or(&folded.subject);
        let agree = [
            (
                "user_no",
                event
                    .subject
                    .as_ref()
                    .is_none_or(|subject| *subject == folded.subject),
            ),
            (
                "sequence",
                folded.usersequence == event.sequence.to_string(),
            ),
            ("event_id", folded.id == event.event_id),
            ("type", folded.event_type == event.event_type),
            ("writer", *writer == event.writer),
            (
                "idempotency_key",
                folded.idempotencykey == event.idempotency_key,
            ),
            (
                "recorded_at",
                folded.recordedtime == time::micros(event.recorded_at),
            ),
            (
                "effective_at",
                folded.time.parse::<Timestamp>().ok() == Some(event.effective_at),
            ),
        ];
        for (column, _) in agree.into_iter().filter(|(_, agrees)| !agrees) {
            self.fault(format!("{at}: {column} is not what the record says"));
        }
        let millis = event.event_id.as_u64_pair().0 >> 16;
        if event.event_id.get_version_num() != 7
            || u64::try_from(event.recorded_at.as_millisecond()) != Ok(millis)
        {
            self.fault(format!(
                "{at}: event_id does not bear the milliseconds of recorded_at"
            ));
        }
    }

    fn legs(
        &mut self,
        at: &str,
        event: &StoredEvent,
        stored: &[StoredPosting],
        folded: &[FoldedPosting],
    ) {
        for index in 0..stored.len().max(folded.len()) {
            let (row, leg) = (stored.get(index), folded.get(index));
            let agrees = row.zip(leg).is_some_and(|(row, leg)| {
                usize::try_from(row.leg) == Ok(index)
                    && row.address.as_ref() == Some(&leg.account)
                    && row.asset == leg.asset
                    && row.amount.0 == leg.amount
                    && row.recorded_at == event.recorded_at
            });
            if !agrees {
                self.fault(format!(
                    "{at}: leg {index}: the posting is {}, the record's {}",
                    row.map_or_else(|| "missing".to_owned(), posting),
                    leg.map_or_else(
                        || "missing".to_owned(),
                        |leg| format!("{} {} {}", leg.account, leg.asset, leg.amount)
                    )
                ));
            }
        }
    }

    fn take(&mut self, at: &str, position: i64, keys: &[FoldedUnique]) {
        for key in keys {
            let until = key.until.as_deref().map(str::parse::<Timestamp>);
            match until.transpose() {
                Ok(until) => {
                    let name = key_name(&key.namespace, &key.key);
                    self.keys.insert(name, (position, until));
                }
                Err(error) => self.fault(format!("{at}: a business key's until: {error}")),
            }
        }
    }

    fn add(&mut self, at: &str, postings: Vec<FoldedPosting>) {
        let mut zero: BTreeMap<String, Sum> = BTreeMap::new();
        for posting in postings {
            self.report.postings += 1;
            zero.entry(posting.asset.clone())
                .or_default()
                .add(posting.amount);
            let place = (posting.account, posting.asset);
            let shown = posting.balance.map(Sum::of);
            let sum = self.sums.entry(place.clone()).or_default();
            sum.add(posting.amount);
            let sum = *sum;
            if let Some(shown) = shown.filter(|shown| *shown != sum) {
                self.fault(format!(
                    "{at}: {} {}: the record shows the balance {shown}, the records sum to {sum}",
                    place.0, place.1
                ));
            }
        }
        if let Some((asset, sum)) = zero.iter().find(|(_, sum)| **sum != Sum::default()) {
            self.fault(format!(
                "{at}: the record's postings in {asset} sum to {sum}"
            ));
        }
    }

    fn stray(&mut self, row: &StoredPosting) {
        self.fault(format!(
            "position {}: leg {}: a posting without an event: {}",
            row.position,
            row.leg,
            posting(row)
        ));
    }

    /// A balance snapshot, when the pass stands at its position.
    fn snapshot(&mut self, row: &StoredSnapshot) {
        let Some(address) = &row.address else {
            return self.fault(format!(
                "a balance snapshot in {} of account {}, which has no row",
                row.asset, row.account_no
            ));
        };
        let sum = self
            .sums
            .get(&(address.clone(), row.asset.clone()))
            .copied()
            .unwrap_or_default();
        let at = format!("{address} {}", row.asset);
        if sum.to_string() != row.amount {
            self.fault(format!(
                "{at}: the snapshot of {} up to position {} is {}, the records sum to {sum}",
                row.day, row.position, row.amount
            ));
        }
        if row.guard.as_deref() == Some("floor") {
            self.fault(format!(
                "{at}: a balance snapshot of an account that has a floor"
            ));
        }
    }

    fn users(&mut self, users: &[audit::Head]) {
        self.report.users = users.len() as u64;
        for user in users {
            let agrees = match self.heads.get(&user.user_no) {
                Some(head) => {
                    (user.sequence, user.last_at) == (head.sequence, head.recorded_at)
                        && user.hash == head.hash
                }
                None => user.sequence == 0 && user.hash == [0; 32],
            };
            if !agrees {
                self.fault(format!(
                    "{}: the head is not that of the latest record",
                    user.subject
                ));
            }
        }
    }

    fn balances(&mut self, balances: &[audit::StoredBalance]) {
        self.report.balances = self.sums.len() as u64;
        for balance in balances {
            let Some(address) = &balance.address else {
                self.fault(format!(
                    "a balance in {} of an account without a row",
                    balance.asset
                ));
                continue;
            };
            let sum = self
                .sums
                .get(&(address.clone(), balance.asset.clone()))
                .copied()
                .unwrap_or_default();
            let at = format!("{address} {}", balance.asset);
            let amount = balance.amount.0;
            if Sum::of(amount) != sum {
                self.fault(format!("{at}: balance {amount}, records {sum}"));
            }
            if balance.guard.as_deref() != Some("floor") {
                self.fault(format!("{at}: a balance of an account that has no floor"));
            }
            if balance.floor.is_some_and(|floor| amount < floor.0) {
                self.fault(format!("{at}: {amount} is below the floor"));
            }
        }
    }

    fn business_key(&mut self, row: &audit::StoredKey) {
        let taken = self.keys.remove(&key_name(&row.namespace, &row.key));
        if taken != Some((row.position, row.until)) {
            self.fault(format!(
                "business key {} {}: the row is not what the latest record that took it says",
                row.namespace, row.key
            ));
        }
    }

    fn missing_keys(&mut self) {
        let mut left: Vec<i64> = std::mem::take(&mut self.keys)
            .into_values()
            .map(|(position, _)| position)
            .collect();
        left.sort_unstable();
        for position in left {
            self.fault(format!(
                "position {position}: a business key that the record took has no row"
            ));
        }
    }
}

/// No part can have a NUL in the database, so two names are never one.
fn key_name(namespace: &str, key: &str) -> [u8; 32] {
    record::hash(&format!("{namespace}\0{key}"))
}

fn posting(row: &StoredPosting) -> String {
    format!(
        "{} {} {} (leg {}, recorded at {})",
        row.address.as_deref().unwrap_or("an account without a row"),
        row.asset,
        row.amount.0,
        row.leg,
        row.recorded_at
    )
}

/// Rows in the order of their positions, read as far as the events have been.
struct Following<'a, S, T> {
    rows: Pin<&'a mut S>,
    next: Option<T>,
    position: fn(&T) -> i64,
}

impl<'a, T, S: Stream<Item = Result<T, tokio_postgres::Error>>> Following<'a, S, T> {
    /// `rows` is fused: asked again after its end, a stream of rows is an error.
    fn new(rows: Pin<&'a mut S>, position: fn(&T) -> i64) -> Self {
        Following {
            rows,
            next: None,
            position,
        }
    }

    /// The next row, unless its position is beyond `position`.
    async fn up_to(&mut self, position: i64) -> Result<Option<T>, tokio_postgres::Error> {
        if self.next.is_none() {
            self.next = self.rows.try_next().await?;
        }
        Ok(self.next.take_if(|row| (self.position)(row) <= position))
    }
}

/// Verifies a ledger. `progress` is told (events read, events in all).
///
/// # Errors
/// [`VerifyError`] when the database cannot be read; a ledger that does not agree is a report with faults.
pub async fn verify(
    url: &SecretString,
    ledger: &str,
    progress: impl Fn(u64, u64),
) -> Result<Report, VerifyError> {
    let (client, _driver) = session::connect(url, ledger, Purpose::Batch).await?;
    // A session streams one statement at a time.
    let (second, _second_driver) = session::connect(url, ledger, Purpose::Batch).await?;
    let (third, _third_driver) = session::connect(url, ledger, Purpose::Batch).await?;
    audit::begin(&client).await?;
    audit::begin_same(&client, &second).await?;
    audit::begin_same(&client, &third).await?;
    let total = u64::try_from(audit::count_events(&client).await?).unwrap_or_default();
    let mut fold = Fold::default();
    let mut events = std::pin::pin!(audit::events(&client).await?);
    let rows = std::pin::pin!(audit::postings(&second).await?.fuse());
    let mut legs = Following::new(rows, |row: &StoredPosting| row.position);
    let rows = std::pin::pin!(audit::snapshots(&third).await?.fuse());
    let mut snapshots = Following::new(rows, |row: &StoredSnapshot| row.position);
    while let Some(event) = events.try_next().await? {
        while let Some(row) = snapshots.up_to(event.position - 1).await? {
            fold.snapshot(&row);
        }
        let mut its_own = Vec::new();
        while let Some(row) = legs.up_to(event.position).await? {
            if row.position == event.position {
                its_own.push(row);
            } else {
                fold.stray(&row);
            }
        }
        fold.event(&event, &its_own);
        progress(fold.report.events, total);
    }
    while let Some(row) = legs.up_to(i64::MAX).await? {
        fold.stray(&row);
    }
    while let Some(row) = snapshots.up_to(i64::MAX).await? {
        fold.snapshot(&row);
    }
    compare(&client, &mut fold).await?;
    Ok(fold.report)
}

async fn compare(client: &Client, fold: &mut Fold) -> Result<(), VerifyError> {
    fold.users(&audit::heads(client).await?);
    fold.balances(&audit::balances(client).await?);
    let mut keys = std::pin::pin!(audit::business_keys(client).await?);
    while let Some(key) = keys.try_next().await? {
        fold.business_key(&key);
    }
    fold.missing_keys();
    for (address, asset) in audit::guarded_without_balance(client).await? {
        fold.fault(format!(
            "{address} {asset}: has postings and a floor but no balance"
        ));
    }
    for fault in audit::faults(client).await? {
        fold.fault(fault);
    }
    Ok(())
}
