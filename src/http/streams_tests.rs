//! Tests of HTTP/2 on the wire: what it carries, and what a client can not make it do.
//!
//! No database. Well-behaved clients are those of the `h2` crate; the others write their frames by hand.

use super::serve::{Limits, serve};
use super::streams::STREAMS_MAX;
use axum::Router;
use axum::routing::get;
use bytes::Bytes;
use h2::client::SendRequest;
use h2::{Reason, RecvStream};
use prometheus_client::metrics::gauge::Gauge;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const BIG: usize = 1024 * 1024;
const STALL: Duration = Duration::from_secs(1);
/// Longer than anything here may take.
const PATIENCE: Duration = Duration::from_secs(20);

const LIMITS: Limits = Limits {
    header_timeout: Duration::from_millis(300),
    write_stall: Duration::from_secs(5),
    stream_stall: STALL,
    connections_max: 10,
    drain: Duration::from_secs(10),
};

struct Server {
    address: SocketAddr,
    /// Answers that may be given to requests of `/waits`.
    turns: Arc<Semaphore>,
    connections: Gauge,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

async fn server(limits: Limits) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let turns = Arc::new(Semaphore::new(0));
    let waiting = turns.clone();
    let waits = move || {
        let turns = waiting.clone();
        async move {
            turns.acquire().await.unwrap().forget();
            "waited"
        }
    };
    let router = Router::new()
        .route("/quick", get(|| async { "quick" }))
        .route("/big", get(|| async { vec![b'x'; BIG] }))
        .route("/waits", get(waits));
    let (stop, stopped) = oneshot::channel();
    let connections = Gauge::default();
    let serving = serve(
        listener,
        router,
        async { drop(stopped.await) },
        limits,
        connections.clone(),
    );
    Server {
        address,
        turns,
        connections,
        stop,
        serving: tokio::spawn(serving),
    }
}

/// A client that keeps the rules, and the task of its connection.
async fn client(address: SocketAddr) -> (SendRequest<Bytes>, JoinHandle<Result<(), h2::Error>>) {
    let stream = TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::Builder::new()
        .initial_window_size(16 * 1024)
        .initial_connection_window_size(8 * 1024 * 1024)
        .handshake(stream)
        .await
        .unwrap();
    (client.ready().await.unwrap(), tokio::spawn(connection))
}

/// Sends a request and waits for the head of its answer.
async fn ask(client: &mut SendRequest<Bytes>, path: &str) -> RecvStream {
    let request = axum::http::Request::get(format!("http://x{path}"))
        .body(())
        .unwrap();
    let (answer, _) = client.send_request(request, true).unwrap();
    let answer = timeout(PATIENCE, answer).await.unwrap().unwrap();
    assert_eq!(answer.status(), 200);
    answer.into_body()
}

/// Takes all of an answer, piece by piece, with a pause after each.
async fn take(mut body: RecvStream, pause: Duration) -> Result<usize, h2::Error> {
    let mut taken = 0;
    while let Some(piece) = timeout(PATIENCE, body.data()).await.unwrap() {
        let length = piece?.len();
        taken += length;
        tokio::time::sleep(pause).await;
        body.flow_control().release_capacity(length)?;
    }
    Ok(taken)
}

/// A client that keeps no rules.
struct Raw(TcpStream);

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = length[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// The head of `GET http://.../<path>`, as HPACK: two entries of the static table, and the path as it is.
fn get_frame(stream: u32, path: &str) -> Vec<u8> {
    let mut block = vec![0x82, 0x86, 0x04, u8::try_from(path.len()).unwrap()];
    block.extend(path.as_bytes());
    frame(HEADERS, END_HEADERS | END_STREAM, stream, &block)
}

impl Raw {
    async fn begin(address: SocketAddr) -> Self {
        let mut raw = Raw(TcpStream::connect(address).await.unwrap());
        raw.send(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat())
            .await;
        raw
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.unwrap();
    }

    /// The next frame: kind, flags, stream, payload. None when the server has closed the connection.
    async fn next(&mut self) -> Option<(u8, u8, u32, Vec<u8>)> {
        let mut head = [0; 9];
        let read = timeout(PATIENCE, self.0.read_exact(&mut head)).await;
        read.expect("the server neither answers nor closes").ok()?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        self.0.read_exact(&mut payload).await.ok()?;
        Some((head[3], head[4], stream, payload))
    }

    /// Reads until the connection ends; what the last GOAWAY said, if there was one.
    async fn farewell(&mut self) -> Option<Reason> {
        let mut told = None;
        while let Some((kind, _, _, payload)) = self.next().await {
            if kind == GOAWAY {
                let code = payload[4..8].try_into().unwrap();
                told = Some(Reason::from(u32::from_be_bytes(code)));
            }
        }
        told
    }
}

#[tokio::test]
async fn a_client_that_asks_nothing_loses_its_place_whatever_it_has_sent() {
    let server = server(Limits {
        connections_max: 1,
        ..LIMITS
    })
    .await;
    let half_a_head = &get_frame(1, "/quick")[..12];
    let settings = frame(SETTINGS, 0, 0, &[]);
    for sent in [
        b"".to_vec(),
        b"P".to_vec(),
        PREFACE[..12].to_vec(),
        PREFACE.to_vec(),
        [PREFACE, &settings].concat(),
        [PREFACE, &settings, half_a_head].concat(),
    ] {
        let mut silent = Raw(TcpStream::connect(server.address).await.unwrap());
        silent.send(&sent).await;
        silent.farewell().await;
    }
    // The one place is free, so it is got.
    let (mut client, _connection) = client(server.address).await;
    let body = ask(&mut client, "/quick").await;
    assert_eq!(take(body, Duration::ZERO).await.unwrap(), 5);
}

#[tokio::test]
async fn both_protocols_are_served_beside_each_other() {
    let server = server(LIMITS).await;
    let (mut two, _connection) = client(server.address).await;
    let mut one = TcpStream::connect(server.address).await.unwrap();
    // Its first byte is the preface's too.
    one.write_all(b"P").await.unwrap();
    let body = ask(&mut two, "/quick").await;
    one.write_all(b"OST /quick HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    one.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 405"), "{answer}");
    assert_eq!(take(body, Duration::ZERO).await.unwrap(), 5);
    // A request that waits keeps no other from its answer, and its connection is not idle.
    let waiting = tokio::spawn({
        let mut two = two.clone();
        async move { take(ask(&mut two, "/waits").await, Duration::ZERO).await }
    });
    let begun = Instant::now();
    while begun.elapsed() < 3 * LIMITS.header_timeout {
        let body = ask(&mut two, "/quick").await;
        assert_eq!(take(body, LIMITS.header_timeout).await.unwrap(), 5);
    }
    server.turns.add_permits(1);
    assert_eq!(waiting.await.unwrap().unwrap(), 6);
}

