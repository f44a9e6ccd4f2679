//! What waits for a lane: one queue for all lanes of a process, from which each takes what no other has the rows of.
//!
//! Two batches that meet on a row would wait for each other in the database, all of their commands with them. So a command whose
//! rows are in a batch under way stays here, and nothing that shares a row with it overtakes it. This is advice, never a lock:
//! other processes know nothing of it, and a row that is missing here costs a wait in the database, or a batch that is run again.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Something that waits.
pub(super) trait Command {
    /// The rows that it will have locked, hashed. Two rows of one hash only meet more often.
    fn rows(&self) -> &[u64];

    /// Whether nobody waits for it any more.
    fn is_over(&self) -> bool;
}

/// Commands for the same row that wait at most, as a part of the queue: one user, or one merchant, leaves room for the others.
const SAME_ROW_PART: usize = 4;
/// How many waiting commands a lane looks at for one batch: more would hold up those who queue. More than may wait for one row, so
/// that the others are seen.
const LOOK_MAX: usize = 2_048;

/// Why nothing was queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// No room, or none for more commands on one of its rows.
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
    waiting: VecDeque<T>,
    /// How many of those there are for each row.
    waiting_for: HashMap<u64, usize>,
    /// Rows of batches under way, each with its lane.
    claims: HashMap<u64, usize>,
    closed: bool,
}

