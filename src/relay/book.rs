//! What the relay knows of its shards: rows scanned, the one message of each user that is out, and the floor each scan starts from.
//!
//! Pure: no IO and no clock of its own. Never lets two messages of one user out at once, and never raises a floor past a row that
//! is not gone, or past what is settled.

use crate::store::outbox::{SHARDS, Waiting};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::Duration;
use tokio::time::Instant;
use uuid::Uuid;

/// Pause before a message that the broker refused is tried again.
pub const REFUSED_PAUSE: Duration = Duration::from_secs(1);
/// Rows kept in memory at most, a scan's worth more or less.
pub const KNOWN_MAX: usize = 8_192;

#[derive(Debug)]
struct User {
    shard: u8,
    /// By position; the first is the next to be published, or is out.
    rows: VecDeque<Waiting>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    /// Published, or about to be, and not yet deleted.
    Out,
    Held(Instant),
}

/// The book of one relay.
#[derive(Debug, Default)]
pub struct Book {
    users: HashMap<i64, User>,
    /// Heads that may be published: position to user.
    ready: BTreeMap<i64, i64>,
    sent: HashMap<Uuid, i64>,
    /// Positions of which one closed a channel: to be published alone. Outlives connections.
    suspects: HashSet<i64>,
    floors: [i64; SHARDS as usize],
    known: usize,
    out: usize,
    shards: u16,
}

/// The bit of a shard in a set of shards.
#[must_use]
pub fn bit(shard: u8) -> u16 {
    1_u16.checked_shl(u32::from(shard)).unwrap_or(0)
}

impl Book {
    /// Takes the set of shards that may be published now. Of the others, only what is out is kept, until it is settled.
    pub fn set_shards(&mut self, shards: u16) {
        for shard in 0..SHARDS {
            if shards & !self.shards & bit(shard) != 0 {
                self.set_floor(shard, 0);
            }
        }
        self.shards = shards;
        let strangers: Vec<i64> = self
            .users
            .iter()
            .filter(|(_, user)| bit(user.shard) & shards == 0)
            .map(|(user_no, _)| *user_no)
            .collect();
        for user_no in strangers {
            if self
                .users
                .get(&user_no)
                .is_some_and(|user| user.state == State::Out)
            {
                self.keep_head(user_no);
            } else {
                self.forget(user_no);
            }
        }
    }

    /// Where to scan from: each shard of the set with its floor.
    #[must_use]
    pub fn floors(&self) -> Vec<(u8, i64)> {
        (0..SHARDS)
            .filter(|shard| self.shards & bit(*shard) != 0)
            .map(|shard| (shard, self.floors[usize::from(shard)]))
            .collect()
    }

    /// Users to leave out of a scan: their rows are known as far as is needed.
    #[must_use]
    pub fn busy(&self) -> Vec<i64> {
        self.users.keys().copied().collect()
    }

