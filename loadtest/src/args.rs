//! What a run may be told, each within bounds: every scenario ends by itself.
//!
//! Reads no address and opens no connection.

use crate::scenario::{self, Scenario};
use crate::server::Setup;
use clap::{Args as Flags, Parser, Subcommand};
use std::path::PathBuf;

/// Load scenarios for Daybook, each verified afterwards, on private services: run it by `make bench`.
#[derive(Parser)]
#[command(name = "daybook-loadtest")]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What can be done.
#[derive(Subcommand)]
pub enum Command {
    /// Measure the control and scenarios, and write the report.
    Bench {
        #[command(flatten)]
        services: Services,
        #[command(flatten)]
        bench: BenchArgs,
    },
    /// Look where the time goes at saturation: by program, a flame graph of the server, and the dearest statements.
    Profile {
        #[command(flatten)]
        services: Services,
        #[command(flatten)]
        profile: ProfileArgs,
    },
    /// The scenarios and how long they take.
    List,
}

/// Which scenarios run, and how.
#[derive(Flags)]
pub struct BenchArgs {
    /// One scenario, at its full length; none: the standard set.
    #[arg(value_parser = scenario::find)]
    pub scenario: Option<&'static Scenario>,
    /// Take the length of the standard set for the one scenario, too.
    #[arg(long)]
    pub short: bool,
    /// Users to choose from at random.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(64..=1_000_000))]
    pub users: u32,
    /// Where pgbench is, if not beside the newest installed Postgres or on the PATH.
    #[arg(long, env = "PG_BIN_DIR")]
    pub pg_bin_dir: Option<PathBuf>,
    /// Where the report goes.
    #[arg(long, default_value = "loadtest/report")]
    pub report: PathBuf,
}

/// What is looked at.
#[derive(Flags)]
pub struct ProfileArgs {
    /// Where it goes.
    #[arg(long, default_value = "loadtest/report")]
    pub report: PathBuf,
    /// Roles of the server; with the relay, somebody receives.
    #[arg(long, default_value = "api,relay,keeper")]
    pub roles: String,
    /// Requests in flight.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    pub in_flight: u32,
    /// A setting of the server, such as DAYBOOK_LANES=2. May be given again.
    #[arg(long, value_name = "NAME=VALUE", value_parser = setting)]
    pub set: Vec<(String, String)>,
    /// Leave out the flame graph, which takes minutes.
    #[arg(long)]
    pub no_graph: bool,
}

impl ProfileArgs {
    /// Whether a flame graph is drawn.
    pub fn graph(&self) -> bool {
        !self.no_graph
    }

    /// The server that is looked at.
    pub fn setup(&self) -> Setup {
        Setup {
            variables: self.set.clone(),
            ..Setup::roles(&self.roles)
        }
    }
}

fn setting(text: &str) -> Result<(String, String), &'static str> {
    let (name, value) = text.split_once('=').ok_or("not NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// The private services, as `daybook services run` names them, and the program that is measured.
#[derive(Clone, Debug, Flags)]
pub struct Services {
    /// Postgres, as its superuser. Loopback only.
    #[arg(long, env = "TEST_DATABASE_URL", hide_env_values = true)]
    pub database_url: String,
    /// RabbitMQ. Loopback only.
    #[arg(long, env = "TEST_AMQP_URL", hide_env_values = true)]
    pub amqp_url: String,
    /// A directory for keys and other files of the run.
    #[arg(long, env = "TEST_SCRATCH_DIR")]
    pub scratch: PathBuf,
    /// The program that serves and verifies. Its variable has no DAYBOOK_ in front: the service refuses names it does not know.
    #[arg(long, env = "LOADTEST_DAYBOOK", default_value = "target/dist/daybook")]
    pub program: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVICES: [&str; 6] = [
        "--database-url",
        "postgres://a@127.0.0.1/d",
        "--amqp-url",
        "amqp://a@127.0.0.1",
        "--scratch",
        "/nowhere",
    ];

    fn bench(more: &[&str]) -> Result<BenchArgs, clap::Error> {
        let line = ["daybook-loadtest", "bench"]
            .iter()
            .chain(&SERVICES)
            .chain(more);
        match Args::try_parse_from(line)?.command {
            Command::Bench { bench, .. } => Ok(bench),
            Command::Profile { .. } | Command::List => panic!("another command"),
        }
    }

    #[test]
    fn the_command_line_is_sound() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn a_scenario_is_known_by_its_name() {
        assert!(bench(&[]).unwrap().scenario.is_none());
        let named = bench(&["saturation", "--short"]).unwrap();
        assert_eq!(named.scenario.unwrap().name, "saturation");
        assert!(named.short);
        for bad in [
            &["nothing"][..],
            &["--users", "63"],
            &["--users", "1000001"],
        ] {
            assert!(bench(bad).is_err(), "{bad:?}");
        }
    }
}
