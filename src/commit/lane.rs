//! One lane: takes what has queued while its last commit was in flight, and makes one transaction of it.
//!
//! Every failure ends in an answer: run again, split, 503 when nothing was written, 504 when that cannot be learned. A
//! COMMIT is never cancelled.

use super::queue::{Command, Queue};
use super::{BEGUN_GRACE, Outcome, Phase, Recorded, Settings, Unavailable, record};
use crate::domain::decide::DedupeKey;
use crate::domain::{Decision, Draft, Guard, Rejection, Stored, decide};
use crate::store::fault::{Fault, commit_refused};
use crate::store::ledger::{self, BatchError, Locked, NewEvent, Numbers, Statements};
use crate::store::session::{self, Purpose};
use crate::telemetry::Kind;
use futures_util::FutureExt;
use jiff::{SignedDuration, Timestamp};
use std::collections::HashSet;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::Client;

/// Times one batch is run again after a conflict.
const CONFLICTS_MAX: u8 = 10;
/// Times a lost session is replaced for one batch before it is answered 503.
const SESSIONS_MAX: u8 = 3;
/// How long the parts of a split batch wait for a lock, in milliseconds; one command alone waits the session's full second.
const PATIENCE_MS: u16 = 50;
/// How long a batch waits for a lock before it is split, in milliseconds: longer than a few commits of other lanes.
const BATCH_PATIENCE_MS: u16 = 500;
/// How long a phase may take before the session counts as lost; the server's own time-outs are shorter.
const PHASE_TIMEOUT: Duration = Duration::from_secs(12);
/// How long COMMIT may take before the session is dropped and the batch run again under the locks.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the outcome of a lost COMMIT is sought past the request's deadline.
const UNKNOWN_GRACE: Duration = Duration::from_secs(10);
/// Pause before the next session after one could not be opened; doubled by jitter at most.
const RECONNECT_PAUSE: Duration = Duration::from_secs(1);
/// Clocks further apart than this would poison a user's history with times to come.
const CLOCK_SKEW_MAX: SignedDuration = SignedDuration::from_secs(60);
/// Batches a session serves before it is renewed: its buffers keep their high-water mark.
const SESSION_BATCHES_MAX: u32 = 100_000;

/// A command in a lane.
pub(super) struct Job {
    draft: Draft,
    rows: Vec<u64>,
    deadline: Instant,
    phase: Arc<Phase>,
    reply: oneshot::Sender<Outcome>,
    /// Ids of this command's earlier attempts: a duplicate with one of them is our own lost COMMIT.
    attempts: Vec<uuid::Uuid>,
    _room: OwnedSemaphorePermit,
}

impl Job {
    /// What a queued command weighs besides its data.
    pub(super) const OVERHEAD_BYTES: usize = 1_024;

    pub(super) fn new(
        draft: Draft,
        deadline: Instant,
        phase: Arc<Phase>,
        reply: oneshot::Sender<Outcome>,
        room: OwnedSemaphorePermit,
    ) -> Self {
        Job {
            rows: rows(&draft),
            draft,
            deadline,
            phase,
            reply,
            attempts: Vec::new(),
            _room: room,
        }
    }

    pub(super) fn answer(self, outcome: Outcome) {
        // The request may have gone away; the event stays.
        let _ = self.reply.send(outcome);
    }
}

impl Command for Job {
    fn rows(&self) -> &[u64] {
        &self.rows
    }

    fn is_over(&self) -> bool {
        self.deadline <= Instant::now() || self.phase.is_given_up()
    }
}

