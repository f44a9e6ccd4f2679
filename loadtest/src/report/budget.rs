//! The performance budget: what is promised of each scenario.
//!
//! Holds no measurement.

/// A row of the budget.
#[derive(Debug)]
pub struct Budget {
    /// What is measured.
    pub name: &'static str,
    /// What its value counts.
    pub unit: Unit,
    /// What the value has to be.
    pub target: Target,
    /// What it depends on most, for whoever reads that it was missed.
    pub rests_on: &'static str,
}

/// What a value counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Multiples of the control's events a second.
    Control,
    /// Events a second.
    Events,
    /// Milliseconds.
    Millis,
    /// Per cent.
    Percent,
    /// Bytes.
    Bytes,
}

impl Unit {
    /// As the report writes it.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Control => "x control",
            Unit::Events => "events/s",
            Unit::Millis => "ms",
            Unit::Percent => "%",
            Unit::Bytes => "bytes",
        }
    }
}

/// What a value has to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// This or more.
    AtLeast(f64),
    /// This or less.
    AtMost(f64),
    /// Less than this.
    Below(f64),
}

impl Target {
    /// Whether a value keeps it.
    pub fn is_met(self, value: f64) -> bool {
        match self {
            Target::AtLeast(bound) => value >= bound,
            Target::AtMost(bound) => value <= bound,
            Target::Below(bound) => value < bound,
        }
    }

    /// By how much a value misses it, in per cent of the bound.
    pub fn missed_by(self, value: f64) -> f64 {
        let (Target::AtLeast(bound) | Target::AtMost(bound) | Target::Below(bound)) = self;
        100.0 * (value - bound).abs() / bound
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::AtLeast(bound) => write!(f, ">= {bound}"),
            Target::AtMost(bound) => write!(f, "<= {bound}"),
            Target::Below(bound) => write!(f, "< {bound}"),
        }
    }
}

/// Saturation of the API role alone.
pub const SATURATION: Budget = Budget {
    name: "POST /v1/events at saturation: JWT ES256, schema, dedupe, double entry, chain, outbox, durable commit; relay paused",
    unit: Unit::Control,
    target: Target::AtLeast(4.0),
    rests_on: "processor time, all of it taken. The control rests on the disk's flushes: a faster disk raises it more than the service",
};
/// Saturation with everything running.
pub const SATURATION_RELAY: Budget = Budget {
    name: "the same with relay, broker and a consumer on the same cores; the relay keeps up",
    unit: Unit::Control,
    target: Target::AtLeast(3.0),
    rests_on: "processor time, all of it taken: broker, relay and consumer share the cores with the rest",
};
/// Latency at half of that.
pub const HALF: Budget = Budget {
    name: "p99 at half of saturation, relay on",
    unit: Unit::Millis,
    target: Target::AtMost(25.0),
    rests_on: "processor time and flushes of this machine: an event waits for the batch before its own and for its own, each with a flush",
};
/// Many events in a request.
pub const BATCH: Budget = Budget {
    name: "batch endpoint, relay paused",
    unit: Unit::Control,
    target: Target::AtLeast(5.0),
    rests_on: "an endpoint that does not exist yet",
};
/// One guarded account.
pub const HOT_FLOOR: Budget = Budget {
    name: "64 writers on one floor account",
    unit: Unit::Control,
    target: Target::AtLeast(2.0),
    rests_on: "the round trips of one batch after the other: two cannot be decided at a time",
};
/// A small pod.
pub const POD: Budget = Budget {
    name: "a pod limited to 400m CPU / 64 MiB, after 10 minutes at 17/s: events/s with p99 <= 100 ms and no errors",
    unit: Unit::Events,
    target: Target::AtLeast(2_000.0),
    rests_on: "processor time within the limit of 0.4 cores: a slower core does less in it",
};
/// Delivery.
pub const RELAY_LAG: Budget = Budget {
    name: "committed -> seen by a consumer, at 1,000/s: p99",
    unit: Unit::Millis,
    target: Target::AtMost(50.0),
    rests_on: "the flush of the batch, and the relay's turn on a processor that the load keeps busy",
};
/// Reading balances.
pub const BALANCE: Budget = Budget {
    name: "balance of an account, every guard, 200 thousand to 20 million postings, at 100/s: p99, the worst of all",
    unit: Unit::Millis,
    target: Target::AtMost(3.0),
    rests_on: "processor time while events go on: a read is one round trip to Postgres",
};
/// Writing into a large ledger.
pub const SIZE: Budget = Budget {
    name: "write rate with 20 million events in the tables, of that with an empty one",
    unit: Unit::Percent,
    target: Target::AtLeast(90.0),
    rests_on: "the indexes by user and account: each write goes to another leaf, which has to be read, and to be written whole after each checkpoint (`max_wal_size`)",
};
/// A snapshot that is held open, writes.
pub const HELD_WRITES: Budget = Budget {
    name: "a REPEATABLE READ session held open for 10 minutes at half load: writes lost",
    unit: Unit::Percent,
    target: Target::Below(20.0),
    rests_on: "the versions of users' and balances' rows that each update leaves and nothing may remove meanwhile",
};
/// A snapshot that is held open, relay.
pub const HELD_RELAY: Budget = Budget {
    name: "a REPEATABLE READ session held open for 10 minutes at half load: deliveries lost",
    unit: Unit::Percent,
    target: Target::Below(20.0),
    rests_on: "the same versions, and on processor time",
};
/// What an event takes on disk.
pub const BYTES: Budget = Budget {
    name: "bytes per event with two postings, all indexes",
    unit: Unit::Bytes,
    target: Target::AtMost(1_300.0),
    rests_on: "the record, text that anybody can read and hash, and indexes by user and account whose pages are half full, since they grow in their middle",
};

/// All rows, in the order of the report.
pub const ALL: [&Budget; 12] = [
    &SATURATION,
    &SATURATION_RELAY,
    &HALF,
    &BATCH,
    &HOT_FLOOR,
    &POD,
    &RELAY_LAG,
    &BALANCE,
    &SIZE,
    &HELD_WRITES,
    &HELD_RELAY,
    &BYTES,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_what_keeps_it() {
        assert!(Target::AtLeast(4.0).is_met(4.0));
        assert!(!Target::AtLeast(4.0).is_met(3.99));
        assert!(Target::AtMost(25.0).is_met(25.0));
        assert!(!Target::AtMost(25.0).is_met(25.01));
        assert!(Target::Below(20.0).is_met(19.99));
        assert!(!Target::Below(20.0).is_met(20.0));
        assert!(!Target::AtLeast(4.0).is_met(f64::NAN));
    }

    #[test]
    fn what_is_missed_is_a_share_of_the_bound() {
        assert!((Target::AtLeast(4.0).missed_by(3.0) - 25.0).abs() < 1e-9);
        assert!((Target::AtMost(1_300.0).missed_by(1_430.0) - 10.0).abs() < 1e-9);
    }

    #[test]
    fn a_target_reads_as_it_is_met() {
        assert_eq!(SATURATION.target.to_string(), ">= 4");
        assert_eq!(BYTES.target.to_string(), "<= 1300");
    }

    #[test]
    fn names_tell_rows_apart() {
        let names: std::collections::HashSet<_> = ALL.iter().map(|row| row.name).collect();
        assert_eq!(names.len(), ALL.len());
    }
}
