//! Latency at half of saturation: random arrivals that wait for nobody, with relay, broker and a consumer.
//!
//! Latency counts from when a request should have been sent, so a stall costs all that arrive during it.

use super::Bench;
use super::stand::Stand;
use crate::load::Tally;
use crate::report::plot;
use crate::report::{
    Axis, Findings, Plot, Scale, Series, budget, grouped, percentiles, quantile_ms,
};
use crate::server::Setup;
use anyhow::{Context, Result};
use hdrhistogram::Histogram;

/// Runs it.
///
/// # Errors
/// When the run fails its gate, or not every arrival was sent.
pub async fn run(bench: &mut Bench) -> Result<Findings> {
    let saturated = bench.saturated().await?;
    let per_second = saturated.half();
    let lasts = bench.seconds(30, 120);
    let measured = bench.lab.with_ledger("half", async |ledger| {
        let mut stand = Stand::raise(bench, ledger, &Setup::everything()).await?;
        let arrived = stand.arrive(per_second, lasts).await?;
        stand.finish().await?;
        Ok(arrived)
    });
    let (tally, lag_us) = measured.await?;
    tally.all_answered().context("at half of saturation")?;
    let mut findings = Findings::default();
    findings.row(&budget::HALF, quantile_ms(&tally.latency_us, 0.99));
    findings.text(format!(
        "Poisson arrivals at {:.0} a second, half of the {:.0} that everything together takes with {} in flight; {} events in {} s.",
        per_second,
        saturated.rate,
        saturated.in_flight,
        grouped(tally.created),
        lasts.as_secs()
    ));
    table(&mut findings, &tally, &lag_us);
    findings.plot(plot::percentiles(
        "percentiles",
        "Latency by percentile at half of saturation",
        [
            ("answer 201, from the intended start", &tally.latency_us),
            ("receipt by a consumer, from the commit", &lag_us),
        ],
    ));
    findings.plot(over_time(&tally, "Latency over time at half of saturation"));
    Ok(findings)
}

fn table(findings: &mut Findings, tally: &Tally, lag_us: &Histogram<u64>) {
    let line = |name: &str, latency_us: &Histogram<u64>| {
        let [p50, p90, p99, p999, max] = percentiles(latency_us);
        [name.into(), p50, p90, p99, p999, max]
    };
    findings.table(
        ["", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "max ms"],
        vec![
            line("answer 201, from the intended start", &tally.latency_us),
            line("answer 201, from the send", &tally.service_us),
            line("receipt by a consumer, from the commit", lag_us),
        ],
    );
}

/// Median, p99 and maximum of each second.
pub fn over_time(tally: &Tally, title: &str) -> Plot {
    let line = |name: &str, us: fn(&crate::load::Second) -> u64| Series {
        name: name.to_owned(),
        points: tally
            .seconds
            .iter()
            .filter(|second| second.done > 0)
            .map(|second| (second.at_s as f64, us(second) as f64 / 1_000.0))
            .collect(),
    };
    Plot {
        file: "over-time".to_owned(),
        title: title.to_owned(),
        x: Axis {
            label: "s",
            scale: Scale::Linear,
        },
        y: Axis {
            label: "ms",
            scale: Scale::Log10,
        },
        series: vec![
            line("p50", |second| second.p50_us),
            line("p99", |second| second.p99_us),
            line("max", |second| second.max_us),
        ],
    }
}