/// The rows that a draft will have locked, each once: users, balances with a floor, business keys.
fn rows(draft: &Draft) -> Vec<u64> {
    let hasher = BuildHasherDefault::<DefaultHasher>::default();
    let users = draft.locked_users().map(|user| hasher.hash_one(user));
    let balances = draft
        .touched()
        .filter(|(account, _)| matches!(account.guard, Guard::Floor(_)))
        .map(|(account, asset)| hasher.hash_one((&account.address, asset)));
    let keys = draft
        .unique
        .iter()
        .map(|unique| hasher.hash_one((&unique.namespace, &unique.key)));
    let mut rows: Vec<u64> = users.chain(balances).chain(keys).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// Commands that share a transaction, and what has happened to them so far.
struct Batch {
    jobs: Vec<Job>,
    /// Runs that met a conflict.
    conflicts: u8,
    /// Sessions that were lost under it.
    sessions: u8,
    /// A COMMIT was sent whose answer did not come.
    unknown: bool,
    /// Shortened wait for locks, after a split.
    patience: Option<u16>,
}

impl Batch {
    fn of(jobs: Vec<Job>) -> Self {
        Batch {
            patience: (jobs.len() > 1).then_some(BATCH_PATIENCE_MS),
            jobs,
            conflicts: 0,
            sessions: 0,
            unknown: false,
        }
    }

    /// Answers commands that their requests have given up while they waited for locks. When a COMMIT may have happened they stay: it is
    /// still to be learned.
    fn drop_abandoned(&mut self) {
        if self.unknown {
            return;
        }
        let now = Instant::now();
        let jobs = std::mem::take(&mut self.jobs);
        let (over, jobs) = jobs
            .into_iter()
            .partition::<Vec<Job>, _>(|job| job.deadline + BEGUN_GRACE <= now);
        self.jobs = jobs;
        for job in over {
            job.answer(Outcome::Unavailable(Unavailable::DeadlinePassed));
        }
    }

    fn answer(self, outcome: &Outcome) {
        for job in self.jobs {
            job.answer(outcome.clone());
        }
    }

    /// Answers all of them: nothing was written, or it cannot be learned.
    fn give_up(self, why: Unavailable) {
        let outcome = if self.unknown {
            Outcome::Unknown
        } else {
            Outcome::Unavailable(why)
        };
        self.answer(&outcome);
    }
}

/// Why a run of a batch ended without answers.
enum Failure {
    Fault(Fault),
    /// COMMIT was sent; its answer did not come.
    CommitLost,
    ClockSkew,
}

struct Session {
    client: Client,
    statements: Statements,
    numbers: Numbers,
    batches: u32,
}

/// One lane.
pub(super) struct Lane {
    number: usize,
    queue: Arc<Queue<Job>>,
    settings: Settings,
    source: String,
    session: Option<Session>,
    /// No new session before this: a dead database is not hammered.
    not_before: Option<Instant>,
}

impl Lane {
    pub(super) fn new(number: usize, settings: Settings, queue: Arc<Queue<Job>>) -> Self {
        let source = format!("/daybook/{}", settings.ledger);
        Lane {
            number,
            queue,
            settings,
            source,
            session: None,
            not_before: None,
        }
    }

    /// Serves until the queue is closed and empty.
    pub(super) async fn run(mut self) {
        // The first request of a pod need not wait for a session; a failure is that request's to report.
        let _ = self.connect(false).await;
        let queue = self.queue.clone();
        while let Some(jobs) = queue.take(self.number, self.settings.batch_max).await {
            let batch: Vec<Job> = jobs.into_iter().filter_map(|job| self.begin(job)).collect();
            // A bug must cost one batch (its requests learn that the outcome is unknown), not the lane and its users for ever.
            let settled = AssertUnwindSafe(self.settle(batch)).catch_unwind().await;
            queue.release(self.number, &HashSet::new());
            if settled.is_err() {
                tracing::error!("a lane panicked; it goes on with a new session");
                self.session = None;
            }
        }
    }

    /// A job whose request still waits.
    fn begin(&self, job: Job) -> Option<Job> {
        self.settings.metrics.lane_queue.dec();
        if job.deadline <= Instant::now() || !job.phase.begin() {
            job.answer(Outcome::Unavailable(Unavailable::DeadlinePassed));
            return None;
        }
        Some(job)
    }

    /// Runs a batch, and the parts it may be split into, until every command has its answer.
    async fn settle(&mut self, jobs: Vec<Job>) {
        if jobs.is_empty() {
            return;
        }
        let mut waiting = vec![Batch::of(jobs)];
        while let Some(mut batch) = waiting.pop() {
            batch.drop_abandoned();
            if batch.jobs.is_empty() {
                continue;
            }
            match self.attempt(&mut batch).await {
                Ok(outcomes) => {
                    for (job, outcome) in batch.jobs.into_iter().zip(outcomes) {
                        job.answer(outcome);
                    }
                }
                Err(failure) => self.recover(batch, &failure, &mut waiting).await,
            }
            // Who is answered does not wait for the parts that are left; nor do others for his rows.
            if !waiting.is_empty() {
                let left = waiting.iter().flat_map(|batch| &batch.jobs);
                let kept = left.flat_map(|job| job.rows().iter().copied()).collect();
                self.queue.release(self.number, &kept);
            }
        }
    }

    async fn recover(&mut self, mut batch: Batch, failure: &Failure, waiting: &mut Vec<Batch>) {
        let reason = match failure {
            Failure::Fault(Fault::Conflict) => "conflict",
            Failure::Fault(Fault::Timeout) => "timeout",
            Failure::Fault(Fault::Lost) => "session_lost",
            Failure::Fault(Fault::Down) => "database_down",
            Failure::Fault(Fault::Wrong) => "statement",
            Failure::CommitLost => "commit_lost",
            Failure::ClockSkew => "clock_skew",
        };
        self.settings
            .metrics
            .retries
            .get_or_create(&Kind { kind: reason })
            .inc();
        match failure {
            Failure::Fault(Fault::Conflict) if batch.conflicts < CONFLICTS_MAX => {
                batch.conflicts += 1;
                pause(Duration::from_millis(2 * u64::from(batch.conflicts))).await;
                waiting.push(batch);
            }
            Failure::Fault(Fault::Timeout | Fault::Wrong | Fault::Conflict)
                if batch.jobs.len() > 1 =>
            {
                split(batch, waiting);
            }
            // Behind a lost COMMIT even this says nothing of what the first run wrote.
            Failure::Fault(Fault::Wrong) if batch.unknown => batch.answer(&Outcome::Unknown),
            Failure::Fault(Fault::Wrong) => batch.answer(&Outcome::Failed),
            Failure::Fault(Fault::Lost) if batch.sessions < SESSIONS_MAX || sought(&batch) => {
                batch.sessions = batch.sessions.saturating_add(1);
                waiting.push(batch);
            }
            Failure::Fault(Fault::Timeout | Fault::Conflict | Fault::Down) if sought(&batch) => {
                pause(Duration::from_millis(200)).await;
                waiting.push(batch);
            }
            Failure::CommitLost => {
                batch.unknown = true;
                if sought(&batch) {
                    waiting.push(batch);
                } else {
                    batch.answer(&Outcome::Unknown);
                }
            }
            Failure::Fault(_) => batch.give_up(Unavailable::Database),
            Failure::ClockSkew => batch.give_up(Unavailable::ClockSkew),
        }
    }

    /// One run: a session, a transaction, COMMIT.
    async fn attempt(&mut self, batch: &mut Batch) -> Result<Vec<Outcome>, Failure> {
        self.connect(batch.unknown).await?;
        let Some(session) = &mut self.session else {
            return Err(Failure::Fault(Fault::Lost));
        };
        let started = Instant::now();
        let result = transact(session, batch, &self.source, &self.settings).await;
        session.batches += 1;
        let size = batch.jobs.len();
        match &result {
            Ok(_) => {
                self.settings
                    .metrics
                    .commit_seconds
                    .observe(started.elapsed().as_secs_f64());
                self.settings
                    .metrics
                    .batch_size
                    .observe(f64::from(u32::try_from(size).unwrap_or(u32::MAX)));
            }
            Err(Failure::CommitLost | Failure::Fault(Fault::Lost)) => self.session = None,
            // A server that cannot serve may have become a standby: only a new session finds the one that can.
            Err(Failure::Fault(Fault::Down)) => {
                self.session = None;
                self.pause_reconnecting();
            }
            Err(_) => {}
        }
        let spent = self
            .session
            .as_ref()
            .is_some_and(|s| s.batches >= SESSION_BATCHES_MAX || s.client.is_closed());
        if spent || (result.is_err() && !self.roll_back().await) {
            self.session = None;
        }
        result
    }

    fn pause_reconnecting(&mut self) {
        let pause = RECONNECT_PAUSE.mul_f64(1.0 + rand::random::<f64>());
        self.not_before = Some(Instant::now() + pause);
    }

    async fn roll_back(&self) -> bool {
        let Some(session) = &self.session else {
            return true;
        };
        matches!(
            timeout(PHASE_TIMEOUT, ledger::roll_back(&session.client)).await,
            Ok(Ok(()))
        )
    }

    /// Opens a session if there is none. While an outcome is sought it waits for the next try; else it fails at once.
    async fn connect(&mut self, patient: bool) -> Result<(), Failure> {
        if self.session.is_some() {
            return Ok(());
        }
        if let Some(not_before) = self.not_before.filter(|at| *at > Instant::now()) {
            if !patient {
                return Err(Failure::Fault(Fault::Down));
            }
            tokio::time::sleep_until(not_before).await;
        }
        let opened = timeout(PHASE_TIMEOUT, async {
            let url = &self.settings.database_url;
            let (client, _driver) = session::connect(url, &self.settings.ledger, Purpose::Lane)
                .await
                .map_err(|error| error.to_string())?;
            let statements = Statements::prepare(&client)
                .await
                .map_err(|error| error.to_string())?;
            Ok::<_, String>(Session {
                client,
                statements,
                numbers: Numbers::default(),
                batches: 0,
            })
        })
        .await
        .unwrap_or_else(|_| Err("no answer in time".to_owned()));
        match opened {
            Ok(session) => {
                self.session = Some(session);
                self.not_before = None;
                Ok(())
            }
            Err(error) => {
                tracing::warn!(error, "a lane has no database session");
                self.pause_reconnecting();
                Err(Failure::Fault(Fault::Down))
            }
        }
    }
}

async fn pause(at_most: Duration) {
    sleep(at_most.mul_f64(0.5 + rand::random::<f64>() / 2.0)).await;
}

/// Whether the outcome of a lost COMMIT is still worth seeking.
fn sought(batch: &Batch) -> bool {
    let latest = batch.jobs.iter().map(|job| job.deadline).max();
    batch.unknown && latest.is_some_and(|latest| Instant::now() < latest + UNKNOWN_GRACE)
}

/// Splits a batch in two, the first half to run first; the halves wait for locks only briefly until a command is alone.
fn split(mut batch: Batch, waiting: &mut Vec<Batch>) {
    let second = batch.jobs.split_off(batch.jobs.len() / 2);
    for jobs in [second, batch.jobs] {
        let patience = (jobs.len() > 1).then_some(PATIENCE_MS);
        waiting.push(Batch {
            unknown: batch.unknown,
            patience,
            ..Batch::of(jobs)
        });
    }
}

async fn transact(
    session: &mut Session,
    batch: &mut Batch,
    source: &str,
    settings: &Settings,
) -> Result<Vec<Outcome>, Failure> {
    let Session {
        client,
        statements,
        numbers,
        ..
    } = session;
    let drafts: Vec<&Draft> = batch.jobs.iter().map(|job| &job.draft).collect();
    let days = SignedDuration::from_hours(24 * i64::from(settings.dedupe_days));
    let since = Timestamp::now() - days;
    let locked = within(ledger::lock(
        client,
        statements,
        numbers,
        &drafts,
        since,
        batch.patience,
    ))
    .await;
    let mut locked = locked.map_err(Failure::Fault)?;
    if locked.now.duration_since(Timestamp::now()).abs() > CLOCK_SKEW_MAX {
        return Err(Failure::ClockSkew);
    }
    let (outcomes, events) = decide_all(&batch.jobs, &mut locked, source, batch.unknown);
    if events.is_empty() {
        // Nothing to write; what was read under the locks stands. The locks go with the roll-back.
        return match within(async { Ok(ledger::roll_back(client).await?) }).await {
            Ok(()) => Ok(outcomes),
            Err(fault) => Err(Failure::Fault(fault)),
        };
    }
    let new: Vec<Option<uuid::Uuid>> = outcomes
        .iter()
        .map(|outcome| {
            if let Outcome::Created(recorded) = outcome {
                Some(recorded.event_id)
            } else {
                None
            }
        })
        .collect();
    let written = within(ledger::write(client, statements, &mut locked, &events)).await;
    drop(events);
    let records = written.map_err(Failure::Fault)?;
    for (job, id) in batch.jobs.iter_mut().zip(new) {
        job.attempts.extend(id);
    }
    match timeout(COMMIT_TIMEOUT, ledger::commit(client)).await {
        Ok(Ok(())) => {
            settings.committed.give(records);
            Ok(outcomes)
        }
        Ok(Err(error)) if commit_refused(&error) => {
            tracing::warn!(%error, "COMMIT was refused");
            Err(Failure::Fault(Fault::of(&error)))
        }
        Ok(Err(_)) | Err(_) => Err(Failure::CommitLost),
    }
}

/// Waits for a phase; a session that does not answer counts as lost.
async fn within<T>(phase: impl Future<Output = Result<T, BatchError>>) -> Result<T, Fault> {
    match timeout(PHASE_TIMEOUT, phase).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(BatchError::Postgres(error))) => {
            let fault = Fault::of(&error);
            match fault {
                Fault::Wrong | Fault::Down => {
                    tracing::error!(%error, detail = ?error.as_db_error(), "a batch failed")
                }
                _ => tracing::debug!(%error, "a batch will run again"),
            }
            Err(fault)
        }
        Ok(Err(BatchError::Changed(what))) => {
            tracing::warn!(what, "a compare-and-set failed; the batch will run again");
            Err(Fault::Conflict)
        }
        Ok(Err(BatchError::Corrupt(what))) => {
            tracing::error!(what, "a stored value is out of range");
            Err(Fault::Wrong)
        }
        Err(_) => Err(Fault::Lost),
    }
}

