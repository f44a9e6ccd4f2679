//! When requests arrive: a schedule of exact times from the beginning of a run, made without looking at a clock.
//!
//! Never asks how the service is doing: an arrival is due when it is due.

use anyhow::{Result, ensure};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use std::time::Duration;

/// Arrivals a second that can still be released one by one.
const RATE_MAX: f64 = 1_000_000.0;
/// A thousandth of a request a second is one in 17 minutes; less is a mistake.
const RATE_MIN: f64 = 0.001;
const STEPS_MAX: usize = 1_000;

/// When requests arrive.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrivals {
    /// The next one when a connection is free: how much is possible.
    Closed,
    /// At equal distances.
    Constant {
        /// Arrivals a second.
        per_second: f64,
    },
    /// Independently of each other, as those of many clients are.
    Poisson {
        /// Arrivals a second, in the mean.
        per_second: f64,
    },
    /// At equal distances that change. The steps begin with the measured time; the first one's rate holds in the warm-up
    /// already, and the last one's until the end.
    Stepped(Vec<Step>),
}

/// A part of a stepped schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Arrivals a second.
    pub per_second: f64,
    /// For how long.
    pub lasts: Duration,
}

impl Arrivals {
    /// Whether the schedule can be kept.
    ///
    /// # Errors
    /// When a rate is not a number within bounds, or there are no steps or too many.
    pub fn check(&self) -> Result<()> {
        let rates: Vec<f64> = match self {
            Arrivals::Closed => return Ok(()),
            Arrivals::Constant { per_second } | Arrivals::Poisson { per_second } => {
                vec![*per_second]
            }
            Arrivals::Stepped(steps) => {
                ensure!(
                    (1..=STEPS_MAX).contains(&steps.len()),
                    "a stepped schedule has 1 to {STEPS_MAX} steps"
                );
                steps.iter().map(|step| step.per_second).collect()
            }
        };
        ensure!(
            rates
                .iter()
                .all(|rate| (RATE_MIN..=RATE_MAX).contains(rate)),
            "a rate is between {RATE_MIN} and {RATE_MAX} a second: {rates:?}"
        );
        Ok(())
    }

    /// The times of all arrivals before `until`, in order, each counted from the beginning of the warm-up. None when the loop
    /// is closed.
    pub fn schedule(&self, seed: u64, warm_up: Duration, until: Duration) -> Option<Schedule> {
        let pace = match self {
            Arrivals::Closed => return None,
            Arrivals::Constant { per_second } => Pace::Even(vec![(*per_second, f64::INFINITY)]),
            Arrivals::Poisson { per_second } => Pace::Random(
                *per_second,
                Box::new(Xoshiro256PlusPlus::seed_from_u64(seed)),
            ),
            Arrivals::Stepped(steps) => {
                let mut lengths: Vec<(f64, f64)> = steps
                    .iter()
                    .map(|step| (step.per_second, step.lasts.as_secs_f64()))
                    .collect();
                if let Some(first) = lengths.first_mut() {
                    first.1 += warm_up.as_secs_f64();
                }
                if let Some(last) = lengths.last_mut() {
                    last.1 = f64::INFINITY;
                }
                lengths.reverse();
                Pace::Even(lengths)
            }
        };
        Some(Schedule {
            pace,
            from: 0.0,
            count: 0,
            until,
        })
    }
}

/// The times of arrivals.
#[derive(Debug)]
pub struct Schedule {
    pace: Pace,
    /// Where the step began, or the last random arrival; in seconds.
    from: f64,
    /// Arrivals since then. Times are multiples and not sums, so that nothing adds up.
    count: u64,
    until: Duration,
}

#[derive(Debug)]
enum Pace {
    /// Rate and length in seconds of each step, the current one last.
    Even(Vec<(f64, f64)>),
    Random(f64, Box<Xoshiro256PlusPlus>),
}

impl Schedule {
    fn even(&mut self) -> Option<f64> {
        let Pace::Even(steps) = &mut self.pace else {
            return None;
        };
        while let Some((rate, length)) = steps.last().copied() {
            let since = self.count as f64 / rate;
            if since < length {
                self.count += 1;
                return Some(self.from + since);
            }
            steps.pop();
            self.from += length;
            self.count = 0;
        }
        None
    }
}

