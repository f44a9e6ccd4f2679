//! Services for the tests of the generator: they answer by a script, over either protocol.
//!
//! Compiled for tests only.

use super::target::Target;
use bytes::Bytes;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// A request as it came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub connection: usize,
    pub authorization: String,
    pub key: String,
    pub body: String,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug)]
pub enum Reply {
    /// This status and body, after this long.
    Answer(u16, &'static str, Duration),
    /// 201, once this many requests are in flight.
    Together(usize),
    /// The connection is lost.
    Lose,
    /// The connection is lost, and so is every later one.
    Vanish,
}

impl Reply {
    pub const CREATED: Reply = Reply::Answer(201, "thebody", Duration::ZERO);
}

/// Decides about the last of all requests so far.
pub type Script = fn(&[Seen]) -> Reply;

/// A running service; it ends with this.
pub struct Fake {
    pub target: Target,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

struct Shared {
    script: Script,
    seen: Mutex<Vec<Seen>>,
    /// How many came to answer together.
    round: tokio::sync::watch::Sender<usize>,
    /// Told when the script says that there is no service any more.
    vanished: tokio::sync::Notify,
}

impl Fake {
    pub async fn http1(script: Script) -> Self {
        Self::start(script, false).await
    }

    pub async fn http2(script: Script) -> Self {
        Self::start(script, true).await
    }

    async fn start(script: Script, http2: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            script,
            seen: Mutex::new(Vec::new()),
            round: tokio::sync::watch::Sender::new(0),
            vanished: tokio::sync::Notify::new(),
        });
        let mut tasks = JoinSet::new();
        let accepting = Arc::clone(&shared);
        tasks.spawn(async move {
            // Dropped together with the listener when the service vanishes.
            let mut connections = JoinSet::new();
            for number in 0.. {
                let stream = tokio::select! {
                    accepted = listener.accept() => accepted.unwrap().0,
                    () = accepting.vanished.notified() => return,
                };
                let shared = Arc::clone(&accepting);
                if http2 {
                    connections.spawn(serve2(stream, number, shared));
                } else {
                    connections.spawn(serve1(stream, number, shared));
                }
            }
        });
        Fake {
            target: Target::new(&format!("http://{address}")).unwrap(),
            shared,
            _tasks: tasks,
        }
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.shared.seen.lock().unwrap().clone()
    }
}

impl Shared {
    /// None when the connection is to be lost.
    async fn reply(&self, request: Seen) -> Option<(u16, &'static str)> {
        let reply = {
            let mut seen = self.seen.lock().unwrap();
            seen.push(request);
            (self.script)(&seen)
        };
        match reply {
            Reply::Answer(status, body, wait) => {
                tokio::time::sleep(wait).await;
                Some((status, body))
            }
            Reply::Together(count) => {
                let mut arrived = 0;
                self.round.send_modify(|all| {
                    *all += 1;
                    arrived = *all;
                });
                let whole = arrived.next_multiple_of(count);
                let mut round = self.round.subscribe();
                round.wait_for(|all| *all >= whole).await.unwrap();
                Some((201, "thebody"))
            }
            Reply::Lose => None,
            Reply::Vanish => {
                self.vanished.notify_one();
                None
            }
        }
    }
}

/// Answers in two pieces, so that nobody takes the first for the whole.
async fn serve1(mut stream: TcpStream, connection: usize, shared: Arc<Shared>) {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let header = |name: &str| {
            let (_, rest) = text.split_once(name).unwrap();
            rest.lines().next().unwrap().trim().to_owned()
        };
        let whole = text
            .split_once("\r\n\r\n")
            .filter(|(_, body)| body.len() >= header("Content-Length:").parse().unwrap());
        let Some((head, body)) = whole else {
            if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
                return;
            }
            continue;
        };
        assert!(head.starts_with("POST /v1/events HTTP/1.1\r\n"), "{head}");
        let seen = Seen {
            connection,
            authorization: header("Authorization:"),
            key: header("Idempotency-Key:"),
            body: body.to_owned(),
        };
        let Some((status, body)) = shared.reply(seen).await else {
            return;
        };
        bytes.clear();
        let head = format!(
            "HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
        tokio::task::yield_now().await;
        stream.write_all(body.as_bytes()).await.unwrap();
    }
}

async fn serve2(stream: TcpStream, connection: usize, shared: Arc<Shared>) {
    let mut http2 = h2::server::handshake(stream).await.unwrap();
    // Whoever wants the connection lost ends the loop, which drops it.
    let (lose, mut lost) = tokio::sync::mpsc::unbounded_channel();
    let mut answers = JoinSet::new();
    loop {
        let (request, mut respond) = tokio::select! {
            Some(Ok(accepted)) = http2.accept() => accepted,
            _ = lost.recv() => return,
            else => return,
        };
        let (shared, lose) = (Arc::clone(&shared), lose.clone());
        answers.spawn(async move {
            let (head, mut incoming) = request.into_parts();
            assert_eq!(
                (head.method.as_str(), head.uri.path()),
                ("POST", "/v1/events")
            );
            let mut body = Vec::new();
            while let Some(data) = incoming.data().await {
                body.extend_from_slice(&data.unwrap());
            }
            let header = |name: &str| head.headers[name].to_str().unwrap().to_owned();
            let seen = Seen {
                connection,
                authorization: header("authorization"),
                key: header("idempotency-key"),
                body: String::from_utf8(body).unwrap(),
            };
            let Some((status, body)) = shared.reply(seen).await else {
                return lose.send(()).unwrap();
            };
            let head = http::Response::builder().status(status).body(()).unwrap();
            let mut send = respond.send_response(head, false).unwrap();
            send.send_data(Bytes::from_static(body.as_bytes()), true)
                .unwrap();
        });
    }
}
