//! The commit: lanes that batch drafts into transactions.

use crate::domain::{Draft, Rejection, Stored};
use std::sync::Arc;
use tokio::time::Instant;

/// An event as it is recorded: its bytes and their hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Its id.
    pub event_id: uuid::Uuid,
    /// Its record, byte for byte.
    pub record: Arc<str>,
}

/// Why nothing was written though nothing is wrong with the request (503).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unavailable {
    /// The lane's queue is full.
    QueueFull,
    /// The deadline passed before the batch began.
    DeadlinePassed,
    /// The database cannot be reached, or retries are used up.
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

/// The lanes of one pod. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Lanes {}

impl Lanes {
    /// Hands a draft to its lane and waits for the outcome; never owns a transaction, so it may be dropped at any point.
    pub async fn submit(&self, draft: Draft, deadline: Instant) -> Outcome {
        let _ = (draft, deadline);
        Outcome::Failed
    }
}
