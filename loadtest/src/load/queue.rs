//! Arrivals that wait for a free place: bounded, first come first served.
//!
//! Never makes an arrival wait for room: it finds some, or it is told at once that there is none.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// A command's number, and when it was to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Its number.
    pub index: u64,
    /// Its intended start.
    pub intended: Instant,
}

/// The queue.
#[derive(Debug)]
pub struct Queue {
    waiting: Mutex<VecDeque<Arrival>>,
    /// As many permits as arrivals that nobody has been woken for.
    arrived: Semaphore,
    /// Places that are free: what they are about to take does not wait.
    free: AtomicUsize,
    waiting_max: usize,
}

impl Queue {
    /// An empty one.
    pub fn new(waiting_max: usize) -> Self {
        Queue {
            waiting: Mutex::new(VecDeque::new()),
            arrived: Semaphore::new(0),
            free: AtomicUsize::new(0),
            waiting_max,
        }
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Arrival>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets one arrive; false when there is no room.
    #[must_use]
    pub fn offer(&self, arrival: Arrival) -> bool {
        let mut waiting = self.waiting();
        let room = self.waiting_max + self.free.load(Ordering::Relaxed);
        if waiting.len() >= room {
            return false;
        }
        waiting.push_back(arrival);
        self.arrived.add_permits(1);
        true
    }

    /// The next arrival, when there is one; None after the last.
    pub async fn take(&self) -> Option<Arrival> {
        self.free.fetch_add(1, Ordering::Relaxed);
        // After the last arrival the semaphore is closed, and what still waits is taken without it.
        if let Ok(permit) = self.arrived.acquire().await {
            permit.forget();
        }
        let mut waiting = self.waiting();
        self.free.fetch_sub(1, Ordering::Relaxed);
        waiting.pop_front()
    }

    /// No more will arrive.
    pub fn close(&self) {
        self.arrived.close();
    }

    /// Gives up what waits, and says how many that were.
    pub fn give_up(&self) -> usize {
        let mut waiting = self.waiting();
        let count = waiting.len();
        waiting.clear();
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn arrival(index: u64) -> Arrival {
        Arrival {
            index,
            intended: Instant::now(),
        }
    }

    #[tokio::test]
    async fn arrivals_are_taken_in_their_order_up_to_the_last() {
        let queue = Queue::new(3);
        let arrivals = [arrival(0), arrival(1), arrival(2)];
        assert!(arrivals.iter().all(|arrival| queue.offer(*arrival)));
        queue.close();
        for arrival in arrivals {
            assert_eq!(queue.take().await, Some(arrival));
        }
        assert_eq!(queue.take().await, None);
    }

    #[tokio::test]
    async fn what_finds_no_room_is_told_so() {
        let queue = Queue::new(2);
        assert!(queue.offer(arrival(0)) && queue.offer(arrival(1)));
        assert!(!queue.offer(arrival(2)));
        queue.take().await.unwrap();
        assert!(queue.offer(arrival(3)));
        assert!(!queue.offer(arrival(4)));
        assert_eq!(queue.give_up(), 2);
    }

    #[tokio::test]
    async fn a_burst_finds_every_free_place_before_the_queue() {
        let queue = Arc::new(Queue::new(0));
        let takers: Vec<_> = (0..3)
            .map(|_| {
                let queue = Arc::clone(&queue);
                tokio::spawn(async move { queue.take().await })
            })
            .collect();
        while queue.free.load(Ordering::Relaxed) < 3 {
            tokio::task::yield_now().await;
        }
        let taken: Vec<bool> = (0..5).map(|index| queue.offer(arrival(index))).collect();
        assert_eq!(taken, [true, true, true, false, false]);
        for taker in takers {
            assert!(taker.await.unwrap().is_some());
        }
    }

    #[tokio::test]
    async fn who_waits_is_woken_by_the_end() {
        let queue = Arc::new(Queue::new(1));
        let other = Arc::clone(&queue);
        let waits = tokio::spawn(async move { other.take().await });
        while queue.free.load(Ordering::Relaxed) < 1 {
            tokio::task::yield_now().await;
        }
        queue.close();
        assert_eq!(waits.await.unwrap(), None);
    }
}
