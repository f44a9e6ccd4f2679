//! The commit: lanes that batch drafts into transactions.
//!
//! A request task hands its draft over and waits; the transaction belongs to the lane, so a request may be dropped at any
//! point. Nothing here knows of HTTP or RabbitMQ.

mod lane;
mod queue;
pub mod record;
#[cfg(test)]
mod record_tests;

use crate::domain::{Draft, Rejection, Stored};
use crate::store::handover::Handover;
use crate::telemetry::{Kind, Metrics};
use lane::{Job, Lane};
use queue::{Queue, Refused};
use secrecy::SecretString;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

/// An event as it is recorded: its bytes and their hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Its id.
    pub event_id: uuid::Uuid,
    /// Its record, byte for byte.
    pub record: Arc<str>,
    /// SHA-256 of it.
    pub hash: [u8; 32],
}

/// Why nothing was written though nothing is wrong with the request (503).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unavailable {
    /// The queue is full.
    QueueFull,
    /// The deadline passed before the batch began.
    DeadlinePassed,
    /// The database cannot be reached, a lock was not to be had, or retries are used up.
    Database,
    /// The clocks of pod and database are more than 60 s apart.
    ClockSkew,
    /// The service is stopping.
    Stopping,
}

/// What became of a draft.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Durable now (201).
    Created(Recorded),
    /// Was durable before under the same key (200, the same bytes).
    Replayed(Stored),
    /// Refused under the locks; nothing was written.
    Rejected(Rejection),
    /// Nothing was written; try again (503).
    Unavailable(Unavailable),
    /// Whether it was written cannot be learned now; send the same key again (504).
    Unknown,
    /// The database refuses it for a reason that is ours; nothing was written (500).
    Failed,
}

impl Outcome {
    const fn kind(&self) -> &'static str {
        match self {
            Outcome::Created(_) => "created",
            Outcome::Replayed(_) => "replayed",
            Outcome::Rejected(_) => "rejected",
            Outcome::Unavailable(_) => "unavailable",
            Outcome::Unknown => "unknown",
            Outcome::Failed => "failed",
        }
    }
}

/// How long a request waits past its deadline once its batch has begun; then its outcome is unknown to it, and the batch
/// goes on.
pub const BEGUN_GRACE: Duration = Duration::from_secs(1);

/// What the lanes of a pod need.
#[derive(Clone)]
pub struct Settings {
    /// Postgres, as the runtime role.
    pub database_url: SecretString,
    /// Name of the ledger.
    pub ledger: String,
    /// Number of lanes.
    pub lanes: usize,
    /// Commands that wait for a lane at most.
    pub queue: usize,
    /// Bytes of commands that are not answered yet, at most.
    pub queue_bytes: usize,
    /// Commands of one transaction at most.
    pub batch_max: usize,
    /// How long a key is remembered.
    pub dedupe_days: u16,
    /// Told after each commit, so that the relay looks at once.
    pub committed: Handover,
    /// Where the lanes count.
    pub metrics: Arc<Metrics>,
}

/// The lanes of one pod. Cheap to clone.
#[derive(Clone)]
pub struct Lanes {
    queue: Arc<Queue<Job>>,
    /// Bytes that still fit.
    room: Arc<Semaphore>,
    metrics: Arc<Metrics>,
}

impl std::fmt::Debug for Lanes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("lanes")
    }
}

/// Ends the lanes: no new commands, those that are queued are answered.
pub struct Drain {
    queue: Arc<Queue<Job>>,
    tasks: JoinSet<()>,
    metrics: Arc<Metrics>,
}

impl std::fmt::Debug for Drain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "drain of {} lanes", self.tasks.len())
    }
}

impl Drain {
    /// Waits until every queued command is answered.
    pub async fn finish(mut self) {
        self.queue.close();
        while self.tasks.join_next().await.is_some() {}
    }
}

