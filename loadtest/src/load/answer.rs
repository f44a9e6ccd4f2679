//! What comes back of one request, whichever way it travels.
//!
//! Says nothing of what should have come.

use std::time::Duration;

/// How long an answer may take; the service itself gives up sooner.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Largest answer, in bytes: a record has 64 KiB at most.
pub const ANSWER_BYTES_MAX: usize = 256 * 1024;

/// An answer.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// Its status.
    pub status: u16,
    /// Its body.
    pub body: &'a [u8],
}

/// Why there is no answer.
#[derive(Debug)]
pub enum Failure {
    /// The service cannot have seen the request.
    NotSent(anyhow::Error),
    /// It may have.
    Unknown(anyhow::Error),
}

impl Answer<'_> {
    /// Nothing was written, says the service.
    pub const UNAVAILABLE: u16 = 503;
}
