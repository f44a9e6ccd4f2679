//! A control group with limits on processor time and memory, as a container has: cgroup v1 or v2.
//!
//! Never runs anything unlimited: where a group cannot be made, that is an error.

use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// Where the system shows its groups.
const ROOT: &str = "/sys/fs/cgroup";
/// The period in which processor time is given out, in microseconds: what Kubernetes uses.
const PERIOD_US: u64 = 100_000;

/// What a group may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Processor time, in thousandths of one core.
    pub cpu_millis: u64,
    /// Memory, in bytes.
    pub memory_bytes: u64,
}

impl Limits {
    fn quota_us(self) -> u64 {
        self.cpu_millis * PERIOD_US / 1_000
    }
}

/// What a group used and what was refused to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Periods in which it wanted to run.
    pub periods: u64,
    /// Periods in which it had to wait, its time used up.
    pub throttled: u64,
    /// How long it waited, in milliseconds, added up over its threads.
    pub throttled_ms: u64,
    /// Memory at most, page cache included, in bytes.
    pub memory_bytes_max: u64,
    /// Processes that were killed for want of memory.
    pub oom_kills: u64,
}

/// A group, removed when dropped; whatever ran in it has to have ended by then.
#[derive(Debug)]
pub struct Cgroup {
    version: Version,
    /// The directories: two in v1, one in v2.
    cpu: PathBuf,
    memory: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Cgroup {
    /// Makes a group with these limits.
    ///
    /// # Errors
    /// When the system has no groups or does not let this process make one.
    pub fn make(limits: Limits) -> Result<Self> {
        Self::make_below(Path::new(ROOT), limits).context(
            "the server cannot be limited: control groups cannot be made here (root is needed)",
        )
    }

    fn make_below(root: &Path, limits: Limits) -> Result<Self> {
        let name = format!("daybook-bench-{:08x}", rand::random::<u32>());
        let version = version(root)?;
        let (cpu, memory) = match version {
            Version::V1 => (
                root.join("cpu").join(&name),
                root.join("memory").join(&name),
            ),
            Version::V2 => (root.join(&name), root.join(&name)),
        };
        let group = Cgroup {
            version,
            cpu,
            memory,
        };
        group.set(root, limits)?;
        Ok(group)
    }

    fn set(&self, root: &Path, limits: Limits) -> Result<()> {
        let quota = limits.quota_us();
        match self.version {
            Version::V1 => {
                make_dir(&self.cpu)?;
                make_dir(&self.memory)?;
                write(&self.cpu.join("cpu.cfs_period_us"), &PERIOD_US.to_string())?;
                write(&self.cpu.join("cpu.cfs_quota_us"), &quota.to_string())?;
                let bytes = limits.memory_bytes.to_string();
                write(&self.memory.join("memory.limit_in_bytes"), &bytes)
            }
            Version::V2 => {
                write(&root.join("cgroup.subtree_control"), "+cpu +memory")?;
                make_dir(&self.cpu)?;
                write(&self.cpu.join("cpu.max"), &format!("{quota} {PERIOD_US}"))?;
                let bytes = limits.memory_bytes.to_string();
                write(&self.cpu.join("memory.max"), &bytes)
            }
        }
    }

    /// Shell commands by which a shell joins the group.
    pub fn join_script(&self) -> String {
        let mut dirs = vec![&self.cpu, &self.memory];
        dirs.dedup();
        dirs.iter().fold(String::new(), |script, dir| {
            format!(
                "{script}echo $$ > '{}' &&",
                dir.join("cgroup.procs").display()
            )
        })
    }

    /// What was used up to now.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn usage(&self) -> Result<Usage> {
        let stat = read(&self.cpu.join("cpu.stat"))?;
        let (throttled_ms, most, kills) = match self.version {
            Version::V1 => (
                field(&stat, "throttled_time")? / 1_000_000,
                read(&self.memory.join("memory.max_usage_in_bytes"))?,
                read(&self.memory.join("memory.oom_control"))?,
            ),
            Version::V2 => (
                field(&stat, "throttled_usec")? / 1_000,
                read(&self.memory.join("memory.peak"))?,
                read(&self.memory.join("memory.events"))?,
            ),
        };
        Ok(Usage {
            periods: field(&stat, "nr_periods")?,
            throttled: field(&stat, "nr_throttled")?,
            throttled_ms,
            memory_bytes_max: most.trim().parse()?,
            oom_kills: field(&kills, "oom_kill")?,
        })
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // One that is still in use, after a failure, stays behind empty and limits nobody.
        for dir in [&self.cpu, &self.memory] {
            let _ = fs::remove_dir(dir);
        }
    }
}

