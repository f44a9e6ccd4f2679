//! The relay: every event to the broker, at least once, in order per user.
//!
//! Never deletes an outbox row whose message is not known to be delivered, and has nothing to say about what an event means.

mod backoff;
mod book;
mod broker;
mod lease;
mod message;
mod outcome;
pub mod pattern;
mod publish;
mod reach;
mod supervise;
mod tail;
mod topology;
mod verdict;

use secrecy::SecretString;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::config::RelayConfig;
use crate::store::handover::Handover;
use crate::telemetry::Metrics;

pub use broker::BrokerError;
pub use tail::{Received, Source, tail};
pub use topology::{declare_queue, exchange};

use supervise::supervise;

/// What a relay needs to know.
#[derive(Clone, Debug)]
pub struct RelaySettings {
    /// Postgres, as the runtime role. Two connections are used.
    pub database_url: SecretString,
    /// RabbitMQ.
    pub amqp_url: SecretString,
    /// The ledger: schema, lock keys, exchange.
    pub ledger: String,
    /// Windows and holds.
    pub config: RelayConfig,
    /// Where it counts.
    pub metrics: Arc<Metrics>,
    /// Woken after a commit of the same process.
    pub handover: Handover,
}

/// A running relay. Dropped without [`Relay::stop`], it ends at once, and what it had out is published again by another.
#[derive(Debug)]
pub struct Relay {
    stop_publisher: watch::Sender<bool>,
    stop_leases: watch::Sender<bool>,
    /// Ends it at once when it is dropped.
    abort_publisher: Option<oneshot::Sender<()>>,
    publisher: JoinHandle<()>,
    leases: JoinHandle<()>,
    drain_limit: Duration,
}

impl Relay {
    /// Starts it: the leases on the current runtime, the publisher on a thread. Nothing need be reachable: it connects, and connects again, by itself.
    #[must_use]
    pub fn start(settings: RelaySettings) -> Self {
        settings.handover.open();
        let (lease_sender, lease) = watch::channel(lease::Lease::none());
        let (report, report_receiver) = watch::channel(lease::Report::default());
        let (stop_publisher, publisher_stop) = watch::channel(false);
        let (stop_leases, leases_stop) = watch::channel(false);
        let keeper = lease::Keeper {
            database_url: settings.database_url.clone(),
            ledger: settings.ledger.clone(),
            metrics: Arc::clone(&settings.metrics),
            lease: lease_sender,
            report: report_receiver,
            stop: leases_stop.clone(),
        };
        let leases = supervise("leases", leases_stop, move || {
            // Of one that died, nothing is proven any more.
            keeper.show_lost();
            keeper.clone().run()
        });
        let drain_limit =
            Duration::from_millis(settings.config.confirm_timeout_ms) + publish::DELETE_LIMIT;
        let publisher = supervise("publisher", publisher_stop.clone(), move || {
            // One that died has nothing out that would ever be settled, and wants no shards.
            report.send_replace(lease::Report::default());
            publish::Publisher::new(
                settings.clone(),
                lease.clone(),
                report.clone(),
                publisher_stop.clone(),
            )
            .run()
        });
        let (abort_publisher, aborted) = oneshot::channel();
        Relay {
            stop_publisher,
            stop_leases,
            abort_publisher: Some(abort_publisher),
            publisher: tokio::task::spawn_blocking(|| apart(publisher, aborted)),
            leases: tokio::spawn(leases),
            drain_limit,
        }
    }

    /// Publishes nothing more, waits for outstanding confirms (at most the confirm time-out), deletes what they settle, and gives
    /// the leases up. What stays unconfirmed stays in the outbox.
    pub async fn stop(mut self) {
        self.stop_publisher.send_replace(true);
        if tokio::time::timeout(self.drain_limit, &mut self.publisher)
            .await
            .is_err()
        {
            tracing::warn!("the relay stops with messages unconfirmed");
            self.abort_publisher = None;
        }
        self.stop_leases.send_replace(true);
        let _ = tokio::time::timeout(publish::DELETE_LIMIT, &mut self.leases).await;
    }
}

/// Runs a task on this thread alone. The kernel shares the processor among threads: requests, however many wait for it in the other
/// runtime, cannot keep the task from its turn.
fn apart(task: impl Future<Output = ()>, aborted: oneshot::Receiver<()>) {
    let work = async {
        tokio::select! {
            () = task => {}
            _ = aborted => {}
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    match runtime {
        Ok(runtime) => {
            runtime.block_on(work);
            // A look-up of a name that takes long must not hold up the stop.
            runtime.shutdown_background();
        }
        Err(error) => {
            tracing::warn!(%error, "the relay has no runtime of its own, and shares that of the requests");
            Handle::current().block_on(work);
        }
    }
}

/// Resolves when the signal is given, or can be given no more.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.abort_publisher = None;
        self.leases.abort();
    }
}