/// The event of this command whose COMMIT was lost and has happened all the same. Nothing that changed since, such as a revocation
/// of the token, undoes it.
fn written_before(job: &Job, locked: &Locked) -> Option<Recorded> {
    let stored = locked.state.stored.get(&DedupeKey::of(&job.draft))?;
    job.attempts.contains(&stored.event_id).then(|| Recorded {
        event_id: stored.event_id,
        hash: record::hash(&stored.record),
        record: stored.record.clone(),
    })
}

/// Decides one command after another; each sees what those before it changed.
fn decide_all<'a>(
    jobs: &'a [Job],
    locked: &mut Locked,
    source: &str,
    unknown: bool,
) -> (Vec<Outcome>, Vec<NewEvent<'a>>) {
    let mut outcomes = Vec::with_capacity(jobs.len());
    let mut events = Vec::with_capacity(jobs.len());
    for job in jobs {
        if let Some(recorded) = written_before(job, locked) {
            outcomes.push(Outcome::Created(recorded));
            continue;
        }
        let outcome = match decide(&locked.state, &job.draft, locked.now) {
            Decision::Replay(stored) => Outcome::Replayed(stored),
            // A new user has no row to lock, so a lost COMMIT may still be on its way: only an insert would meet it.
            Decision::Refuse(_)
                if unknown && !locked.state.users.contains_key(&job.draft.subject) =>
            {
                Outcome::Unknown
            }
            Decision::Refuse(rejection) => Outcome::Rejected(rejection),
            Decision::Accept(accepted) => {
                let event_id = record::event_id(accepted.recorded_at, rand::random());
                match record::write(&job.draft, &accepted, event_id, source) {
                    Ok(text) if text.len() > record::RECORD_BYTES_MAX => {
                        Outcome::Rejected(Rejection::RecordTooLarge)
                    }
                    Ok(text) => {
                        let record: Arc<str> = text.into();
                        let hash = record::hash(&record);
                        let stored = Stored {
                            event_id,
                            fingerprint: job.draft.fingerprint,
                            record: record.clone(),
                        };
                        locked.state.apply(&job.draft, &accepted, hash, stored);
                        events.push(NewEvent {
                            draft: &job.draft,
                            accepted,
                            event_id,
                            record: record.clone(),
                        });
                        Outcome::Created(Recorded {
                            event_id,
                            record,
                            hash,
                        })
                    }
                    Err(error) => {
                        tracing::error!(%error, "a record could not be written");
                        Outcome::Failed
                    }
                }
            }
        };
        outcomes.push(outcome);
    }
    (outcomes, events)
}
