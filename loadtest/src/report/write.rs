//! The files of the report: `report.md`, `summary.json`, a page and plots for each scenario.
//!
//! Keeps what other invocations measured on the same machine, with their time, commit and control; never mixes machines.

use super::{Block, Budget, Cell, Findings, Machine, Table, Unit, budget, grouped};
use crate::control::{Control, Reached};
use anyhow::{Context as _, Result};
use jiff::Timestamp;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

const SUMMARY: &str = "summary.json";
const REPORT: &str = "report.md";

/// What all numbers of an invocation have to be read with.
#[derive(Clone, Debug)]
pub struct Context {
    /// What they were measured on.
    pub machine: Machine,
    /// The commit that was measured.
    pub commit: String,
    /// When it began.
    pub at: Timestamp,
    /// The control before the scenarios.
    pub first: Control,
    /// The control after them.
    pub last: Control,
}

/// A scenario that was run.
#[derive(Debug)]
pub struct Run {
    /// Its name.
    pub scenario: &'static str,
    /// What it does.
    pub about: &'static str,
    /// How long it took, with its gate.
    pub took: Duration,
    /// What it found; None when it failed, and then it has no numbers.
    pub findings: Option<Findings>,
}

/// A directory of reports.
#[derive(Debug)]
pub struct Report {
    /// The directory.
    pub dir: PathBuf,
    /// Whether what was measured before on the same machine stays.
    pub keep: bool,
    /// Names of all scenarios, in the order of the report.
    pub scenarios: Vec<&'static str>,
}

impl Context {
    /// Events a second of the control: the mean of both ends, since machines drift.
    fn control(&self) -> f64 {
        f64::midpoint(self.first.single.rate, self.last.single.rate)
    }

    fn ceiling(&self) -> f64 {
        f64::midpoint(self.first.ceiling.rate, self.last.ceiling.rate)
    }

    /// How much the machine changed between both ends, in per cent.
    fn drift(&self) -> f64 {
        100.0 * (self.last.single.rate / self.first.single.rate - 1.0)
    }

    /// A value in the budget's own unit.
    fn value(&self, budget: &Budget, measured: f64) -> f64 {
        let value = match budget.unit {
            Unit::Control => measured / self.control(),
            _ => measured,
        };
        (value * 100.0).round() / 100.0
    }

    fn control_json(&self) -> Value {
        json!({
            "events_per_s": self.control().round(), "first": self.first.single.rate.round(),
            "last": self.last.single.rate.round(), "ceiling_events_per_s": self.ceiling().round(),
        })
    }

    fn heading(&self) -> String {
        let setting = |name: &str| self.machine.postgres.value(name).unwrap_or("?");
        let mut text = format!(
            "{}, {} cores shared by service, Postgres, RabbitMQ and load; {} MiB of memory; Linux {}; RabbitMQ {}; Postgres {}",
            self.machine.cpu,
            self.machine.cores,
            grouped(self.machine.memory_mib),
            self.machine.kernel,
            self.machine.rabbitmq,
            setting("server_version"),
        );
        for (name, value) in &self.machine.postgres.0 {
            if name != "server_version" {
                let _ = write!(text, ", {name} {value}");
            }
        }
        text.push_str(".\n");
        if !self.machine.postgres.is_durable() {
            text.push_str("\n**NOT DURABLE**: these settings may lose answered events; the numbers say nothing about a real server.\n");
        }
        if cfg!(debug_assertions) {
            text.push_str("\n**NOT OPTIMISED**: this was built without `--release`.\n");
        }
        text
    }
}

