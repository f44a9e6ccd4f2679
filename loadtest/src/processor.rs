//! Processor time by program: of all processes that the laboratory's services are made of, this one included.
//!
//! Steadier than a rate on a shared machine: an event costs what it costs, however little of the machine is left for it.

use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::time::Duration;

/// What `utime` and `stime` are counted in, on every Linux.
const TICK: Duration = Duration::from_millis(10);

/// Time used up to now, by the name of the program.
#[derive(Clone, Debug, Default)]
pub struct Times(BTreeMap<String, u64>);

/// One process, as `/proc/<pid>/stat` tells it.
#[derive(Debug, PartialEq)]
struct Process {
    pid: u32,
    name: String,
    parent: u32,
    /// Of its own and of children that have ended.
    ticks: u64,
}

impl Times {
    /// Of everything below the process that started this one: it has started the services, too.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn now() -> Result<Self> {
        let processes = running()?;
        Ok(below(&processes, std::os::unix::process::parent_id()))
    }

    /// What was used since an earlier look.
    pub fn since(&self, earlier: &Times) -> Vec<(String, Duration)> {
        let used = self.0.iter().map(|(name, ticks)| {
            let before = earlier.0.get(name).copied().unwrap_or(0);
            let ticks = u32::try_from(ticks.saturating_sub(before)).unwrap_or(u32::MAX);
            (name.clone(), TICK * ticks)
        });
        used.filter(|(_, used)| !used.is_zero()).collect()
    }
}

fn running() -> Result<Vec<Process>> {
    let mut processes = Vec::new();
    for entry in std::fs::read_dir("/proc").context("/proc")? {
        let entry = entry?;
        // `self` is there a second time by its number.
        if !entry
            .file_name()
            .as_encoded_bytes()
            .iter()
            .all(u8::is_ascii_digit)
        {
            continue;
        }
        // It may have just ended.
        let Ok(text) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        processes.extend(parse(&text));
    }
    Ok(processes)
}

fn below(processes: &[Process], root: u32) -> Times {
    let mut members = vec![root];
    let mut times = Times::default();
    let mut at = 0;
    while let Some(parent) = members.get(at).copied() {
        at += 1;
        for process in processes.iter().filter(|process| process.parent == parent) {
            members.push(process.pid);
            *times.0.entry(process.name.clone()).or_default() += process.ticks;
        }
    }
    times
}

fn parse(stat: &str) -> Option<Process> {
    // The name stands in parentheses and may contain any of them.
    let (before, after) = stat.rsplit_once(") ")?;
    let (pid, name) = before.split_once(" (")?;
    let fields: Vec<&str> = after.split_ascii_whitespace().collect();
    let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some(Process {
        pid: pid.parse().ok()?,
        name: name.to_owned(),
        parent: fields.get(1)?.parse().ok()?,
        // utime, stime, cutime, cstime
        ticks: ticks(11)? + ticks(12)? + ticks(13)? + ticks(14)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "42 (a) (b c) S 7 42 42 0 -1 4194560 100 0 0 0 5 6 7 8 20 0 1 0 100 1000 10";

    #[test]
    fn a_process_is_read_whatever_its_name() {
        let process = parse(STAT).unwrap();
        assert_eq!(
            process,
            Process {
                pid: 42,
                name: "a) (b c".to_owned(),
                parent: 7,
                ticks: 26,
            }
        );
        assert_eq!(parse("42 (cut"), None);
        assert_eq!(parse("42 (a) S 7"), None);
    }

    #[test]
    fn descendants_are_added_up_by_name() {
        let process = |pid, parent, name: &str, ticks| Process {
            pid,
            name: name.to_owned(),
            parent,
            ticks,
        };
        let all = [
            process(3, 2, "postgres", 5),
            process(2, 1, "postgres", 1),
            process(4, 1, "beam.smp", 100),
            process(5, 9, "postgres", 1_000),
        ];
        let earlier = Times(BTreeMap::from([("beam.smp".to_owned(), 100)]));
        let used = below(&all, 1).since(&earlier);
        assert_eq!(
            used,
            [("postgres".to_owned(), Duration::from_millis(60))],
            "what used nothing is left out"
        );
    }

    #[test]
    fn a_process_is_read_once() {
        let processes = running().unwrap();
        let own = std::process::id();
        assert_eq!(processes.iter().filter(|one| one.pid == own).count(), 1);
    }
}
