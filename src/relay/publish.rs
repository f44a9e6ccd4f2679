//! The publisher: scan, publish, wait for confirms, delete; one task, one channel, for all shards it has leases of.
//!
//! Never deletes on receipt or on an unknown outcome, and never publishes on a lease that is not proven now.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use lapin::types::ShortString;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_postgres::Client;
use uuid::Uuid;

use super::RelaySettings;
use super::backoff::Backoff;
use super::book::Book;
use super::broker::{Broker, BrokerError};
use super::lease::{Lease, Report};
use super::message::Message;
use super::stopped;
use super::verdict::{Confirmed, Verdicts};
use crate::store::outbox::{self, Waiting};
use crate::store::session::{self, Purpose, SessionError};
use crate::telemetry::{Kind, Metrics};

/// Between two scans while there is work.
const BUSY_POLL: Duration = Duration::from_millis(20);
/// Between two scans while there is none.
const IDLE_POLL: Duration = Duration::from_millis(100);
/// Least pause between two scans while messages are out: each costs the database the same whether it finds one row or a hundred.
const SCAN_GAP: Duration = Duration::from_millis(5);
/// Between two looks for rows that were put off and are due.
const DUE_POLL: Duration = Duration::from_millis(100);
/// Between two looks for redriven rows, which lie below the floors, and at the outbox as a whole.
const SURVEY: Duration = Duration::from_secs(5);
/// How long counting the outbox may take, and how many times as long it then rests at least: it walks what an old snapshot keeps from
/// being removed, and publishing waits for it.
const COUNT_LIMIT: Duration = Duration::from_millis(500);
const COUNT_REST: u32 = 30;
/// Records read and published at a time; with the limit on a record, a bound on memory.
const CHUNK: usize = 128;
/// Bytes of messages that are not confirmed, before no more are published: what a blocked broker may leave in memory.
const BYTES_OUT_MAX: usize = 8 * 1024 * 1024;
/// Time for one statement, before the connection counts as lost.
pub(super) const DELETE_LIMIT: Duration = Duration::from_secs(5);

