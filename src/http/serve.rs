//! The accept loop: HTTP/1.1 and HTTP/2 on one port, with limits on heads, connections and the time to drain.
//!
//! Listener and stop signal come in as values, so a test binds port 0 and stops it by hand. Never speaks TLS, so a client of HTTP/2
//! begins with it, without an upgrade ("prior knowledge").

use super::preface::{self, Protocol};
use super::stall::Unstalled;
use super::streams;
use crate::shutdown;
use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus_client::metrics::gauge::Gauge;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// Most headers of a request over HTTP/1.1. HTTP/2 counts bytes only.
const HEADERS_MAX: usize = 64;
/// Largest head of a request, and read buffer of a connection, in bytes.
pub(super) const HEAD_BYTES_MAX: usize = 32 * 1024;
/// How long the loop waits after a failed accept: out of descriptors, it must not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long an answer may wait for its client to read any of it.
pub const WRITE_STALL_MAX: Duration = Duration::from_secs(30);

/// The limits of one listener.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long a client may take to send its request's head: from the connection's or the last answer's end over HTTP/1.1; over
    /// HTTP/2, how long a connection may have no request open.
    pub header_timeout: Duration,
    /// How long a write may wait for a client that does not read. One that reads, however slowly, is never cut off.
    pub write_stall: Duration,
    /// How long nothing may happen to a stream of HTTP/2. Longer than any handler waits, because its time counts too.
    pub stream_stall: Duration,
    /// Open connections at most; more wait in the kernel's queue.
    pub connections_max: usize,
    /// How long open requests may take to finish after the stop signal.
    pub drain: Duration,
}

/// Serves until `stop` resolves, then closes the listener, lets open requests finish within `limits.drain`, and returns.
/// What is still open then is cut off. `connections` counts open connections.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    stop: impl Future<Output = ()>,
    limits: Limits,
    connections: Gauge,
) {
    let mut stop = pin!(stop);
    let permits = Arc::new(Semaphore::new(limits.connections_max));
    let (stopping, stopped) = watch::channel(false);
    let mut tasks = JoinSet::new();
    loop {
        let accepting = async {
            // The semaphore is never closed; the permit lives as long as its connection.
            let permit = permits.clone().acquire_owned().await.ok();
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            biased;
            () = &mut stop => break,
            accepted = accepting => accepted,
        };
        while tasks.try_join_next().is_some() {}
        match accepted {
            Ok((stream, _)) => {
                let counted = Counted::new(connections.clone());
                let serving = connection(stream, router.clone(), limits, stopped.clone());
                tasks.spawn(async move {
                    let _held = (permit, counted);
                    serving.await;
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    // Somebody listens: `stopped` is still here.
    let _ = stopping.send(true);
    let draining = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.drain, draining).await.is_err() {
        tracing::warn!("connections were cut off at the end of the drain time");
    }
    tasks.shutdown().await;
}

async fn connection(
    mut stream: TcpStream,
    router: Router,
    limits: Limits,
    stopped: watch::Receiver<bool>,
) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY");
    }
    let opening = tokio::time::timeout(limits.header_timeout, preface::read(&mut stream));
    let opened = tokio::select! {
        // What has arrived before the stop is a request that is answered.
        biased;
        opened = opening => opened,
        () = shutdown::wait(stopped.clone()) => return,
    };
    let (protocol, seen) = match opened {
        Ok(Ok(opened)) => opened,
        Ok(Err(error)) => return tracing::debug!(%error, "a connection ended early"),
        Err(_) => return tracing::debug!("a client sent nothing in time"),
    };
    let io = TokioIo::new(Unstalled::new(stream, seen, limits.write_stall));
    let service = TowerToHyperService::new(router);
    let ended = match protocol {
        Protocol::Http1 => http1(io, service, limits, stopped).await,
        // Apart, because it is the larger of the two: most connections need not keep room for it.
        Protocol::Http2 => Box::pin(streams::serve(io, service, limits, stopped)).await,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

async fn http1(
    io: TokioIo<Unstalled>,
    service: TowerToHyperService<Router>,
    limits: Limits,
    stopped: watch::Receiver<bool>,
) -> hyper::Result<()> {
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(io, service);
    let mut connection = pin!(connection);
    tokio::select! {
        ended = &mut connection => return ended,
        () = shutdown::wait(stopped) => connection.as_mut().graceful_shutdown(),
    }
    connection.await
}

/// One open connection in the gauge, however its task ends.
struct Counted(Gauge);

impl Counted {
    fn new(gauge: Gauge) -> Self {
        gauge.inc();
        Counted(gauge)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}
