//! One run from its first connection to its last answer.
//!
//! Never sends anything before every connection is open, and never forgets an arrival: it is sent, or counted as dropped.

use super::answer::{Answer, Failure};
use super::arrivals::Schedule;
use super::command::Commands;
use super::link::Link;
use super::queue::{Arrival, Queue};
use super::tally::{Recorder, Span, Tally, Times};
use super::{Plan, progress};
use anyhow::{Context, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep, sleep_until, timeout};

/// How long a place of a closed loop rests after 503, or when nobody takes its connection. An open one keeps to its schedule.
const FAILURE_PAUSE: Duration = Duration::from_millis(100);
/// How long what waits at the end may still be sent.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Runs the plan to its end.
///
/// # Errors
/// When the plan cannot be kept or the service is not there at its beginning. What fails later is tallied.
pub async fn drive(plan: Plan) -> Result<Tally> {
    plan.check()?;
    let links = Link::open(
        &plan.target,
        plan.protocol,
        plan.in_flight,
        &plan.mix.tokens,
    )
    .await?;
    let shows = plan.progress && progress::is_seen();
    let total = plan.warm_up + plan.lasts;
    let schedule = plan.arrivals.schedule(plan.mix.seed, plan.warm_up, total);
    let run = Arc::new(Run::new(plan, schedule.is_none())?);

    let mut places = JoinSet::new();
    for link in links {
        places.spawn(Arc::clone(&run).work(link));
    }
    let mut others = JoinSet::new();
    if shows {
        others.spawn(Arc::clone(&run).show());
    }
    if let Some(schedule) = schedule {
        run.release(schedule).await;
        run.queue.close();
        match timeout(DRAIN_LIMIT, join(&mut places)).await {
            Ok(ended) => ended?,
            Err(_) => {
                let given_up = u64::try_from(run.queue.give_up())?;
                run.recorder().dropped(given_up, Instant::now());
            }
        }
    }
    join(&mut places).await?;
    others.shutdown().await;
    if shows {
        progress::clear();
    }
    let run = Arc::into_inner(run).context("a part of the run has not ended")?;
    let recorder = run
        .recorder
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    Ok(recorder.finish(Instant::now()))
}

async fn join(tasks: &mut JoinSet<()>) -> Result<()> {
    while let Some(ended) = tasks.join_next().await {
        ended?;
    }
    Ok(())
}

/// What all places share.
struct Run {
    commands: Commands,
    /// Whether the next command waits for nothing but a free place.
    closed: bool,
    /// Its number, in a closed loop.
    next: AtomicU64,
    count_max: u64,
    queue: Queue,
    span: Span,
    recorder: Mutex<Recorder>,
}

impl Run {
    fn new(plan: Plan, closed: bool) -> Result<Self> {
        let begin = Instant::now();
        let from = begin + plan.warm_up;
        let span = Span {
            begin,
            from,
            until: from + plan.lasts,
        };
        Ok(Run {
            recorder: Mutex::new(Recorder::new(span, plan.mix.users)?),
            commands: Commands::new(plan.mix),
            closed,
            next: AtomicU64::new(0),
            count_max: plan.count_max,
            queue: Queue::new(plan.queue_max),
            span,
        })
    }

    fn recorder(&self) -> MutexGuard<'_, Recorder> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets every arrival of the schedule happen when it is due. The timer ticks once a millisecond; all that are due by then
    /// are released together, each with the exact time at which it was.
    async fn release(&self, schedule: Schedule) {
        for (index, at) in (0..self.count_max).zip(schedule) {
            let intended = self.span.begin + at;
            if intended > Instant::now() {
                sleep_until(intended).await;
            }
            if !self.queue.offer(Arrival { index, intended }) {
                self.recorder().dropped(1, Instant::now());
            }
        }
    }

    /// The next command's number, and when it was to be sent; None of that in a closed loop, where it is when it is.
    async fn next(&self) -> Option<(u64, Option<Instant>)> {
        if !self.closed {
            let arrival = self.queue.take().await?;
            return Some((arrival.index, Some(arrival.intended)));
        }
        if Instant::now() >= self.span.until {
            return None;
        }
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        (index < self.count_max).then_some((index, None))
    }

    /// Sends one command after another on one place.
    async fn work(self: Arc<Self>, mut link: Link) {
        while let Some((index, intended)) = self.next().await {
            let shot = self.commands.shot(index);
            let sent = Instant::now();
            self.recorder().sent(sent);
            let outcome = link.post(&shot).await;
            let ended = Instant::now();
            let rests = match outcome {
                Ok(answer) => {
                    let times = Times {
                        intended: intended.unwrap_or(sent),
                        sent,
                        ended,
                    };
                    self.recorder().answered(&shot, &times, &answer);
                    answer.status == Answer::UNAVAILABLE
                }
                Err(failure) => {
                    self.recorder().failed(&failure, ended);
                    matches!(failure, Failure::NotSent(_))
                }
            };
            if rests && self.closed {
                sleep(FAILURE_PAUSE).await;
            }
        }
        self.recorder().reopened(link.reopened());
    }

