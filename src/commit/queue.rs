//! What waits for a lane: one queue for all lanes of a process, from which each takes what no other has the rows of.
//!
//! Two batches that meet on a row would wait for each other in the database, all of their commands with them. So a command whose
//! rows are in a batch under way stays here, and nothing that shares a row with it overtakes it. This is advice, never a lock:
//! other processes know nothing of it, and a row that is missing here costs a wait in the database and nothing else.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// The rows that a command will have locked, hashed. Two rows of one hash only meet more often.
pub(super) type Rows = Vec<u64>;

/// How many waiting commands a lane looks at for one batch: more would hold up those who queue.
const LOOK_MAX: usize = 1_024;

/// Why nothing was queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// No room.
    Full,
    /// No more commands are taken.
    Closed,
}

/// Commands in the order in which they came, and the rows of the batches under way.
#[derive(Debug)]
pub(super) struct Queue<T> {
    state: Mutex<State<T>>,
    /// Somebody may have something to take.
    ready: Notify,
    capacity: usize,
}

#[derive(Debug)]
struct State<T> {
    waiting: VecDeque<(Rows, T)>,
    /// Rows of batches under way, each with its lane.
    claims: HashMap<u64, usize>,
    closed: bool,
}

impl<T> Queue<T> {
    pub(super) fn new(capacity: usize) -> Self {
        Queue {
            state: Mutex::new(State {
                waiting: VecDeque::new(),
                claims: HashMap::new(),
                closed: false,
            }),
            ready: Notify::new(),
            capacity,
        }
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        // No code that holds it can panic half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, rows: Rows, item: T) -> Result<(), Refused> {
        let mut state = self.state();
        if state.closed {
            return Err(Refused::Closed);
        }
        if state.waiting.len() >= self.capacity {
            return Err(Refused::Full);
        }
        let claimed = rows.iter().any(|row| state.claims.contains_key(row));
        state.waiting.push_back((rows, item));
        drop(state);
        // The lane that has its rows looks again when it has finished.
        if !claimed {
            self.ready.notify_one();
        }
        Ok(())
    }

    /// Waits for commands and takes up to `max` of them, with their rows, until [`Queue::release`]. None when the queue is closed
    /// and empty.
    pub(super) async fn take(&self, lane: usize, max: usize) -> Option<Vec<T>> {
        loop {
            {
                let mut state = self.state();
                let (taken, more) = state.take(lane, max);
                let ended = state.closed && state.waiting.is_empty() && taken.is_empty();
                drop(state);
                if more || ended {
                    self.ready.notify_one();
                }
                if ended {
                    return None;
                }
                if !taken.is_empty() {
                    return Some(taken);
                }
            }
            self.ready.notified().await;
        }
    }

    /// Gives up the rows of a lane's batch; the lane is about to take again.
    pub(super) fn release(&self, lane: usize) {
        self.state().claims.retain(|_, owner| *owner != lane);
    }

    /// No new commands; those that wait are still taken.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.ready.notify_one();
    }
}