fn version(root: &Path) -> Result<Version> {
    if root.join("cpu").is_dir() && root.join("memory").is_dir() {
        Ok(Version::V1)
    } else if root.join("cgroup.controllers").is_file() {
        Ok(Version::V2)
    } else {
        bail!("neither version of control groups is in {}", root.display())
    }
}

fn make_dir(path: &Path) -> Result<()> {
    fs::create_dir(path).with_context(|| path.display().to_string())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| path.display().to_string())
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| path.display().to_string())
}

/// The number behind a name, of lines such as `nr_throttled 5`.
fn field(text: &str, name: &str) -> Result<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
        .with_context(|| format!("no {name} in {text:?}"))?
        .trim()
        .parse()
        .with_context(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: Limits = Limits {
        cpu_millis: 400,
        memory_bytes: 64 * 1024 * 1024,
    };

    /// A directory that looks like the system's, as far as it is written to.
    fn system(dirs: &[&str]) -> PathBuf {
        let root =
            std::env::temp_dir().join(format!("daybook-groups-{:016x}", rand::random::<u64>()));
        for dir in dirs {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        fs::create_dir_all(&root).unwrap();
        root
    }

    #[test]
    fn the_first_version_has_two_directories() {
        let root = system(&["cpu", "memory"]);
        let group = Cgroup::make_below(&root, POD).unwrap();
        let written = |path: PathBuf| fs::read_to_string(path).unwrap();
        assert_eq!(written(group.cpu.join("cpu.cfs_quota_us")), "40000");
        assert_eq!(written(group.cpu.join("cpu.cfs_period_us")), "100000");
        assert_eq!(
            written(group.memory.join("memory.limit_in_bytes")),
            "67108864"
        );
        assert_eq!(group.join_script().matches("cgroup.procs").count(), 2);
        let stat = "nr_periods 10\nnr_throttled 4\nthrottled_time 2500000000\n";
        fs::write(group.cpu.join("cpu.stat"), stat).unwrap();
        fs::write(group.memory.join("memory.max_usage_in_bytes"), "4096\n").unwrap();
        let control = "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n";
        fs::write(group.memory.join("memory.oom_control"), control).unwrap();
        let expected = Usage {
            periods: 10,
            throttled: 4,
            throttled_ms: 2_500,
            memory_bytes_max: 4_096,
            oom_kills: 1,
        };
        assert_eq!(group.usage().unwrap(), expected);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn the_second_version_has_one_directory() {
        let root = system(&[]);
        fs::write(root.join("cgroup.controllers"), "cpu memory").unwrap();
        let group = Cgroup::make_below(&root, POD).unwrap();
        let written = |path: PathBuf| fs::read_to_string(path).unwrap();
        assert_eq!(written(root.join("cgroup.subtree_control")), "+cpu +memory");
        assert_eq!(written(group.cpu.join("cpu.max")), "40000 100000");
        assert_eq!(written(group.cpu.join("memory.max")), "67108864");
        assert_eq!(group.join_script().matches("cgroup.procs").count(), 1);
        let stat = "usage_usec 5\nnr_periods 10\nnr_throttled 4\nthrottled_usec 2500000\n";
        fs::write(group.cpu.join("cpu.stat"), stat).unwrap();
        fs::write(group.cpu.join("memory.peak"), "4096\n").unwrap();
        fs::write(group.cpu.join("memory.events"), "oom 0\noom_kill 0\n").unwrap();
        let usage = group.usage().unwrap();
        assert_eq!((usage.throttled, usage.throttled_ms), (4, 2_500));
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn without_groups_nothing_runs() {
        let root = system(&[]);
        let why = Cgroup::make_below(&root, POD).unwrap_err().to_string();
        assert!(why.contains("neither version"), "{why}");
        fs::remove_dir_all(&root).unwrap();
    }
}
