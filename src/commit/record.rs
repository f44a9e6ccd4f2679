//! The record: the one byte string that an accepted event is.
//!
//! Made here once; answered, stored, hashed and published as it is. There is no second serialisation.

use crate::domain::{Accepted, Amount, Draft, Posting, time};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

/// Longest record, in bytes.
pub const RECORD_BYTES_MAX: usize = 64 * 1024;

/// Members in the order in which they are written.
#[derive(Serialize)]
struct Record<'a> {
    specversion: &'static str,
    id: uuid::Uuid,
    source: &'a str,
    r#type: &'a str,
    subject: &'a str,
    time: String,
    recordedtime: String,
    schemaversion: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    inputschema: Option<String>,
    usersequence: String,
    previoushash: String,
    idempotencykey: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    authid: Option<&'a str>,
    data: Data<'a>,
}

#[derive(Serialize)]
struct Data<'a> {
    input: &'a RawValue,
    postings: &'a [Posting],
    #[serde(skip_serializing_if = "Effects::is_empty")]
    effects: Effects<'a>,
}

/// What an event changes besides balances: with it a fold needs no expression.
#[derive(Serialize)]
struct Effects<'a> {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unique: Vec<Unique<'a>>,
}

impl Effects<'_> {
    fn is_empty(&self) -> bool {
        self.unique.is_empty()
    }
}

#[derive(Serialize)]
struct Unique<'a> {
    namespace: &'a str,
    key: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    until: Option<String>,
}

/// Writes the record of an accepted event. `source` is `/daybook/<ledger>`.
///
/// # Errors
/// When a part cannot be written as JSON; none of them can fail today.
pub fn write(
    draft: &Draft,
    accepted: &Accepted,
    event_id: uuid::Uuid,
    source: &str,
) -> Result<String, serde_json::Error> {
    let writer = draft.principal.subject.as_str();
    let unique = accepted.unique.iter().map(|(unique, until)| Unique {
        namespace: &unique.namespace,
        key: &unique.key,
        until: until.map(time::micros),
    });
    serde_json::to_string(&Record {
        specversion: "1.0",
        id: event_id,
        source,
        r#type: draft.event_type.as_str(),
        subject: draft.subject.as_str(),
        time: draft
            .time
            .map_or_else(|| time::micros(accepted.recorded_at), |at| at.to_string()),
        recordedtime: time::micros(accepted.recorded_at),
        schemaversion: draft.schema.to_string(),
        inputschema: draft.input_schema.map(|version| version.to_string()),
        usersequence: accepted.sequence.to_string(),
        previoushash: hex::encode(accepted.previous),
        idempotencykey: draft.key.as_str(),
        authid: (writer != draft.subject.as_str()).then_some(writer),
        data: Data {
            input: &draft.input,
            postings: &accepted.postings,
            effects: Effects {
                unique: unique.collect(),
            },
        },
    })
}

/// The event's hash: SHA-256 of the record's bytes.
#[must_use]
pub fn hash(record: &str) -> [u8; 32] {
    Sha256::digest(record.as_bytes()).into()
}

/// A UUID v7 whose milliseconds are those of the recording, so that a look-up by id prunes to one partition.
#[must_use]
pub fn event_id(recorded_at: Timestamp, random: [u8; 10]) -> uuid::Uuid {
    let millis = u64::try_from(recorded_at.as_millisecond()).unwrap_or_default();
    uuid::Builder::from_unix_timestamp_millis(millis, &random).into_uuid()
}

/// What a fold needs of a record; verification reads it back from the stored bytes.
#[derive(Debug, serde::Deserialize)]
pub struct Folded {
    /// The event's id.
    pub id: uuid::Uuid,
    /// Its type.
    #[serde(rename = "type")]
    pub event_type: String,
    /// Whose history.
    pub subject: String,
    /// When it took effect, RFC 3339.
    pub time: String,
    /// When it was recorded, RFC 3339 with six decimals.
    pub recordedtime: String,
    /// Place in it, decimal.
    pub usersequence: String,
    /// Hash of the record before it, hexadecimal.
    pub previoushash: String,
    /// The writer's key.
    pub idempotencykey: String,
    /// Who wrote it, when not the subject.
    pub authid: Option<String>,
    /// The parts that change balances.
    pub data: FoldedData,
}

/// The postings and effects of a record.
#[derive(Debug, serde::Deserialize)]
pub struct FoldedData {
    /// The legs, in order.
    pub postings: Vec<FoldedPosting>,
    /// What it changed besides balances.
    #[serde(default)]
    pub effects: FoldedEffects,
}

/// The effects of a record.
#[derive(Debug, Default, serde::Deserialize)]
pub struct FoldedEffects {
    /// The business keys it took.
    #[serde(default)]
    pub unique: Vec<FoldedUnique>,
}

/// One business key that a record took.
#[derive(Debug, serde::Deserialize)]
pub struct FoldedUnique {
    /// Of which kind.
    pub namespace: String,
    /// The key.
    pub key: String,
    /// Until when, RFC 3339; None is for ever.
    pub until: Option<String>,
}

/// One leg of a record.
#[derive(Debug, serde::Deserialize)]
pub struct FoldedPosting {
    /// Address of the account.
    pub account: String,
    /// Asset.
    pub asset: String,
    /// Amount; negative is a debit.
    pub amount: Amount,
    /// The balance after it, where the record shows it.
    pub balance: Option<Amount>,
}

/// Reads back what a fold needs.
///
/// # Errors
/// When the bytes are no record.
pub fn read(record: &str) -> Result<Folded, serde_json::Error> {
    serde_json::from_str(record)
}
