//! Fills a ledger that nobody has used with a long history, as fast as the machine takes it, so that scenarios begin where a year of
//! work would have led. `daybook verify` proves it like any other.
//!
//! Records, hashes and decisions are the library's own; only the way into the tables is another one. Never adds to a ledger in use.

mod history;
mod rows;
mod tables;
#[cfg(test)]
mod tests;

pub use history::{Kind, Plan};

use crate::database::Database;
use anyhow::{Context, Result, bail};
use bytes::Bytes;
use daybook::domain::{Guard, Subject};
use daybook::store::numeric::Numeric;
use futures_util::SinkExt;
use history::{Event, History};
use rows::Rows;
use std::pin::pin;
use std::time::{Duration, Instant};
use tables::{Dropped, Month};
use tokio::sync::mpsc;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, CopyInSink};

/// Bytes of events that go on their way at once.
const PORTION_BYTES: usize = 512 * 1024;
/// Portions made ahead.
const PORTIONS_AHEAD: usize = 8;

const EVENT_COLUMNS: &str = "position, user_no, sequence, event_id, type, writer, idempotency_key, fingerprint, record, \
     recorded_at, effective_at";
const POSTING_COLUMNS: &str = "position, leg, account_no, asset, amount, recorded_at";

/// How long filling took, by part.
#[derive(Clone, Copy, Debug)]
pub struct Filled {
    /// Events that are there now.
    pub events: u64,
    /// Making events and postings and copying them.
    pub copying: Duration,
    /// Making the indexes.
    pub indexing: Duration,
    /// Users, accounts, balances, statistics and the checkpoint.
    pub settling: Duration,
}

impl std::fmt::Display for Filled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let per_second = u128::from(self.events) * 1_000_000 / self.copying.as_micros().max(1);
        write!(
            f,
            "{} events: copied in {:.1?} ({per_second}/s), indexed in {:.1?}, settled in {:.1?}",
            self.events, self.copying, self.indexing, self.settling
        )
    }
}

/// Fills the ledger, over its month up to now. The database's user has to be a superuser.
///
/// # Errors
/// When the ledger has been used, the plan makes no sense, or Postgres refuses; the database is of no use then.
pub async fn fill(database: &Database, ledger: &str, plan: Plan) -> Result<Filled> {
    let client = database.connect().await?;
    tables::settle_in(&client, ledger).await?;
    let month = tables::month(&client).await?;
    let (events, keep_indexes) = (plan.events, plan.keep_indexes);
    let history = History::new(plan, ledger, (month.begins, month.now))?;

    let started = Instant::now();
    let dropped = match keep_indexes {
        true => Dropped::default(),
        false => tables::drop_indexes(&client, &month).await?,
    };
    let history = copy(database, ledger, &month, history).await?;
    let copying = started.elapsed();

    let started = Instant::now();
    tables::make_indexes(&client, &dropped).await?;
    let indexing = started.elapsed();

    let started = Instant::now();
    settle(&client, &history, events).await?;
    Ok(Filled {
        events,
        copying,
        indexing,
        settling: started.elapsed(),
    })
}

/// Events and postings that go together.
struct Portion {
    events: Bytes,
    postings: Bytes,
}

/// Copies events and postings side by side, while another thread makes them. Returns the history at its end.
async fn copy(
    database: &Database,
    ledger: &str,
    month: &Month,
    history: History,
) -> Result<History> {
    let (to_events, to_postings) = (database.connect().await?, database.connect().await?);
    let events = open(&to_events, ledger, &month.events, EVENT_COLUMNS).await?;
    let postings = open(&to_postings, ledger, &month.postings, POSTING_COLUMNS).await?;
    let (mut events, mut postings) = (pin!(events), pin!(postings));
    let (sender, mut portions) = mpsc::channel::<Portion>(PORTIONS_AHEAD);
    let maker = tokio::task::spawn_blocking(move || make(history, &sender));
    while let Some(portion) = portions.recv().await {
        let sent = tokio::try_join!(events.send(portion.events), postings.send(portion.postings));
        if let Err(error) = sent {
            // That only says that the stream is closed; its end says why.
            events.finish().await?;
            postings.finish().await?;
            bail!(error);
        }
    }
    let history = maker.await??;
    events.finish().await?;
    postings.finish().await?;
    to_events.batch_execute("COMMIT").await?;
    to_postings.batch_execute("COMMIT").await?;
    Ok(history)
}

async fn open(
    client: &Client,
    ledger: &str,
    partition: &str,
    columns: &str,
) -> Result<CopyInSink<Bytes>> {
    tables::settle_in(client, ledger).await?;
    let copy = tables::begin_copy(client, partition, columns).await?;
    Ok(client.copy_in(&copy).await?)
}