impl<T: Command> Queue<T> {
    pub(super) fn new(capacity: usize) -> Self {
        Queue {
            state: Mutex::new(State {
                waiting: VecDeque::new(),
                waiting_for: HashMap::new(),
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

    pub(super) fn push(&self, item: T) -> Result<(), Refused> {
        let mut state = self.state();
        if state.closed {
            return Err(Refused::Closed);
        }
        let same_row_max = (self.capacity / SAME_ROW_PART).max(1);
        let of_row = |row: &u64| state.waiting_for.get(row).copied().unwrap_or(0);
        if state.waiting.len() >= self.capacity
            || item.rows().iter().any(|row| of_row(row) >= same_row_max)
        {
            return Err(Refused::Full);
        }
        let claimed = item.rows().iter().any(|row| state.claims.contains_key(row));
        for row in item.rows() {
            *state.waiting_for.entry(*row).or_default() += 1;
        }
        state.waiting.push_back(item);
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
                // Who has taken nothing has found only what another lane must finish first, and must not wake itself.
                if ended || (more && !taken.is_empty()) {
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

    /// Gives up the rows of a lane's batch but for `kept`. A lane that gives up all of them is about to take again; else others are
    /// told.
    pub(super) fn release(&self, lane: usize, kept: &HashSet<u64>) {
        let mut state = self.state();
        state
            .claims
            .retain(|row, owner| *owner != lane || kept.contains(row));
        drop(state);
        if !kept.is_empty() {
            self.ready.notify_one();
        }
    }

    /// No new commands; those that wait are still taken.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.ready.notify_one();
    }

    /// Takes all that waits, for somebody who has no lanes.
    pub(super) fn empty(&self) -> VecDeque<T> {
        let mut state = self.state();
        state.waiting_for.clear();
        std::mem::take(&mut state.waiting)
    }
}

impl<T: Command> State<T> {
    /// What a lane takes, and whether it left something that it has not looked at. Commands that are over come with them, for their
    /// answer; they claim nothing.
    fn take(&mut self, lane: usize, max: usize) -> (Vec<T>, bool) {
        let mut taken = Vec::new();
        let mut kept = Vec::new();
        // Rows of commands that stay: who comes later for one of them stays as well.
        let mut spoken_for = HashSet::new();
        let mut looked = 0;
        while taken.len() < max && looked < LOOK_MAX {
            let Some(item) = self.waiting.pop_front() else {
                break;
            };
            looked += 1;
            let over = item.is_over();
            let free = item.rows().iter().all(|row| {
                !spoken_for.contains(row) && self.claims.get(row).is_none_or(|owner| *owner == lane)
            });
            if !over && !free {
                spoken_for.extend(item.rows().iter().copied());
                kept.push(item);
                continue;
            }
            for row in item.rows() {
                if !over {
                    self.claims.insert(*row, lane);
                }
                if let Some(waiting) = self.waiting_for.get_mut(row) {
                    *waiting -= 1;
                    if *waiting == 0 {
                        self.waiting_for.remove(row);
                    }
                }
            }
            taken.push(item);
        }
        let more = !self.waiting.is_empty();
        for item in kept.into_iter().rev() {
            self.waiting.push_front(item);
        }
        (taken, more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::{FutureExt, poll};
    use std::pin::pin;
    use std::time::Duration;
    use tokio::time::timeout;

    #[derive(Debug, PartialEq)]
    struct Item {
        name: char,
        rows: Vec<u64>,
        over: bool,
    }

    impl Command for Item {
        fn rows(&self) -> &[u64] {
            &self.rows
        }

        fn is_over(&self) -> bool {
            self.over
        }
    }

    fn item(rows: &[u64], name: char) -> Item {
        Item {
            name,
            rows: rows.to_vec(),
            over: false,
        }
    }

    fn queue(items: &[(&[u64], char)]) -> Queue<Item> {
        let queue = Queue::new(100);
        for (rows, name) in items {
            assert_eq!(queue.push(item(rows, *name)), Ok(()));
        }
        queue
    }

    fn names(taken: &[Item]) -> String {
        taken.iter().map(|item| item.name).collect()
    }

    fn take(queue: &Queue<Item>, lane: usize, max: usize) -> Option<String> {
        let taken = queue.take(lane, max).now_or_never()??;
        Some(names(&taken))
    }

    fn release(queue: &Queue<Item>, lane: usize) {
        queue.release(lane, &HashSet::new());
    }

    #[test]
    fn a_command_waits_for_the_batch_that_has_its_rows() {
        let queue = queue(&[(&[1, 2], 'a'), (&[3], 'b'), (&[2, 4], 'c'), (&[5], 'd')]);
        assert_eq!(take(&queue, 0, 1).as_deref(), Some("a"));
        assert_eq!(take(&queue, 1, 9).as_deref(), Some("bd"));
        assert_eq!(take(&queue, 1, 9), None);
        release(&queue, 0);
        assert_eq!(take(&queue, 1, 9).as_deref(), Some("c"));
    }

    #[test]
    fn nothing_overtakes_a_command_it_shares_a_row_with() {
        let queue = queue(&[(&[1], 'a'), (&[1, 2], 'b'), (&[2, 3], 'c'), (&[3], 'd')]);
        assert_eq!(take(&queue, 0, 1).as_deref(), Some("a"));
        // Row 3 is nobody's, but `c` was here before `d`, and `b` before `c`.
        assert_eq!(take(&queue, 1, 9), None);
        release(&queue, 0);
        assert_eq!(take(&queue, 1, 9).as_deref(), Some("bcd"));
    }

    #[test]
    fn a_lane_takes_as_many_of_its_own_rows_as_fit() {
        let queue = queue(&[(&[1], 'a'), (&[1], 'b'), (&[1], 'c')]);
        assert_eq!(take(&queue, 0, 2).as_deref(), Some("ab"));
        assert_eq!(take(&queue, 1, 2), None);
        release(&queue, 0);
        assert_eq!(take(&queue, 0, 2).as_deref(), Some("c"));
    }

    #[test]
    fn rows_that_are_done_with_are_free_before_the_batch_is() {
        let queue = queue(&[(&[1], 'a'), (&[2], 'b'), (&[1], 'c'), (&[2], 'd')]);
        assert_eq!(take(&queue, 0, 2).as_deref(), Some("ab"));
        queue.release(0, &HashSet::from([2]));
        assert_eq!(take(&queue, 1, 9).as_deref(), Some("c"));
        release(&queue, 0);
        assert_eq!(take(&queue, 1, 9).as_deref(), Some("d"));
    }

    #[test]
    fn a_command_that_is_over_comes_out_whoever_has_its_rows() {
        let queue = queue(&[(&[1], 'a')]);
        assert_eq!(take(&queue, 0, 1).as_deref(), Some("a"));
        let over = Item {
            over: true,
            ..item(&[1, 2], 'b')
        };
        assert_eq!(queue.push(over), Ok(()));
        assert_eq!(queue.push(item(&[2], 'c')), Ok(()));
        assert_eq!(take(&queue, 1, 9).as_deref(), Some("bc"));
    }

    #[test]
    fn a_full_queue_and_a_closed_one_refuse() {
        let queue = Queue::new(1);
        assert_eq!(queue.push(item(&[1], 'a')), Ok(()));
        assert_eq!(queue.push(item(&[2], 'b')), Err(Refused::Full));
        queue.close();
        assert_eq!(queue.push(item(&[2], 'b')), Err(Refused::Closed));
        assert_eq!(queue.empty().len(), 1);
    }

    #[test]
    fn one_row_leaves_room_for_the_others() {
        let queue = Queue::new(8);
        for _ in 0..2 {
            assert_eq!(queue.push(item(&[1], 'a')), Ok(()));
        }
        assert_eq!(queue.push(item(&[2, 1], 'b')), Err(Refused::Full));
        assert_eq!(queue.push(item(&[2], 'c')), Ok(()));
        assert_eq!(take(&queue, 0, 1).as_deref(), Some("a"));
        assert_eq!(queue.push(item(&[1], 'd')), Ok(()));
    }

    #[test]
    fn a_lane_that_can_take_nothing_waits_however_many_commands_there_are() {
        let capacity = SAME_ROW_PART * 2 * LOOK_MAX;
        let queue = Queue::new(capacity);
        assert_eq!(queue.push(item(&[1], 'a')), Ok(()));
        assert_eq!(take(&queue, 0, 1).as_deref(), Some("a"));
        for _ in 0..=LOOK_MAX {
            assert_eq!(queue.push(item(&[1], 'b')), Ok(()));
        }
        assert_eq!(take(&queue, 1, 9), None);
        release(&queue, 0);
        assert_eq!(take(&queue, 1, 2).as_deref(), Some("bb"));
    }

    #[tokio::test]
    async fn a_closed_queue_is_emptied_and_ends_every_lane() {
        let queue = queue(&[(&[1], 'a'), (&[1], 'b')]);
        assert_eq!(take(&queue, 0, 1).as_deref(), Some("a"));
        // One lane waits for the other's rows, a third for anything at all.
        let (mut second, mut third) = (pin!(queue.take(1, 9)), pin!(queue.take(2, 9)));
        assert!(poll!(&mut second).is_pending() && poll!(&mut third).is_pending());
        queue.close();
        let first = async {
            release(&queue, 0);
            let last = queue.take(0, 9).await;
            release(&queue, 0);
            (last.map(|taken| names(&taken)), queue.take(0, 9).await)
        };
        let all = async { tokio::join!(second, third, first) };
        let (second, third, (last, ended)) = timeout(Duration::from_secs(10), all).await.unwrap();
        // Whichever lane was first has the last command.
        let taken = [second, third].into_iter().flatten().flatten();
        let by_others: Vec<char> = taken.map(|item| item.name).collect();
        assert_eq!(
            by_others.len() + last.iter().len(),
            1,
            "{by_others:?}, {last:?}"
        );
        assert_eq!(ended, None);
    }

    #[tokio::test]
    async fn idle_lanes_share_what_comes() {
        let queue = queue(&[]);
        let (first, second) = (queue.take(0, 1), queue.take(1, 1));
        let feed = async {
            assert_eq!(queue.push(item(&[1], 'a')), Ok(()));
            assert_eq!(queue.push(item(&[2], 'b')), Ok(()));
        };
        let all = async { tokio::join!(first, second, feed) };
        let (first, second, ()) = timeout(Duration::from_secs(10), all).await.unwrap();
        let mut taken: Vec<char> = [first, second]
            .into_iter()
            .flatten()
            .flatten()
            .map(|item| item.name)
            .collect();
        taken.sort_unstable();
        assert_eq!(taken, ['a', 'b']);
    }
}
