//! Leases: which shards this relay may publish, by session locks on a connection of its own.
//!
//! Never says that a shard may be published when the last ping is four seconds old: by then Postgres may have ended the session and
//! another relay may have the lock.

use std::sync::Arc;
use std::time::Duration;

use secrecy::SecretString;
use sha2::{Digest, Sha256};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_postgres::Client;

use super::backoff::{Backoff, SOUND};
use super::book::bit;
use super::stopped;
use crate::store::outbox::{self, SHARDS};
use crate::store::session::{self, Purpose, SessionError};
use crate::telemetry::Metrics;

/// Between two pings.
const PING: Duration = Duration::from_secs(1);
/// A ping this old is no proof any more. Less than the five seconds after which Postgres ends a silent session.
const PROOF: Duration = Duration::from_secs(4);
/// Least pause between two rounds that a report, not the clock, asked for.
const ROUND_GAP: Duration = Duration::from_millis(20);

/// What the publisher may do.
#[derive(Clone, Copy, Debug)]
pub struct Lease {
    /// Changes with each session: another one means that all older leases were lost.
    pub session: u64,
    /// Grows with each change of the set.
    pub version: u64,
    /// Shards that may be published.
    pub shards: u16,
    /// Until when.
    pub valid_until: Instant,
}

impl Lease {
    /// No shard.
    #[must_use]
    pub fn none() -> Self {
        Lease {
            session: 0,
            version: 0,
            shards: 0,
            valid_until: Instant::now(),
        }
    }
}

/// What the publisher says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The last lease version it has taken in.
    pub seen: u64,
    /// Shards of which something is out.
    pub in_use: u16,
    /// Whether it is connected to the broker; one that is not wants no shards.
    pub ready: bool,
}

