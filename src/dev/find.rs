//! Finding the server programs of Postgres and RabbitMQ on this machine.
//!
//! Only looks: it never installs, and it never takes Debian's `/usr/sbin/rabbitmq-server`, which runs the system's own broker.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::Error;

/// Major versions of Postgres that the SQL is written for.
const POSTGRES_MAJORS: std::ops::RangeInclusive<u32> = 15..=18;
/// The oldest RabbitMQ (major, minor) that works.
const RABBITMQ_OLDEST: (u32, u32) = (3, 10);

/// Programs of one Postgres version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostgresPrograms {
    /// Directory of `postgres`, `initdb` and `createdb`.
    pub bin: PathBuf,
    /// Major version.
    pub major: u32,
}

/// Where to look. A value, so that a test can look at an empty machine.
#[derive(Clone, Debug)]
pub struct Search {
    /// `/`, or in a test some directory.
    pub root: PathBuf,
    /// Directories of `PATH`.
    pub path: Vec<PathBuf>,
    /// `PG_BIN_DIR`: the only place to look at.
    pub postgres_only: Option<PathBuf>,
    /// `RABBITMQ_BIN_DIR`: the only place to look at.
    pub rabbitmq_only: Option<PathBuf>,
}

impl Search {
    /// This machine, as its environment says.
    #[must_use]
    pub fn machine() -> Self {
        let only = |name: &str| {
            env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let mut path: Vec<PathBuf> = env::var_os("PATH")
            .map(|value| env::split_paths(&value).collect())
            .unwrap_or_default();
        // Often missing from a user's PATH, though the programs are there.
        path.extend(
            [
                "/usr/local/sbin",
                "/usr/local/bin",
                "/usr/sbin",
                "/usr/bin",
                "/sbin",
                "/bin",
            ]
            .map(PathBuf::from),
        );
        Self {
            root: PathBuf::from("/"),
            path,
            postgres_only: only("PG_BIN_DIR"),
            rabbitmq_only: only("RABBITMQ_BIN_DIR"),
        }
    }

    /// A program by the search path.
    #[must_use]
    pub fn on_path(&self, program: &str) -> Option<PathBuf> {
        self.path
            .iter()
            .map(|dir| dir.join(program))
            .find(|file| file.is_file())
    }

    /// Postgres: of version `wanted` (that of existing data), else the newest one supported. None: there is no supported one.
    ///
    /// # Errors
    /// When `PG_BIN_DIR` does not hold it, or only other versions than `wanted` are there.
    pub fn postgres(&self, wanted: Option<u32>) -> Result<Option<PostgresPrograms>, Error> {
        let found: Vec<PostgresPrograms> = self
            .postgres_dirs()
            .into_iter()
            .filter_map(|bin| postgres_at(&bin))
            .collect();
        let majors: Vec<u32> = found.iter().map(|programs| programs.major).collect();
        let chosen = choose_major(&majors, wanted)
            .and_then(|major| found.into_iter().find(|programs| programs.major == major));
        match (chosen, &self.postgres_only, wanted) {
            (Some(programs), _, _) => Ok(Some(programs)),
            (None, Some(dir), _) => Err(Error::Refused(format!(
                "PG_BIN_DIR={} holds no postgres, initdb and createdb of {}",
                dir.display(),
                wanted.map_or_else(
                    || "versions 15 to 18".to_owned(),
                    |major| format!("version {major}")
                )
            ))),
            (None, None, Some(major)) if !majors.is_empty() => Err(Error::Refused(format!(
                "the data was made by Postgres {major}, but only {majors:?} is installed: install {major}, or delete the data to start anew"
            ))),
            (None, None, _) => Ok(None),
        }
    }

    fn postgres_dirs(&self) -> Vec<PathBuf> {
        if let Some(dir) = &self.postgres_only {
            return vec![dir.clone()];
        }
        let mut dirs = self.path.clone();
        dirs.extend(children(&self.root.join("usr/lib/postgresql")).map(|dir| dir.join("bin")));
        dirs.extend(
            children(&self.root.join("usr"))
                .filter(|dir| named(dir, "pgsql-"))
                .map(|dir| dir.join("bin")),
        );
        dirs.push(self.root.join("usr/local/pgsql/bin"));
        for brew in [
            "opt/homebrew/opt",
            "usr/local/opt",
            "home/linuxbrew/.linuxbrew/opt",
        ] {
            dirs.extend(
                children(&self.root.join(brew))
                    .filter(|dir| named(dir, "postgresql"))
                    .map(|dir| dir.join("bin")),
            );
        }
        if let Some(bin) = self
            .on_path("pg_config")
            .and_then(|program| first_line(&program, "--bindir"))
        {
            dirs.push(PathBuf::from(bin));
        }
        dirs
    }

    /// RabbitMQ's own start script. None: there is no supported one.
    ///
    /// # Errors
    /// When `RABBITMQ_BIN_DIR` does not hold it.
    pub fn rabbitmq(&self) -> Result<Option<PathBuf>, Error> {
        let script = self
            .rabbitmq_dirs()
            .into_iter()
            .find_map(|dir| rabbitmq_at(&dir));
        match (&script, &self.rabbitmq_only) {
            (None, Some(dir)) => Err(Error::Refused(format!(
                "RABBITMQ_BIN_DIR={} does not hold RabbitMQ's own rabbitmq-server and rabbitmq-env (3.10 or newer)",
                dir.display()
            ))),
            _ => Ok(script),
        }
    }

    fn rabbitmq_dirs(&self) -> Vec<PathBuf> {
        if let Some(dir) = &self.rabbitmq_only {
            return vec![dir.clone()];
        }
        let mut dirs = vec![self.root.join("usr/lib/rabbitmq/bin")];
        for parent in ["usr/lib/rabbitmq/lib", "opt", "usr/local/lib"] {
            let mut versions: Vec<PathBuf> = children(&self.root.join(parent))
                .filter(|dir| named(dir, "rabbitmq"))
                .collect();
            versions.sort_by_key(|dir| std::cmp::Reverse(rabbitmq_version(dir)));
            dirs.extend(versions.into_iter().map(|dir| dir.join("sbin")));
        }
        for brew in [
            "opt/homebrew/opt",
            "usr/local/opt",
            "home/linuxbrew/.linuxbrew/opt",
        ] {
            dirs.push(self.root.join(brew).join("rabbitmq/sbin"));
        }
        dirs.extend(self.path.iter().cloned());
        dirs
    }

    /// Erlang's port mapper, which a private broker needs an own one of.
    ///
    /// # Errors
    /// When there is none, though RabbitMQ cannot run without Erlang.
    pub fn epmd(&self) -> Result<PathBuf, Error> {
        if let Some(epmd) = self.on_path("epmd") {
            return Ok(epmd);
        }
        let mut homes = vec![
            self.root.join("usr/lib/erlang"),
            self.root.join("opt/erlang/lib/erlang"),
            self.root.join("usr/local/lib/erlang"),
        ];
        // `erl` is .../erlang/bin/erl behind its link.
        homes.extend(
            self.on_path("erl")
                .and_then(|erl| erl.canonicalize().ok())
                .and_then(|erl| Some(erl.parent()?.parent()?.to_owned())),
        );
        homes
            .iter()
            .flat_map(|home| children(home).filter(|dir| named(dir, "erts-")).map(|dir| dir.join("bin/epmd")))
            .find(|file| file.is_file())
            .ok_or_else(|| Error::Refused("RabbitMQ is there, but Erlang's epmd is not: install Erlang so that 'erl' is on the PATH".to_owned()))
    }
}

fn children(dir: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
}

fn named(dir: &Path, start: &str) -> bool {
    dir.file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with(start))
}

