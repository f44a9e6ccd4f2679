//! Daybook's command line. Only picks a function to run; it never does anything itself.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use daybook::dev;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs a private Postgres, RabbitMQ and server, for trying things out.
    Dev {
        /// Where its data and `env` live.
        #[arg(long, default_value = ".daybook", global = true)]
        dir: PathBuf,
        #[command(subcommand)]
        action: Option<DevAction>,
    },
    /// Runs a command with private services for tests.
    #[command(hide = true)]
    Services {
        #[command(subcommand)]
        action: ServicesAction,
    },
}

#[derive(Subcommand)]
enum DevAction {
    /// Stops or starts the broker of a running `daybook dev`.
    Broker {
        #[arg(value_parser = ["stop", "start"])]
        what: String,
    },
}

#[derive(Subcommand)]
enum ServicesAction {
    /// Runs a command.
    Run {
        #[arg(long, default_value = ".daybook/test")]
        dir: PathBuf,
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
}

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Command::Dev {
            dir,
            action: Some(DevAction::Broker { what }),
        } => {
            if what == "stop" {
                dev::broker_stop(&dir)?
            } else {
                dev::broker_start(&dir)?
            }
        }
        Command::Dev { dir, action: None } => {
            dev::dev(&dir, |mut ready| async move {
                let session = dev::Session {
                    url: "http://127.0.0.1:8080".into(),
                    ops_url: "http://127.0.0.1:8081".into(),
                    token: "token".into(),
                    admin_token: "admin".into(),
                    database_url: ready.database_url.clone(),
                    amqp_url: ready.amqp_url.clone(),
                    demo_queue: "demo".into(),
                };
                session.write(&ready.dir)?;
                println!("{}", session.welcome("daybook", &ready.dir));
                ready.stop.wait_for(|stop| *stop).await?;
                anyhow::Ok(())
            })
            .await?;
        }
        Command::Services {
            action: ServicesAction::Run { dir, command },
        } => {
            return Ok(ExitCode::from(
                dev::run_with_services(&dir, &command).await?,
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}