#[tokio::test]
async fn a_stop_ends_what_is_idle_and_finishes_what_is_open() {
    let limits = Limits {
        header_timeout: Duration::from_secs(60),
        ..LIMITS
    };
    let server = server(limits).await;
    let (_idle, idle) = client(server.address).await;
    let (mut busy, busy_connection) = client(server.address).await;
    let unknown = TcpStream::connect(server.address).await.unwrap();
    let request = axum::http::Request::get("http://x/waits").body(()).unwrap();
    let (answer, _) = busy.send_request(request, true).unwrap();
    // The request is there once another one, sent after it, is answered.
    take(ask(&mut busy, "/quick").await, Duration::ZERO)
        .await
        .unwrap();
    server.stop.send(()).unwrap();
    timeout(PATIENCE, idle).await.unwrap().unwrap().unwrap();
    assert!(!server.serving.is_finished());
    server.turns.add_permits(1);
    let answer = timeout(PATIENCE, answer).await.unwrap().unwrap();
    let body = answer.into_body();
    assert_eq!(take(body, Duration::ZERO).await.unwrap(), 6);
    timeout(PATIENCE, server.serving).await.unwrap().unwrap();
    busy_connection.await.unwrap().unwrap();
    assert_eq!(server.connections.get(), 0);
    drop(unknown);
}

#[tokio::test]
async fn streams_beyond_the_limit_are_refused_and_the_others_are_answered() {
    const BEYOND: u32 = 44;
    let server = server(LIMITS).await;
    let mut raw = Raw::begin(server.address).await;
    let last = 2 * (STREAMS_MAX + BEYOND) - 1;
    let asked: Vec<u8> = (1..=last)
        .step_by(2)
        .flat_map(|stream| get_frame(stream, "/waits"))
        .collect();
    raw.send(&asked).await;
    let mut refused = 0;
    while refused < BEYOND {
        let (kind, _, stream, payload) = raw.next().await.unwrap();
        if kind == RST_STREAM {
            assert!(stream > 2 * STREAMS_MAX);
            assert_eq!(payload, u32::from(Reason::REFUSED_STREAM).to_be_bytes());
            refused += 1;
        }
    }
    server
        .turns
        .add_permits(usize::try_from(STREAMS_MAX).unwrap());
    let mut answered = 0;
    while answered < STREAMS_MAX {
        let (kind, flags, stream, _) = raw.next().await.unwrap();
        assert!(kind != GOAWAY && kind != RST_STREAM);
        answered += u32::from(stream != 0 && flags & END_STREAM != 0);
    }
}

#[tokio::test]
async fn a_client_that_opens_and_resets_is_sent_away() {
    let server = server(LIMITS).await;
    let mut raw = Raw::begin(server.address).await;
    let cancel = u32::from(Reason::CANCEL).to_be_bytes();
    let storm: Vec<u8> = (1..2_000)
        .step_by(2)
        .flat_map(|stream| {
            let reset = frame(RST_STREAM, 0, stream, &cancel);
            [get_frame(stream, "/waits"), reset].concat()
        })
        .collect();
    // The server may close before it has read everything.
    let _ = raw.0.write_all(&storm).await;
    assert_eq!(raw.farewell().await, Some(Reason::ENHANCE_YOUR_CALM));
    let (mut client, _connection) = client(server.address).await;
    take(ask(&mut client, "/quick").await, Duration::ZERO)
        .await
        .unwrap();
}

#[tokio::test]
async fn an_answer_that_nobody_takes_is_given_up_and_one_taken_slowly_is_not() {
    let server = server(LIMITS).await;
    let (mut client, _connection) = client(server.address).await;
    let deaf = ask(&mut client, "/big").await;
    let started = Instant::now();
    let slow = ask(&mut client, "/big").await;
    let pause = 3 * STALL / u32::try_from(BIG / (16 * 1024)).unwrap();
    assert_eq!(take(slow, pause).await.unwrap(), BIG);
    assert!(started.elapsed() > 2 * STALL);
    let error = take(deaf, Duration::ZERO).await.unwrap_err();
    assert!(error.is_reset() && error.is_remote(), "{error}");
}