impl Iterator for Schedule {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let at = match &mut self.pace {
            Pace::Even(_) => self.even()?,
            Pace::Random(rate, random) => {
                // The inverse of the exponential distribution; 1 - u is never 0.
                let uniform: f64 = random.random();
                self.from += -(1.0 - uniform).ln() / *rate;
                self.from
            }
        };
        Duration::try_from_secs_f64(at)
            .ok()
            .filter(|at| *at < self.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn times(arrivals: &Arrivals, warm_up_s: u32, until_s: u32) -> Vec<Duration> {
        arrivals
            .schedule(1, SECOND * warm_up_s, SECOND * until_s)
            .unwrap()
            .collect()
    }

    #[test]
    fn constant_arrivals_do_not_drift() {
        // A third of a millisecond has no exact form: a sum of distances would run away from the multiples.
        let times = times(
            &Arrivals::Constant {
                per_second: 3_000.0,
            },
            0,
            1_000,
        );
        assert_eq!(times.len(), 3_000_000);
        for (second, at) in (0_u32..).zip(times.chunks(3_000).map(|second| second[0])) {
            let off = at.abs_diff(SECOND * second);
            assert!(off < Duration::from_micros(1), "{second} s: {off:?}");
        }
    }

    #[test]
    fn poisson_arrivals_have_the_mean_and_the_spread_of_one() {
        let rate = 500.0;
        let times = times(&Arrivals::Poisson { per_second: rate }, 0, 200);
        let expected = 100_000.0_f64;
        // Ten standard deviations; the seed is fixed anyhow.
        assert!((times.len() as f64 - expected).abs() < 10.0 * expected.sqrt());
        assert!(times.is_sorted());
        let gaps: Vec<f64> = times
            .windows(2)
            .map(|pair| (pair[1] - pair[0]).as_secs_f64() * rate)
            .collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((mean - 1.0).abs() < 0.03, "{mean}");
        // An even schedule has 0, and so would one whose gaps were only jittered.
        assert!((variance - 1.0).abs() < 0.1, "{variance}");
    }

    #[test]
    fn the_same_seed_gives_the_same_arrivals() {
        let arrivals = Arrivals::Poisson { per_second: 100.0 };
        let of = |seed| -> Vec<Duration> {
            arrivals
                .schedule(seed, Duration::ZERO, SECOND * 5)
                .unwrap()
                .collect()
        };
        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
    }

    #[test]
    fn steps_change_the_rate_at_their_boundaries() {
        let steps = Arrivals::Stepped(vec![
            Step {
                per_second: 10.0,
                lasts: SECOND * 2,
            },
            Step {
                per_second: 100.0,
                lasts: SECOND,
            },
            Step {
                per_second: 1.0,
                lasts: SECOND,
            },
        ]);
        let times = times(&steps, 3, 9);
        let within = |from: u64, to: u64| {
            times
                .iter()
                .filter(|at| (from..to).contains(&at.as_secs()))
                .count()
        };
        assert_eq!(within(0, 3), 30, "the first rate holds in the warm-up");
        assert_eq!(within(3, 5), 20);
        assert_eq!(within(5, 6), 100);
        assert_eq!(within(6, 9), 3, "the last rate holds until the end");
        for boundary in [5, 6] {
            assert!(times.contains(&(SECOND * boundary)), "{boundary} s");
        }
    }

    #[test]
    fn a_closed_loop_has_no_schedule_and_a_bad_rate_is_refused() {
        assert!(Arrivals::Closed.schedule(1, SECOND, SECOND).is_none());
        Arrivals::Closed.check().unwrap();
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, 2e6] {
            let constant = Arrivals::Constant { per_second: bad };
            let poisson = Arrivals::Poisson { per_second: bad };
            let stepped = Arrivals::Stepped(vec![Step {
                per_second: bad,
                lasts: SECOND,
            }]);
            for arrivals in [constant, poisson, stepped] {
                assert!(arrivals.check().is_err(), "{arrivals:?}");
            }
        }
        assert!(Arrivals::Stepped(Vec::new()).check().is_err());
        Arrivals::Constant { per_second: 17.0 }.check().unwrap();
    }
}