/// Why a session with database and broker ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("{0}")]
    Session(#[from] SessionError),
    #[error("postgres: {0}")]
    Postgres(#[from] tokio_postgres::Error),
    #[error("postgres did not answer in time")]
    PostgresLate,
    #[error("{0}")]
    Broker(#[from] BrokerError),
    #[error("the broker did not confirm in time")]
    ConfirmLate,
    #[error("the leases are lost")]
    LeaseLost,
}

/// One relay's publisher.
pub(super) struct Publisher {
    pub(super) settings: RelaySettings,
    lease: watch::Receiver<Lease>,
    report: watch::Sender<Report>,
    stop: watch::Receiver<bool>,
    pub(super) book: Book,
    pub(super) verdicts: Verdicts,
    /// Confirms taken from the channel and not looked at yet.
    pub(super) confirmed: Vec<Confirmed>,
    /// Messages without a verdict.
    pub(super) flying: HashMap<Uuid, Flight>,
    pub(super) bytes_out: usize,
    lease_session: u64,
    /// When messages went out, oldest first; those with a verdict are dropped when they come to the front.
    sent_at: VecDeque<(Instant, Uuid)>,
    next_scan: Instant,
    next_due: Instant,
    next_survey: Instant,
    next_count: Instant,
    pub(super) backoff: Backoff,
}

/// What is kept of a message that is out.
pub(super) struct Flight {
    pub(super) routing_key: ShortString,
    pub(super) bytes: usize,
    at: Instant,
}

/// The connections of one session.
pub(super) struct Session {
    pub(super) client: Client,
    pub(super) broker: Broker,
}

pub(super) async fn within<T>(
    work: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Result<T, Fault> {
    Ok(timeout(DELETE_LIMIT, work)
        .await
        .map_err(|_| Fault::PostgresLate)??)
}

pub(super) fn count(metrics: &Metrics, kind: &'static str, number: usize) {
    metrics
        .relay
        .get_or_create(&Kind { kind })
        .inc_by(u64::try_from(number).unwrap_or(u64::MAX));
}

impl Publisher {
    pub(super) fn new(
        settings: RelaySettings,
        lease: watch::Receiver<Lease>,
        report: watch::Sender<Report>,
        stop: watch::Receiver<bool>,
    ) -> Self {
        let now = Instant::now();
        Publisher {
            settings,
            lease,
            report,
            stop,
            book: Book::default(),
            verdicts: Verdicts::default(),
            confirmed: Vec::new(),
            flying: HashMap::new(),
            bytes_out: 0,
            lease_session: 0,
            sent_at: VecDeque::new(),
            next_scan: now,
            next_due: now,
            next_survey: now,
            next_count: now,
            backoff: Backoff::default(),
        }
    }

    /// Runs until told to stop, over as many sessions as it takes.
    pub(super) async fn run(mut self) {
        while !*self.stop.borrow() {
            let mut stop = self.stop.clone();
            let connected = tokio::select! {
                connected = self.connect() => connected,
                () = stopped(&mut stop) => return,
            };
            let outcome = match connected {
                Ok(mut session) => {
                    tracing::info!("the relay is connected");
                    let outcome = self.rounds(&mut session).await;
                    self.forget_session();
                    session.broker.close().await;
                    outcome
                }
                Err(fault) => Err(fault),
            };
            self.forget_session();
            let Err(fault) = outcome else {
                return;
            };
            let pause = self.backoff.next(rand::random());
            tracing::warn!(error = %fault, pause_ms = pause.as_millis(), "the relay connects again");
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stopped(&mut stop) => {}
            }
        }
    }

    async fn connect(&mut self) -> Result<Session, Fault> {
        let settings = &self.settings;
        let broker = Broker::connect(&settings.amqp_url, &settings.ledger).await?;
        let (client, _driver) =
            session::connect(&settings.database_url, &settings.ledger, Purpose::Relay).await?;
        Ok(Session { client, broker })
    }

    /// Whatever was out has an unknown outcome now: it is scanned again, and published again with the same id.
    fn forget_session(&mut self) {
        self.settings.handover.clear();
        self.book.reset();
        self.confirmed.clear();
        self.forget_flights();
        self.report(false);
    }

    pub(super) fn forget_flights(&mut self) {
        self.verdicts.clear();
        self.flying.clear();
        self.sent_at.clear();
        self.bytes_out = 0;
    }

    fn report(&self, ready: bool) {
        let now = Report {
            seen: self.lease.borrow().version,
            in_use: self.book.in_use(),
            ready,
        };
        self.report.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
    }

    /// Works until told to stop (and then until nothing is out), or something fails.
    async fn rounds(&mut self, session: &mut Session) -> Result<(), Fault> {
        let now = Instant::now();
        (self.next_scan, self.next_due, self.next_survey) = (now, now, now);
        self.report(true);
        self.lease_session = self.lease.borrow().session;
        loop {
            match self.round(session).await {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(Fault::Broker(error)) => self.broker_failed(session, error).await?,
                Err(fault) => return Err(fault),
            }
        }
    }

    /// One turn; true when stopped and drained.
    async fn round(&mut self, session: &mut Session) -> Result<bool, Fault> {
        self.take_lease()?;
        self.settle(session).await?;
        let now = Instant::now();
        let stopping = *self.stop.borrow();
        if stopping && self.book.out() == 0 {
            return Ok(true);
        }
        if self.confirm_is_late(now) {
            return Err(Fault::ConfirmLate);
        }
        if !stopping {
            if now >= self.next_survey {
                self.survey(&session.client).await?;
            }
            if now >= self.next_due {
                self.take_due(&session.client).await?;
            }
            if now >= self.next_scan {
                self.scan(&session.client).await?;
            }
            self.publish(session).await?;
        }
        self.report(true);
        if !session.broker.is_open() {
            return Err(BrokerError::Late("stay connected").into());
        }
        self.wait(session).await?;
        Ok(false)
    }

    fn confirm_limit(&self) -> Duration {
        Duration::from_millis(self.settings.config.confirm_timeout_ms)
    }

    fn confirm_is_late(&mut self, now: Instant) -> bool {
        while let Some((at, id)) = self.sent_at.front() {
            if self.flying.get(id).is_some_and(|flight| flight.at == *at) {
                return now > *at + self.confirm_limit();
            }
            self.sent_at.pop_front();
        }
        false
    }

    fn take_lease(&mut self) -> Result<(), Fault> {
        let lease = *self.lease.borrow_and_update();
        let proven = Instant::now() < lease.valid_until;
        if self.book.in_use() != 0 && (lease.session != self.lease_session || !proven) {
            return Err(Fault::LeaseLost);
        }
        if lease.session != self.lease_session {
            // Another relay may have had the shards since: what is known of them may be old.
            self.book.reset();
            self.lease_session = lease.session;
        }
        self.book.set_shards(if proven { lease.shards } else { 0 });
        Ok(())
    }

    fn lease_holds(&self) -> bool {
        let lease = self.lease.borrow();
        lease.session == self.lease_session && Instant::now() < lease.valid_until
    }

    /// Reads the settled position, THEN scans.
    async fn scan(&mut self, client: &Client) -> Result<(), Fault> {
        let ranges = self.book.ranges();
        let began = Instant::now();
        if ranges.is_empty() || !self.book.has_room() {
            self.next_scan = began + IDLE_POLL;
            return Ok(());
        }
        let horizon = within(outbox::horizon(client)).await?;
        let window = self.settings.config.window;
        let limit = (2 * window).div_ceil(ranges.len()).max(32);
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let rows = within(outbox::scan(client, &ranges, &self.book.busy(), limit))
            .await
            .inspect_err(|_| self.book.scan_failed())?;
        let found = !rows.is_empty();
        let ended = self.book.scanned(rows, horizon);
        let pause = if found || self.book.out() > 0 {
            BUSY_POLL
        } else if ended {
            IDLE_POLL
        } else {
            // The next part follows.
            Duration::ZERO
        };
        self.next_scan = began + pause;
        Ok(())
    }

    /// Looks for rows that were put off and are due. They have low positions and go first, so they get half of the window only:
    /// what is refused again and again must not take the place of the rest.
    async fn take_due(&mut self, client: &Client) -> Result<(), Fault> {
        self.next_due = Instant::now() + DUE_POLL;
        let shards: Vec<u8> = self.book.ranges().iter().map(|range| range.shard).collect();
        let half = self.settings.config.window.div_ceil(2);
        let limit = i64::try_from(half.saturating_sub(self.book.late())).unwrap_or(0);
        if limit > 0 && !shards.is_empty() && self.book.has_room() {
            let rows = within(outbox::due(client, &shards, &self.book.busy(), limit)).await?;
            self.book.offer_late(rows);
        }
        Ok(())
    }

    /// Looks for redriven rows, and counts the outbox.
    async fn survey(&mut self, client: &Client) -> Result<(), Fault> {
        for (position, shard, user_no) in within(outbox::redriven(client)).await? {
            self.book.lower(shard, position, user_no);
        }
        let began = Instant::now();
        self.next_survey = began + SURVEY;
        if began < self.next_count {
            return Ok(());
        }
        let depth = within(outbox::depth_within(client, COUNT_LIMIT)).await?;
        self.next_count = Instant::now() + began.elapsed() * COUNT_REST;
        let Some(depth) = depth else {
            tracing::debug!("counting the outbox takes too long; its metrics stay as they were");
            return Ok(());
        };
        let metrics = &self.settings.metrics;
        metrics.outbox_rows.set(depth.waiting);
        metrics.outbox_oldest_seconds.set(depth.oldest_seconds);
        metrics.outbox_parked.set(depth.parked);
        Ok(())
    }

    async fn publish(&mut self, session: &mut Session) -> Result<(), Fault> {
        while self.bytes_out < BYTES_OUT_MAX && self.lease_holds() {
            let picked = self.book.pick(self.settings.config.window, CHUNK);
            if picked.is_empty() {
                return Ok(());
            }
            let messages = self.messages(&session.client, picked).await?;
            // Reading took a while: what the lease proved before may be proven no more.
            if !self.lease_holds() {
                return Err(Fault::LeaseLost);
            }
            count(&self.settings.metrics, "published", messages.len());
            let limit = self.confirm_limit();
            session.broker.publish(&messages, limit).await?;
        }
        Ok(())
    }

    /// The messages of rows that are to go out. A row that cannot be a message is parked.
    async fn messages(
        &mut self,
        client: &Client,
        picked: Vec<Waiting>,
    ) -> Result<Vec<Message>, Fault> {
        let mut records = self.records(client, &picked).await?;
        let mut messages = Vec::with_capacity(picked.len());
        let at = Instant::now();
        for row in picked {
            let message = records
                .remove(&row.position)
                .ok_or_else(|| "its event does not exist".to_owned())
                .and_then(|record| Message::new(&row, record));
            match message {
                Ok(message) => {
                    self.book.sent(message.id, row.user_no);
                    let flight = Flight {
                        routing_key: message.routing_key.clone(),
                        bytes: message.body.len(),
                        at,
                    };
                    self.bytes_out += flight.bytes;
                    self.sent_at.push_back((at, message.id));
                    self.flying.insert(message.id, flight);
                    messages.push(message);
                }
                Err(reason) => self.park(client, &row, &reason).await?,
            }
        }
        Ok(messages)
    }

    /// The events of rows: as handed over by the lanes of this process, else as read.
    async fn records(
        &self,
        client: &Client,
        picked: &[Waiting],
    ) -> Result<HashMap<i64, outbox::Record>, Fault> {
        let handover = &self.settings.handover;
        let mut records = HashMap::with_capacity(picked.len());
        let mut missing = Vec::new();
        for row in picked {
            match handover.take(row.position, row.recorded_at) {
                Some(record) => {
                    records.insert(row.position, record);
                }
                None => missing.push(row),
            }
        }
        if !missing.is_empty() {
            let read = within(outbox::records(client, &missing)).await?;
            records.extend(read.into_iter().map(|record| (record.position, record)));
        }
        Ok(records)
    }

    /// Waits for a confirm, a commit, a change of leases, the stop, or the time of the next scan.
    async fn wait(&mut self, session: &mut Session) -> Result<(), Fault> {
        if self.book.has_ready()
            && self.book.out() < self.settings.config.window
            && self.bytes_out < BYTES_OUT_MAX
            && !*self.stop.borrow()
            && !self.book.waits_for_suspect()
        {
            return Ok(());
        }
        let handover = self.settings.handover.clone();
        let scan_again = Instant::now() + SCAN_GAP;
        let mut stop = self.stop.clone();
        let stopping = *stop.borrow();
        tokio::select! {
            outcome = session.broker.confirmed(&mut self.confirmed) => outcome?,
            () = handover.woken(), if !stopping => {
                // With messages out, their confirms will come first anyway.
                self.next_scan = if self.book.out() > 0 {
                    self.next_scan.min(scan_again)
                } else {
                    Instant::now()
                };
            }
            () = sleep_until(self.next_scan), if !stopping => {}
            () = tokio::time::sleep(IDLE_POLL), if stopping => {}
            changed = self.lease.changed() => changed.map_err(|_| Fault::LeaseLost)?,
            () = stopped(&mut stop), if !stopping => {}
        }
        Ok(())
    }
}
