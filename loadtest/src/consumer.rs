//! A consumer of every message of a ledger: counts distinct ids and measures how long each was under way.
//!
//! Runs on a thread of its own, so that what it measures is not the wait for a busy load generator.

use crate::lab::Ledger;
use anyhow::{Context, Result, ensure};
use daybook::relay::{self, Received, Source};
use hdrhistogram::Histogram;
use jiff::Timestamp;
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

    fn add(&mut self, message: Received, now: Timestamp) {
        self.messages += 1;
        match recorded(&message.body) {
            // A clock that was set back in between makes it negative; nothing is faster than at once.
            Some(recorded) => {
                let us = u64::try_from(now.duration_since(recorded).as_micros()).unwrap_or(1);
                self.lag_us.saturating_record(us.max(1));
            }
            None => self.fault = Some(format!("{}: no recordedtime", message.message_id)),
        }
        self.ids.insert(message.message_id);
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
            let source = Source::Queue {
                name: queue,
                acknowledge: true,
            };
            let show = move |message: Received| lock(&kept).add(message, Timestamp::now());
            runtime.block_on(async {
                tokio::select! {
                    ended = relay::tail(&url, source, show) => ended.context("the consumer"),
                    _ = stopped => Ok(()),
                }
            })
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
    use std::collections::BTreeMap;

    fn message(id: &str, body: &str) -> Received {
        Received {
            message_id: id.to_owned(),
            routing_key: "transfer".to_owned(),
            headers: BTreeMap::new(),
            body: body.as_bytes().to_vec(),
            redelivered: false,
        }
    }

    #[test]
    fn copies_count_once_and_their_lag_twice() {
        let record = r#"{"id":"a","recordedtime":"2026-11-30T11:00:00.000001Z","data":{}}"#;
        let now: Timestamp = "2026-11-30T11:00:00.005001Z".parse().unwrap();
        let mut seen = Seen::new().unwrap();
        seen.add(message("a", record), now);
        seen.add(message("a", record), now);
        seen.add(
            message("b", record),
            "2026-11-30T10:00:00Z".parse().unwrap(),
        );
        assert_eq!((seen.ids.len(), seen.messages), (2, 3));
        assert_eq!(seen.lag_us.count_between(4_995, 5_005), 2);
        assert_eq!(seen.lag_us.min(), 1);
        assert_eq!(seen.fault, None);
        seen.add(message("c", "{}"), now);
        assert!(seen.fault.is_some());
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
