//! The table that a run ends with.
//!
//! Whole numbers only, and nothing that was not measured in this run.

use crate::args::Common;
use crate::control::{Control, cores};
use crate::database::Settings;
use crate::saturation::Saturation;
use hdrhistogram::Histogram;
use std::fmt::Write as _;
use std::time::Duration;

const QUANTILES: [f64; 4] = [0.5, 0.9, 0.99, 0.999];

/// What was measured, under which settings, and the ratio when both sides are there.
#[must_use]
pub fn table(
    settings: &Settings,
    common: &Common,
    control: Option<&Control>,
    saturation: Option<&Saturation>,
) -> String {
    let mut text = heading(settings, common);
    if let Some(control) = control {
        let name = format!("control: pgbench, {} clients", control.clients);
        let mean = format!("mean {}", control.latency_mean_ms);
        row(&mut text, &name, control.events, control.rate, &mean);
    }
    if let Some(saturation) = saturation {
        let name = format!("saturation: HTTP, {} in flight", saturation.connections);
        let rate = rate(saturation.events(), saturation.elapsed);
        let latency = latencies(&saturation.latency_us);
        row(&mut text, &name, saturation.events(), rate, &latency);
        let ratio = control.and_then(|control| ratio(rate, control.rate));
        if let Some(ratio) = ratio {
            let _ = writeln!(text, "ratio: {ratio} x control");
        }
        let _ = writeln!(
            text,
            "answers 503 (nothing written): {}; outbox rows the relay had left at the end: {}",
            saturation.unavailable, saturation.outbox
        );
        text.push_str("verified: as many 201s as new events; daybook verify found no fault\n");
    }
    if control.is_some() {
        text.push_str("control verified: events, postings, outbox rows and heads agree; no money made or lost\n");
    }
    text
}

fn heading(settings: &Settings, common: &Common) -> String {
    let mut text = format!(
        "\nPostgres {}: fsync {}, synchronous_commit {}, full_page_writes {}; {} cores, shared by all; {} users; {} s each\n",
        settings.version,
        settings.fsync,
        settings.synchronous_commit,
        settings.full_page_writes,
        cores(),
        common.users,
        common.seconds
    );
    if !settings.is_durable() {
        text.push_str("NOT DURABLE: these settings may lose answered events; the numbers say nothing about a real server\n");
    }
    if cfg!(debug_assertions) {
        text.push_str("NOT OPTIMISED: the load itself was built without --release\n");
    }
    let _ = writeln!(
        text,
        "\n{:<36} {:>9} {:>9}   latency in ms",
        "", "events", "events/s"
    );
    text
}

fn row(text: &mut String, name: &str, events: u64, rate: u64, latency: &str) {
    let _ = writeln!(text, "{name:<36} {events:>9} {rate:>9}   {latency}");
}

fn latencies(latency_us: &Histogram<u64>) -> String {
    let mut text = String::new();
    for (name, quantile) in ["p50", "p90", "p99", "p99.9"].iter().zip(QUANTILES) {
        let value = millis(latency_us.value_at_quantile(quantile));
        let _ = write!(text, "{name} {value}  ");
    }
    let _ = write!(text, "max {}", millis(latency_us.max()));
    text
}

/// Microseconds as milliseconds with two places.
fn millis(us: u64) -> String {
    format!("{}.{:02}", us / 1_000, us % 1_000 / 10)
}

/// Events a second.
fn rate(events: u64, elapsed: Duration) -> u64 {
    let rate = u128::from(events) * 1_000_000 / elapsed.as_micros().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

/// How many times `of`, with two places.
fn ratio(rate: u64, of: u64) -> Option<String> {
    let hundredths = rate.checked_mul(100)?.checked_div(of)?;
    Some(format!("{}.{:02}", hundredths / 100, hundredths % 100))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(fsync: &str) -> Settings {
        Settings {
            version: "15.14".to_owned(),
            fsync: fsync.to_owned(),
            synchronous_commit: "on".to_owned(),
            full_page_writes: "on".to_owned(),
        }
    }

    fn common() -> Common {
        Common {
            database_url: String::new(),
            users: 100,
            seconds: 15,
        }
    }

    fn saturation() -> Saturation {
        let mut latency_us = Histogram::new_with_bounds(1, 120_000_000, 3).unwrap();
        for us in 1..=1_000_u64 {
            latency_us.record(us * 100).unwrap();
        }
        Saturation {
            connections: 256,
            elapsed: Duration::from_millis(500),
            latency_us,
            unavailable: 3,
            outbox: 7,
        }
    }

    #[test]
    fn percentiles_come_in_milliseconds() {
        // Three digits are kept, so the highest value of the bucket stands for all in it.
        assert_eq!(
            latencies(&saturation().latency_us),
            "p50 50.01  p90 90.04  p99 99.00  p99.9 99.90  max 100.03"
        );
        assert_eq!(millis(5), "0.00");
        assert_eq!(millis(1_234_567), "1234.56");
    }

    #[test]
    fn the_table_has_both_sides_and_their_ratio() {
        let control = Control {
            clients: 32,
            events: 24_581,
            rate: 1_600,
            latency_mean_ms: "19.527".to_owned(),
        };
        let text = table(
            &settings("on"),
            &common(),
            Some(&control),
            Some(&saturation()),
        );
        assert!(text.contains("fsync on"), "{text}");
        assert!(text.contains("      1000      2000   p50"), "{text}");
        assert!(text.contains("ratio: 1.25 x control"), "{text}");
        assert!(text.contains("503 (nothing written): 3;"), "{text}");
        assert!(!text.contains("NOT DURABLE"), "{text}");
        let alone = table(&settings("off"), &common(), None, Some(&saturation()));
        assert!(!alone.contains("ratio:"), "{alone}");
        assert!(alone.contains("NOT DURABLE"), "{alone}");
    }

    #[test]
    fn nothing_is_divided_by_nothing() {
        assert_eq!(ratio(5, 0), None);
        assert_eq!(rate(5, Duration::ZERO), 5_000_000);
    }
}
