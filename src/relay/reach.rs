//! How many positions of a shard one scan of the outbox walks over.
//!
//! Mostly all there are. But while somebody holds an old snapshot, rows that are gone are walked over as well: a relay that begins at
//! the first position may meet more of them than a statement has time for, and would begin there again and again. So after a scan
//! that failed the next ones walk a part each and raise the floors to its end, until one has come to the settled position.

/// Positions of a part after the first failure.
const FIRST: i64 = 1_000_000;
/// Positions of a part at least.
const LEAST: i64 = 100_000;

/// How many positions one scan walks over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach(i64);

impl Default for Reach {
    fn default() -> Self {
        Reach(i64::MAX)
    }
}

impl Reach {
    /// The last position of a scan that starts above this one.
    #[must_use]
    pub fn end(self, floor: i64) -> i64 {
        floor.saturating_add(self.0)
    }

    /// A scan failed: perhaps it took too long.
    pub fn failed(&mut self) {
        self.0 = (self.0 / 8).clamp(LEAST, FIRST);
    }

    /// Scans have come to the settled position: what is above it is new, however far that goes.
    pub fn ended(&mut self) {
        *self = Reach::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_shorten_it_down_to_a_bound() {
        let mut reach = Reach::default();
        assert_eq!(reach.end(5), i64::MAX);
        reach.failed();
        assert_eq!(reach.end(5), 5 + FIRST);
        for _ in 0..10 {
            reach.failed();
        }
        assert_eq!(reach.end(5), 5 + LEAST);
        reach.ended();
        assert_eq!(reach.end(5), i64::MAX);
    }
}