impl Report {
    /// Writes all files and returns the summary for a terminal.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write(&self, context: &Context, runs: &[Run]) -> Result<String> {
        fs::create_dir_all(&self.dir).with_context(|| self.dir.display().to_string())?;
        let before = self.before(context);
        if before.is_none() {
            self.remove_pages(&self.scenarios)?;
        }
        // A scenario that ran again has no older numbers, even when it failed.
        let again: Vec<&str> = runs.iter().map(|run| run.scenario).collect();
        self.remove_pages(&again)?;
        // Nor are rows kept that the budget has no more.
        let is_known = |row: &Value| budget::ALL.iter().any(|known| row["name"] == known.name);
        let kept = before.unwrap_or_default().into_iter().filter(|row| {
            let scenario = row["scenario"].as_str();
            scenario.is_some_and(|scenario| !again.contains(&scenario)) && is_known(row)
        });
        let mut rows: Vec<Value> = kept.chain(measured(context, runs)).collect();
        rows.extend(unmeasured(&rows));
        rows.sort_by_key(|row| {
            budget::ALL
                .iter()
                .position(|known| row["name"] == known.name)
        });
        let summary = json!({
            "rows": rows, "control": context.control_json(), "machine": context.machine.json(),
        });
        let text = serde_json::to_string_pretty(&summary)? + "\n";
        self.file(SUMMARY, &text)?;
        for run in runs {
            if let Some(findings) = &run.findings {
                self.page(context, run, findings)?;
            }
        }
        let failed: Vec<&str> = runs
            .iter()
            .filter(|run| run.findings.is_none())
            .map(|run| run.scenario)
            .collect();
        let has_profile = self.dir.join("profile.md").is_file();
        let front = front(context, &rows, &self.pages(), &failed, has_profile);
        self.file(REPORT, &front)?;
        Ok(front)
    }

    /// The rows of a summary of the same machine; None when there is none to be kept.
    fn before(&self, context: &Context) -> Option<Vec<Value>> {
        let text = fs::read_to_string(self.dir.join(SUMMARY)).ok()?;
        let summary: Value = serde_json::from_str(&text).ok()?;
        let same = self.keep && summary["machine"] == context.machine.json();
        same.then(|| summary["rows"].as_array().cloned()).flatten()
    }

    /// Removes the pages and plots of these scenarios.
    fn remove_pages(&self, scenarios: &[&str]) -> Result<()> {
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let name = path.file_stem().and_then(|name| name.to_str());
            let of_scenario = name.is_some_and(|name| {
                scenarios.iter().any(|scenario| {
                    name.strip_prefix(scenario)
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with("--"))
                })
            });
            if of_scenario {
                fs::remove_file(&path).with_context(|| path.display().to_string())?;
            }
        }
        Ok(())
    }

    /// The scenarios that have a page.
    fn pages(&self) -> Vec<&'static str> {
        self.scenarios
            .iter()
            .copied()
            .filter(|scenario| self.dir.join(format!("{scenario}.md")).is_file())
            .collect()
    }

    fn page(&self, context: &Context, run: &Run, findings: &Findings) -> Result<()> {
        let mut text = format!(
            "# {}\n\n{}.\n\nMeasured {:.0} at commit `{}` in {} s, gate included; control {} events/s.\n",
            run.scenario,
            run.about,
            context.at,
            context.commit,
            run.took.as_secs(),
            grouped(whole(context.control())),
        );
        for block in &findings.blocks {
            text.push('\n');
            match block {
                Block::Text(paragraph) => {
                    let _ = writeln!(text, "{paragraph}");
                }
                Block::Table(table) => text.push_str(&markdown(table, context.control())),
                Block::Plot(plot) => {
                    let mut plot = plot.clone();
                    // Two dashes, so that no scenario's files are taken for those of another whose name it begins with.
                    plot.file = format!("{}--{}", run.scenario, plot.file);
                    plot.write(&self.dir)?;
                    let _ = writeln!(text, "![{}]({}.svg)", plot.title, plot.file);
                }
            }
        }
        self.file(&format!("{}.md", run.scenario), &text)
    }

    fn file(&self, name: &str, text: &str) -> Result<()> {
        let path = self.dir.join(name);
        fs::write(&path, text).with_context(|| path.display().to_string())
    }
}

