//! From the lanes to the relay of the same process: a wake-up after each commit, and the records that were committed, so that the
//! relay need not read again what has just been written.
//!
//! Never a promise: what is not here, or no longer, is read from the database. An outbox row decides what is published and when.

use super::outbox::Record;
use jiff::Timestamp;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Bytes of records that wait for the relay at most; the oldest make room.
const BYTES_MAX: usize = 4 * 1024 * 1024;
/// Records that wait at most.
const RECORDS_MAX: usize = 8_192;

/// One way from lanes to a relay. Cheap to clone. Without a relay nothing is kept.
#[derive(Clone, Debug, Default)]
pub struct Handover(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    committed: Notify,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    open: bool,
    by_position: HashMap<i64, Record>,
    /// As they came; those taken meanwhile are passed over.
    order: VecDeque<i64>,
    bytes: usize,
}

impl Handover {
    /// From now on somebody takes.
    pub fn open(&self) {
        self.kept().open = true;
    }

    /// Forgets what waits: after a failover the database may have given a position to another event.
    pub fn clear(&self) {
        let mut kept = self.kept();
        *kept = Kept {
            open: kept.open,
            ..Kept::default()
        };
    }

    /// Wakes the relay. Never lost, never waits.
    pub fn wake(&self) {
        self.0.committed.notify_one();
    }

    /// Hands over what a COMMIT, whose answer came, has made durable, and wakes the relay.
    pub fn give(&self, records: Vec<Record>) {
        let mut kept = self.kept();
        if kept.open {
            for record in records {
                kept.push(record);
            }
        }
        drop(kept);
        self.wake();
    }

    /// The record at a position, if it waits here and is of that time; taken once.
    #[must_use]
    pub fn take(&self, position: i64, recorded_at: Timestamp) -> Option<Record> {
        self.kept()
            .remove(position)
            .filter(|record| record.recorded_at == recorded_at)
    }

    /// Resolves after the next (or a missed) [`Handover::wake`]. One waiter only.
    pub async fn woken(&self) {
        self.0.committed.notified().await;
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn push(&mut self, record: Record) {
        self.bytes += record.record.len();
        self.order.push_back(record.position);
        self.by_position.insert(record.position, record);
        while let Some(oldest) = self.order.front().copied() {
            let taken = !self.by_position.contains_key(&oldest);
            if !taken && self.bytes <= BYTES_MAX && self.order.len() <= RECORDS_MAX {
                break;
            }
            self.order.pop_front();
            self.remove(oldest);
        }
    }

    fn remove(&mut self, position: i64) -> Option<Record> {
        let record = self.by_position.remove(&position)?;
        self.bytes -= record.record.len();
        Some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn record(position: i64, bytes: usize) -> Record {
        Record {
            position,
            event_id: Uuid::from_u128(1),
            event_type: "t".into(),
            sequence: 1,
            record: "x".repeat(bytes).into(),
            recorded_at: Timestamp::UNIX_EPOCH,
            subject: "alice".into(),
        }
    }

    #[test]
    fn nothing_is_kept_without_a_relay() {
        let handover = Handover::default();
        handover.give(vec![record(1, 10)]);
        assert!(handover.take(1, Timestamp::UNIX_EPOCH).is_none());
        handover.open();
        handover.give(vec![record(1, 10), record(2, 10)]);
        assert_eq!(handover.take(1, Timestamp::UNIX_EPOCH).unwrap().position, 1);
        assert!(handover.take(1, Timestamp::UNIX_EPOCH).is_none());
        handover.clear();
        assert!(handover.take(2, Timestamp::UNIX_EPOCH).is_none());
    }

    #[test]
    fn another_event_at_the_same_position_is_not_taken() {
        let handover = Handover::default();
        handover.open();
        handover.give(vec![record(1, 10)]);
        assert!(handover.take(1, Timestamp::MAX).is_none());
    }

    #[test]
    fn bytes_and_records_have_a_limit_whether_they_are_taken_or_not() {
        let handover = Handover::default();
        handover.open();
        let count = 3 * i64::try_from(RECORDS_MAX).unwrap();
        for position in 0..count {
            handover.give(vec![record(position, 2_000)]);
            if position % 3 == 0 {
                assert!(handover.take(position, Timestamp::UNIX_EPOCH).is_some());
            }
        }
        let kept = handover.kept();
        assert!(kept.order.len() <= RECORDS_MAX && kept.by_position.len() <= kept.order.len());
        assert!(kept.bytes <= BYTES_MAX);
        assert_eq!(kept.bytes, kept.by_position.len() * 2_000);
        assert!(kept.by_position.contains_key(&(count - 1)));
    }
}
