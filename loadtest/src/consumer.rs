//! A consumer of every message of a ledger: counts distinct ids and measures how long each was under way.
//!
//! Runs on a thread of its own, so that what it measures is not the wait for a busy load generator. Acknowledges all that it
//! received, many at once where many are there; a message never waits for others to be acknowledged with.

use crate::lab::Ledger;
use anyhow::{Context, Result, anyhow, ensure};
use daybook::relay;
use futures_util::{FutureExt, Stream, StreamExt};
use hdrhistogram::Histogram;
use jiff::Timestamp;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicQosOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Connection, ConnectionProperties};
use secrecy::{ExposeSecret, SecretString};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

/// Slowest delivery that is told apart, in microseconds: a backlog is minutes old.
const LAG_MAX_US: u64 = 3_600_000_000;
/// How often is looked whether everything has come.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Messages that one acknowledgement covers at most: each is a command in the log of a quorum queue.
const ACK_MAX: u32 = 64;
/// Messages under way or not acknowledged at most: a few acknowledgements' worth, so that the broker need not wait for one.
const PREFETCH: u16 = 256;
/// In front of the time at which an event was recorded.
const RECORDED: &[u8] = b"\"recordedtime\":\"";

/// A running consumer.
#[derive(Debug)]
pub struct Consumer {
    seen: Arc<Mutex<Seen>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<()>>>,
}

/// What was received up to now.
#[derive(Clone, Debug)]
struct Seen {
    ids: HashSet<String>,
    messages: u64,
    /// From the record's `recordedtime` to the receipt, since the last look. Both clocks are this machine's.
    lag_us: Histogram<u64>,
    /// A message that could not be read.
    fault: Option<String>,
}

impl Seen {
    fn new() -> Result<Self> {
        Ok(Seen {
            ids: HashSet::new(),
            messages: 0,
            lag_us: Histogram::new_with_bounds(1, LAG_MAX_US, 3)?,
            fault: None,
        })
    }

    fn add(&mut self, id: &str, record: &[u8], now: Timestamp) {
        self.messages += 1;
        match recorded(record) {
            // A clock that was set back in between makes it negative; nothing is faster than at once.
            Some(recorded) => {
                let us = u64::try_from(now.duration_since(recorded).as_micros()).unwrap_or(1);
                self.lag_us.saturating_record(us.max(1));
            }
            None => self.fault = Some(format!("{id}: no recordedtime")),
        }
        self.ids.insert(id.to_owned());
    }
}

