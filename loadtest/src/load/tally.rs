//! What came of a run: counts, latencies and the money that moved.
//!
//! Never leaves out what did not go well, draws no conclusion, and reads no clock.

use super::answer::{Answer, Failure};
use super::command::{Expect, Shot};
use super::event::Party;
use anyhow::{Result, ensure};
use hdrhistogram::Histogram;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// Slowest latency that is told apart, in microseconds.
const LATENCY_MAX_US: u64 = 120_000_000;
/// Bytes kept of an answer that should not have been.
const SAMPLE_CHARS_MAX: usize = 500;
const MICROS: u128 = 1_000_000;

/// What came of a run. Counts are of the whole run, warm-up included, since the ledger holds that too; what is measured says so.
#[derive(Debug)]
pub struct Tally {
    /// Latency of measured commands that got the answer they had to get, from their INTENDED start, in microseconds.
    pub latency_us: Histogram<u64>,
    /// The same from when they were sent: what the service took, without the wait for a free connection.
    pub service_us: Histogram<u64>,
    /// Requests sent.
    pub sent: u64,
    /// Answers by status.
    pub by_status: BTreeMap<u16, u64>,
    /// Refusals by problem code.
    pub by_code: BTreeMap<String, u64>,
    /// Answers 201: as many events were stored, and up to `unknown` more.
    pub created: u64,
    /// Answers 200.
    pub replayed: u64,
    /// Refusals that had to be.
    pub refused: u64,
    /// Answers 503: nothing was written.
    pub unavailable: u64,
    /// Answers that should not have been.
    pub unexpected: u64,
    /// The first of those, with its command.
    pub sample: Option<String>,
    /// Requests whose outcome is not known: 504, or the connection was lost, or there was no answer in time.
    pub unknown: u64,
    /// Requests that could not be sent: nobody took the connection.
    pub unreached: u64,
    /// Why the first of both failed.
    pub lost: Option<String>,
    /// Connections opened again.
    pub reopened: u64,
    /// Arrivals that found every connection busy and the queue full. They were never sent.
    pub dropped: u64,
    /// Answers 201 within `window`.
    pub created_in_window: u64,
    /// The measured time: from the end of the warm-up to the end of the plan, or to the last answer if that came sooner.
    pub window: Duration,
    /// From the first request to the last answer.
    pub elapsed: Duration,
    /// One after the other, warm-up included.
    pub seconds: Vec<Second>,
    /// What the answers 201 moved.
    pub moved: Moved,
}

impl Tally {
    /// Events a second within the measured time.
    pub fn rate(&self) -> f64 {
        let seconds = self.window.as_secs_f64();
        if seconds > 0.0 {
            self.created_in_window as f64 / seconds
        } else {
            0.0
        }
    }

    /// Whether every request got an answer that may be: then the ledger holds exactly what was answered with 201.
    pub fn is_clean(&self) -> bool {
        self.unexpected == 0 && self.unknown == 0 && self.unreached == 0
    }

    /// That every arrival was sent and answered as it had to be: nothing was dropped, refused for want of room, or lost.
    ///
    /// # Errors
    /// When one was not.
    pub fn all_answered(&self) -> Result<()> {
        ensure!(
            self.is_clean() && self.dropped == 0 && self.unavailable == 0,
            "not every arrival was answered: {} dropped, {}",
            self.dropped,
            self.trouble()
        );
        Ok(())
    }

    /// What was not as it should be, for whoever reads of a run that failed.
    pub fn trouble(&self) -> String {
        let mut text = format!(
            "unexpected {}, unknown {}, unreached {}, unavailable {}; by status {:?}; by code {:?}",
            self.unexpected,
            self.unknown,
            self.unreached,
            self.unavailable,
            self.by_status,
            self.by_code
        );
        for first in [&self.sample, &self.lost].into_iter().flatten() {
            text.push_str("; the first: ");
            text.push_str(first);
        }
        text
    }
}

/// One second of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Second {
    /// Seconds since the measured time began; negative in the warm-up.
    pub at_s: i64,
    /// Requests sent in it.
    pub sent: u64,
    /// Commands whose right answer came in it.
    pub done: u64,
    /// All others that ended in it: 503, unexpected, unknown, unreached.
    pub failed: u64,
    /// Arrivals dropped in it.
    pub dropped: u64,
    /// Latency of `done` from the intended start, in microseconds.
    pub p50_us: u64,
    /// The same.
    pub p99_us: u64,
    /// The same.
    pub max_us: u64,
}

