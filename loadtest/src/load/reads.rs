//! Reads over HTTP, timed: one path after another, as fast as they are answered or at a steady rate.
//!
//! Writes nothing, and counts no answer but 200.

use super::answer::ANSWER_TIMEOUT;
use super::http1::exchange;
use super::target::Target;
use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{Mutex as AsyncMutex, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

/// Slowest read that is told apart, in microseconds.
const LATENCY_MAX_US: u64 = 120_000_000;
/// Characters kept of an answer that explains a failure.
const SAMPLE_CHARS_MAX: usize = 500;

/// When reads begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// When the one before is answered.
    Closed,
    /// So many a second, whether those before are answered or not; counted from when they should have begun.
    PerSecond(u32),
}

/// What is read.
#[derive(Clone, Debug)]
pub struct Reads {
    /// The service.
    pub target: Target,
    /// Who reads.
    pub token: String,
    /// What, over and over again in this order.
    pub paths: Vec<String>,
    /// Connections, each with one request in flight.
    pub connections: u32,
    /// When.
    pub pace: Pace,
    /// Driven first and not measured.
    pub warm_up: Duration,
    /// Measured after that.
    pub lasts: Duration,
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Microseconds from when a read should have begun to its answer.
    pub latency_us: Histogram<u64>,
    /// Over this time.
    pub window: Duration,
}

impl Measured {
    /// Reads a second.
    pub fn rate(&self) -> f64 {
        self.latency_us.len() as f64 / self.window.as_secs_f64().max(f64::EPSILON)
    }

    /// A quantile, in milliseconds.
    pub fn millis(&self, quantile: f64) -> f64 {
        self.latency_us.value_at_quantile(quantile) as f64 / 1_000.0
    }
}

/// One keep-alive connection that reads.
pub struct Reader {
    stream: TcpStream,
    /// Everything of a request that comes after its path.
    rest: String,
    request: String,
    answer: Vec<u8>,
}

impl Reader {
    /// Connects.
    ///
    /// # Errors
    /// When nobody listens there.
    pub async fn open(target: &Target, token: &str) -> Result<Self> {
        Ok(Reader {
            stream: target.connect().await?,
            rest: format!(
                " HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {token}\r\n\r\n",
                target.authority
            ),
            request: String::new(),
            answer: Vec::with_capacity(64 * 1024),
        })
    }

    /// Reads one path; returns the body.
    ///
    /// # Errors
    /// When it is not answered with 200.
    pub async fn get(&mut self, path: &str) -> Result<&[u8]> {
        self.request.clear();
        self.request.push_str("GET ");
        self.request.push_str(path);
        self.request.push_str(&self.rest);
        let exchange = exchange(&mut self.stream, self.request.as_bytes(), &mut self.answer);
        let head = timeout(ANSWER_TIMEOUT, exchange)
            .await
            .with_context(|| format!("GET {path}: no answer in time"))??;
        let body = self.answer.get(head.length..).unwrap_or_default();
        ensure!(
            head.status == 200,
            "GET {path}: {}: {}",
            head.status,
            sample(body)
        );
        Ok(body)
    }
}

fn sample(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    text.chars().take(SAMPLE_CHARS_MAX).collect()
}

/// A read's number and when it should begin.
type Arrival = (u64, Instant);

struct Shared {
    reads: Reads,
    measured_from: Instant,
    end: Instant,
    /// Of a closed loop.
    next: AtomicU64,
    /// Of a steady rate.
    arrivals: AsyncMutex<mpsc::UnboundedReceiver<Arrival>>,
    latency_us: Mutex<Histogram<u64>>,
}

impl Shared {
    /// The next read; None when there is none any more.
    async fn arrival(&self) -> Option<Arrival> {
        match self.reads.pace {
            Pace::Closed => {
                let now = Instant::now();
                (now < self.end).then(|| (self.next.fetch_add(1, Ordering::Relaxed), now))
            }
            Pace::PerSecond(_) => self.arrivals.lock().await.recv().await,
        }
    }

    async fn work(self: Arc<Self>, mut reader: Reader) -> Result<()> {
        while let Some((index, begin)) = self.arrival().await {
            let count = self.reads.paths.len().max(1);
            let place = usize::try_from(index % u64::try_from(count)?)?;
            let path = self.reads.paths.get(place).context("no path")?;
            reader.get(path).await?;
            if begin >= self.measured_from {
                let micros = u64::try_from(begin.elapsed().as_micros())?;
                let mut latency = self
                    .latency_us
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                latency.saturating_record(micros);
            }
        }
        Ok(())
    }
}

