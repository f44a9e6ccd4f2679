//! The message of an event: the record's bytes as the body, and what consumers route, order and check by.
//!
//! Never changes a byte of the record.

use crate::store::outbox::{Record, Waiting};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use uuid::Uuid;

/// AMQP's `delivery_mode` of a message that survives the broker's restart.
const PERSISTENT: u8 = 2;
/// Structured mode's media type.
const CONTENT_TYPE: &str = "application/cloudevents+json";
/// Who publishes.
const APP_ID: &str = "daybook";

/// A message ready to be published.
#[derive(Debug)]
pub struct Message {
    /// The event's id, which is the message's.
    pub id: Uuid,
    /// The event's type.
    pub routing_key: ShortString,
    /// The record.
    pub body: Arc<str>,
    /// Properties and headers.
    pub properties: BasicProperties,
}

impl Message {
    /// Builds the message of an outbox row.
    ///
    /// # Errors
    /// Why the event cannot be a message at all: its type is longer than a routing key may be.
    pub fn new(row: &Waiting, record: Record) -> Result<Self, String> {
        let short = |text: &str| ShortString::try_new(text).map_err(|error| error.to_string());
        let routing_key = short(&record.event_type)?;
        let mut headers = FieldTable::default();
        let mut header = |name: &str, value: String| -> Result<(), String> {
            headers.insert(short(name)?, AMQPValue::LongString(LongString::from(value)));
            Ok(())
        };
        header("subject", record.subject.to_string())?;
        header("usersequence", record.sequence.to_string())?;
        header("position", record.position.to_string())?;
        header(
            "sha256",
            hex::encode(Sha256::digest(record.record.as_bytes())),
        )?;
        if let Some(traceparent) = &row.traceparent {
            header("traceparent", traceparent.clone())?;
        }
        if row.redriven {
            header("redriven", "true".to_owned())?;
        }
        let properties = BasicProperties::default()
            .with_content_type(short(CONTENT_TYPE)?)
            .with_delivery_mode(PERSISTENT)
            .with_message_id(short(&record.event_id.to_string())?)
            .with_type(routing_key.clone())
            .with_timestamp(u64::try_from(record.recorded_at.as_second()).unwrap_or(0))
            .with_app_id(short(APP_ID)?)
            .with_headers(headers);
        Ok(Message {
            id: record.event_id,
            routing_key,
            body: record.record,
            properties,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::outbox::Tid;
    use jiff::Timestamp;

    fn parts(event_type: &str, redriven: bool) -> (Waiting, Record) {
        let at = Timestamp::from_second(1_700_000_000).unwrap();
        let row = Waiting {
            position: 9,
            shard: 1,
            user_no: 17,
            recorded_at: at,
            traceparent: Some("00-a-b-01".into()),
            tries: 0,
            redriven,
            place: Tid::default(),
        };
        let record = Record {
            position: 9,
            event_id: Uuid::from_u128(1),
            event_type: event_type.into(),
            sequence: 42,
            record: "abc".into(),
            recorded_at: at,
            subject: "alice".into(),
        };
        (row, record)
    }

    #[test]
    fn it_says_what_consumers_need() {
        let (row, record) = parts("transfer", true);
        let message = Message::new(&row, record).unwrap();
        assert_eq!(&*message.body, "abc");
        assert_eq!(*message.properties.timestamp(), Some(1_700_000_000));
        let headers = message.properties.headers().as_ref().unwrap();
        let text = |name: &str| match headers.inner().get(name) {
            Some(AMQPValue::LongString(value)) => value.to_string(),
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(text("subject"), "alice");
        assert_eq!(text("usersequence"), "42");
        assert_eq!(text("position"), "9");
        assert_eq!(
            text("sha256"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(text("redriven"), "true");
        assert_eq!(text("traceparent"), "00-a-b-01");
    }

    #[test]
    fn a_type_that_is_no_routing_key_is_an_error_and_no_panic() {
        let (row, record) = parts(&"x".repeat(256), false);
        assert!(Message::new(&row, record).is_err());
    }
}
