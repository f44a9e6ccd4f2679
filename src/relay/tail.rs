//! Looks at messages as a consumer would, for people and tests.
//!
//! Never acknowledges unless told to, so that what it shows stays where it is.

use futures_util::StreamExt;
use lapin::Connection;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicQosOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use secrecy::SecretString;
use std::collections::BTreeMap;

use super::broker::BrokerError;
use super::topology::{self, short};

/// Messages shown and not acknowledged at most; the broker sends no more until they are.
const PREFETCH: u16 = 1_000;
/// Messages acknowledged together at most.
const ACKNOWLEDGED_AT_ONCE: usize = 100;

/// Which messages to show.
#[derive(Clone, Debug)]
pub enum Source {
    /// Those of a queue, from its head; unless acknowledged they return to it, at most 1000 are shown, and a quorum queue counts
    /// the deliveries.
    Queue {
        /// Its name.
        name: String,
        /// Whether to take them out.
        acknowledge: bool,
    },
    /// Those published from now on that match a topic pattern, through a queue of the connection's own.
    New {
        /// The ledger.
        ledger: String,
        /// The topic pattern; `#` is all.
        pattern: String,
    },
}

/// A message as it was received.
#[derive(Clone, Debug)]
pub struct Received {
    /// The event's id.
    pub message_id: String,
    /// The event's type.
    pub routing_key: String,
    /// Headers that are text.
    pub headers: BTreeMap<String, String>,
    /// The record.
    pub body: Vec<u8>,
    /// Whether it may have been received before.
    pub redelivered: bool,
}

/// Shows messages, one after another, until the future is dropped or the broker ends it.
///
/// # Errors
/// When the broker cannot be reached, the queue does not exist, or the connection ends.
pub async fn tail(
    url: &SecretString,
    source: Source,
    mut show: impl FnMut(Received),
) -> Result<(), BrokerError> {
    let connection = topology::connect(url, "daybook tail").await?;
    let (queue, acknowledge, channel) = open(&connection, source).await?;
    channel
        .basic_qos(PREFETCH, BasicQosOptions::default())
        .await?;
    let consumer = channel
        .basic_consume(
            queue,
            ShortString::default(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await?;
    // What has come already is acknowledged in one go: each acknowledgement is a write of its own to a quorum queue.
    let mut deliveries = consumer.ready_chunks(ACKNOWLEDGED_AT_ONCE);
    while let Some(came) = deliveries.next().await {
        let mut last = None;
        for delivery in came {
            let delivery = delivery?;
            last = Some(delivery.acker.clone());
            show(received(delivery));
        }
        if acknowledge && let Some(last) = last {
            last.ack(BasicAckOptions { multiple: true }).await?;
        }
    }
    Ok(())
}

fn received(delivery: Delivery) -> Received {
    let properties = &delivery.properties;
    Received {
        message_id: properties
            .message_id()
            .as_ref()
            .map(ShortString::to_string)
            .unwrap_or_default(),
        routing_key: delivery.routing_key.to_string(),
        headers: texts(properties.headers().as_ref()),
        redelivered: delivery.redelivered,
        body: delivery.data,
    }
}

async fn open(
    connection: &Connection,
    source: Source,
) -> Result<(ShortString, bool, lapin::Channel), BrokerError> {
    let channel = connection.create_channel().await?;
    match source {
        Source::Queue { name, acknowledge } => Ok((short(&name)?, acknowledge, channel)),
        Source::New { ledger, pattern } => {
            let exchange = topology::declare_exchange(&channel, &ledger).await?;
            let options = QueueDeclareOptions {
                exclusive: true,
                auto_delete: true,
                ..QueueDeclareOptions::default()
            };
            let queue = channel
                .queue_declare(ShortString::default(), options, FieldTable::default())
                .await?
                .name()
                .clone();
            channel
                .queue_bind(
                    queue.clone(),
                    exchange,
                    short(&pattern)?,
                    QueueBindOptions::default(),
                    FieldTable::default(),
                )
                .await?;
            Ok((queue, true, channel))
        }
    }
}

fn texts(headers: Option<&FieldTable>) -> BTreeMap<String, String> {
    headers
        .into_iter()
        .flat_map(|table| table.inner())
        .filter_map(|(name, value)| match value {
            AMQPValue::LongString(text) => Some((name.to_string(), text.to_string())),
            _ => None,
        })
        .collect()
}
