//! The load generator: drives a plan against a service and tallies what came of it.
//!
//! Never leaves loopback, never runs without an end, and never waits for an answer before the next arrival is due, unless the
//! loop is closed.

mod answer;
mod arrivals;
mod command;
mod drive;
mod event;
#[cfg(test)]
mod fake;
mod http1;
mod http2;
mod link;
mod mix;
mod progress;
mod queue;
mod reads;
mod tally;
mod target;

pub use arrivals::{Arrivals, Step};
pub use drive::drive;
pub use event::VERSIONS;
pub use mix::{Kind, Mix, Spread};
pub use reads::{Measured, Pace, Reader, Reads, read};
pub use tally::{Moved, Second, Tally};
pub use target::{Target, loopback};

use anyhow::{Result, ensure};
use std::time::Duration;

/// Of HTTP/1.1, each with a connection of its own.
const IN_FLIGHT_MAX: u32 = 4_096;
/// Of HTTP/2, all on these connections.
const STREAMS_MAX: u32 = 16_384;
const CONNECTIONS_MAX: u32 = 64;
const WARM_UP_MAX: Duration = Duration::from_secs(600);
const LASTS_MAX: Duration = Duration::from_secs(3 * 3_600);
const COUNT_MAX: u64 = 200_000_000;
const QUEUE_MAX: usize = 1_000_000;

/// How requests travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Keep-alive connections, one request in flight on each.
    Http1,
    /// HTTP/2 without TLS, known to be spoken; the requests in flight are streams.
    Http2 {
        /// That many connections share them.
        connections: u32,
    },
}

/// One run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The service.
    pub target: Target,
    /// How requests travel.
    pub protocol: Protocol,
    /// When they arrive.
    pub arrivals: Arrivals,
    /// Requests in flight at most: connections, or streams.
    pub in_flight: u32,
    /// Driven first, counted, and not measured.
    pub warm_up: Duration,
    /// The measured time after that. Answers that come later still count.
    pub lasts: Duration,
    /// Requests at most, warm-up included.
    pub count_max: u64,
    /// Arrivals at most that wait for a free connection; what comes beyond is dropped and counted.
    pub queue_max: usize,
    /// What is sent.
    pub mix: Mix,
    /// Whether a terminal shows how it goes.
    pub progress: bool,
}

impl Plan {
    /// A closed loop over HTTP/1.1: how much is possible with so many requests in flight.
    pub fn closed(target: Target, in_flight: u32, lasts: Duration, mix: Mix) -> Self {
        Plan {
            target,
            protocol: Protocol::Http1,
            arrivals: Arrivals::Closed,
            in_flight,
            warm_up: Duration::ZERO,
            lasts,
            count_max: COUNT_MAX,
            queue_max: 0,
            mix,
            progress: true,
        }
    }

    fn check(&self) -> Result<()> {
        let in_flight_max = match self.protocol {
            Protocol::Http1 => IN_FLIGHT_MAX,
            Protocol::Http2 { connections } => {
                ensure!(
                    (1..=CONNECTIONS_MAX).contains(&connections),
                    "between 1 and {CONNECTIONS_MAX} connections are shared"
                );
                STREAMS_MAX
            }
        };
        ensure!(
            (1..=in_flight_max).contains(&self.in_flight),
            "between 1 and {in_flight_max} requests are in flight"
        );
        ensure!(
            self.warm_up <= WARM_UP_MAX && self.lasts <= LASTS_MAX && !self.lasts.is_zero(),
            "a run ends: after {LASTS_MAX:?}, with at most {WARM_UP_MAX:?} before"
        );
        ensure!(
            (1..=COUNT_MAX).contains(&self.count_max) && self.queue_max <= QUEUE_MAX,
            "between 1 and {COUNT_MAX} requests are sent, and at most {QUEUE_MAX} wait"
        );
        self.arrivals.check()?;
        self.mix.check()
    }
}
