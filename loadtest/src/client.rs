//! A small HTTP/1.1 client for one kind of request: it costs the shared machine as little as it can.
//!
//! Never follows, retries or pipelines anything, and never leaves loopback.

use anyhow::{Context, Result, bail, ensure};
use std::io::Write as _;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long an answer may take; the service itself gives up sooner.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Largest answer, in bytes: a record has 64 KiB at most.
const ANSWER_BYTES_MAX: usize = 256 * 1024;
const HEADERS_MAX: usize = 64;

/// The address of a name, which must be of this machine whichever way it resolves.
///
/// # Errors
/// When it does not resolve, or not to loopback only.
pub fn loopback(host: &str, port: u16) -> Result<SocketAddr> {
    let addresses: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .with_context(|| format!("{host} does not resolve"))?
        .collect();
    ensure!(
        addresses.iter().all(|address| address.ip().is_loopback()),
        "{host} is not loopback: a load test stays on its own machine"
    );
    // The service listens on IPv4 unless it was told otherwise.
    addresses
        .iter()
        .find(|address| address.is_ipv4())
        .or(addresses.first())
        .copied()
        .with_context(|| format!("{host} has no address"))
}

/// Where events are posted, and as whom.
#[derive(Clone)]
pub struct Target {
    address: SocketAddr,
    authority: String,
    token: String,
}

impl Target {
    /// Reads an address such as `http://127.0.0.1:8080`.
    ///
    /// # Errors
    /// When it is of another form, not loopback, or the token could not be a header's value.
    pub fn new(url: &str, token: &str) -> Result<Self> {
        let authority = url
            .strip_prefix("http://")
            .map(|rest| rest.trim_end_matches('/'))
            .filter(|rest| !rest.contains(['/', '@', '?', '#']))
            .context("DAYBOOK_URL is not of the form http://127.0.0.1:8080")?;
        let (host, port) = authority.rsplit_once(':').context("DAYBOOK_URL: no port")?;
        let port: u16 = port.parse().context("DAYBOOK_URL: port")?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        ensure!(
            !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic()),
            "DAYBOOK_ADMIN_TOKEN is not a token"
        );
        Ok(Target {
            address: loopback(host, port).context("DAYBOOK_URL")?,
            authority: authority.to_owned(),
            token: token.to_owned(),
        })
    }
}

/// One keep-alive connection.
pub struct Connection {
    stream: TcpStream,
    /// Everything of a request that does not change.
    head: Vec<u8>,
    request: Vec<u8>,
    answer: Vec<u8>,
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// When nobody listens there.
    pub async fn open(target: &Target) -> Result<Self> {
        let stream = timeout(ANSWER_TIMEOUT, TcpStream::connect(target.address))
            .await?
            .with_context(|| format!("the service at {}", target.authority))?;
        stream.set_nodelay(true)?;
        let head = format!(
            "POST /v1/events HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {}\r\nContent-Type: application/json\r\n",
            target.authority, target.token
        );
        Ok(Connection {
            stream,
            head: head.into_bytes(),
            request: Vec::new(),
            answer: Vec::with_capacity(4 * 1024),
        })
    }

    /// Posts one event and returns the status and body of its answer.
    ///
    /// # Errors
    /// When the connection breaks, the answer is late, or is not what an HTTP/1.1 server sends.
    pub async fn post(&mut self, key: &str, body: &str) -> Result<(u16, &[u8])> {
        self.request.clear();
        self.request.extend_from_slice(&self.head);
        write!(
            self.request,
            "Idempotency-Key: {key}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let (status, body) = timeout(ANSWER_TIMEOUT, self.exchange())
            .await
            .context("no answer in time")??;
        Ok((status, self.answer.get(body..).unwrap_or_default()))
    }

    /// Status, and where the body begins.
    async fn exchange(&mut self) -> Result<(u16, usize)> {
        self.stream.write_all(&self.request).await?;
        self.answer.clear();
        let mut head = None;
        loop {
            let read = self.stream.read_buf(&mut self.answer).await?;
            ensure!(read > 0, "the service closed the connection");
            ensure!(
                self.answer.len() <= ANSWER_BYTES_MAX,
                "the answer is larger than {ANSWER_BYTES_MAX} bytes"
            );
            if head.is_none() {
                head = parse_head(&self.answer)?;
            }
            if let Some((status, begin, length)) = head {
                let have = self.answer.len() - begin;
                ensure!(have <= length, "the answer is longer than it says");
                if have == length {
                    return Ok((status, begin));
                }
            }
        }
    }
}

/// Status, length of the head and of the body; None while the head is not whole.
fn parse_head(bytes: &[u8]) -> Result<Option<(u16, usize, usize)>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut answer = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(begin) = answer.parse(bytes)? else {
        return Ok(None);
    };
    let Some(status) = answer.code else {
        bail!("an answer without a status");
    };
    let length = answer
        .headers
        .iter()
        .find(|header| header.name.eq_ignore_ascii_case("content-length"))
        .context("an answer without a content-length")?;
    let length: usize = std::str::from_utf8(length.value)?.trim().parse()?;
    ensure!(
        length <= ANSWER_BYTES_MAX,
        "the answer is larger than {ANSWER_BYTES_MAX} bytes"
    );
    Ok(Some((status, begin, length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_service_of_this_machine_is_loaded() {
        for good in [
            "http://127.0.0.1:8080",
            "http://localhost:1/",
            "http://[::1]:1",
        ] {
            assert!(Target::new(good, "t").is_ok(), "{good}");
        }
        for bad in [
            "http://192.0.2.1:8080",
            "http://0.0.0.0:8080",
            "https://127.0.0.1:8080",
            "http://127.0.0.1",
            "http://127.0.0.1:8080/x",
            "http://127.0.0.1@192.0.2.1:80",
            "127.0.0.1:8080",
        ] {
            assert!(Target::new(bad, "t").is_err(), "{bad}");
        }
        assert!(Target::new("http://127.0.0.1:1", "a\r\nb: c").is_err());
        assert!(Target::new("http://127.0.0.1:1", "").is_err());
    }

    #[test]
    fn a_head_is_read_when_it_is_whole() {
        let whole = b"HTTP/1.1 201 Created\r\nContent-Length: 5\r\n\r\nhel";
        assert_eq!(parse_head(whole).unwrap(), Some((201, whole.len() - 3, 5)));
        assert_eq!(parse_head(&whole[..20]).unwrap(), None);
        assert!(parse_head(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
        assert!(parse_head(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n").is_err());
        assert!(parse_head(b"SSH-2.0-x\r\n\r\n").is_err());
    }
}