#[derive(Debug, thiserror::Error)]
enum LeaseError {
    #[error("{0}")]
    Session(#[from] SessionError),
    #[error("postgres: {0}")]
    Postgres(#[from] tokio_postgres::Error),
    #[error("postgres did not answer a ping in time")]
    Late,
}

/// The task that keeps leases.
#[derive(Clone, Debug)]
pub struct Keeper {
    /// Postgres.
    pub database_url: SecretString,
    /// The ledger, part of the lock keys.
    pub ledger: String,
    /// Where the number of leases is shown.
    pub metrics: Arc<Metrics>,
    /// To the publisher.
    pub lease: watch::Sender<Lease>,
    /// From the publisher.
    pub report: watch::Receiver<Report>,
    /// Becomes true when the leases are to be given up for good.
    pub stop: watch::Receiver<bool>,
}

/// Locks of one session.
#[derive(Debug, Default)]
struct Locks {
    appeared: bool,
    locked: u16,
    offered: u16,
    /// What the publisher had said when the locks were last looked at.
    seen: Report,
}

impl Locks {
    /// Whether another round could do more than the ping: the publisher came or went, or something is being given up and what
    /// he has out of it changed. What he has out of his own shards changes all the time.
    fn concern(&self, now: &Report) -> bool {
        now.ready != self.seen.ready || (self.locked != self.offered && *now != self.seen)
    }
}

/// Lock key of a shard; number 16 is the presence of relays. Same for all relays of a ledger, unlike another ledger's.
fn key(ledger: &str, slot: u8) -> i64 {
    let hash = Sha256::digest(format!("daybook relay {ledger}").as_bytes());
    let mut bytes = [0_u8; 8];
    for (to, from) in bytes.iter_mut().zip(hash) {
        *to = from;
    }
    (i64::from_be_bytes(bytes) & !0x1f) | i64::from(slot)
}

/// Shards of one relay at most, when so many are live.
fn share(relays: i64) -> u32 {
    let relays = u32::try_from(relays).unwrap_or(1).max(1);
    u32::from(SHARDS).div_ceil(relays)
}

impl Keeper {
    /// Keeps leases until told to stop, over as many sessions as it takes.
    pub async fn run(mut self) {
        let mut backoff = Backoff::default();
        // A session's number is never used twice, not even by the next keeper of the same relay.
        let mut number = self.lease.borrow().session;
        while !*self.stop.borrow() {
            number += 1;
            let began = Instant::now();
            let outcome = self.session(number).await;
            self.show(number, 0, Instant::now());
            let Err(error) = outcome else {
                return;
            };
            tracing::warn!(%error, "the relay's leases are lost");
            if began.elapsed() > SOUND {
                backoff.reset();
            }
            let pause = backoff.next(rand::random());
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stopped(&mut self.stop) => {}
            }
        }
    }

    /// Shows that the leases of whoever kept them before are lost.
    pub fn show_lost(&self) {
        let session = self.lease.borrow().session;
        self.show(session + 1, 0, Instant::now());
    }

    async fn session(&mut self, number: u64) -> Result<(), LeaseError> {
        let (client, driver) =
            session::connect(&self.database_url, &self.ledger, Purpose::Relay).await?;
        let mut locks = Locks::default();
        let outcome = self.rounds(number, &client, &mut locks).await;
        // The locks go with the session. Its end is waited for, but not for ever.
        drop(client);
        let abort = driver.abort_handle();
        if tokio::time::timeout(PING, driver).await.is_err() {
            abort.abort();
        }
        outcome
    }

    async fn rounds(
        &mut self,
        number: u64,
        client: &Client,
        locks: &mut Locks,
    ) -> Result<(), LeaseError> {
        let mut deadline = Instant::now() + PROOF;
        timeout_at(deadline, outbox::lease_session(client))
            .await
            .map_err(|_| LeaseError::Late)??;
        loop {
            let began = Instant::now();
            timeout_at(deadline, self.round(client, locks))
                .await
                .map_err(|_| LeaseError::Late)??;
            deadline = began + PROOF;
            self.show(number, locks.offered, deadline);
            tokio::select! {
                () = sleep_until(began + PING) => {}
                () = stopped(&mut self.stop) => return Ok(()),
                gone = async { self.report.wait_for(|now| locks.concern(now)).await.is_err() } => {
                    if gone {
                        return Ok(());
                    }
                    sleep_until(began + ROUND_GAP).await;
                }
            }
        }
    }

    /// Counts the relays (which is the ping), gives up what is too much, takes what is missing.
    async fn round(&mut self, client: &Client, locks: &mut Locks) -> Result<(), LeaseError> {
        let report = *self.report.borrow_and_update();
        locks.seen = report;
        if report.ready != locks.appeared {
            outbox::appear(client, key(&self.ledger, SHARDS), report.ready).await?;
            locks.appeared = report.ready;
        }
        let relays = outbox::live(client, key(&self.ledger, SHARDS)).await?;
        let most = if report.ready { share(relays) } else { 0 };
        for shard in 0..SHARDS {
            let bit = bit(shard);
            if locks.locked & bit == 0 || locks.offered & bit != 0 {
                continue;
            }
            // Given up in an earlier round: unlocked once the publisher knows and has nothing of it out. One that is not connected
            // publishes nothing before it has looked again.
            let knows = !report.ready || report.seen == self.lease.borrow().version;
            if knows && report.in_use & bit == 0 {
                outbox::release(client, key(&self.ledger, shard)).await?;
                locks.locked &= !bit;
            }
        }
        for shard in 0..SHARDS {
            if locks.offered.count_ones() <= most {
                break;
            }
            locks.offered &= !bit(shard);
        }
        // Each begins elsewhere, so that they rarely try the same ones.
        let start: u8 = rand::random_range(0..SHARDS);
        for step in 0..SHARDS {
            let shard = (start + step) % SHARDS;
            if locks.offered.count_ones() >= most {
                break;
            }
            if locks.locked & bit(shard) == 0
                && outbox::lease(client, key(&self.ledger, shard)).await?
            {
                locks.locked |= bit(shard);
                locks.offered |= bit(shard);
            }
        }
        Ok(())
    }

    fn show(&self, session: u64, shards: u16, valid_until: Instant) {
        let before = *self.lease.borrow();
        let changed = before.session != session || before.shards != shards;
        if changed && before.shards != shards {
            tracing::info!(shards = shards.count_ones(), "the relay's leases changed");
        }
        self.metrics
            .relay_leases
            .set(i64::from(shards.count_ones()));
        self.lease.send_if_modified(|lease| {
            *lease = Lease {
                session,
                version: before.version + u64::from(changed),
                shards,
                valid_until,
            };
            changed
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_all_shards() {
        for relays in 1..40_i64 {
            assert!(i64::from(share(relays)) * relays >= i64::from(SHARDS));
        }
        assert_eq!([share(0), share(1), share(3), share(20)], [16, 16, 6, 1]);
    }

    #[test]
    fn keys_are_apart_by_ledger_and_shard() {
        let mut keys: Vec<i64> = (0..=SHARDS)
            .flat_map(|slot| [key("main", slot), key("other", slot)])
            .collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 34);
    }
}