/// The rows of this invocation.
fn measured(context: &Context, runs: &[Run]) -> Vec<Value> {
    let mut rows = Vec::new();
    for run in runs {
        for row in run.findings.iter().flat_map(|findings| &findings.rows) {
            let value = context.value(row.budget, row.value);
            let size = row.size.as_ref();
            let met = size
                .is_none_or(|size| size.is_full)
                .then(|| row.budget.target.is_met(value));
            rows.push(json!({
                "name": row.budget.name, "unit": row.budget.unit.name(), "target": row.budget.target.to_string(),
                "value": value, "met": met, "size": size.map(|size| &size.is), "scenario": run.scenario,
                "measured_at": format!("{:.0}", context.at), "commit": context.commit, "control": context.control_json(),
            }));
        }
    }
    rows
}

/// The rows of the budget that nobody has measured yet.
fn unmeasured(rows: &[Value]) -> Vec<Value> {
    let is_there = |budget: &&&Budget| rows.iter().any(|row| row["name"] == budget.name);
    let missing = budget::ALL.iter().filter(|budget| !is_there(budget));
    missing
        .map(|budget| {
            json!({
                "name": budget.name, "unit": budget.unit.name(), "target": budget.target.to_string(),
                "value": null, "met": null, "size": null, "scenario": null, "measured_at": null, "commit": null, "control": null,
            })
        })
        .collect()
}

/// The report's first page.
fn front(
    context: &Context,
    rows: &[Value],
    pages: &[&str],
    failed: &[&str],
    has_profile: bool,
) -> String {
    let mut text = format!("# What Daybook costs\n\n{}\n", context.heading());
    text.push_str("| what | target | value | met | scenario | measured | commit | control, events/s |\n|---|---|---|---|---|---|---|---|\n");
    for row in rows {
        text.push_str(&line(row));
    }
    for scenario in failed {
        let _ = writeln!(text, "\n`{scenario}` failed: it has no numbers.");
    }
    text.push_str(&missed(rows, has_profile));
    text.push_str(&controls(context));
    if !pages.is_empty() {
        text.push_str("\n## Scenarios\n\n");
    }
    for page in pages {
        let _ = writeln!(text, "- [{page}]({page}.md)");
    }
    text
}

/// A row of the budget as a line of the table.
fn line(row: &Value) -> String {
    let word = |name: &str| row[name].as_str().unwrap_or("-").to_owned();
    let size = row["size"].as_str().map(|size| format!(" ({size})"));
    let value = match &row["value"] {
        Value::Null => "not measured".to_owned(),
        value => format!("{value}{}", size.unwrap_or_default()),
    };
    let met = match (&row["met"], &row["value"]) {
        (Value::Bool(true), _) => "yes",
        (Value::Bool(false), _) => "**no**",
        (_, Value::Null) => "-",
        _ => "not at full size",
    };
    let control = |name: &str| row["control"][name].as_f64().map(whole);
    let control = match control("first").zip(control("last")) {
        Some((first, last)) => format!("{} to {}", grouped(first), grouped(last)),
        None => "-".to_owned(),
    };
    format!(
        "| {} | {} {} | {value} | {met} | {} | {} | {} | {control} |\n",
        word("name"),
        word("target"),
        word("unit"),
        word("scenario"),
        word("measured_at"),
        word("commit"),
    )
}

/// By how much rows are missed, and on what they rest.
fn missed(rows: &[Value], has_profile: bool) -> String {
    let mut text = String::new();
    for row in rows.iter().filter(|row| row["met"] == false) {
        let known = budget::ALL.iter().find(|known| row["name"] == known.name);
        if let Some((budget, value)) = known.zip(row["value"].as_f64()) {
            let _ = writeln!(
                text,
                "- {}: missed by {:.1} %. It rests on {}.",
                budget.name,
                budget.target.missed_by(value),
                budget.rests_on
            );
        }
    }
    if !text.is_empty() {
        text.insert_str(0, "\n## What is missed\n\n");
        if has_profile {
            text.push_str("\nThe [profile](profile.md) tells where the time of everything goes.\n");
        }
    }
    text
}

