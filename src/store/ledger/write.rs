//! What a batch writes: rows built column by column, one array statement a table.
//!
//! Every statement's row count is checked; whoever calls this commits only when all of it succeeded.

use super::super::numeric::Numeric;
use super::super::outbox::Record;
use super::super::tid::Tid;
use super::{BatchError, Locked, Statements, address, subject};
use crate::domain::{Accepted, Account, Address, Draft, Guard, Subject, UserState};
use futures_util::future::{join, join3, join4};
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio_postgres::Client;

/// An accepted event with its record, ready to be written.
pub struct NewEvent<'a> {
    /// What was asked.
    pub draft: &'a Draft,
    /// What was decided.
    pub accepted: Accepted,
    /// Its id.
    pub event_id: uuid::Uuid,
    /// Its record.
    pub record: Arc<str>,
}

/// Writes what a batch accepted. `locked.state` is the state after it. Returns the records for the relay, which may have them once
/// they are committed.
///
/// # Errors
/// [`BatchError`]; the transaction is then to be rolled back.
pub async fn write(
    client: &Client,
    statements: &Statements,
    locked: &mut Locked,
    events: &[NewEvent<'_>],
) -> Result<Vec<Record>, BatchError> {
    open(client, statements, locked, events).await?;
    let rows = EventRows::of(locked, events)?;
    let postings = PostingRows::of(locked, events)?;
    let heads = HeadRows::of(locked)?;
    let balances = BalanceRows::of(locked)?;
    let (keys, retaken) = KeyRows::of(locked, events)?;
    let (first, second) = join(
        join3(
            rows.insert(client, statements),
            postings.insert(client, statements),
            heads.update(client, statements),
        ),
        join4(
            balances.insert(client, statements),
            balances.update(client, statements),
            keys.insert(client, statements),
            retaken.update(client, statements),
        ),
    )
    .await;
    first.0?;
    first.1?;
    first.2?;
    second.0?;
    second.1?;
    second.2?;
    second.3?;
    Ok(rows.records(events))
}

/// Opens the users and accounts that are new, sorted, by plain inserts: a unique violation means that another pod was first.
/// A new user is written with his head as it is after the batch.
async fn open(
    client: &Client,
    statements: &Statements,
    locked: &mut Locked,
    events: &[NewEvent<'_>],
) -> Result<(), BatchError> {
    let users: BTreeMap<&Subject, &UserState> = locked
        .state
        .users
        .iter()
        .filter(|(subject, _)| !locked.user_nos.contains_key(*subject))
        .collect();
    let mut accounts: BTreeMap<&Address, &Account> = BTreeMap::new();
    for event in events {
        for (account, _) in event.draft.touched() {
            let used = || {
                event
                    .accepted
                    .postings
                    .iter()
                    .any(|posting| posting.account == account.address)
            };
            if !locked.account_nos.contains_key(&account.address) && used() {
                accounts.insert(&account.address, account);
            }
        }
    }
    if users.is_empty() && accounts.is_empty() {
        return Ok(());
    }
    let subjects: Vec<&str> = users.keys().map(|subject| subject.as_str()).collect();
    let sequences: Vec<i64> = users
        .values()
        .map(|user| signed(user.sequence))
        .collect::<Result<_, _>>()?;
    let heads: Vec<&[u8]> = users.values().map(|user| user.head.as_slice()).collect();
    let times: Vec<Timestamp> = users.values().map(|user| user.last_at).collect();
    let addresses: Vec<&str> = accounts.keys().map(|address| address.as_str()).collect();
    let owners: Vec<Option<&str>> = accounts
        .values()
        .map(|a| a.owner.as_ref().map(Subject::as_str))
        .collect();
    let guards: Vec<&str> = accounts.values().map(|a| guard(a.guard).0).collect();
    let floors: Vec<Option<Numeric>> = accounts.values().map(|a| guard(a.guard).1).collect();
    let (users, accounts) = join(
        client.query(
            &statements.insert_users,
            &[&subjects, &sequences, &heads, &times],
        ),
        client.query(
            &statements.insert_accounts,
            &[&addresses, &owners, &guards, &floors],
        ),
    )
    .await;
    for row in users? {
        locked.user_nos.insert(subject(&row, 1)?, row.try_get(0)?);
    }
    for row in accounts? {
        locked
            .account_nos
            .insert(address(&row, 1)?, row.try_get(0)?);
    }
    Ok(())
}

const fn guard(guard: Guard) -> (&'static str, Option<Numeric>) {
    match guard {
        Guard::Floor(floor) => ("floor", Some(Numeric(floor))),
        Guard::None => ("none", None),
    }
}

fn signed(sequence: u64) -> Result<i64, BatchError> {
    i64::try_from(sequence).map_err(|_| BatchError::Corrupt("sequence"))
}

fn counted(written: u64, wanted: usize, what: &'static str) -> Result<(), BatchError> {
    if usize::try_from(written) == Ok(wanted) {
        Ok(())
    } else {
        Err(BatchError::Changed(what))
    }
}

/// Rows of `events` and `outbox`, column by column.
#[derive(Default)]
struct EventRows<'a> {
    positions: Vec<i64>,
    users: Vec<i64>,
    sequences: Vec<i64>,
    ids: Vec<uuid::Uuid>,
    types: Vec<&'a str>,
    writers: Vec<&'a str>,
    keys: Vec<&'a str>,
    fingerprints: Vec<&'a [u8]>,
    records: Vec<&'a str>,
    recorded: Vec<Timestamp>,
    effective: Vec<Timestamp>,
    traces: Vec<Option<&'a str>>,
}

impl<'a> EventRows<'a> {
    fn of(locked: &Locked, events: &'a [NewEvent<'a>]) -> Result<Self, BatchError> {
        let mut rows = EventRows::default();
        for (event, position) in events.iter().zip(&locked.positions) {
            let user = locked
                .user_nos
                .get(&event.draft.subject)
                .ok_or(BatchError::Corrupt("user"))?;
            rows.positions.push(*position);
            rows.users.push(*user);
            rows.sequences.push(signed(event.accepted.sequence)?);
            rows.ids.push(event.event_id);
            rows.types.push(event.draft.event_type.as_str());
            rows.writers.push(event.draft.principal.subject.as_str());
            rows.keys.push(event.draft.key.as_str());
            rows.fingerprints.push(&event.draft.fingerprint);
            rows.records.push(&event.record);
            rows.recorded.push(event.accepted.recorded_at);
            rows.effective
                .push(event.draft.time.unwrap_or(event.accepted.recorded_at));
            rows.traces.push(event.draft.traceparent.as_deref());
        }
        Ok(rows)
    }

    async fn insert(&self, client: &Client, statements: &Statements) -> Result<(), BatchError> {
        let (events, outbox) = join(
            client.execute(
                &statements.insert_events,
                &[
                    &self.positions,
                    &self.users,
                    &self.sequences,
                    &self.ids,
                    &self.types,
                    &self.writers,
                    &self.keys,
                    &self.fingerprints,
                    &self.records,
                    &self.recorded,
                    &self.effective,
                ],
            ),
            client.execute(
                &statements.insert_outbox,
                &[&self.positions, &self.users, &self.recorded, &self.traces],
            ),
        )
        .await;
        counted(events?, self.positions.len(), "events")?;
        counted(outbox?, self.positions.len(), "outbox")
    }

    fn records(&self, events: &[NewEvent<'_>]) -> Vec<Record> {
        let numbers = self.positions.iter().zip(&self.sequences);
        let records = events
            .iter()
            .zip(numbers)
            .map(|(event, (position, sequence))| Record {
                position: *position,
                event_id: event.event_id,
                event_type: event.draft.event_type.as_str().into(),
                sequence: *sequence,
                record: event.record.clone(),
                recorded_at: event.accepted.recorded_at,
                subject: event.draft.subject.as_str().into(),
            });
        records.collect()
    }
}

/// Rows of `postings`, column by column.
#[derive(Default)]
struct PostingRows<'a> {
    positions: Vec<i64>,
    legs: Vec<i16>,
    accounts: Vec<i64>,
    assets: Vec<&'a str>,
    amounts: Vec<Numeric>,
    recorded: Vec<Timestamp>,
}

