//! What a database error means for the batch that met it.
//!
//! The one place that reads SQLSTATEs.

use tokio_postgres::error::{DbError, Error, Severity, SqlState};

/// What to do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Another transaction was first, or the server chose this one to give way: run the batch again.
    Conflict,
    /// A row stayed locked, or a statement ran out of time: split the batch.
    Timeout,
    /// The session is gone or of no more use: open a new one, then run the batch again.
    Lost,
    /// The server cannot serve now (starting, stopping, out of connections, disk or memory, read-only).
    Down,
    /// The statement or its data is wrong: split the batch, so that one command fails alone.
    Wrong,
}

/// Whether the server says itself that it did not commit. Only a plain ERROR says so: a FATAL or a PANIC (no space for WAL, say)
/// can come when the commit record is already on its way to the disk, and recovery then keeps it.
#[must_use]
pub fn commit_refused(error: &Error) -> bool {
    error.as_db_error().and_then(DbError::parsed_severity) == Some(Severity::Error)
}

impl Fault {
    /// Reads an error.
    #[must_use]
    pub fn of(error: &Error) -> Self {
        let Some(state) = error.code() else {
            return if error.is_closed()
                || std::error::Error::source(error).is_some_and(|s| s.is::<std::io::Error>())
            {
                Fault::Lost
            } else {
                Fault::Wrong
            };
        };
        match *state {
            SqlState::UNIQUE_VIOLATION
            | SqlState::T_R_SERIALIZATION_FAILURE
            | SqlState::T_R_DEADLOCK_DETECTED => Fault::Conflict,
            SqlState::LOCK_NOT_AVAILABLE | SqlState::QUERY_CANCELED => Fault::Timeout,
            // No constraint is named: there is no partition for the row. Readiness says so, and the keeper makes one.
            SqlState::CHECK_VIOLATION
                if error
                    .as_db_error()
                    .is_some_and(|found| found.constraint().is_none()) =>
            {
                Fault::Down
            }
            // A plan made before a migration: a fresh session has fresh plans.
            SqlState::FEATURE_NOT_SUPPORTED => Fault::Lost,
            SqlState::ADMIN_SHUTDOWN
            | SqlState::CRASH_SHUTDOWN
            | SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT
            | SqlState::IDLE_SESSION_TIMEOUT => Fault::Lost,
            SqlState::CANNOT_CONNECT_NOW
            | SqlState::READ_ONLY_SQL_TRANSACTION
            | SqlState::INVALID_CATALOG_NAME
            | SqlState::UNDEFINED_TABLE
            | SqlState::INSUFFICIENT_PRIVILEGE => Fault::Down,
            _ => match &state.code()[..2] {
                "08" => Fault::Lost,
                "53" | "57" | "58" => Fault::Down,
                _ => Fault::Wrong,
            },
        }
    }
}