    /// Whether there is room for another scan's rows.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.known < KNOWN_MAX
    }

    /// Takes what a scan found (by position, without busy users), and raises the floors: to `horizon`, read before the scan, and
    /// below the lowest row still there.
    pub fn offer(&mut self, rows: Vec<Waiting>, horizon: i64, now: Instant) {
        let mut fresh = HashSet::new();
        for row in rows {
            if bit(row.shard) & self.shards == 0 {
                continue;
            }
            let user_no = row.user_no;
            if !self.users.contains_key(&user_no) {
                fresh.insert(user_no);
                let state = if row.wait.is_zero() {
                    self.ready.insert(row.position, user_no);
                    State::Ready
                } else {
                    State::Held(now + row.wait)
                };
                self.users.insert(
                    user_no,
                    User {
                        shard: row.shard,
                        rows: VecDeque::new(),
                        state,
                    },
                );
            }
            if fresh.contains(&user_no)
                && let Some(user) = self.users.get_mut(&user_no)
                && (user.rows.is_empty() || user.state == State::Ready)
            {
                if row.tries > 0 {
                    self.suspects.insert(row.position);
                }
                user.rows.push_back(row);
                self.known += 1;
            }
        }
        self.raise_floors(horizon);
    }

    fn raise_floors(&mut self, horizon: i64) {
        let mut limits = [horizon; SHARDS as usize];
        for user in self.users.values() {
            if let Some(head) = user.rows.front() {
                let limit = &mut limits[usize::from(user.shard)];
                *limit = (*limit).min(head.position - 1);
            }
        }
        for (floor, limit) in self.floors.iter_mut().zip(limits) {
            *floor = (*floor).max(limit);
        }
    }

    /// Makes the next scan of a shard see a row that lies below its floor, unless its user is known already.
    pub fn lower(&mut self, shard: u8, position: i64, user_no: i64) {
        if !self.users.contains_key(&user_no) {
            self.set_floor(shard, self.floor(shard).min(position - 1));
        }
    }

    fn floor(&self, shard: u8) -> i64 {
        self.floors.get(usize::from(shard)).copied().unwrap_or(0)
    }

    fn set_floor(&mut self, shard: u8, value: i64) {
        if let Some(floor) = self.floors.get_mut(usize::from(shard)) {
            *floor = value;
        }
    }

    /// The next rows to publish, lowest positions first, at most `window` out in all; they count as out from now on. A suspect is
    /// given only alone.
    pub fn pick(&mut self, window: usize, most: usize) -> Vec<Waiting> {
        let mut picked = Vec::new();
        while self.out < window && picked.len() < most {
            let Some((position, user_no)) = self.ready.first_key_value().map(|(p, u)| (*p, *u))
            else {
                break;
            };
            if self.waits_for_suspect() {
                break;
            }
            self.ready.remove(&position);
            if let Some(user) = self.users.get_mut(&user_no)
                && let Some(head) = user.rows.front()
            {
                user.state = State::Out;
                self.out += 1;
                picked.push(head.clone());
            }
        }
        picked
    }

    /// Whether the next row has to wait until others are in: it is a suspect, or one is out.
    #[must_use]
    pub fn waits_for_suspect(&self) -> bool {
        self.out > 0
            && (self.suspect_is_out()
                || self
                    .ready
                    .first_key_value()
                    .is_some_and(|(position, _)| self.suspects.contains(position)))
    }

    fn suspect_is_out(&self) -> bool {
        self.out == 1
            && !self.suspects.is_empty()
            && self
                .heads_out()
                .any(|head| self.suspects.contains(&head.position))
    }

    fn heads_out(&self) -> impl Iterator<Item = &Waiting> {
        self.users
            .values()
            .filter(|user| user.state == State::Out)
            .filter_map(|user| user.rows.front())
    }

    /// Notes under which id a picked row goes out.
    pub fn sent(&mut self, id: Uuid, user_no: i64) {
        self.sent.insert(id, user_no);
    }

    /// The row that went out under an id; it stays out until it is gone, held or forgotten.
    pub fn settle(&mut self, id: Uuid) -> Option<Waiting> {
        let user_no = self.sent.remove(&id)?;
        self.users.get(&user_no)?.rows.front().cloned()
    }

    /// The row has left the outbox: the user's next one may go.
    pub fn gone(&mut self, row: &Waiting) {
        self.suspects.remove(&row.position);
        let Some(user) = self.users.get_mut(&row.user_no) else {
            return;
        };
        if user
            .rows
            .front()
            .is_none_or(|head| head.position != row.position)
        {
            return;
        }
        if user.state == State::Out {
            self.out -= 1;
        }
        user.rows.pop_front();
        self.known -= 1;
        match user.rows.front() {
            Some(next) => {
                user.state = State::Ready;
                self.ready.insert(next.position, row.user_no);
            }
            None => {
                self.users.remove(&row.user_no);
            }
        }
    }

    /// Holds a user back behind his row until a moment.
    pub fn hold(&mut self, user_no: i64, until: Instant) {
        self.keep_head(user_no);
        if let Some(user) = self.users.get_mut(&user_no) {
            if user.state == State::Out {
                self.out -= 1;
            }
            if let Some(head) = user.rows.front() {
                self.ready.remove(&head.position);
            }
            user.state = State::Held(until);
        }
    }

    /// Lets the next scan find the users whose time has come; what is known of them may be old. True when there were any.
    pub fn release_due(&mut self, now: Instant) -> bool {
        let due: Vec<i64> = self
            .users
            .iter()
            .filter(|(_, user)| matches!(user.state, State::Held(until) if until <= now))
            .map(|(user_no, _)| *user_no)
            .collect();
        for user_no in &due {
            self.forget(*user_no);
        }
        !due.is_empty()
    }

    fn keep_head(&mut self, user_no: i64) {
        if let Some(user) = self.users.get_mut(&user_no) {
            self.known -= user.rows.len().saturating_sub(1);
            user.rows.truncate(1);
        }
    }

    fn forget(&mut self, user_no: i64) {
        let Some(user) = self.users.remove(&user_no) else {
            return;
        };
        self.known -= user.rows.len();
        if user.state == State::Out {
            self.out -= 1;
        }
        if let Some(head) = user.rows.front() {
            self.ready.remove(&head.position);
            self.set_floor(user.shard, self.floor(user.shard).min(head.position - 1));
        }
    }

    /// The channel closed with these rows out, and one of them is why. They may go again. When it was alone it is returned: it is
    /// the one. Otherwise each is a suspect from now on, to be published alone.
    pub fn channel_closed(&mut self) -> Option<Waiting> {
        self.sent.clear();
        let mut out: Vec<Waiting> = self.heads_out().cloned().collect();
        if let [_] = out.as_slice() {
            return out.pop();
        }
        for head in out {
            self.suspects.insert(head.position);
            self.ready.insert(head.position, head.user_no);
            if let Some(user) = self.users.get_mut(&head.user_no) {
                user.state = State::Ready;
                self.out -= 1;
            }
        }
        None
    }

    /// Forgets all but the suspects: what was out has an unknown outcome, and is found again by a scan.
    pub fn reset(&mut self) {
        *self = Book {
            suspects: std::mem::take(&mut self.suspects),
            ..Book::default()
        };
        // A suspect that another relay has settled would stay for ever.
        if self.suspects.len() > KNOWN_MAX {
            self.suspects.clear();
        }
    }

    /// Rows out.
    #[must_use]
    pub fn out(&self) -> usize {
        self.out
    }

    /// Whether a row could be published at once.
    #[must_use]
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Shards that rows are out of.
    #[must_use]
    pub fn in_use(&self) -> u16 {
        self.users
            .values()
            .filter(|user| user.state == State::Out)
            .fold(0, |set, user| set | bit(user.shard))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::Timestamp;

    fn row(position: i64, user_no: i64) -> Waiting {
        Waiting {
            position,
            shard: u8::try_from(user_no % 16).unwrap(),
            user_no,
            recorded_at: Timestamp::UNIX_EPOCH,
            traceparent: None,
            tries: 0,
            redriven: false,
            wait: Duration::ZERO,
        }
    }

    fn book() -> Book {
        let mut book = Book::default();
        book.set_shards(u16::MAX);
        book
    }

    fn positions(rows: &[Waiting]) -> Vec<i64> {
        rows.iter().map(|row| row.position).collect()
    }

    fn floor(book: &Book, shard: u8) -> i64 {
        book.floors()[usize::from(shard)].1
    }

    #[tokio::test]
    async fn one_message_of_a_user_is_out_at_a_time() {
        let mut book = book();
        book.offer(vec![row(1, 7), row(2, 7), row(3, 8)], 3, Instant::now());
        let first = book.pick(10, 10);
        assert_eq!(positions(&first), [1, 3]);
        book.sent(Uuid::from_u128(1), 7);
        assert!(book.pick(10, 10).is_empty());
        let settled = book.settle(Uuid::from_u128(1)).unwrap();
        assert!(
            book.pick(10, 10).is_empty(),
            "confirmed, but not deleted yet"
        );
        book.gone(&settled);
        assert_eq!(positions(&book.pick(10, 10)), [2]);
    }

    #[tokio::test]
    async fn the_floor_stays_below_what_is_there_and_what_is_not_settled() {
        let mut book = book();
        book.offer(vec![row(10, 7), row(12, 7)], 11, Instant::now());
        assert_eq!(floor(&book, 7), 9);
        assert_eq!(
            floor(&book, 8),
            11,
            "an empty shard is settled up to the horizon"
        );
        let out = book.pick(10, 10);
        book.gone(&out[0]);
        book.offer(vec![], 11, Instant::now());
        assert_eq!(floor(&book, 7), 11, "never past the horizon");
        book.lower(7, 3, 23);
        assert_eq!(floor(&book, 7), 2);
        book.lower(7, 1, 7);
        assert_eq!(
            floor(&book, 7),
            2,
            "a known user's row is not lost sight of"
        );
    }

    #[tokio::test]
    async fn a_held_user_waits_and_is_scanned_again() {
        let mut book = book();
        let now = Instant::now();
        book.offer(vec![row(5, 7), row(6, 7), row(7, 8)], 7, now);
        assert_eq!(book.pick(10, 10).len(), 2);
        book.hold(7, now + Duration::from_secs(1));
        assert_eq!(book.out(), 1);
        assert!(!book.release_due(now));
        assert!(book.busy().contains(&7));
        assert!(book.release_due(now + Duration::from_secs(1)));
        assert_eq!(floor(&book, 7), 4);
        assert!(!book.busy().contains(&7));
    }

    #[tokio::test]
    async fn a_row_that_must_wait_holds_its_user_from_the_scan_on() {
        let mut book = book();
        let mut waiting = row(5, 7);
        waiting.wait = Duration::from_secs(3);
        book.offer(vec![waiting, row(6, 7)], 9, Instant::now());
        assert!(book.pick(10, 10).is_empty());
        assert_eq!(floor(&book, 7), 4);
    }

    #[tokio::test]
    async fn after_a_channel_error_suspects_go_one_by_one() {
        let mut book = book();
        book.offer(vec![row(1, 1), row(2, 2), row(3, 3)], 3, Instant::now());
        assert_eq!(book.pick(2, 10).len(), 2);
        assert!(book.channel_closed().is_none());
        let alone = book.pick(10, 10);
        assert_eq!(positions(&alone), [1]);
        assert!(book.pick(10, 10).is_empty(), "nothing beside a suspect");
        assert_eq!(book.channel_closed().unwrap().position, 1);
        book.hold(1, Instant::now());
        assert_eq!(positions(&book.pick(10, 10)), [2]);
    }

    #[tokio::test]
    async fn a_shard_given_up_keeps_only_what_is_out() {
        let mut book = book();
        book.offer(vec![row(1, 1), row(2, 1), row(3, 2)], 3, Instant::now());
        let out = book.pick(1, 10);
        book.set_shards(0);
        assert_eq!(book.in_use(), bit(1));
        assert!(!book.has_ready());
        book.gone(&out[0]);
        assert_eq!(book.in_use(), 0);
        assert_eq!((book.known, book.out), (0, 0));
    }

    #[tokio::test]
    async fn a_window_is_never_passed() {
        let mut book = book();
        book.offer((1..=50).map(|n| row(n, n)).collect(), 50, Instant::now());
        assert_eq!(book.pick(20, 8).len(), 8);
        assert_eq!(book.pick(20, 100).len(), 12);
        assert!(book.pick(20, 100).is_empty());
    }
}
