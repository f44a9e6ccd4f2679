//! What a new connection speaks: its first bytes tell.
//!
//! Never answers, and never waits by itself: the caller limits the time.

use bytes::Bytes;
use std::io;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

/// What every client of HTTP/2 sends first (RFC 9113, section 3.4), and nobody else does.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What is spoken on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

/// Reads until a byte is another than the preface's, or the preface is whole. The bytes are still to be parsed.
pub(super) async fn read(stream: &mut TcpStream) -> io::Result<(Protocol, Bytes)> {
    let mut seen = [0; PREFACE.len()];
    let mut length = 0;
    while length < PREFACE.len() {
        let read = stream.read(&mut seen[length..]).await?;
        length += read;
        if read == 0 || seen[..length] != PREFACE[..length] {
            return Ok((Protocol::Http1, Bytes::copy_from_slice(&seen[..length])));
        }
    }
    Ok((Protocol::Http2, Bytes::from_static(PREFACE)))
}
