//! The scenarios: what is run, for how long, and in which order. Each is a file.
//!
//! A scenario returns its findings only after the gate has let every run of it through.

mod balance;
mod create;
mod half;
mod hot;
mod http2;
mod one_subject;
mod overload;
mod pod;
mod relay;
mod saturation;
mod size;
mod smoke;
mod soak;
mod stand;

use crate::lab::Lab;
use crate::report::Findings;
use anyhow::Result;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

pub use stand::Stand;

/// A scenario.
pub struct Scenario {
    /// What it is called by.
    pub name: &'static str,
    /// What it does, in a sentence.
    pub about: &'static str,
    /// Whether the standard set has it.
    pub is_standard: bool,
    /// How long it takes at the standard set's length, gate included, in seconds.
    pub short_s: u64,
    /// How long it takes on its own, at full length, in seconds.
    pub full_s: u64,
    /// Does it.
    pub run: for<'a> fn(&'a mut Bench) -> Running<'a>,
}

/// A scenario at work.
pub type Running<'a> = Pin<Box<dyn Future<Output = Result<Findings>> + 'a>>;

/// All of them, in the order of the standard set: what is found early is used later.
pub const ALL: &[Scenario] = &[
    Scenario {
        name: "saturation",
        about: "Transfers between random users, as many as the service takes with 1 to 1,024 requests in flight: with the relay paused, and with relay, broker and a consumer",
        is_standard: true,
        short_s: 140,
        full_s: 300,
        run: |bench| Box::pin(saturation::run(bench)),
    },
    Scenario {
        name: "half",
        about: "Random arrivals at half of saturation, with relay, broker and a consumer: how long answers and messages take",
        is_standard: true,
        short_s: 40,
        full_s: 150,
        run: |bench| Box::pin(half::run(bench)),
    },
    Scenario {
        name: "pod-400m",
        about: "The whole service in 0.4 cores and 64 MiB: 17 events a second, then as much as it takes",
        is_standard: true,
        short_s: 125,
        full_s: 900,
        run: |bench| Box::pin(pod::run(bench)),
    },
    Scenario {
        name: "create-25",
        about: "25 new users with a first deposit each and 25 transfers, one request after the other, from an empty ledger",
        is_standard: true,
        short_s: 15,
        full_s: 60,
        run: |bench| Box::pin(create::run(bench)),
    },
    Scenario {
        name: "hot-account",
        about: "64 writers on one account: a guarded one, debited and credited, and one that is neither locked nor checked",
        is_standard: true,
        short_s: 35,
        full_s: 120,
        run: |bench| Box::pin(hot::run(bench)),
    },
    Scenario {
        name: "relay",
        about: "From the commit to a consumer: lag at 100 and 1,000 events a second and at saturation, a backlog of 100,000, and a snapshot that is held open",
        is_standard: true,
        short_s: 200,
        full_s: 1_200,
        run: |bench| Box::pin(relay::run(bench)),
    },
    Scenario {
        name: "overload",
        about: "Three times as many arrivals as the service takes: what is refused, and how long what is accepted takes",
        is_standard: true,
        short_s: 50,
        full_s: 200,
        run: |bench| Box::pin(overload::run(bench)),
    },
    Scenario {
        name: "http2",
        about: "The same load over HTTP/1.1 connections and over streams of a few HTTP/2 connections",
        is_standard: false,
        short_s: 25,
        full_s: 100,
        run: |bench| Box::pin(http2::run(bench)),
    },
    Scenario {
        name: "size",
        about: "Writes and reads with many events in the tables, beside the same with none; and what an event takes on disk",
        is_standard: true,
        short_s: 100,
        full_s: 1_200,
        run: |bench| Box::pin(size::run(bench)),
    },
    Scenario {
        name: "one-subject",
        about: "One user with a short and with a long history: what a further one costs, and reading it",
        is_standard: true,
        short_s: 60,
        full_s: 240,
        run: |bench| Box::pin(one_subject::run(bench)),
    },
    Scenario {
        name: "balance-100",
        about: "Balances of accounts with few and with many postings, read 100 times a second, beside a full sum",
        is_standard: true,
        short_s: 65,
        full_s: 1_500,
        run: |bench| Box::pin(balance::run(bench)),
    },
    Scenario {
        name: "soak",
        about: "Half of saturation for long: memory, outbox and latency stay where they are",
        is_standard: false,
        short_s: 85,
        full_s: 1_900,
        run: |bench| Box::pin(soak::run(bench)),
    },
    Scenario {
        name: "smoke",
        about: "Everything running, 256 requests in flight: a short look",
        is_standard: false,
        short_s: 20,
        full_s: 40,
        run: |bench| Box::pin(smoke::run(bench)),
    },
];

/// A scenario by its name.
///
/// # Errors
/// When there is none of that name.
pub fn find(name: &str) -> Result<&'static Scenario, String> {
    ALL.iter()
        .find(|scenario| scenario.name == name)
        .ok_or_else(|| {
            let names: Vec<&str> = ALL.iter().map(|scenario| scenario.name).collect();
            format!("there are {}", names.join(", "))
        })
}

/// What scenarios work with.
#[derive(Debug)]
pub struct Bench {
    /// Services, tokens and the program.
    pub lab: Lab,
    /// Whether scenarios take their full length.
    pub full: bool,
    /// Users to choose from at random, where a scenario has no reason for others.
    pub users: u32,
    /// What saturates everything together, once it is known.
    pub saturated: Option<Saturated>,
    /// Where pgbench is, if not where it usually is.
    pub pg_bin_dir: Option<PathBuf>,
}

/// Where everything together saturates: service, relay, broker and a consumer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Saturated {
    /// Events a second, stored and received.
    pub rate: f64,
    /// Requests in flight.
    pub in_flight: u32,
}

impl Saturated {
    /// Half of it, in events a second.
    pub fn half(&self) -> f64 {
        (self.rate / 2.0).max(1.0)
    }
}

impl Bench {
    /// A length of time: that of the standard set, or the full one.
    pub fn seconds(&self, standard: u64, full: u64) -> Duration {
        Duration::from_secs(if self.full { full } else { standard })
    }

    /// Where everything together saturates; measured shortly when no scenario has found it yet.
    ///
    /// # Errors
    /// What that measurement returns.
    pub async fn saturated(&mut self) -> Result<Saturated> {
        match self.saturated {
            Some(known) => Ok(known),
            None => saturation::find(self).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_scenarios_apart_and_make_databases() {
        let mut names: Vec<&str> = ALL.iter().map(|scenario| scenario.name).collect();
        for name in &names {
            assert!(name.len() <= 16, "{name}");
            let plain =
                |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
            assert!(name.bytes().all(plain), "{name}");
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ALL.len());
        assert!(find("saturation").is_ok());
        assert!(find("Saturation").is_err());
    }

    #[test]
    fn the_standard_set_takes_less_than_a_quarter_of_an_hour() {
        let standard = ALL.iter().filter(|scenario| scenario.is_standard);
        let standard: u64 = standard.map(|scenario| scenario.short_s).sum();
        // The control is measured twice besides.
        assert!(standard + 60 < 15 * 60, "{standard} s");
    }
}