impl<'a> PostingRows<'a> {
    fn of(locked: &Locked, events: &'a [NewEvent<'a>]) -> Result<Self, BatchError> {
        let mut rows = PostingRows::default();
        for (event, position) in events.iter().zip(&locked.positions) {
            for (leg, posting) in event.accepted.postings.iter().enumerate() {
                let account = locked
                    .account_nos
                    .get(&posting.account)
                    .ok_or(BatchError::Corrupt("account"))?;
                rows.positions.push(*position);
                rows.legs
                    .push(i16::try_from(leg).map_err(|_| BatchError::Corrupt("leg"))?);
                rows.accounts.push(*account);
                rows.assets.push(posting.asset.as_str());
                rows.amounts.push(Numeric(posting.amount));
                rows.recorded.push(event.accepted.recorded_at);
            }
        }
        Ok(rows)
    }

    async fn insert(&self, client: &Client, statements: &Statements) -> Result<(), BatchError> {
        if self.positions.is_empty() {
            return Ok(());
        }
        let written = client
            .execute(
                &statements.insert_postings,
                &[
                    &self.positions,
                    &self.legs,
                    &self.accounts,
                    &self.assets,
                    &self.amounts,
                    &self.recorded,
                ],
            )
            .await?;
        counted(written, self.positions.len(), "postings")
    }
}

/// New heads of the users that had a row before the batch.
#[derive(Default)]
struct HeadRows<'a> {
    places: Vec<Tid>,
    users: Vec<i64>,
    before: Vec<i64>,
    after: Vec<i64>,
    heads: Vec<&'a [u8]>,
    times: Vec<Timestamp>,
}

