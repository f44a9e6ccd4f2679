//! One connection and one channel to the broker: publishes in order, and tells confirms as they come.
//!
//! One task only may use it: publishes of two tasks on one channel can swap delivery tags. Never counts on lapin's recovery; whoever
//! owns it throws it away and makes a new one.

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt, poll};
use lapin::options::BasicPublishOptions;
use lapin::types::ShortString;
use lapin::{Channel, Confirmation, Connection, ErrorKind, PublisherConfirm};
use secrecy::SecretString;
use std::task::Poll;
use std::time::Duration;
use uuid::Uuid;

use super::message::Message;
use super::topology;
use super::verdict::Confirmed;

/// Time to say goodbye, and to learn why a channel closed.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// Why the broker could not be used.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// What lapin says.
    #[error("broker: {0}")]
    Lapin(#[from] lapin::Error),
    /// The broker took too long.
    #[error("broker: {0} took too long")]
    Late(&'static str),
    /// The URL does not parse.
    #[error("broker: AMQP_URL is no AMQP URL")]
    Url,
    /// A name is longer than AMQP allows.
    #[error("broker: a name is longer than 255 bytes")]
    Name,
}

/// What closed a channel or a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// A message, by what it is: too large, malformed. Counts as a try when it was alone.
    ByMessage,
    /// A message, but for a reason that may be the operator's: a permission, a resource. Never counts.
    ByRule,
    /// Nothing that says anything about a message: the network, a shutdown, a missing exchange.
    Otherwise,
}

impl BrokerError {
    /// What this error says about the messages in flight.
    #[must_use]
    pub fn closed(&self) -> Closed {
        let BrokerError::Lapin(error) = self else {
            return Closed::Otherwise;
        };
        let ErrorKind::ProtocolError(error) = error.kind() else {
            return Closed::Otherwise;
        };
        match error.get_id() {
            // Content too large, precondition failed; frame, syntax and unexpected-frame errors.
            311 | 406 | 501 | 502 | 505 => Closed::ByMessage,
            // Access refused, resource locked, not allowed, not implemented, internal error.
            403 | 405 | 530 | 540 | 541 => Closed::ByRule,
            _ => Closed::Otherwise,
        }
    }
}

type Confirm = BoxFuture<'static, (Uuid, Result<Confirmation, lapin::Error>)>;

/// A connection with its one channel.
pub struct Broker {
    connection: Connection,
    channel: Channel,
    exchange: ShortString,
    confirms: FuturesUnordered<Confirm>,
    ledger: String,
}

impl std::fmt::Debug for Broker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Broker")
            .field("exchange", &self.exchange)
            .field("pending", &self.confirms.len())
            .finish_non_exhaustive()
    }
}

impl Broker {
    /// Connects, declares the exchange, and asks for confirms.
    ///
    /// # Errors
    /// When any of it fails or takes too long.
    pub async fn connect(url: &SecretString, ledger: &str) -> Result<Self, BrokerError> {
        let connection = topology::connect(url, &format!("daybook relay {ledger}")).await?;
        let (channel, exchange) = topology::publishing_channel(&connection, ledger).await?;
        Ok(Broker {
            connection,
            channel,
            exchange,
            confirms: FuturesUnordered::new(),
            ledger: ledger.to_owned(),
        })
    }

    /// A fresh channel on the same connection; confirms of the old one are dropped.
    ///
    /// # Errors
    /// When the connection is gone too, or the broker takes too long.
    pub async fn reopen(&mut self) -> Result<(), BrokerError> {
        self.confirms = FuturesUnordered::new();
        let (channel, exchange) =
            topology::publishing_channel(&self.connection, &self.ledger).await?;
        self.channel = channel;
        self.exchange = exchange;
        Ok(())
    }