impl Consumer {
    /// Binds a durable quorum queue to everything and begins to take from it. To be called before the first event.
    ///
    /// # Errors
    /// When the broker is not there.
    pub async fn start(ledger: &Ledger) -> Result<Self> {
        let queue = format!("{}.all", ledger.name);
        relay::declare_queue(&ledger.amqp_url, &ledger.name, &queue, "#")
            .await
            .context("declaring the consumer's queue")?;
        let seen = Arc::new(Mutex::new(Seen::new()?));
        let (stop, stopped) = oneshot::channel();
        let url = ledger.amqp_url.clone();
        let kept = Arc::clone(&seen);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            runtime.block_on(consume(&url, &queue, &kept, stopped))
        });
        Ok(Consumer {
            seen,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Distinct messages received.
    pub fn distinct(&self) -> u64 {
        u64::try_from(lock(&self.seen).ids.len()).unwrap_or(u64::MAX)
    }

    /// The lag of what came since this was asked last, in microseconds.
    pub fn take_lag_us(&self) -> Histogram<u64> {
        let mut seen = lock(&self.seen);
        let taken = seen.lag_us.clone();
        seen.lag_us.reset();
        taken
    }

    /// Waits until this many distinct messages are there.
    ///
    /// # Errors
    /// When they do not come in time, more than these came, or one could not be read.
    pub async fn await_distinct(&self, wanted: u64, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit;
        while self.distinct() < wanted {
            self.still_runs()?;
            ensure!(
                Instant::now() < end,
                "{} of {wanted} messages were received within {} s",
                self.distinct(),
                limit.as_secs()
            );
            sleep(LOOK_EVERY).await;
        }
        let seen = lock(&self.seen);
        ensure!(seen.fault.is_none(), "a message: {:?}", seen.fault);
        let distinct = u64::try_from(seen.ids.len())?;
        ensure!(
            distinct == wanted,
            "{distinct} messages were received, but {wanted} events are stored"
        );
        Ok(())
    }

    /// Stops it and removes its queue.
    ///
    /// # Errors
    /// When it has failed before, or not every message that the queue had was received and acknowledged.
    pub async fn finish(mut self) -> Result<()> {
        drop(self.stop.take());
        let thread = self.thread.take().context("the consumer has no thread")?;
        tokio::task::spawn_blocking(|| thread.join())
            .await?
            .map_err(|_| anyhow!("the consumer broke off"))?
            .context("the consumer")
    }

    fn still_runs(&self) -> Result<()> {
        let ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        ensure!(!ended, "the consumer has ended");
        Ok(())
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        // Its connection ends with the thread; the thread has nothing to say that `await_distinct` did not miss.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes messages until it is told to stop, and leaves no queue behind.
async fn consume(
    url: &SecretString,
    queue: &str,
    seen: &Mutex<Seen>,
    mut stopped: oneshot::Receiver<()>,
) -> Result<()> {
    let properties = ConnectionProperties::default();
    let connection = Connection::connect(url.expose_secret(), properties).await?;
    let channel = connection.create_channel().await?;
    let qos = BasicQosOptions::default();
    channel.basic_qos(PREFETCH, qos).await?;
    let mut messages = channel
        .basic_consume(
            ShortString::try_new(queue)?,
            ShortString::default(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await?;
    let mut acknowledged = 0;
    loop {
        let first = tokio::select! {
            message = messages.next() => message.context("the broker ended it")??,
            _ = &mut stopped => break,
        };
        let show = |message: &Delivery| show(seen, message);
        let (last, count) = at_once(first, &mut messages, show).await?;
        last.ack(BasicAckOptions { multiple: true }).await?;
        acknowledged += u64::from(count);
    }
    channel.close(200, ShortString::try_new("done")?).await?;
    let received = lock(seen).messages;
    ensure!(
        acknowledged == received,
        "{received} messages were received, but {acknowledged} acknowledged"
    );
    // Kept open for the connection to close: one that is dropped closes itself, and fails when both happen at once.
    let channel = connection.create_channel().await?;
    remove(&channel, queue).await?;
    connection.close(200, ShortString::try_new("done")?).await?;
    Ok(())
}

/// Shows a message and those that are there already, up to what is acknowledged at once. Returns the last of them, and how many.
async fn at_once<T, E>(
    first: T,
    messages: &mut (impl Stream<Item = Result<T, E>> + Unpin),
    mut show: impl FnMut(&T),
) -> Result<(T, u32), E> {
    let (mut last, mut count) = (first, 1);
    show(&last);
    while count < ACK_MAX {
        // None of either kind: nothing more is there, or nothing more will come. Who waits next is told.
        let Some(Some(message)) = messages.next().now_or_never() else {
            break;
        };
        last = message?;
        count += 1;
        show(&last);
    }
    Ok((last, count))
}

fn show(seen: &Mutex<Seen>, message: &Delivery) {
    let id = message.properties.message_id().as_ref();
    let id = id.map(ShortString::as_str).unwrap_or_default();
    lock(seen).add(id, &message.data, Timestamp::now());
}

/// Removes the queue, in which nothing may be left. What was not acknowledged has come back to it with the end of the channel.
async fn remove(channel: &Channel, queue: &str) -> Result<()> {
    let name = ShortString::try_new(queue)?;
    let options = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::default()
    };
    let state = channel
        .queue_declare(name.clone(), options, FieldTable::default())
        .await?;
    let left = state.message_count();
    ensure!(left == 0, "{left} messages are left in {queue}");
    channel
        .queue_delete(name, QueueDeleteOptions::default())
        .await?;
    Ok(())
}

/// When the record was made. It stands before anything that a client wrote, so the first match is the member.
fn recorded(record: &[u8]) -> Option<Timestamp> {
    let start = record
        .windows(RECORDED.len())
        .position(|window| window == RECORDED)?
        + RECORDED.len();
    let rest = record.get(start..)?;
    let end = rest.iter().position(|byte| *byte == b'"')?;
    std::str::from_utf8(rest.get(..end)?).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream::{iter, pending};
    use std::convert::Infallible;

    #[test]
    fn copies_count_once_and_their_lag_twice() {
        let record = r#"{"id":"a","recordedtime":"2026-11-30T11:00:00.000001Z","data":{}}"#;
        let now: Timestamp = "2026-11-30T11:00:00.005001Z".parse().unwrap();
        let mut seen = Seen::new().unwrap();
        let record = record.as_bytes();
        seen.add("a", record, now);
        seen.add("a", record, now);
        seen.add("b", record, "2026-11-30T10:00:00Z".parse().unwrap());
        assert_eq!((seen.ids.len(), seen.messages), (2, 3));
        assert_eq!(seen.lag_us.count_between(4_995, 5_005), 2);
        assert_eq!(seen.lag_us.min(), 1);
        assert_eq!(seen.fault, None);
        seen.add("c", b"{}", now);
        assert!(seen.fault.is_some());
    }

    /// What is acknowledged together when so many messages are there, and nothing is known of more.
    async fn together(there: u32) -> Vec<(u32, u32)> {
        let mut messages = iter((1..=there).map(Ok::<_, Infallible>)).chain(pending());
        let (mut shown, mut acknowledged) = (0, Vec::new());
        while shown < there {
            let Ok(first) = messages.next().await.unwrap();
            let Ok(last) = at_once(first, &mut messages, |_| shown += 1).await;
            acknowledged.push(last);
        }
        acknowledged
    }

    #[tokio::test]
    async fn what_is_there_is_acknowledged_together_and_nothing_waits_for_more() {
        assert_eq!(together(1).await, [(1, 1)]);
        assert_eq!(together(3).await, [(3, 3)]);
        assert_eq!(together(64).await, [(64, 64)]);
        assert_eq!(together(130).await, [(64, 64), (128, 64), (130, 2)]);
    }

    #[test]
    fn the_time_of_a_record_is_found() {
        let record = br#"{"recordedtime":"2026-11-30T11:00:00.123456Z","x":1}"#;
        let expected: Timestamp = "2026-11-30T11:00:00.123456Z".parse().unwrap();
        assert_eq!(recorded(record), Some(expected));
        assert_eq!(recorded(br#"{"recordedtime":"2026"#), None);
        assert_eq!(recorded(b"{}"), None);
    }
}
