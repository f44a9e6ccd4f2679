//! One place in flight: a connection of HTTP/1.1, or a stream of HTTP/2.
//!
//! Never sends a request twice.

use super::answer::{Answer, Failure};
use super::command::Shot;
use super::target::Target;
use super::{Protocol, http1, http2};
use anyhow::Result;

/// One request in flight at a time.
pub enum Link {
    /// A connection of its own.
    Http1(http1::Connection),
    /// A place on a shared connection.
    Http2(http2::Stream),
}

impl Link {
    /// Posts one event.
    ///
    /// # Errors
    /// When there is no answer. The next call opens a new connection then.
    pub async fn post(&mut self, shot: &Shot) -> Result<Answer<'_>, Failure> {
        match self {
            Link::Http1(connection) => connection.post(shot).await,
            Link::Http2(stream) => stream.post(shot).await,
        }
    }

    /// How often a connection was opened again.
    pub fn reopened(&self) -> u64 {
        match self {
            Link::Http1(connection) => connection.reopened(),
            Link::Http2(stream) => stream.reopened(),
        }
    }

    /// Opens all places of a run.
    ///
    /// # Errors
    /// When nobody listens there.
    pub async fn open(
        target: &Target,
        protocol: Protocol,
        in_flight: u32,
        tokens: &[String],
    ) -> Result<Vec<Link>> {
        let mut links = Vec::new();
        match protocol {
            Protocol::Http1 => {
                let heads = http1::heads(target, tokens);
                for _ in 0..in_flight {
                    let connection = http1::Connection::open(target, heads.clone()).await?;
                    links.push(Link::Http1(connection));
                }
            }
            Protocol::Http2 { connections } => {
                let mut opened = Vec::new();
                for _ in 0..connections.min(in_flight) {
                    opened.push(http2::Connection::open(target, tokens).await?);
                }
                // Neighbours are on different connections, so that a few in flight use them all.
                for connection in opened.iter().cycle().take(usize::try_from(in_flight)?) {
                    links.push(Link::Http2(connection.stream().await));
                }
            }
        }
        Ok(links)
    }
}