impl Drop for Drain {
    /// The lanes go with it, so nobody else will answer.
    fn drop(&mut self) {
        self.queue.close();
        for job in self.queue.empty() {
            self.metrics.lane_queue.dec();
            job.answer(Outcome::Unavailable(Unavailable::Stopping));
        }
    }
}

impl Lanes {
    /// Starts the lanes; each opens its session at once, and again when it needs one.
    #[must_use]
    pub fn start(settings: &Settings) -> (Self, Drain) {
        let queue = Arc::new(Queue::new(settings.queue));
        let mut tasks = JoinSet::new();
        for number in 0..settings.lanes {
            tasks.spawn(Lane::new(number, settings.clone(), queue.clone()).run());
        }
        (
            Lanes {
                queue: queue.clone(),
                room: Arc::new(Semaphore::new(settings.queue_bytes)),
                metrics: settings.metrics.clone(),
            },
            Drain {
                queue,
                tasks,
                metrics: settings.metrics.clone(),
            },
        )
    }

    /// Hands a draft to the lanes and waits for the outcome; never owns a transaction, so it may be dropped at any point.
    pub async fn submit(&self, draft: Draft, deadline: Instant) -> Outcome {
        let outcome = self.enqueue(draft, deadline).await;
        if matches!(&outcome, Outcome::Rejected(rejection) if rejection.code() == "type_error") {
            self.metrics.type_errors.inc();
        }
        self.metrics
            .outcomes
            .get_or_create(&Kind {
                kind: outcome.kind(),
            })
            .inc();
        outcome
    }

    async fn enqueue(&self, draft: Draft, deadline: Instant) -> Outcome {
        let Ok(bytes) = u32::try_from(draft.input.get().len() + Job::OVERHEAD_BYTES) else {
            return Outcome::Unavailable(Unavailable::QueueFull);
        };
        let Ok(room) = self.room.clone().try_acquire_many_owned(bytes) else {
            return Outcome::Unavailable(Unavailable::QueueFull);
        };
        let phase = Arc::new(Phase::default());
        let (reply, mut answer) = oneshot::channel();
        let job = Job::new(draft, deadline, phase.clone(), reply, room);
        match self.queue.push(job) {
            Ok(()) => {}
            Err(Refused::Full) => return Outcome::Unavailable(Unavailable::QueueFull),
            Err(Refused::Closed) => return Outcome::Unavailable(Unavailable::Stopping),
        }
        self.metrics.lane_queue.inc();
        let answered = match timeout_at(deadline, &mut answer).await {
            Ok(answered) => answered,
            Err(_) if phase.give_up() => return Outcome::Unavailable(Unavailable::DeadlinePassed),
            Err(_) => match timeout_at(deadline + BEGUN_GRACE, answer).await {
                Ok(answered) => answered,
                Err(_) => return Outcome::Unknown,
            },
        };
        // A lane answers every job; a dropped reply means that its task died, perhaps during COMMIT.
        answered.unwrap_or(Outcome::Unknown)
    }
}

/// Whether a queued command may still be given up: decided once, by whoever is first.
#[derive(Debug, Default)]
pub(crate) struct Phase(AtomicU8);

impl Phase {
    const QUEUED: u8 = 0;
    const BEGUN: u8 = 1;
    const GIVEN_UP: u8 = 2;

    /// The lane takes it; false when the request has given it up.
    fn begin(&self) -> bool {
        self.0
            .compare_exchange(
                Self::QUEUED,
                Self::BEGUN,
                Ordering::AcqRel,
                Ordering::Acquire,
            )
            .is_ok()
    }

    /// Whether the request has given it up.
    fn is_given_up(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::GIVEN_UP
    }

    /// The request gives it up; false when the lane has begun.
    fn give_up(&self) -> bool {
        self.0
            .compare_exchange(
                Self::QUEUED,
                Self::GIVEN_UP,
                Ordering::AcqRel,
                Ordering::Acquire,
            )
            .is_ok()
    }
}
