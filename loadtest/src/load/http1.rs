//! A small keep-alive HTTP/1.1 client for one kind of request: it costs the shared machine as little as it can.
//!
//! Never follows, retries or pipelines anything.

use super::answer::{ANSWER_BYTES_MAX, ANSWER_TIMEOUT, Answer, Failure};
use super::command::Shot;
use super::target::Target;
use anyhow::{Context, Result, bail, ensure};
use std::io;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

const HEADERS_MAX: usize = 64;

/// One keep-alive connection, opened again when it is lost.
pub struct Connection {
    target: Target,
    /// Of each token, everything of a request that does not change.
    heads: Arc<[Vec<u8>]>,
    /// None when it was lost.
    stream: Option<TcpStream>,
    request: Vec<u8>,
    answer: Vec<u8>,
    reopened: u64,
}

/// What requests of each token begin with; all connections share it.
pub fn heads(target: &Target, tokens: &[String]) -> Arc<[Vec<u8>]> {
    tokens
        .iter()
        .map(|token| {
            format!(
                "POST /v1/events HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nAuthorization: Bearer {token}\r\nIdempotency-Key: ",
                target.authority
            )
            .into_bytes()
        })
        .collect()
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// When nobody listens there.
    pub async fn open(target: &Target, heads: Arc<[Vec<u8>]>) -> Result<Self> {
        Ok(Connection {
            stream: Some(target.connect().await?),
            target: target.clone(),
            heads,
            request: Vec::with_capacity(2 * 1024),
            answer: Vec::with_capacity(4 * 1024),
            reopened: 0,
        })
    }

    /// How often it was opened again.
    pub fn reopened(&self) -> u64 {
        self.reopened
    }

    /// Posts one event.
    ///
    /// # Errors
    /// When there is no answer, or it is not what an HTTP/1.1 server sends.
    pub async fn post(&mut self, shot: &Shot) -> Result<Answer<'_>, Failure> {
        let mut stream = match self.stream.take().filter(is_open) {
            Some(stream) => stream,
            None => {
                self.reopened += 1;
                self.target.connect().await.map_err(Failure::NotSent)?
            }
        };
        self.write_request(shot).map_err(Failure::NotSent)?;
        let head = timeout(
            ANSWER_TIMEOUT,
            exchange(&mut stream, &self.request, &mut self.answer),
        )
        .await
        .context("no answer in time")
        .flatten()
        .map_err(Failure::Unknown)?;
        if !head.closes {
            self.stream = Some(stream);
        }
        Ok(Answer {
            status: head.status,
            body: self.answer.get(head.length..).unwrap_or_default(),
        })
    }

    fn write_request(&mut self, shot: &Shot) -> Result<()> {
        let head = self
            .heads
            .get(shot.token)
            .context("there is no such token")?;
        self.request.clear();
        self.request.extend_from_slice(head);
        self.request.extend_from_slice(shot.key.as_bytes());
        self.request.extend_from_slice(b"\r\nContent-Length: ");
        self.request
            .extend_from_slice(shot.body.len().to_string().as_bytes());
        self.request.extend_from_slice(b"\r\n\r\n");
        self.request.extend_from_slice(shot.body.as_bytes());
        Ok(())
    }
}

/// Whether the service has left an idle connection open. If not, a request on it would be lost for nothing.
fn is_open(stream: &TcpStream) -> bool {
    let read = stream.try_read(&mut [0]);
    matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

/// Sends the request and reads the whole answer.
pub(super) async fn exchange(
    stream: &mut TcpStream,
    request: &[u8],
    answer: &mut Vec<u8>,
) -> Result<Head> {
    stream.write_all(request).await?;
    answer.clear();
    let mut head = None;
    loop {
        let read = stream.read_buf(answer).await?;
        ensure!(read > 0, "the service closed the connection");
        ensure!(
            answer.len() <= ANSWER_BYTES_MAX,
            "the answer is larger than {ANSWER_BYTES_MAX} bytes"
        );
        if head.is_none() {
            head = Head::parse(answer)?;
        }
        if let Some(head) = head {
            let have = answer.len() - head.length;
            ensure!(have <= head.body, "the answer is longer than it says");
            if have == head.body {
                return Ok(head);
            }
        }
    }
}

/// What the head of an answer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) status: u16,
    /// Bytes of it.
    pub(super) length: usize,
    /// Bytes of the body.
    body: usize,
    /// Whether the service closes the connection now.
    closes: bool,
}

impl Head {
    /// None while it is not whole.
    fn parse(bytes: &[u8]) -> Result<Option<Self>> {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut answer = httparse::Response::new(&mut headers);
        let httparse::Status::Complete(length) = answer.parse(bytes)? else {
            return Ok(None);
        };
        let Some(status) = answer.code else {
            bail!("an answer without a status");
        };
        let value = |name: &str| {
            answer
                .headers
                .iter()
                .find(|header| header.name.eq_ignore_ascii_case(name))
                .map(|header| header.value.trim_ascii())
        };
        let body = value("content-length").context("an answer without a content-length")?;
        let body: usize = std::str::from_utf8(body)?.parse()?;
        ensure!(
            body <= ANSWER_BYTES_MAX,
            "the answer is larger than {ANSWER_BYTES_MAX} bytes"
        );
        Ok(Some(Head {
            status,
            length,
            body,
            closes: value("connection").is_some_and(|value| value.eq_ignore_ascii_case(b"close")),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_read_when_it_is_whole() {
        let whole = b"HTTP/1.1 201 Created\r\nContent-Length: 5\r\n\r\nhel";
        let head = Head {
            status: 201,
            length: whole.len() - 3,
            body: 5,
            closes: false,
        };
        assert_eq!(Head::parse(whole).unwrap(), Some(head));
        assert_eq!(Head::parse(&whole[..20]).unwrap(), None);
        let last = b"HTTP/1.1 503 X\r\ncontent-length: 0\r\nconnection: Close\r\n\r\n";
        assert!(Head::parse(last).unwrap().unwrap().closes);
        assert!(Head::parse(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
        assert!(Head::parse(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n").is_err());
        assert!(Head::parse(b"SSH-2.0-x\r\n\r\n").is_err());
    }
}