/// Announces reads when they are due, on a thread of its own: the runtime's timer ticks once a millisecond, which is a good part of
/// what a read takes. Ends at the end, or when nobody reads any more.
fn announce(rate: u32, from: Instant, end: Instant, arrivals: &mpsc::UnboundedSender<Arrival>) {
    for index in 0_u64.. {
        let micros = index.saturating_mul(1_000_000) / u64::from(rate.max(1));
        let due = from + Duration::from_micros(micros);
        if due >= end {
            return;
        }
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if arrivals.send((index, due)).is_err() {
            return;
        }
    }
}

/// Reads to the end of the plan.
///
/// # Errors
/// When any read is not answered with 200.
pub async fn read(reads: Reads) -> Result<Measured> {
    ensure!(!reads.paths.is_empty(), "there is nothing to read");
    let mut readers = Vec::new();
    for _ in 0..reads.connections {
        readers.push(Reader::open(&reads.target, &reads.token).await?);
    }
    let (sender, arrivals) = mpsc::unbounded_channel();
    let start = Instant::now();
    let measured_from = start + reads.warm_up;
    let end = measured_from + reads.lasts;
    if let Pace::PerSecond(rate) = reads.pace {
        tokio::task::spawn_blocking(move || announce(rate, start, end, &sender));
    }
    let shared = Arc::new(Shared {
        measured_from,
        end,
        next: AtomicU64::new(0),
        arrivals: AsyncMutex::new(arrivals),
        latency_us: Mutex::new(Histogram::new_with_bounds(1, LATENCY_MAX_US, 3)?),
        reads,
    });
    let mut workers = JoinSet::new();
    for reader in readers {
        workers.spawn(Arc::clone(&shared).work(reader));
    }
    while let Some(ended) = workers.join_next().await {
        ended??;
    }
    let latency_us = shared
        .latency_us
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    Ok(Measured {
        latency_us: latency_us.clone(),
        window: shared.reads.lasts,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    /// A service that answers every request with this status.
    async fn service(status: u16) -> (Target, Arc<Mutex<Vec<String>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = Target::new(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&seen);
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let kept = Arc::clone(&kept);
                tokio::spawn(async move {
                    let mut bytes = Vec::new();
                    while stream.read_buf(&mut bytes).await.unwrap_or(0) > 0 {
                        if bytes.ends_with(b"\r\n\r\n") {
                            let text = String::from_utf8(std::mem::take(&mut bytes)).unwrap();
                            kept.lock().unwrap().push(text);
                            let answer =
                                format!("HTTP/1.1 {status} X\r\nContent-Length: 2\r\n\r\n{{}}");
                            stream.write_all(answer.as_bytes()).await.unwrap();
                        }
                    }
                });
            }
        });
        (target, seen)
    }

    fn reads(target: Target, pace: Pace) -> Reads {
        Reads {
            target,
            token: "t".to_owned(),
            paths: vec!["/a".to_owned(), "/b".to_owned()],
            connections: 2,
            pace,
            warm_up: Duration::ZERO,
            lasts: Duration::from_millis(300),
        }
    }

    #[tokio::test]
    async fn a_steady_rate_is_kept_and_paths_take_turns() {
        let (target, seen) = service(200).await;
        let measured = read(reads(target, Pace::PerSecond(100))).await.unwrap();
        assert_eq!(measured.latency_us.len(), 30);
        let seen = seen.lock().unwrap();
        let of = |path: &str| seen.iter().filter(|text| text.starts_with(path)).count();
        assert_eq!(
            (of("GET /a HTTP/1.1\r\n"), of("GET /b HTTP/1.1\r\n")),
            (15, 15)
        );
        assert!(
            seen.iter()
                .all(|text| text.contains("\r\nAuthorization: Bearer t\r\n"))
        );
    }

    #[test]
    fn reads_are_announced_when_they_are_due_and_with_that_time() {
        let (sender, mut arrivals) = mpsc::unbounded_channel();
        let from = Instant::now();
        announce(1_000, from, from + Duration::from_millis(20), &sender);
        assert!(from.elapsed() >= Duration::from_millis(19));
        for index in 0..20 {
            let due = from + Duration::from_millis(index);
            assert_eq!(arrivals.try_recv().unwrap(), (index, due));
        }
        assert!(arrivals.try_recv().is_err());
    }

    #[tokio::test]
    async fn as_fast_as_answers_come_is_faster() {
        let (target, _) = service(200).await;
        let measured = read(reads(target, Pace::Closed)).await.unwrap();
        assert!(measured.latency_us.len() > 30);
    }

    #[tokio::test]
    async fn another_answer_ends_it() {
        let (target, _) = service(404).await;
        let why = read(reads(target, Pace::Closed)).await.unwrap_err();
        assert!(why.to_string().contains("404: {}"), "{why}");
    }
}