/// Net amounts in minor units. They sum to zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Of `users:u-<n>:available`, at index n - 1.
    pub users: Vec<i128>,
    /// Of `world`.
    pub world: i128,
    /// Of `platform:fees`.
    pub fees: i128,
}

/// The times of a run.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// When the warm-up begins.
    pub begin: Instant,
    /// When the measured time begins.
    pub from: Instant,
    /// When the measured time ends, and nothing more arrives.
    pub until: Instant,
}

/// The times of one command.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// When it was to be sent.
    pub intended: Instant,
    /// When it was.
    pub sent: Instant,
    /// When its answer was there, or was not going to come.
    pub ended: Instant,
}

/// Tallies a run while it goes.
#[derive(Debug)]
pub struct Recorder {
    tally: Tally,
    span: Span,
    last_answer: Option<Instant>,
    second: Second,
    second_us: Histogram<u64>,
}

impl Recorder {
    /// Nothing yet.
    ///
    /// # Errors
    /// When there is no memory for the histograms.
    pub fn new(span: Span, users: u32) -> Result<Self> {
        let histogram = |digits| Histogram::new_with_bounds(1, LATENCY_MAX_US, digits);
        Ok(Recorder {
            tally: Tally {
                latency_us: histogram(3)?,
                service_us: histogram(3)?,
                sent: 0,
                by_status: BTreeMap::new(),
                by_code: BTreeMap::new(),
                created: 0,
                replayed: 0,
                refused: 0,
                unavailable: 0,
                unexpected: 0,
                sample: None,
                unknown: 0,
                unreached: 0,
                lost: None,
                reopened: 0,
                dropped: 0,
                created_in_window: 0,
                window: Duration::ZERO,
                elapsed: Duration::ZERO,
                seconds: Vec::new(),
                moved: Moved::of(users),
            },
            second: Second::at(second_of(&span, span.begin)),
            second_us: histogram(2)?,
            span,
            last_answer: None,
        })
    }

    /// A request is being sent.
    pub fn sent(&mut self, now: Instant) {
        self.tick(now);
        self.tally.sent += 1;
        self.second.sent += 1;
    }

    /// Arrivals found no room.
    pub fn dropped(&mut self, count: u64, now: Instant) {
        self.tick(now);
        self.tally.dropped += count;
        self.second.dropped += count;
    }

    /// Connections had to be opened again.
    pub fn reopened(&mut self, count: u64) {
        self.tally.reopened += count;
    }

    /// A request has its answer.
    pub fn answered(&mut self, shot: &Shot, times: &Times, answer: &Answer<'_>) {
        self.tick(times.ended);
        self.last_answer = Some(times.ended);
        *self.tally.by_status.entry(answer.status).or_default() += 1;
        let code = (answer.status >= 400).then(|| problem_code(answer.body));
        let verdict = Verdict::of(shot.expect, answer.status, code.as_deref());
        if let Some(code) = code {
            *self.tally.by_code.entry(code).or_default() += 1;
        }
        match verdict {
            Verdict::Created => self.created(shot, times),
            Verdict::Replayed => self.tally.replayed += 1,
            Verdict::Refused => self.tally.refused += 1,
            Verdict::Unavailable => self.tally.unavailable += 1,
            Verdict::Unknown => self.tally.unknown += 1,
            Verdict::Unexpected => {
                self.tally.unexpected += 1;
                self.tally
                    .sample
                    .get_or_insert_with(|| sample(shot, answer));
            }
        }
        match verdict {
            Verdict::Created | Verdict::Replayed | Verdict::Refused => self.right(times),
            Verdict::Unavailable | Verdict::Unknown | Verdict::Unexpected => {
                self.second.failed += 1;
            }
        }
    }

    /// A request has no answer, and gets none.
    pub fn failed(&mut self, failure: &Failure, now: Instant) {
        self.tick(now);
        self.second.failed += 1;
        let (count, why) = match failure {
            Failure::NotSent(why) => (&mut self.tally.unreached, why),
            Failure::Unknown(why) => (&mut self.tally.unknown, why),
        };
        *count += 1;
        self.tally.lost.get_or_insert_with(|| format!("{why:#}"));
    }

