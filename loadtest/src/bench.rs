//! One invocation: the control, scenarios, the control again, and the report.
//!
//! Never reports a number of a scenario that did not prove right.

use crate::args::BenchArgs;
use crate::control::{self, Control};
use crate::lab::Lab;
use crate::report::{Context, Machine, Report, Run, commit};
use crate::scenario::{ALL, Bench, Scenario};
use anyhow::{Result, bail};
use jiff::Timestamp;
use std::io::Write as _;
use std::time::{Duration, Instant};

/// Seconds of the control, of its ceiling, and of both with all that they need.
const CONTROL_S: u32 = 10;
const CEILING_S: u32 = 6;
const CONTROL_BUDGET_S: u64 = 24;

/// Runs what was asked for and returns the report's first page.
///
/// # Errors
/// When the control or a scenario fails. What the other scenarios found is in the report then.
pub async fn run(bench: &mut Bench, args: &BenchArgs) -> Result<String> {
    let (at, commit) = (Timestamp::now(), commit());
    let machine = Machine::ask(bench.lab.postgres(), bench.lab.amqp_url()).await?;
    let chosen: Vec<&Scenario> = match args.scenario {
        Some(scenario) => vec![scenario],
        None => ALL.iter().filter(|scenario| scenario.is_standard).collect(),
    };
    bench.full = args.scenario.is_some() && !args.short;
    bench.pg_bin_dir.clone_from(&args.pg_bin_dir);
    let mut left_s =
        2 * CONTROL_BUDGET_S + chosen.iter().map(|one| budget_s(bench, one)).sum::<u64>();
    tell(&format!(
        "control: about {CONTROL_BUDGET_S} s of {left_s} s in all"
    ));
    let first = controlled(&bench.lab, args).await?;
    left_s -= CONTROL_BUDGET_S;
    let mut runs = Vec::new();
    for scenario in chosen {
        let budget_s = budget_s(bench, scenario);
        tell(&format!(
            "{}: about {budget_s} s; {left_s} s left",
            scenario.name
        ));
        left_s -= budget_s;
        runs.push(one(bench, scenario).await);
    }
    tell(&format!("control again: {left_s} s left"));
    let last = controlled(&bench.lab, args).await?;
    let context = Context {
        machine,
        commit,
        at,
        first,
        last,
    };
    let report = Report {
        dir: args.report.clone(),
        keep: args.scenario.is_some(),
        scenarios: ALL.iter().map(|scenario| scenario.name).collect(),
    };
    let front = report.write(&context, &runs)?;
    let failed: Vec<&str> = runs
        .iter()
        .filter(|run| run.findings.is_none())
        .map(|run| run.scenario)
        .collect();
    if !failed.is_empty() {
        bail!("{} failed", failed.join(", "));
    }
    Ok(front)
}

async fn one(bench: &mut Bench, scenario: &Scenario) -> Run {
    let began = Instant::now();
    let outcome = (scenario.run)(bench).await;
    if let Err(error) = &outcome {
        tell(&format!("{}: no numbers: {error:#}", scenario.name));
    }
    Run {
        scenario: scenario.name,
        about: scenario.about,
        took: began.elapsed(),
        findings: outcome.ok(),
    }
}

async fn controlled(lab: &Lab, args: &BenchArgs) -> Result<Control> {
    let settings = control::Settings {
        users: args.users,
        seconds: CONTROL_S,
        ceiling_seconds: CEILING_S,
        pg_bin_dir: args.pg_bin_dir.clone(),
    };
    control::run(lab, &settings).await
}

fn budget_s(bench: &Bench, scenario: &Scenario) -> u64 {
    if bench.full {
        scenario.full_s
    } else {
        scenario.short_s
    }
}

/// Scenarios and their lengths, for people.
pub fn list() -> String {
    let mut text = String::new();
    for scenario in ALL {
        let within = if scenario.is_standard {
            "in the standard set"
        } else {
            "with --short"
        };
        let full = Duration::from_secs(scenario.full_s);
        text.push_str(&format!(
            "{:<14} {:>6} {within:<19}, {:>6} alone   {}\n",
            scenario.name,
            format!("{} s", scenario.short_s),
            format!("{} s", full.as_secs()),
            scenario.about
        ));
    }
    text
}

/// Progress goes where no report goes; nobody may be reading.
fn tell(line: &str) {
    let _ = writeln!(std::io::stderr(), "[{:.0}] {line}", Timestamp::now());
}