fn controls(context: &Context) -> String {
    let mut text = format!(
        "\n## Control\n\nThe same tables written by `pgbench -M prepared`, at {:.0} and again after the scenarios. Ratios are to the mean, \
         {} events/s; between both the machine changed by {:+.1} %.\n\n\
         | script | clients | events a transaction | first, events/s | last, events/s | mean latency, ms |\n|---|---|---|---|---|---|\n",
        context.at,
        grouped(whole(context.control())),
        context.drift(),
    );
    let pairs: [(&str, Reached, Reached); 2] = [
        (
            "one transaction per event",
            context.first.single,
            context.last.single,
        ),
        ("the ceiling", context.first.ceiling, context.last.ceiling),
    ];
    for (name, first, last) in pairs {
        let _ = writeln!(
            text,
            "| {name} | {} | {} | {} | {} | {:.1} |",
            first.clients,
            first.batch,
            grouped(whole(first.rate)),
            grouped(whole(last.rate)),
            f64::midpoint(first.latency_mean_ms, last.latency_mean_ms),
        );
    }
    let _ = writeln!(
        text,
        "\nEvents, postings, outbox rows, heads and balances of each agree with the transactions that pgbench counted."
    );
    text
}

/// A table in Markdown.
fn markdown(table: &Table, control: f64) -> String {
    let mut text = format!("| {} |\n", table.head.join(" | "));
    let _ = writeln!(text, "|{}", "---|".repeat(table.head.len()));
    for row in &table.rows {
        let cells: Vec<String> = row
            .iter()
            .map(|cell| match cell {
                Cell::Text(text) => text.clone(),
                Cell::Rate(rate) => format!("{} ({:.2} x)", grouped(whole(*rate)), rate / control),
            })
            .collect();
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    text
}

/// A rate as a whole number.
fn whole(rate: f64) -> u64 {
    // Rates are far below 2^53 and not negative; what is not a number has nothing to show.
    format!("{rate:.0}").parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::database::Settings;
    use crate::report::Size;
    use crate::report::budget::{HALF, HELD_WRITES, SATURATION, SIZE};

    fn reached(batch: u64, rate: f64) -> Reached {
        Reached {
            clients: 32,
            batch,
            events: 10_000,
            rate,
            latency_mean_ms: 19.5,
        }
    }

    fn control(rate: f64) -> Control {
        Control {
            single: reached(1, rate),
            ceiling: reached(400, 10_000.0),
        }
    }

    fn context(kernel: &str) -> Context {
        let durable = ["fsync", "synchronous_commit", "full_page_writes"];
        Context {
            machine: Machine {
                cpu: "Some CPU".to_owned(),
                cores: 2,
                memory_mib: 16_000,
                kernel: kernel.to_owned(),
                postgres: Settings(
                    durable
                        .map(|name| (name.to_owned(), "on".to_owned()))
                        .to_vec(),
                ),
                rabbitmq: "3.10.8".to_owned(),
            },
            commit: "abc1234".to_owned(),
            at: "2026-11-30T11:00:00Z".parse().unwrap(),
            first: control(1_000.0),
            last: control(2_000.0),
        }
    }

    fn run(scenario: &'static str, budget: Option<(&'static Budget, f64)>) -> Run {
        let findings = budget.map(|(budget, value)| {
            let mut findings = Findings::default();
            findings.row(budget, value);
            findings.table(
                ["in flight", "events/s"],
                vec![["1".into(), Cell::Rate(3_000.0)]],
            );
            findings
        });
        Run {
            scenario,
            about: "What it does",
            took: Duration::from_secs(5),
            findings,
        }
    }

    /// A report in a directory of its own.
    fn report(keep: bool) -> Report {
        Report {
            dir: std::env::temp_dir()
                .join(format!("daybook-report-{:016x}", rand::random::<u64>())),
            keep,
            scenarios: vec!["saturation", "half"],
        }
    }

    fn rows(report: &Report) -> Vec<(String, f64, bool)> {
        let text = fs::read_to_string(report.dir.join(SUMMARY)).unwrap();
        let summary: Value = serde_json::from_str(&text).unwrap();
        let rows = summary["rows"].as_array().unwrap().iter();
        let measured = rows.filter(|row| !row["value"].is_null());
        measured
            .map(|row| {
                let scenario = row["scenario"].as_str().unwrap().to_owned();
                (
                    scenario,
                    row["value"].as_f64().unwrap(),
                    row["met"].as_bool().unwrap(),
                )
            })
            .collect()
    }

    #[test]
    fn ratios_are_to_the_mean_of_both_controls() {
        let report = report(false);
        let runs = [run("saturation", Some((&SATURATION, 6_000.0)))];
        let front = report.write(&context("6.1"), &runs).unwrap();
        assert_eq!(rows(&report), [("saturation".to_owned(), 4.0, true)]);
        assert!(
            front.contains("1,500 events/s") && front.contains("+100.0 %"),
            "{front}"
        );
        assert!(!front.contains("NOT DURABLE"), "{front}");
        let page = fs::read_to_string(report.dir.join("saturation.md")).unwrap();
        assert!(page.contains("| 1 | 3,000 (2.00 x) |"), "{page}");
        fs::remove_dir_all(&report.dir).unwrap();
    }

    #[test]
    fn one_scenario_joins_what_the_same_machine_measured_before() {
        let report = report(true);
        let first = [run("saturation", Some((&SATURATION, 4_500.0)))];
        report.write(&context("6.1"), &first).unwrap();
        let second = [run("half", Some((&HALF, 12.0)))];
        let front = report.write(&context("6.1"), &second).unwrap();
        let expected = [
            ("saturation".to_owned(), 3.0, false),
            ("half".to_owned(), 12.0, true),
        ];
        assert_eq!(rows(&report), expected);
        assert!(front.contains("[saturation](saturation.md)"), "{front}");

        let other = [run("half", Some((&HALF, 30.0)))];
        report.write(&context("6.2"), &other).unwrap();
        assert_eq!(rows(&report), [("half".to_owned(), 30.0, false)]);
        assert!(!report.dir.join("saturation.md").exists());
        fs::remove_dir_all(&report.dir).unwrap();
    }

    #[test]
    fn a_row_says_how_large_what_it_measured_was() {
        let report = report(true);
        let mut size = run("size", None);
        let mut findings = Findings::default();
        let size_of = |is_full| Size {
            is: "1,000,000 events".to_owned(),
            is_full,
        };
        findings.sized_row(&SIZE, 91.0, size_of(false));
        findings.sized_row(&HELD_WRITES, 20.0, size_of(true));
        size.findings = Some(findings);
        report.write(&context("6.1"), &[size]).unwrap();
        // One that joins shows it again, from the summary.
        let other = [run("half", Some((&HALF, 12.0)))];
        let front = report.write(&context("6.1"), &other).unwrap();
        for part in [
            "| 91.0 (1,000,000 events) | not at full size |",
            "| 20.0 (1,000,000 events) | **no** |",
            "| 12.0 | yes |",
            "| batch endpoint, relay paused | >= 5 x control | not measured | - |",
            "writes lost: missed by 0.0 %. It rests on the versions",
        ] {
            assert!(front.contains(part), "{part}: {front}");
        }
        fs::remove_dir_all(&report.dir).unwrap();
    }

    #[test]
    fn a_standard_set_keeps_nothing() {
        let mut report = report(true);
        let first = [run("saturation", Some((&SATURATION, 4_500.0)))];
        report.write(&context("6.1"), &first).unwrap();
        report.keep = false;
        let second = [run("half", Some((&HALF, 12.0)))];
        report.write(&context("6.1"), &second).unwrap();
        assert_eq!(rows(&report), [("half".to_owned(), 12.0, true)]);
        fs::remove_dir_all(&report.dir).unwrap();
    }

    #[test]
    fn a_failed_scenario_loses_its_older_numbers() {
        let report = report(true);
        let first = [run("half", Some((&HALF, 12.0)))];
        report.write(&context("6.1"), &first).unwrap();
        let front = report.write(&context("6.1"), &[run("half", None)]).unwrap();
        assert!(rows(&report).is_empty());
        assert!(
            front.contains("`half` failed: it has no numbers"),
            "{front}"
        );
        assert!(!report.dir.join("half.md").exists());
        fs::remove_dir_all(&report.dir).unwrap();
    }
}