impl<'a> HeadRows<'a> {
    fn of(locked: &'a Locked) -> Result<Self, BatchError> {
        let mut rows = HeadRows::default();
        for (subject, (place, before)) in &locked.users_before {
            let (Some(after), Some(number)) = (
                locked.state.users.get(subject),
                locked.user_nos.get(subject),
            ) else {
                return Err(BatchError::Corrupt("user"));
            };
            if after.sequence != before.sequence {
                rows.places.push(*place);
                rows.users.push(*number);
                rows.before.push(signed(before.sequence)?);
                rows.after.push(signed(after.sequence)?);
                rows.heads.push(&after.head);
                rows.times.push(after.last_at);
            }
        }
        Ok(rows)
    }

    async fn update(&self, client: &Client, statements: &Statements) -> Result<(), BatchError> {
        if self.places.is_empty() {
            return Ok(());
        }
        let written = client
            .execute(
                &statements.update_users,
                &[
                    &self.places,
                    &self.users,
                    &self.before,
                    &self.after,
                    &self.heads,
                    &self.times,
                ],
            )
            .await?;
        counted(written, self.places.len(), "a user's head")
    }
}

/// Balances that the batch opens or changes.
#[derive(Default)]
struct BalanceRows<'a> {
    new: (Vec<i64>, Vec<&'a str>, Vec<Numeric>),
    places: Vec<Tid>,
    accounts: Vec<i64>,
    before: Vec<Numeric>,
    after: Vec<Numeric>,
}

impl<'a> BalanceRows<'a> {
    fn of(locked: &'a Locked) -> Result<Self, BatchError> {
        let mut rows = BalanceRows::default();
        for (name, after) in &locked.state.balances {
            let account = || {
                let account = locked.account_nos.get(&name.0).copied();
                account.ok_or(BatchError::Corrupt("account"))
            };
            match locked.balances_before.get(name) {
                Some((_, before)) if before == after => {}
                Some((place, before)) => {
                    rows.places.push(*place);
                    rows.accounts.push(account()?);
                    rows.before.push(Numeric(*before));
                    rows.after.push(Numeric(*after));
                }
                None => {
                    rows.new.0.push(account()?);
                    rows.new.1.push(name.1.as_str());
                    rows.new.2.push(Numeric(*after));
                }
            }
        }
        Ok(rows)
    }

    async fn insert(&self, client: &Client, statements: &Statements) -> Result<(), BatchError> {
        let (accounts, assets, amounts) = &self.new;
        if accounts.is_empty() {
            return Ok(());
        }
        let written = client
            .execute(&statements.insert_balances, &[accounts, assets, amounts])
            .await?;
        counted(written, accounts.len(), "balances")
    }

    async fn update(&self, client: &Client, statements: &Statements) -> Result<(), BatchError> {
        if self.places.is_empty() {
            return Ok(());
        }
        let written = client
            .execute(
                &statements.update_balances,
                &[&self.places, &self.accounts, &self.before, &self.after],
            )
            .await?;
        counted(written, self.places.len(), "a balance")
    }
}

/// Business keys: new ones, or expired ones that are taken again (then `before` is set).
#[derive(Default)]
struct KeyRows<'a> {
    namespaces: Vec<&'a str>,
    keys: Vec<&'a str>,
    before: Vec<i64>,
    positions: Vec<i64>,
    until: Vec<Option<Timestamp>>,
}

impl<'a> KeyRows<'a> {
    fn of(locked: &'a Locked, events: &'a [NewEvent<'a>]) -> Result<(Self, Self), BatchError> {
        // The last event of the batch that took a key holds it: a key can expire between two events of one batch.
        let mut taken: BTreeMap<(&str, &str), (i64, Option<Timestamp>)> = BTreeMap::new();
        for (event, position) in events.iter().zip(&locked.positions) {
            for (unique, until) in &event.accepted.unique {
                taken.insert((&unique.namespace, &unique.key), (*position, *until));
            }
        }
        let (mut new, mut retaken) = (KeyRows::default(), KeyRows::default());
        for ((namespace, key), (position, until)) in taken {
            let before = locked
                .key_positions
                .get(&(namespace.to_owned(), key.to_owned()));
            let rows = if before.is_some() {
                &mut retaken
            } else {
                &mut new
            };
            rows.namespaces.push(namespace);
            rows.keys.push(key);
            rows.before.extend(before);
            rows.positions.push(position);
            rows.until.push(until);
        }
        Ok((new, retaken))
    }

    async fn insert(&self, client: &Client, statements: &Statements) -> Result<(), BatchError> {
        if self.keys.is_empty() {
            return Ok(());
        }
        let written = client
            .execute(
                &statements.insert_keys,
                &[&self.namespaces, &self.keys, &self.positions, &self.until],
            )
            .await?;
        counted(written, self.keys.len(), "business keys")
    }

    async fn update(&self, client: &Client, statements: &Statements) -> Result<(), BatchError> {
        if self.keys.is_empty() {
            return Ok(());
        }
        let written = client
            .execute(
                &statements.update_keys,
                &[
                    &self.namespaces,
                    &self.keys,
                    &self.before,
                    &self.positions,
                    &self.until,
                ],
            )
            .await?;
        counted(written, self.keys.len(), "a business key")
    }
}