    async fn show(self: Arc<Self>) {
        let mut interval = interval(PROGRESS_INTERVAL);
        loop {
            interval.tick().await;
            let now = Instant::now();
            let mut recorder = self.recorder();
            recorder.tick(now);
            progress::show(
                recorder.so_far(),
                self.span.until.saturating_duration_since(now),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{Fake, Reply, Seen};
    use super::super::{Arrivals, Kind, Mix, Protocol};
    use super::*;
    use std::collections::{BTreeMap, HashSet};

    const MS: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(30);

    fn mix(kind: Kind) -> Mix {
        Mix::new(kind, 5, vec!["a.b.c".to_owned()])
    }

    fn closed(fake: &Fake, count_max: u64, in_flight: u32) -> Plan {
        Plan {
            count_max,
            ..Plan::closed(fake.target.clone(), in_flight, LONG, mix(Kind::Transfer))
        }
    }

    fn constant(fake: &Fake, per_second: f64, lasts: Duration) -> Plan {
        Plan {
            arrivals: Arrivals::Constant { per_second },
            queue_max: 1_000,
            ..Plan::closed(fake.target.clone(), 1, lasts, mix(Kind::Transfer))
        }
    }

    /// What every tally has to say about itself.
    fn adds_up(tally: &Tally) {
        let answers: u64 = tally.by_status.values().sum();
        let ended = tally.created
            + tally.replayed
            + tally.refused
            + tally.unavailable
            + tally.unexpected
            + tally.unknown
            + tally.unreached;
        assert_eq!(tally.sent, ended, "{}", tally.trouble());
        assert!(answers <= tally.sent);
        let of = |field: fn(&super::super::Second) -> u64| -> u64 {
            tally.seconds.iter().map(field).sum()
        };
        assert_eq!(of(|second| second.sent), tally.sent);
        assert_eq!(of(|second| second.done + second.failed), tally.sent);
        assert_eq!(of(|second| second.dropped), tally.dropped);
        assert!(
            tally
                .seconds
                .windows(2)
                .all(|pair| pair[1].at_s == pair[0].at_s + 1)
        );
        let moved = &tally.moved;
        assert_eq!(
            moved.users.iter().sum::<i128>() + moved.world + moved.fees,
            0
        );
    }

    #[tokio::test]
    async fn every_user_gets_money_once_and_the_tally_knows_how_much() {
        let fake = Fake::http1(|_| Reply::CREATED).await;
        let mut deposits = mix(Kind::DepositEach);
        deposits.amounts = 100..=100;
        let plan = Plan {
            mix: deposits,
            ..closed(&fake, 5, 3)
        };
        let tally = drive(plan).await.unwrap();
        adds_up(&tally);
        assert!(tally.is_clean());
        assert_eq!(tally.created, 5);
        assert_eq!(tally.moved.users, [100; 5]);
        assert_eq!(tally.moved.world, -500);
        let subjects: HashSet<String> = fake
            .seen()
            .iter()
            .map(|seen| serde_json::from_str::<serde_json::Value>(&seen.body).unwrap())
            .map(|body| body["subject"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(subjects.len(), 5);
    }

    #[tokio::test]
    async fn answers_are_counted_up_to_the_limit_and_only_201_moves_money() {
        let fake = Fake::http1(|seen| match seen.len() % 3 {
            0 => Reply::Answer(503, r#"{"code":"lane_full"}"#, Duration::ZERO),
            _ => Reply::CREATED,
        })
        .await;
        let tally = drive(closed(&fake, 30, 4)).await.unwrap();
        adds_up(&tally);
        assert_eq!((tally.created, tally.unavailable), (20, 10));
        assert_eq!(tally.by_status, BTreeMap::from([(201, 20), (503, 10)]));
        assert_eq!(
            tally.by_code,
            BTreeMap::from([("lane_full".to_owned(), 10)])
        );
        assert_eq!(tally.latency_us.len(), 20);
        assert!(tally.is_clean(), "503 says that nothing was written");
        let seen = fake.seen();
        let keys: HashSet<&String> = seen.iter().map(|seen| &seen.key).collect();
        assert_eq!(keys.len(), 30);
        assert!(seen.iter().all(|seen| seen.authorization == "Bearer a.b.c"));
    }

    #[tokio::test]
    async fn the_time_ends_a_closed_loop_too() {
        let fake = Fake::http1(|_| Reply::CREATED).await;
        let plan = Plan {
            lasts: 300 * MS,
            ..closed(&fake, 1_000_000, 2)
        };
        let tally = drive(plan).await.unwrap();
        adds_up(&tally);
        assert!(tally.created > 0 && tally.rate() > 0.0);
        assert!(tally.window <= 300 * MS);
        assert_eq!(tally.latency_us.len(), tally.service_us.len());
    }

    #[tokio::test]
    async fn an_answer_that_should_not_be_is_kept_with_its_command() {
        let fake = Fake::http1(|seen| match seen.len() {
            3 => Reply::Answer(422, r#"{"code":"user_frozen"}"#, Duration::ZERO),
            4 => Reply::Answer(200, "{}", Duration::ZERO),
            _ => Reply::CREATED,
        })
        .await;
        let tally = drive(closed(&fake, 5, 1)).await.unwrap();
        adds_up(&tally);
        assert_eq!((tally.created, tally.unexpected), (3, 2));
        assert!(!tally.is_clean());
        let sample = tally.sample.unwrap();
        assert!(
            sample.contains("user_frozen") && sample.contains("-2 "),
            "{sample}"
        );
    }

    #[tokio::test]
    async fn refusals_that_have_to_be_are_no_trouble() {
        let fake =
            Fake::http1(|_| Reply::Answer(422, r#"{"code":"insufficient_funds"}"#, Duration::ZERO))
                .await;
        let mut refusals = mix(Kind::Transfer);
        refusals.refusals = 1.0;
        let plan = Plan {
            mix: refusals,
            ..closed(&fake, 60, 2)
        };
        let tally = drive(plan).await.unwrap();
        adds_up(&tally);
        assert!(tally.refused > 5, "{}", tally.trouble());
        assert_eq!(tally.refused + tally.unexpected, 60);
        assert_eq!(tally.moved.users, [0; 5]);
    }

    /// What the service does: 201 for a new key, 200 for one that it knows.
    fn dedupes(seen: &[Seen]) -> Reply {
        let (last, before) = seen.split_last().unwrap();
        match before.iter().find(|seen| seen.key == last.key) {
            None => Reply::CREATED,
            Some(first) if first.body == last.body => Reply::Answer(200, "{}", Duration::ZERO),
            Some(_) => Reply::Answer(422, r#"{"code":"idempotency_key_reused"}"#, Duration::ZERO),
        }
    }

    #[tokio::test]
    async fn duplicates_are_sent_again_and_create_nothing() {
        let fake = Fake::http1(dedupes).await;
        let mut again = mix(Kind::Transfer);
        again.duplicates = 0.5;
        let plan = Plan {
            mix: again,
            ..closed(&fake, 200, 8)
        };
        let tally = drive(plan).await.unwrap();
        adds_up(&tally);
        assert!(tally.is_clean(), "{}", tally.trouble());
        let keys: HashSet<String> = fake.seen().into_iter().map(|seen| seen.key).collect();
        assert_eq!(tally.created, u64::try_from(keys.len()).unwrap());
        assert!(tally.replayed > 50, "{}", tally.replayed);
    }

    #[tokio::test]
    async fn a_stall_is_felt_by_every_request_that_should_have_been_sent_in_it() {
        let fake = Fake::http1(|seen| match seen.len() {
            20 => Reply::Answer(201, "", 300 * MS),
            _ => Reply::CREATED,
        })
        .await;
        let tally = drive(constant(&fake, 100.0, 1_000 * MS)).await.unwrap();
        adds_up(&tally);
        assert_eq!(tally.created, 100);
        let slow =
            |histogram: &hdrhistogram::Histogram<u64>| histogram.count_between(100_000, u64::MAX);
        // One request met the stall. Those due in its first 200 ms waited for at least 100 ms: twenty of them. What the test's
        // own machine makes slow is in both.
        assert!(slow(&tally.service_us) >= 1);
        let felt = slow(&tally.latency_us) - slow(&tally.service_us);
        assert!(felt >= 18, "{felt}");
    }

    #[tokio::test]
    async fn arrivals_without_room_are_dropped_and_counted() {
        let fake = Fake::http1(|_| Reply::Answer(201, "", 50 * MS)).await;
        let plan = Plan {
            queue_max: 2,
            ..constant(&fake, 500.0, 400 * MS)
        };
        let tally = drive(plan).await.unwrap();
        adds_up(&tally);
        assert_eq!(tally.sent + tally.dropped, 200);
        // One connection has time for eight in 400 ms, and two wait.
        assert!(
            tally.created >= 1 && tally.dropped >= 180,
            "{}",
            tally.dropped
        );
    }

    #[tokio::test]
    async fn a_lost_connection_is_opened_again_and_its_request_is_not_known() {
        let fake = Fake::http1(|seen| match seen.len() {
            3 => Reply::Lose,
            _ => Reply::CREATED,
        })
        .await;
        let tally = drive(closed(&fake, 6, 1)).await.unwrap();
        adds_up(&tally);
        assert_eq!((tally.created, tally.unknown, tally.reopened), (5, 1, 1));
        assert!(tally.lost.is_some() && !tally.is_clean());
        let keys: HashSet<String> = fake.seen().into_iter().map(|seen| seen.key).collect();
        assert_eq!(keys.len(), 6, "nothing is sent twice");
    }

    #[tokio::test]
    async fn who_is_not_there_ends_a_run_before_it_begins_and_is_counted_later() {
        let fake = Fake::http1(|seen| match seen.len() {
            2 => Reply::Vanish,
            _ => Reply::CREATED,
        })
        .await;
        let plan = closed(&fake, 5, 1);
        let tally = drive(plan.clone()).await.unwrap();
        adds_up(&tally);
        assert_eq!((tally.created, tally.unknown, tally.unreached), (1, 1, 3));
        assert!(drive(plan).await.is_err());
    }

    #[tokio::test]
    async fn the_warm_up_is_counted_and_not_measured() {
        let fake = Fake::http1(|_| Reply::CREATED).await;
        let plan = Plan {
            warm_up: 200 * MS,
            ..constant(&fake, 100.0, 100 * MS)
        };
        let tally = drive(plan).await.unwrap();
        adds_up(&tally);
        assert_eq!((tally.created, tally.latency_us.len()), (30, 10));
        assert_eq!(tally.seconds[0].at_s, -1);
        assert!(tally.created_in_window <= 30);
    }

    #[tokio::test]
    async fn an_answer_after_the_end_counts_with_its_latency() {
        let fake = Fake::http1(|_| Reply::Answer(201, "", 200 * MS)).await;
        let tally = drive(constant(&fake, 20.0, 100 * MS)).await.unwrap();
        adds_up(&tally);
        assert_eq!((tally.created, tally.created_in_window), (2, 0));
        assert!(tally.latency_us.min() >= 190_000);
        assert!(tally.elapsed >= 200 * MS && tally.window <= 100 * MS);
    }

    fn http2(fake: &Fake, count_max: u64) -> Plan {
        Plan {
            protocol: Protocol::Http2 { connections: 2 },
            ..closed(fake, count_max, 8)
        }
    }

    #[tokio::test]
    async fn http2_shares_few_connections_among_many_requests() {
        let fake = Fake::http2(|_| Reply::Together(8)).await;
        let tally = drive(http2(&fake, 40)).await.unwrap();
        adds_up(&tally);
        assert_eq!((tally.created, tally.reopened), (40, 0));
        let seen = fake.seen();
        let connections: HashSet<usize> = seen.iter().map(|seen| seen.connection).collect();
        assert_eq!(connections.len(), 2);
        let keys: HashSet<&String> = seen.iter().map(|seen| &seen.key).collect();
        assert_eq!(keys.len(), 40);
        assert!(seen.iter().all(|seen| seen.authorization == "Bearer a.b.c"));
        assert!(seen.iter().all(|seen| seen.body.contains("transfer")));
    }

    #[tokio::test]
    async fn http2_opens_a_lost_connection_once_for_all_its_streams() {
        let fake = Fake::http2(|seen| match seen.len() {
            10 => Reply::Lose,
            _ => Reply::CREATED,
        })
        .await;
        let tally = drive(http2(&fake, 40)).await.unwrap();
        adds_up(&tally);
        assert!(tally.unknown >= 1);
        assert_eq!(tally.created + tally.unknown + tally.unreached, 40);
        assert_eq!(tally.reopened, 1);
        let connections: HashSet<usize> = fake.seen().iter().map(|seen| seen.connection).collect();
        assert_eq!(connections, HashSet::from([0, 1, 2]));
    }

    #[tokio::test]
    async fn what_has_no_bounds_is_refused() {
        let fake = Fake::http1(|_| Reply::CREATED).await;
        let changes: [fn(&mut Plan); 9] = [
            |plan| plan.in_flight = 0,
            |plan| plan.in_flight = 4_097,
            |plan| {
                plan.protocol = Protocol::Http2 { connections: 64 };
                plan.in_flight = 16_385;
            },
            |plan| plan.lasts = Duration::ZERO,
            |plan| plan.lasts = LONG * 1_000,
            |plan| plan.count_max = 0,
            |plan| plan.protocol = Protocol::Http2 { connections: 0 },
            |plan| plan.arrivals = Arrivals::Poisson { per_second: 0.0 },
            |plan| plan.mix.tokens.clear(),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut plan = closed(&fake, 1, 1);
            change(&mut plan);
            assert!(drive(plan).await.is_err(), "{number}");
        }
        assert_eq!(fake.seen(), []);
    }
}
