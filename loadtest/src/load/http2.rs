//! HTTP/2 without TLS: many requests in flight share a few connections.
//!
//! Never sends a request twice, and never negotiates: the service is known to speak it.

use super::answer::{ANSWER_BYTES_MAX, ANSWER_TIMEOUT, Answer, Failure};
use super::command::Shot;
use super::target::Target;
use anyhow::{Context, Error, Result, anyhow, ensure};
use bytes::Bytes;
use h2::client::{Builder, ResponseFuture, SendRequest};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Request, Uri};
use std::future::poll_fn;
use std::sync::Arc;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::timeout;

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
/// So large that answers never wait for room: a stream has one answer, a connection one for each of its streams.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 1 << 26;

/// One connection, opened again when it is lost.
pub struct Connection {
    target: Target,
    uri: Uri,
    authorizations: Vec<HeaderValue>,
    opened: Mutex<Opened>,
}

/// What can be lost.
struct Opened {
    send: SendRequest<Bytes>,
    /// How often it was opened before.
    generation: u64,
    /// Moves the frames. Ends with this.
    _frames: JoinSet<()>,
}

/// A place for one request in flight.
pub struct Stream {
    connection: Arc<Connection>,
    send: SendRequest<Bytes>,
    generation: u64,
    answer: Vec<u8>,
    reopened: u64,
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// When nobody listens there, or the tokens cannot be sent.
    pub async fn open(target: &Target, tokens: &[String]) -> Result<Arc<Self>> {
        let authorizations = tokens
            .iter()
            .map(|token| HeaderValue::try_from(format!("Bearer {token}")))
            .collect::<Result<_, _>>()?;
        Ok(Arc::new(Connection {
            uri: Uri::try_from(format!("http://{}/v1/events", target.authority))?,
            authorizations,
            opened: Mutex::new(Opened::at(target, 0).await?),
            target: target.clone(),
        }))
    }

    /// A place on it.
    pub async fn stream(self: &Arc<Self>) -> Stream {
        let opened = self.opened.lock().await;
        Stream {
            connection: Arc::clone(self),
            send: opened.send.clone(),
            generation: opened.generation,
            answer: Vec::with_capacity(4 * 1024),
            reopened: 0,
        }
    }

    fn request(&self, shot: &Shot) -> Result<Request<()>> {
        let authorization = self
            .authorizations
            .get(shot.token)
            .context("there is no such token")?;
        // Each key is sent once: it would only push what repeats out of the table of compressed headers.
        let mut key = HeaderValue::try_from(&shot.key)?;
        key.set_sensitive(true);
        Ok(Request::post(self.uri.clone())
            .header(CONTENT_TYPE, JSON)
            .header(AUTHORIZATION, authorization.clone())
            .header(IDEMPOTENCY_KEY, key)
            .body(())?)
    }
}

impl Opened {
    async fn at(target: &Target, generation: u64) -> Result<Self> {
        let tcp = target.connect().await?;
        let handshake = Builder::new()
            .initial_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .enable_push(false)
            .handshake(tcp);
        let (send, frames) = timeout(ANSWER_TIMEOUT, handshake).await??;
        let mut moving = JoinSet::new();
        // An error of the connection is one of each of its streams, where it is seen.
        moving.spawn(async move { drop(frames.await) });
        Ok(Opened {
            send,
            generation,
            _frames: moving,
        })
    }
}

impl Stream {
    /// How often it had to open the connection again; the other places of it do not count that again.
    pub fn reopened(&self) -> u64 {
        self.reopened
    }

    /// Posts one event.
    ///
    /// # Errors
    /// When there is no answer, or it is too large.
    pub async fn post(&mut self, shot: &Shot) -> Result<Answer<'_>, Failure> {
        let request = self.connection.request(shot).map_err(Failure::NotSent)?;
        self.ready().await.map_err(Failure::NotSent)?;
        let (response, mut body) = self
            .send
            .send_request(request, false)
            .map_err(|error| Failure::NotSent(error.into()))?;
        body.send_data(Bytes::copy_from_slice(shot.body.as_bytes()), true)
            .map_err(failure)?;
        let status = timeout(ANSWER_TIMEOUT, read(response, &mut self.answer))
            .await
            .map_err(|_| Failure::Unknown(anyhow!("no answer in time")))??;
        Ok(Answer {
            status,
            body: &self.answer,
        })
    }

    /// Waits until the connection takes one more request; opens it again if it has been lost.
    async fn ready(&mut self) -> Result<()> {
        let ready = poll_fn(|context| self.send.poll_ready(context));
        if timeout(ANSWER_TIMEOUT, ready).await?.is_ok() {
            return Ok(());
        }
        let mut opened = self.connection.opened.lock().await;
        if opened.generation == self.generation {
            *opened = Opened::at(&self.connection.target, self.generation + 1).await?;
            self.reopened += 1;
        }
        self.generation = opened.generation;
        self.send = opened.send.clone();
        drop(opened);
        let ready = poll_fn(|context| self.send.poll_ready(context));
        Ok(timeout(ANSWER_TIMEOUT, ready).await??)
    }
}

/// Reads the whole answer and returns its status.
async fn read(response: ResponseFuture, answer: &mut Vec<u8>) -> Result<u16, Failure> {
    let (head, mut body) = response.await.map_err(failure)?.into_parts();
    answer.clear();
    while let Some(data) = body.data().await {
        let data = data.map_err(failure)?;
        let fits = || -> Result<()> {
            ensure!(
                answer.len() + data.len() <= ANSWER_BYTES_MAX,
                "the answer is larger than {ANSWER_BYTES_MAX} bytes"
            );
            Ok(())
        };
        fits().map_err(Failure::Unknown)?;
        answer.extend_from_slice(&data);
        body.flow_control()
            .release_capacity(data.len())
            .map_err(failure)?;
    }
    Ok(head.status.as_u16())
}

/// A refused stream was not looked at, says the protocol; of any other the service may have seen the request.
fn failure(error: h2::Error) -> Failure {
    if error.is_remote() && error.reason() == Some(h2::Reason::REFUSED_STREAM) {
        Failure::NotSent(Error::from(error))
    } else {
        Failure::Unknown(Error::from(error))
    }
}