impl<T> State<T> {
    /// What a lane takes, and whether it left something that it has not looked at.
    fn take(&mut self, lane: usize, max: usize) -> (Vec<T>, bool) {
        let mut taken = Vec::new();
        let mut kept = Vec::new();
        // Rows of commands that stay: who comes later for one of them stays as well.
        let mut spoken_for = HashSet::new();
        let mut looked = 0;
        while taken.len() < max && looked < LOOK_MAX {
            let Some((rows, item)) = self.waiting.pop_front() else {
                break;
            };
            looked += 1;
            let free = rows.iter().all(|row| {
                !spoken_for.contains(row) && self.claims.get(row).is_none_or(|owner| *owner == lane)
            });
            if free {
                self.claims.extend(rows.into_iter().map(|row| (row, lane)));
                taken.push(item);
            } else {
                spoken_for.extend(rows.iter().copied());
                kept.push((rows, item));
            }
        }
        let more = !self.waiting.is_empty();
        for (rows, item) in kept.into_iter().rev() {
            self.waiting.push_front((rows, item));
        }
        (taken, more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn queue(items: &[(&[u64], char)]) -> Queue<char> {
        let queue = Queue::new(100);
        for (rows, item) in items {
            assert_eq!(queue.push(rows.to_vec(), *item), Ok(()));
        }
        queue
    }

    fn take(queue: &Queue<char>, lane: usize, max: usize) -> Option<String> {
        let taken = queue.take(lane, max).now_or_never()??;
        Some(taken.into_iter().collect())
    }

    #[test]
    fn a_command_waits_for_the_batch_that_has_its_rows() {
        let queue = queue(&[(&[1, 2], 'a'), (&[3], 'b'), (&[2, 4], 'c'), (&[5], 'd')]);
        assert_eq!(take(&queue, 0, 1).as_deref(), Some("a"));
        assert_eq!(take(&queue, 1, 9).as_deref(), Some("bd"));
        assert_eq!(take(&queue, 1, 9), None);
        queue.release(0);
        assert_eq!(take(&queue, 1, 9).as_deref(), Some("c"));
    }

    #[test]
    fn nothing_overtakes_a_command_it_shares_a_row_with() {
        let queue = queue(&[(&[1], 'a'), (&[1, 2], 'b'), (&[2, 3], 'c'), (&[3], 'd')]);
        assert_eq!(take(&queue, 0, 1).as_deref(), Some("a"));
        // Row 3 is nobody's, but `c` was here before `d`, and `b` before `c`.
        assert_eq!(take(&queue, 1, 9), None);
        queue.release(0);
        assert_eq!(take(&queue, 1, 9).as_deref(), Some("bcd"));
    }

    #[test]
    fn a_lane_takes_as_many_of_its_own_rows_as_fit() {
        let queue = queue(&[(&[1], 'a'), (&[1], 'b'), (&[1], 'c')]);
        assert_eq!(take(&queue, 0, 2).as_deref(), Some("ab"));
        assert_eq!(take(&queue, 1, 2), None);
        queue.release(0);
        assert_eq!(take(&queue, 0, 2).as_deref(), Some("c"));
    }

    #[test]
    fn a_full_queue_and_a_closed_one_refuse() {
        let queue = Queue::new(1);
        assert_eq!(queue.push(vec![1], 'a'), Ok(()));
        assert_eq!(queue.push(vec![2], 'b'), Err(Refused::Full));
        queue.close();
        assert_eq!(queue.push(vec![2], 'b'), Err(Refused::Closed));
    }

    #[tokio::test]
    async fn a_closed_queue_is_emptied_and_ends_every_lane() {
        let queue = queue(&[(&[1], 'a'), (&[1], 'b')]);
        assert_eq!(queue.take(0, 1).await, Some(vec!['a']));
        // One lane waits for the other's rows, a third for anything at all.
        let (second, third) = (queue.take(1, 9), queue.take(2, 9));
        queue.close();
        let first = async {
            queue.release(0);
            assert_eq!(queue.take(0, 9).await, Some(vec!['b']));
            queue.release(0);
            queue.take(0, 9).await
        };
        assert_eq!(tokio::join!(second, third, first), (None, None, None));
    }

    #[tokio::test]
    async fn idle_lanes_share_what_comes() {
        let queue = queue(&[]);
        let (first, second) = (queue.take(0, 1), queue.take(1, 1));
        let feed = async {
            assert_eq!(queue.push(vec![1], 'a'), Ok(()));
            assert_eq!(queue.push(vec![2], 'b'), Ok(()));
        };
        let (first, second, ()) = tokio::join!(first, second, feed);
        let mut taken = [first, second].map(Option::unwrap_or_default).concat();
        taken.sort_unstable();
        assert_eq!(taken, ['a', 'b']);
    }
}