    /// Whether connection and channel seem to work.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.connection.status().connected() && self.channel.status().connected()
    }

    /// Publishes in this order, and returns when all frames are written. Confirms come later.
    ///
    /// # Errors
    /// When a frame cannot be written within `limit`: then the outcome of all of them is unknown.
    pub async fn publish(
        &mut self,
        messages: &[Message],
        limit: Duration,
    ) -> Result<(), BrokerError> {
        let options = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        let mut written: Vec<(Uuid, BoxFuture<'_, lapin::Result<PublisherConfirm>>)> = Vec::new();
        for message in messages {
            let mut publish = self
                .channel
                .basic_publish(
                    self.exchange.clone(),
                    message.routing_key.clone(),
                    options,
                    message.body.as_bytes(),
                    message.properties.clone(),
                )
                .boxed();
            // The first poll draws the delivery tag and queues the frames: one after the other, here, keeps them in order.
            let written_now = match poll!(&mut publish) {
                Poll::Ready(confirm) => std::future::ready(confirm).boxed(),
                Poll::Pending => publish,
            };
            written.push((message.id, written_now));
        }
        let deadline = tokio::time::Instant::now() + limit;
        for (id, publish) in written {
            let confirm = tokio::time::timeout_at(deadline, publish)
                .await
                .map_err(|_| BrokerError::Late("publish"))??;
            self.confirms
                .push(async move { (id, confirm.await) }.boxed());
        }
        Ok(())
    }

    /// Confirms outstanding.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.confirms.len()
    }

    /// Waits for one confirm, and returns it with all others that are complete by then; never resolves when none is outstanding.
    /// Nothing is lost when the future is dropped.
    ///
    /// # Errors
    /// When one says that the channel or the connection is gone; `into` has those that were complete before.
    pub async fn confirmed(&mut self, into: &mut Vec<Confirmed>) -> Result<(), BrokerError> {
        if self.confirms.is_empty() {
            std::future::pending::<()>().await;
        }
        let mut failure = None;
        let mut next = self.confirms.next().await;
        while let Some((id, outcome)) = next {
            match outcome {
                Ok(confirmation) => into.push(confirmed(id, confirmation)),
                Err(error) => failure = worse(failure, error),
            }
            next = self.confirms.next().now_or_never().flatten();
        }
        failure.map_or(Ok(()), |error| Err(error.into()))
    }

    /// After an error of another call: waits for what the confirms in flight say about it. The channel is of no use any more.
    pub async fn cause(&mut self, error: BrokerError, into: &mut Vec<Confirmed>) -> BrokerError {
        if error.closed() != Closed::Otherwise || self.is_open() {
            return error;
        }
        let collect = async {
            let mut failure = None;
            while let Some((id, outcome)) = self.confirms.next().await {
                match outcome {
                    Ok(confirmation) => into.push(confirmed(id, confirmation)),
                    Err(error) => failure = worse(failure, error),
                }
            }
            failure
        };
        match tokio::time::timeout(CLOSE_LIMIT, collect).await {
            Ok(Some(cause)) => cause.into(),
            _ => error,
        }
    }

    /// Says goodbye, if the broker listens.
    pub async fn close(self) {
        let Ok(text) = topology::short("done") else {
            return;
        };
        let closed = tokio::time::timeout(CLOSE_LIMIT, self.connection.close(200, text)).await;
        if !matches!(closed, Ok(Ok(()))) {
            tracing::debug!("the broker's connection was not closed cleanly");
        }
    }
}

/// The error that says more: the broker's own words before a state that follows from them.
fn worse(known: Option<lapin::Error>, new: lapin::Error) -> Option<lapin::Error> {
    match known {
        Some(known) if known.is_amqp_error() || !new.is_amqp_error() => Some(known),
        _ => Some(new),
    }
}

fn confirmed(id: Uuid, confirmation: Confirmation) -> Confirmed {
    let ack = confirmation.is_ack();
    let returned = confirmation.take_message().and_then(|message| {
        let id = message.properties.message_id().as_ref()?;
        Uuid::parse_str(id.as_str()).ok()
    });
    Confirmed { id, ack, returned }
}