fn first_line(program: &Path, argument: &str) -> Option<String> {
    let output = Command::new(program)
        .arg(argument)
        .stdin(Stdio::null())
        .output()
        .ok()?;
    Some(
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .next()?
            .trim()
            .to_owned(),
    )
}

fn postgres_at(bin: &Path) -> Option<PostgresPrograms> {
    if !["postgres", "initdb", "createdb"]
        .iter()
        .all(|program| bin.join(program).is_file())
    {
        return None;
    }
    let major = postgres_major(&first_line(&bin.join("postgres"), "--version")?)?;
    Some(PostgresPrograms {
        bin: bin.to_owned(),
        major,
    })
}

/// The major version in what `postgres --version` prints, such as `postgres (PostgreSQL) 15.20 (Debian ...)`.
fn postgres_major(line: &str) -> Option<u32> {
    let version = line.split_once("(PostgreSQL) ")?.1;
    let digits: String = version.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

fn choose_major(found: &[u32], wanted: Option<u32>) -> Option<u32> {
    found
        .iter()
        .copied()
        .filter(|major| {
            POSTGRES_MAJORS.contains(major) && wanted.is_none_or(|wanted| wanted == *major)
        })
        .max()
}

fn rabbitmq_at(dir: &Path) -> Option<PathBuf> {
    let script = dir.join("rabbitmq-server").canonicalize().ok()?;
    // The real script stands beside `rabbitmq-env`; a distribution's wrapper does not.
    let home = script.parent()?;
    if !home.join("rabbitmq-env").is_file() {
        return None;
    }
    home.ancestors()
        .find_map(rabbitmq_version)
        .is_none_or(|version| version >= RABBITMQ_OLDEST)
        .then_some(script)
}

/// The version in a directory name such as `rabbitmq_server-3.10.8`.
fn rabbitmq_version(dir: &Path) -> Option<(u32, u32)> {
    let name = dir.file_name()?.to_str()?;
    let mut parts = name.strip_prefix("rabbitmq_server-")?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_the_data_is_kept_and_else_the_newest_is_taken() {
        assert_eq!(choose_major(&[14, 15, 17, 16], None), Some(17));
        assert_eq!(choose_major(&[15, 17], Some(15)), Some(15));
        assert_eq!(choose_major(&[15, 17], Some(16)), None);
        assert_eq!(choose_major(&[9, 14, 19], None), None);
        assert_eq!(choose_major(&[], None), None);
    }

    #[test]
    fn versions_are_read() {
        assert_eq!(
            postgres_major("postgres (PostgreSQL) 15.20 (Debian 15.20-0+deb12u1)"),
            Some(15)
        );
        assert_eq!(postgres_major("postgres (PostgreSQL) 18beta1"), Some(18));
        assert_eq!(postgres_major("something else"), None);
        assert_eq!(
            rabbitmq_version(Path::new("/opt/rabbitmq_server-4.1.0")),
            Some((4, 1))
        );
        assert_eq!(rabbitmq_version(Path::new("/usr/sbin")), None);
    }

    #[test]
    fn a_wrapper_and_an_old_broker_are_passed_over() {
        let root = env::temp_dir().join(format!("daybook-find-{:016x}", rand::random::<u64>()));
        let search = Search {
            root: root.clone(),
            path: vec![root.join("usr/sbin")],
            postgres_only: None,
            rabbitmq_only: None,
        };
        let put = |path: &str| {
            fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
            fs::write(root.join(path), "").unwrap();
        };
        put("usr/sbin/rabbitmq-server");
        for (version, expected) in [
            ("3.9.27", None),
            ("3.10.8", Some("3.10.8")),
            ("4.2.0", Some("4.2.0")),
            ("3.13.7", Some("4.2.0")),
        ] {
            put(&format!(
                "opt/rabbitmq_server-{version}/sbin/rabbitmq-server"
            ));
            put(&format!("opt/rabbitmq_server-{version}/sbin/rabbitmq-env"));
            let wanted = expected.map(|v| {
                root.join(format!("opt/rabbitmq_server-{v}/sbin/rabbitmq-server"))
                    .canonicalize()
                    .unwrap()
            });
            assert_eq!(search.rabbitmq().unwrap(), wanted, "after {version}");
        }
        assert_eq!(search.postgres(None).unwrap(), None);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn an_override_that_holds_nothing_is_an_error_and_no_reason_to_install() {
        let nowhere = Some(PathBuf::from("/nowhere"));
        let search = Search {
            root: PathBuf::from("/nowhere"),
            path: Vec::new(),
            postgres_only: nowhere.clone(),
            rabbitmq_only: nowhere,
        };
        assert!(
            search
                .postgres(None)
                .unwrap_err()
                .to_string()
                .contains("PG_BIN_DIR=/nowhere")
        );
        assert!(
            search
                .rabbitmq()
                .unwrap_err()
                .to_string()
                .contains("RABBITMQ_BIN_DIR=/nowhere")
        );
    }
}
