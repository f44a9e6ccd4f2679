//! What the relay knows of its shards: rows scanned, the one message of each user that is out, and the floor each scan starts from.
//!
//! Pure: no IO and no clock. Never lets two messages of one user out at once, and never raises a floor past what is settled, or past
//! a row that is not gone, but for rows of users that are held. Nothing of these is kept here: the outbox knows until when they are,
//! a scan leaves them out, and their first rows come back, when they are due, by themselves. Any number may be held so.

use super::reach::Reach;
use crate::store::outbox::{Range, SHARDS, Waiting};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::Duration;
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
    /// Was held: this row, and later ones of the user, may lie below the floor.
    late: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    /// Published, or about to be, and not yet deleted.
    Out,
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
    /// How far above its floor a shard is scanned at once. Outlives connections.
    reach: Reach,
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

    /// What to scan: each shard of the set from its floor, as far as a scan may walk.
    #[must_use]
    pub fn ranges(&self) -> Vec<Range> {
        (0..SHARDS)
            .filter(|shard| self.shards & bit(*shard) != 0)
            .map(|shard| (shard, self.floor(shard)))
            .map(|(shard, above)| Range {
                shard,
                above,
                up_to: self.reach.end(above),
            })
            .collect()
    }

    /// A scan failed.
    pub fn scan_failed(&mut self) {
        self.reach.failed();
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

    /// Takes what a scan of the ranges found (by position, without busy and held users), and raises the floors: to `horizon`, read
    /// before the scan, not beyond the range, and below the lowest row still there. Returns whether the ranges went up to the horizon.
    pub fn scanned(&mut self, rows: Vec<Waiting>, horizon: i64) -> bool {
        let ended = self.ranges().iter().all(|range| range.up_to >= horizon);
        self.offer(rows, horizon);
        if ended {
            self.reach.ended();
        }
        ended
    }

    fn offer(&mut self, rows: Vec<Waiting>, horizon: i64) {
        let mut fresh = HashSet::new();
        for row in rows {
            if bit(row.shard) & self.shards == 0 {
                continue;
            }
            if !self.users.contains_key(&row.user_no) {
                fresh.insert(row.user_no);
                self.insert(row, false);
            } else if fresh.contains(&row.user_no)
                && let Some(user) = self.users.get_mut(&row.user_no)
            {
                self.suspects
                    .extend((row.tries > 0).then_some(row.position));
                user.rows.push_back(row);
                self.known += 1;
            }
        }
        self.raise_floors(horizon);
    }

    /// Takes first rows of users whose hold is over.
    pub fn offer_late(&mut self, mut rows: Vec<Waiting>) {
        rows.sort_unstable_by_key(|row| row.position);
        for row in rows {
            if bit(row.shard) & self.shards != 0 && !self.users.contains_key(&row.user_no) {
                self.insert(row, true);
            }
        }
    }

    fn insert(&mut self, row: Waiting, late: bool) {
        self.suspects
            .extend((row.tries > 0).then_some(row.position));
        self.ready.insert(row.position, row.user_no);
        self.known += 1;
        self.users.insert(
            row.user_no,
            User {
                shard: row.shard,
                rows: VecDeque::from([row]),
                state: State::Ready,
                late,
            },
        );
    }

    /// Users known whose hold is over.
    #[must_use]
    pub fn late(&self) -> usize {
        self.users.values().filter(|user| user.late).count()
    }

    fn raise_floors(&mut self, horizon: i64) {
        let mut limits = self.floors.map(|floor| self.reach.end(floor).min(horizon));
        for user in self.users.values().filter(|user| !user.late) {
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
        if user.late {
            // Floors went past his rows while he was held.
            let shard = user.shard;
            self.set_floor(shard, self.floor(shard).min(row.position));
        }
        let Some(user) = self.users.get_mut(&row.user_no) else {
            return;
        };
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

    /// Forgets a user whose first row was put off: his rows come back when it is due.
    pub fn hold(&mut self, user_no: i64) {
        self.forget(user_no);
    }

    /// Forgets a user whose first row was not where it had been seen: another relay has settled it, this one has in a statement that it gave
    /// up waiting for, or somebody has rewritten the table. The next scan finds it, if it is still there.
    pub fn moved(&mut self, row: &Waiting) {
        self.forget(row.user_no);
        self.lower(row.shard, row.position, row.user_no);
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
            reach: self.reach,
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
    use crate::store::outbox::Tid;
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
            place: Tid::default(),
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
        book.ranges()[usize::from(shard)].above
    }

    #[test]
    fn one_message_of_a_user_is_out_at_a_time() {
        let mut book = book();
        book.offer(vec![row(1, 7), row(2, 7), row(3, 8)], 3);
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

    #[test]
    fn the_floor_stays_below_what_is_there_and_what_is_not_settled() {
        let mut book = book();
        book.offer(vec![row(10, 7), row(12, 7)], 11);
        assert_eq!(floor(&book, 7), 9);
        assert_eq!(
            floor(&book, 8),
            11,
            "an empty shard is settled up to the horizon"
        );
        let out = book.pick(10, 10);
        book.gone(&out[0]);
        book.offer(vec![], 11);
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

    #[test]
    fn after_a_scan_that_failed_floors_are_raised_by_parts() {
        let mut book = book();
        book.scan_failed();
        book.reset();
        book.set_shards(u16::MAX);
        let first = book.ranges()[7];
        assert!(first.above == 0 && first.up_to < 5_000_000);
        // One row in the first part; the horizon is beyond it.
        assert!(!book.scanned(vec![row(10, 7)], 5_000_000));
        assert_eq!((floor(&book, 7), floor(&book, 8)), (9, first.up_to));
        let out = book.pick(10, 10);
        book.gone(&out[0]);
        assert!(!book.scanned(vec![], 5_000_000));
        assert_eq!(floor(&book, 7), 9 + first.up_to);
        assert_eq!(floor(&book, 8), 2 * first.up_to);
        let parts = (0..10).filter(|_| !book.scanned(vec![], 5_000_000)).count();
        assert_eq!(
            parts, 3,
            "each as long as the first: what is dead may begin anywhere"
        );
        assert_eq!((floor(&book, 7), floor(&book, 8)), (5_000_000, 5_000_000));
        assert_eq!(book.ranges()[7].up_to, i64::MAX);
    }

    #[test]
    fn a_held_user_is_forgotten_and_his_rows_are_found_once_the_first_is_gone() {
        let mut book = book();
        book.offer(vec![row(5, 7), row(6, 7), row(7, 8)], 7);
        assert_eq!(book.pick(10, 10).len(), 2);
        book.hold(7);
        assert_eq!((book.out(), book.known), (1, 1));
        assert_eq!(book.busy(), [8]);
        book.offer(vec![], 9);
        assert_eq!(floor(&book, 7), 9, "the floor goes on without him");
        book.offer_late(vec![row(5, 7), row(7, 8)]);
        assert_eq!(book.late(), 1, "a user that is known is not late");
        let late = book.pick(10, 10);
        assert_eq!(positions(&late), [5]);
        book.offer(vec![], 10);
        assert_eq!(floor(&book, 7), 10, "nor does he stop it while he is out");
        book.hold(7);
        assert_eq!(floor(&book, 7), 10);
        book.offer_late(late.clone());
        book.pick(10, 10);
        book.gone(&late[0]);
        assert_eq!(floor(&book, 7), 5, "his next one is looked for");
        book.offer(vec![row(6, 7)], 10);
        assert_eq!(floor(&book, 7), 5);
        assert_eq!(positions(&book.pick(10, 10)), [6]);
    }

    #[test]
    fn a_row_that_has_moved_is_scanned_again() {
        let mut book = book();
        book.offer(vec![row(5, 7), row(6, 7)], 9);
        let out = book.pick(10, 10);
        book.offer(vec![], 9);
        assert_eq!((floor(&book, 7), floor(&book, 8)), (4, 9));
        book.moved(&out[0]);
        book.offer(vec![row(6, 7)], 9);
        assert_eq!((book.out(), floor(&book, 7)), (0, 5));
        assert_eq!(positions(&book.pick(10, 10)), [6]);
        // One that was late lies below the floor.
        book.hold(7);
        book.offer(vec![], 9);
        book.offer_late(vec![row(6, 7)]);
        let late = book.pick(10, 10);
        assert_eq!(floor(&book, 7), 9);
        book.moved(&late[0]);
        assert_eq!(floor(&book, 7), 5);
    }

    #[test]
    fn any_number_of_held_users_leaves_room() {
        let mut book = book();
        for user in 0..20_000 {
            assert!(book.has_room());
            book.offer(vec![row(user + 1, user)], user + 1);
            assert_eq!(book.pick(1, 1).len(), 1);
            book.hold(user);
        }
        assert_eq!((book.known, book.out, book.users.len()), (0, 0, 0));
    }

    #[test]
    fn after_a_channel_error_suspects_go_one_by_one() {
        let mut book = book();
        book.offer(vec![row(1, 1), row(2, 2), row(3, 3)], 3);
        assert_eq!(book.pick(2, 10).len(), 2);
        assert!(book.channel_closed().is_none());
        let alone = book.pick(10, 10);
        assert_eq!(positions(&alone), [1]);
        assert!(book.pick(10, 10).is_empty(), "nothing beside a suspect");
        assert_eq!(book.channel_closed().unwrap().position, 1);
        book.hold(1);
        assert_eq!(positions(&book.pick(10, 10)), [2]);
    }

    #[test]
    fn a_shard_given_up_keeps_only_what_is_out() {
        let mut book = book();
        book.offer(vec![row(1, 1), row(2, 1), row(3, 2)], 3);
        let out = book.pick(1, 10);
        book.set_shards(0);
        assert_eq!(book.in_use(), bit(1));
        assert!(!book.has_ready());
        book.gone(&out[0]);
        assert_eq!(book.in_use(), 0);
        assert_eq!((book.known, book.out), (0, 0));
    }

    #[test]
    fn a_window_is_never_passed() {
        let mut book = book();
        book.offer((1..=50).map(|n| row(n, n)).collect(), 50);
        assert_eq!(book.pick(20, 8).len(), 8);
        assert_eq!(book.pick(20, 100).len(), 12);
        assert!(book.pick(20, 100).is_empty());
    }
}
