//! How a run goes, on one line of a terminal.
//!
//! Never writes anywhere else.

use super::tally::Tally;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write, stderr};
use std::time::Duration;

/// Back to the first column, and everything right of it away.
const CLEAR: &str = "\r\x1b[K";

/// Whether anybody would see it.
pub fn is_seen() -> bool {
    stderr().is_terminal()
}

/// Replaces the line.
pub fn show(tally: &Tally, left: Duration) {
    put(&line(tally, left));
}

/// Leaves the line empty.
pub fn clear() {
    put("");
}

/// What happens to a terminal is no reason to end a run.
fn put(line: &str) {
    let mut stderr = stderr().lock();
    drop(write!(stderr, "{CLEAR}{line}").and_then(|()| stderr.flush()));
}

fn line(tally: &Tally, left: Duration) -> String {
    let mut line = String::new();
    if let Some(second) = tally.seconds.last() {
        let warm_up = if second.at_s < 0 { " (warm-up)" } else { "" };
        // Writing to a String cannot fail.
        let _ = write!(
            line,
            "{:>4} s{warm_up}  {}/s  p50 {}  p99 {}",
            second.at_s,
            second.done,
            milliseconds(second.p50_us),
            milliseconds(second.p99_us)
        );
    }
    let failed = tally.unavailable + tally.unexpected + tally.unknown + tally.unreached;
    let _ = write!(
        line,
        "  failed {failed}  dropped {}  {} s left",
        tally.dropped,
        left.as_secs()
    );
    line
}

fn milliseconds(us: u64) -> String {
    format!("{}.{} ms", us / 1_000, us % 1_000 / 100)
}

#[cfg(test)]
mod tests {
    use super::super::tally::{Recorder, Span};
    use super::*;
    use tokio::time::Instant;

    #[test]
    fn a_line_tells_the_last_second_and_what_went_wrong() {
        let begin = Instant::now();
        let span = Span {
            begin,
            from: begin + Duration::from_secs(1),
            until: begin + Duration::from_secs(9),
        };
        let mut recorder = Recorder::new(span, 3).unwrap();
        recorder.sent(begin);
        recorder.dropped(4, begin);
        let left = Duration::from_millis(7_900);
        assert_eq!(
            line(recorder.so_far(), left),
            "  failed 0  dropped 4  7 s left"
        );
        recorder.tick(span.from);
        assert_eq!(
            line(recorder.so_far(), left),
            "  -1 s (warm-up)  0/s  p50 0.0 ms  p99 0.0 ms  failed 0  dropped 4  7 s left"
        );
        assert_eq!(milliseconds(12_345), "12.3 ms");
    }
}