/// Makes all events, and sends them in portions.
fn make(mut history: History, portions: &mpsc::Sender<Portion>) -> Result<History> {
    let (mut events, mut postings) = (Rows::new(11), Rows::new(6));
    while let Some(event) = history.next()? {
        write_event(&mut events, &event)?;
        write_postings(&mut postings, &event)?;
        if events.len() >= PORTION_BYTES {
            send(portions, &mut events, &mut postings)?;
        }
    }
    events.end();
    postings.end();
    send(portions, &mut events, &mut postings)?;
    Ok(history)
}

fn send(portions: &mpsc::Sender<Portion>, events: &mut Rows, postings: &mut Rows) -> Result<()> {
    let portion = Portion {
        events: events.take(),
        postings: postings.take(),
    };
    portions
        .blocking_send(portion)
        .context("nobody takes the events")
}

fn write_event(rows: &mut Rows, event: &Event<'_>) -> Result<()> {
    let draft = event.draft;
    let recorded_at = event.accepted.recorded_at;
    rows.row()
        .value(event.position, &Type::INT8)?
        .value(event.user_no, &Type::INT8)?
        .value(i64::try_from(event.accepted.sequence)?, &Type::INT8)?
        .value(event.event_id, &Type::UUID)?
        .value(draft.event_type.as_str(), &Type::TEXT)?
        .value(draft.principal.subject.as_str(), &Type::TEXT)?
        .value(draft.key.as_str(), &Type::TEXT)?
        .value(draft.fingerprint.as_slice(), &Type::BYTEA)?
        .value(&*event.record, &Type::TEXT)?
        .value(recorded_at, &Type::TIMESTAMPTZ)?
        .value(draft.time.unwrap_or(recorded_at), &Type::TIMESTAMPTZ)?;
    Ok(())
}

fn write_postings(rows: &mut Rows, event: &Event<'_>) -> Result<()> {
    let recorded_at = event.accepted.recorded_at;
    let legs = event.accepted.postings.iter().zip(&event.account_nos);
    for (leg, (posting, account_no)) in legs.enumerate() {
        rows.row()
            .value(event.position, &Type::INT8)?
            .value(i16::try_from(leg)?, &Type::INT2)?
            .value(account_no, &Type::INT8)?
            .value(posting.asset.as_str(), &Type::TEXT)?
            .value(Numeric(posting.amount), &Type::NUMERIC)?
            .value(recorded_at, &Type::TIMESTAMPTZ)?;
    }
    Ok(())
}

/// Writes what the history came to, and lets the ledger go on from there.
async fn settle(client: &Client, history: &History, events: u64) -> Result<()> {
    let (mut rows, mut last_user, mut last_account) = (Rows::new(6), 0, 0);
    for (number, subject, user) in history.users() {
        last_user = last_user.max(number);
        rows.row()
            .value(number, &Type::INT8)?
            .value(subject.as_str(), &Type::TEXT)?
            .value(if user.frozen { "frozen" } else { "active" }, &Type::TEXT)?
            .value(i64::try_from(user.sequence)?, &Type::INT8)?
            .value(user.head.as_slice(), &Type::BYTEA)?
            .value(user.last_at, &Type::TIMESTAMPTZ)?;
    }
    let columns = "user_no, subject, status, sequence, head_hash, last_at";
    copy_all(client, "users", columns, rows).await?;

    let mut rows = Rows::new(5);
    for (number, account) in history.accounts() {
        last_account = last_account.max(number);
        let (guard, floor) = match account.guard {
            Guard::Floor(floor) => ("floor", Some(Numeric(floor))),
            Guard::None => ("none", None),
        };
        rows.row()
            .value(number, &Type::INT8)?
            .value(account.address.as_str(), &Type::TEXT)?
            .value(account.owner.as_ref().map(Subject::as_str), &Type::TEXT)?
            .value(guard, &Type::TEXT)?
            .value(floor, &Type::NUMERIC)?;
    }
    copy_all(
        client,
        "accounts",
        "account_no, address, owner, guard, floor",
        rows,
    )
    .await?;

    let mut rows = Rows::new(3);
    for (number, asset, amount) in history.balances() {
        rows.row()
            .value(number, &Type::INT8)?
            .value(asset.as_str(), &Type::TEXT)?
            .value(Numeric(amount), &Type::NUMERIC)?;
    }
    copy_all(client, "balances", "account_no, asset, amount", rows).await?;
    tables::go_on_after(client, i64::try_from(events)?, last_user, last_account).await?;
    tables::tidy_up(client).await
}

async fn copy_all(client: &Client, table: &str, columns: &str, mut rows: Rows) -> Result<()> {
    rows.end();
    let copy = format!("COPY {table} ({columns}) FROM STDIN (FORMAT binary)");
    let mut sink = pin!(client.copy_in::<_, Bytes>(&copy).await?);
    sink.send(rows.take()).await?;
    sink.finish().await?;
    Ok(())
}