    fn created(&mut self, shot: &Shot, times: &Times) {
        self.tally.created += 1;
        if (self.span.from..=self.span.until).contains(&times.ended) {
            self.tally.created_in_window += 1;
        }
        self.tally.moved.add(&shot.moves);
    }

    fn right(&mut self, times: &Times) {
        let latency = micros(times.ended.saturating_duration_since(times.intended));
        self.second.done += 1;
        self.second_us.saturating_record(latency);
        if times.intended >= self.span.from {
            self.tally.latency_us.saturating_record(latency);
            let service = micros(times.ended.saturating_duration_since(times.sent));
            self.tally.service_us.saturating_record(service);
        }
    }

    /// Closes the seconds that are over.
    pub fn tick(&mut self, now: Instant) {
        let at_s = second_of(&self.span, now);
        while self.second.at_s < at_s {
            self.close_second();
        }
    }

    fn close_second(&mut self) {
        let next = Second::at(self.second.at_s.saturating_add(1));
        let mut closed = std::mem::replace(&mut self.second, next);
        closed.p50_us = self.second_us.value_at_quantile(0.5);
        closed.p99_us = self.second_us.value_at_quantile(0.99);
        closed.max_us = self.second_us.max();
        self.second_us.reset();
        self.tally.seconds.push(closed);
    }

    /// What there is so far.
    pub fn so_far(&self) -> &Tally {
        &self.tally
    }

    /// The whole.
    pub fn finish(mut self, now: Instant) -> Tally {
        self.tick(now);
        self.close_second();
        let end = self.last_answer.unwrap_or(now);
        self.tally.elapsed = end.saturating_duration_since(self.span.begin);
        self.tally.window = end
            .min(self.span.until)
            .saturating_duration_since(self.span.from);
        self.tally
    }
}

/// What an answer means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Created,
    Replayed,
    Refused,
    Unavailable,
    Unknown,
    Unexpected,
}

impl Verdict {
    fn of(expect: Expect, status: u16, code: Option<&str>) -> Self {
        match (expect, status) {
            (Expect::Created | Expect::CreatedOnce, 201) => Verdict::Created,
            (Expect::CreatedOnce, 200) => Verdict::Replayed,
            (Expect::Refused(right, why), _) if status == right && code == Some(why) => {
                Verdict::Refused
            }
            (_, Answer::UNAVAILABLE) => Verdict::Unavailable,
            (_, 504) => Verdict::Unknown,
            _ => Verdict::Unexpected,
        }
    }
}

impl Second {
    fn at(at_s: i64) -> Self {
        Second {
            at_s,
            sent: 0,
            done: 0,
            failed: 0,
            dropped: 0,
            p50_us: 0,
            p99_us: 0,
            max_us: 0,
        }
    }
}

impl Moved {
    fn of(users: u32) -> Self {
        Moved {
            users: (0..users).map(|_| 0).collect(),
            ..Moved::default()
        }
    }

    fn add(&mut self, moves: &[(Party, i128)]) {
        for (party, amount) in moves {
            let balance = match party {
                Party::World => Some(&mut self.world),
                Party::Fees => Some(&mut self.fees),
                Party::User(number) => usize::try_from(*number)
                    .ok()
                    .and_then(|number| self.users.get_mut(number.checked_sub(1)?)),
            };
            if let Some(balance) = balance {
                *balance += amount;
            }
        }
    }
}

/// Which second of the measured time it is, negative before it.
fn second_of(span: &Span, now: Instant) -> i64 {
    match now.checked_duration_since(span.from) {
        Some(since) => i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        None => {
            let before = span.from.saturating_duration_since(now).as_micros();
            i64::try_from(before.div_ceil(MICROS)).map_or(i64::MIN, |seconds| -seconds)
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros())
        .unwrap_or(u64::MAX)
        .max(1)
}

/// The code of a problem document; empty when there is none.
fn problem_code(body: &[u8]) -> String {
    serde_json::from_slice::<serde_json::Value>(body)
        .ok()
        .and_then(|problem| problem.get("code")?.as_str().map(str::to_owned))
        .unwrap_or_default()
}

fn sample(shot: &Shot, answer: &Answer<'_>) -> String {
    let body = String::from_utf8_lossy(answer.body);
    let body: String = body.chars().take(SAMPLE_CHARS_MAX).collect();
    format!("{} {} -> {} {body}", shot.key, shot.body, answer.status)
}
