//! What a run may be told, each within bounds: every scenario ends by itself.
//!
//! Reads no address and opens no connection.

use clap::{Args as Flags, Parser, Subcommand};
use std::path::PathBuf;

/// Load scenarios for Daybook, each verified afterwards.
#[derive(Debug, Parser)]
#[command(name = "daybook-loadtest")]
pub struct Args {
    /// What to run.
    #[command(subcommand)]
    pub scenario: Scenario,
}

/// The scenarios.
#[derive(Debug, Subcommand)]
pub enum Scenario {
    /// The same tables written by pgbench, one transaction per event: what the service is compared with.
    Control {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        control: Pgbench,
    },
    /// Transfers between random users over HTTP, as many as the service takes.
    Saturation {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        service: Service,
    },
    /// The control, then saturation, and their ratio.
    Smoke {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        control: Pgbench,
        #[command(flatten)]
        service: Service,
    },
}

/// What both sides share, so that they are comparable.
#[derive(Clone, Debug, Flags)]
pub struct Common {
    /// The Postgres of the service, as the owner of its database. Loopback only.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    pub database_url: String,
    /// Users to choose from at random.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(2..=1_000_000))]
    pub users: u32,
    /// Seconds that are measured, of each side.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
}

/// How the control runs.
#[derive(Clone, Debug, Flags)]
pub struct Pgbench {
    /// Connections of pgbench.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=90))]
    pub clients: u32,
    /// Where pgbench is, if not beside the newest installed Postgres or on the PATH.
    #[arg(long, env = "PG_BIN_DIR")]
    pub pg_bin_dir: Option<PathBuf>,
}

/// How the service is reached and loaded.
#[derive(Clone, Debug, Flags)]
pub struct Service {
    /// The service, such as http://127.0.0.1:8080. Loopback only.
    #[arg(long, env = "DAYBOOK_URL")]
    pub url: String,
    /// A token that may write for any subject.
    #[arg(long, env = "DAYBOOK_ADMIN_TOKEN", hide_env_values = true)]
    pub token: String,
    /// The ledger that it serves.
    #[arg(long, env = "DAYBOOK_LEDGER", default_value = "main", value_parser = ledger)]
    pub ledger: String,
    /// Connections, each with one request in flight.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    pub connections: u32,
    /// Transfers at most, even if there is time left.
    #[arg(long, default_value_t = 2_000_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub events_max: u64,
    /// The program whose `verify` decides. Its variable has no DAYBOOK_ in front: the service refuses names it does not know.
    #[arg(
        long,
        env = "LOADTEST_DAYBOOK",
        default_value = "target/release/daybook"
    )]
    pub program: PathBuf,
}

/// A ledger's name, which is the name of its schema. That of the control is never a ledger's: it gets dropped.
fn ledger(name: &str) -> Result<String, String> {
    let named = name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.len() <= 32
        && name
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
        && name != crate::control::SCHEMA;
    if named {
        Ok(name.to_owned())
    } else {
        Err("not the name of a ledger".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVICE: [&str; 6] = [
        "--database-url",
        "postgres://a@127.0.0.1/d",
        "--url",
        "http://127.0.0.1:1",
        "--token",
        "t",
    ];

    fn saturation(more: &[&str]) -> Result<(Common, Service), clap::Error> {
        let line = ["daybook-loadtest", "saturation"]
            .iter()
            .chain(&SERVICE)
            .chain(more);
        match Args::try_parse_from(line)?.scenario {
            Scenario::Saturation { common, service } => Ok((common, service)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_command_line_is_sound() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn defaults_end_by_themselves() {
        let (common, service) = saturation(&[]).unwrap();
        assert_eq!((common.users, common.seconds), (10_000, 15));
        assert_eq!(service.connections, 256);
    }

    #[test]
    fn what_is_out_of_bounds_is_refused() {
        for bad in [
            ["--connections", "0"],
            ["--connections", "4097"],
            ["--seconds", "0"],
            ["--seconds", "601"],
            ["--users", "1"],
            ["--users", "1000001"],
            ["--events-max", "10000001"],
            ["--ledger", "Main"],
            ["--ledger", "a\"b"],
            ["--ledger", "daybook_control"],
        ] {
            assert!(saturation(&bad).is_err(), "{bad:?}");
        }
        assert!(saturation(&["--seconds", "600", "--users", "2", "--ledger", "eu_1"]).is_ok());
    }
}
