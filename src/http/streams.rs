//! A connection of HTTP/2: many requests at once, within limits of its own.
//!
//! What one client can make the service hold is bounded: streams, their windows, heads, resets, and answers that nobody takes. Never
//! ends a stream while its handler may still be at work.

use super::BODY_BYTES_MAX;
use super::serve::{HEAD_BYTES_MAX, Limits};
use super::stall::Unstalled;
use crate::shutdown;
use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// Open requests of one connection.
pub(super) const STREAMS_MAX: u32 = 256;
/// What a client may send of one request before it is read: a whole body.
const STREAM_WINDOW_BYTES: u32 = 64 * 1024;
const _: () = assert!(STREAM_WINDOW_BYTES as usize == BODY_BYTES_MAX);
/// The same of all requests of a connection together.
const CONNECTION_WINDOW_BYTES: u32 = 4 * STREAM_WINDOW_BYTES;
/// What is kept of one answer for a client whose window is closed.
const SEND_BYTES_MAX: usize = 64 * 1024;
/// What an answer is cut into: the next piece is taken only when the client has room for some of it.
const PIECE_BYTES: usize = 16 * 1024;
/// Streams that a client has opened and reset before they were looked at; with one more it loses the connection.
const RESETS_MAX: usize = 20;
/// Streams that were refused because they broke a rule; with one more the client loses the connection.
const REFUSALS_MAX: usize = 1_024;
/// How often a client is asked whether it is still there, and how long it may take to say so.
const PING_EVERY: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves one connection until the client ends it, the stop signal comes, or it has no request open for `limits.header_timeout`. Either
/// way open requests finish first; the client learns which of its requests were not begun (GOAWAY).
pub(super) async fn serve(
    io: TokioIo<Unstalled>,
    service: TowerToHyperService<Router>,
    limits: Limits,
    stopped: watch::Receiver<bool>,
) -> hyper::Result<()> {
    let streams = Streams {
        open: Arc::default(),
        stall: limits.stream_stall,
    };
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let answer = service.call(request);
        async move { answer.await.map(|answer| answer.map(Pieces::of)) }
    });
    let connection = hyper::server::conn::http2::Builder::new(streams.clone())
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(SEND_BYTES_MAX)
        .max_header_list_size(u32::try_from(HEAD_BYTES_MAX).unwrap_or(u32::MAX))
        .max_pending_accept_reset_streams(RESETS_MAX)
        .max_local_error_reset_streams(REFUSALS_MAX)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT)
        .serve_connection(io, service);
    let mut connection = pin!(connection);
    tokio::select! {
        ended = &mut connection => return ended,
        () = shutdown::wait(stopped) => {}
        () = streams.open.none_for(limits.header_timeout) => {}
    }
    connection.as_mut().graceful_shutdown();
    tokio::select! {
        ended = &mut connection => ended,
        // It was told to go, has nothing to wait for, and stays.
        () = streams.open.none_for(limits.header_timeout) => Ok(()),
    }
}

/// The requests of a connection that are being answered.
#[derive(Default)]
struct Open {
    count: AtomicUsize,
    /// Whether one has begun since somebody looked.
    begun: AtomicBool,
}

impl Open {
    /// Resolves when there was none for this long; at the latest after twice that.
    async fn none_for(&self, patience: Duration) {
        loop {
            sleep(patience).await;
            let begun = self.begun.swap(false, Ordering::Relaxed);
            if !begun && self.count.load(Ordering::Relaxed) == 0 {
                return;
            }
        }
    }
}

/// One of them, however it ends.
struct Counted(Arc<Open>);

impl Counted {
    fn new(open: Arc<Open>) -> Self {
        open.count.fetch_add(1, Ordering::Relaxed);
        open.begun.store(true, Ordering::Relaxed);
        Counted(open)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs the streams of one connection, each as a task. A task ends with its connection, because its stream does.
#[derive(Clone)]
struct Streams {
    open: Arc<Open>,
    stall: Duration,
}

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let counted = Counted::new(self.open.clone());
        let stall = self.stall;
        tokio::spawn(async move {
            let _counted = counted;
            unless_stalled(stream, stall).await;
        });
    }
}

/// Runs a stream to its end, or until nothing has woken it for `patience`: then its handler is done, and the client takes nothing
/// of the answer. The stream is reset.
async fn unless_stalled(stream: impl Future<Output = ()>, patience: Duration) {
    let mut stream = pin!(stream);
    let mut quiet = pin!(sleep(patience));
    poll_fn(|cx| {
        if stream.as_mut().poll(cx).is_ready() || quiet.is_elapsed() {
            return Poll::Ready(());
        }
        quiet.as_mut().reset(Instant::now() + patience);
        quiet.as_mut().poll(cx)
    })
    .await;
}

/// An answer's body in pieces, so that what the client has no room for stays here, where its stream can be given up.
struct Pieces {
    body: Body,
    rest: Bytes,
}

impl Pieces {
    const fn of(body: Body) -> Self {
        Pieces {
            body,
            rest: Bytes::new(),
        }
    }
}

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                ended => return Poll::Ready(ended),
            }
        }
        let length = self.rest.len().min(PIECE_BYTES);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        // It is asked before the first piece is taken, for the header.
        self.body.size_hint()
    }
}
