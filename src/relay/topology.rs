//! What the relay declares at the broker: one durable topic exchange a ledger, and queues for demonstration and tests.
//!
//! Never declares a classic or transient shared queue: those are gone or deprecated in newer brokers.

use lapin::options::{
    ConfirmSelectOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};
use lapin::uri::AMQPUri;
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};
use secrecy::{ExposeSecret, SecretString};
use std::time::Duration;

use super::broker::BrokerError;

/// Largest frame, in bytes; a longer record is sent in several. The library has room for 64 frames: with the broker's own limit of
/// 128 KiB that is 8 MiB, and it writes to all of it at once when no limit is stated.
const FRAME_BYTES_MAX: u32 = 16 * 1024;
/// Time to connect, shake hands and declare.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// The exchange that a ledger's events are published to.
#[must_use]
pub fn exchange(ledger: &str) -> String {
    format!("daybook.{ledger}.events")
}

/// Opens a new connection; the host's name is looked up anew each time.
///
/// # Errors
/// When the URL is none, or the broker cannot be reached in time.
pub async fn connect(url: &SecretString, name: &str) -> Result<Connection, BrokerError> {
    let properties =
        ConnectionProperties::default().with_connection_name(LongString::from(name.to_owned()));
    // What the parser says may repeat the URL, with the password in it.
    let mut uri: AMQPUri = url.expose_secret().parse().map_err(|_| BrokerError::Url)?;
    uri.query.frame_max.get_or_insert(FRAME_BYTES_MAX);
    let connecting = Connection::connect_uri(uri, properties);
    tokio::time::timeout(CONNECT_LIMIT, connecting)
        .await
        .map_err(|_| BrokerError::Late("connect"))?
        .map_err(BrokerError::from)
}

/// Declares the ledger's exchange; that it exists already is no error.
///
/// # Errors
/// What the broker answers, for instance that the exchange exists with another type.
pub async fn declare_exchange(channel: &Channel, ledger: &str) -> Result<ShortString, BrokerError> {
    let name = short(&exchange(ledger))?;
    let options = ExchangeDeclareOptions {
        durable: true,
        ..ExchangeDeclareOptions::default()
    };
    channel
        .exchange_declare(
            name.clone(),
            ExchangeKind::Topic,
            options,
            FieldTable::default(),
        )
        .await?;
    Ok(name)
}

/// A channel in confirm mode, with the exchange declared.
///
/// # Errors
/// What the broker answers.
pub async fn publishing_channel(
    connection: &Connection,
    ledger: &str,
) -> Result<(Channel, ShortString), BrokerError> {
    let open = async {
        let channel = connection.create_channel().await?;
        let exchange = declare_exchange(&channel, ledger).await?;
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await?;
        Ok((channel, exchange))
    };
    tokio::time::timeout(CONNECT_LIMIT, open)
        .await
        .map_err(|_| BrokerError::Late("open a channel"))?
}

/// Declares a durable quorum queue and binds it to the ledger's exchange by a topic pattern.
///
/// # Errors
/// When the broker cannot be reached, or the queue exists with other properties.
pub async fn declare_queue(
    url: &SecretString,
    ledger: &str,
    queue: &str,
    pattern: &str,
) -> Result<(), BrokerError> {
    let connection = connect(url, "daybook topology").await?;
    let declare = async {
        let channel = connection.create_channel().await?;
        let exchange = declare_exchange(&channel, ledger).await?;
        let mut arguments = FieldTable::default();
        arguments.insert(
            short("x-queue-type")?,
            AMQPValue::LongString(LongString::from("quorum")),
        );
        let options = QueueDeclareOptions {
            durable: true,
            ..QueueDeclareOptions::default()
        };
        channel
            .queue_declare(short(queue)?, options, arguments)
            .await?;
        channel
            .queue_bind(
                short(queue)?,
                exchange,
                short(pattern)?,
                QueueBindOptions::default(),
                FieldTable::default(),
            )
            .await?;
        connection.close(200, short("done")?).await?;
        Ok(())
    };
    tokio::time::timeout(CONNECT_LIMIT, declare)
        .await
        .map_err(|_| BrokerError::Late("declare a queue"))?
}

/// A name as AMQP wants it.
///
/// # Errors
/// When it is longer than 255 bytes.
pub(super) fn short(text: &str) -> Result<ShortString, BrokerError> {
    ShortString::try_new(text).map_err(|_| BrokerError::Name)
}
