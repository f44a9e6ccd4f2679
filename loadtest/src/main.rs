//! Load scenarios for Daybook, each verified afterwards. Reads what to run, runs it, and cleans up however that ends.
//!
//! Never prints a number of a run that did not prove right, and never touches anything but loopback.

mod args;
mod bench;
mod cgroup;
mod consumer;
mod control;
mod database;
mod fill;
mod gate;
mod lab;
mod load;
mod processor;
mod profile;
mod report;
mod scenario;
mod server;
mod tokens;

use anyhow::{Context, Result, anyhow};
use args::{Args, Command, Services};
use clap::Parser;
use lab::Lab;
use scenario::Bench;
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

/// Users of a profile.
const PROFILE_USERS: u32 = 10_000;

/// One thread: the load shares its machine with what it measures, so it may never take more than one core.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let outcome = match Args::parse().command {
        Command::Bench { services, bench } => {
            with_lab(&services, bench.users, async |lab| {
                bench::run(lab, &bench).await
            })
            .await
        }
        Command::Profile { services, profile } => {
            with_lab(&services, PROFILE_USERS, async |lab| {
                profile::run(lab, &profile).await
            })
            .await
        }
        Command::List => Ok(bench::list()),
    };
    match outcome {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("No numbers: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Lets `work` use a lab, until it ends or somebody stops it, and removes what is left of it.
async fn with_lab(
    services: &Services,
    users: u32,
    work: impl AsyncFnOnce(&mut Bench) -> Result<String>,
) -> Result<String> {
    let mut terminate = signal(SignalKind::terminate()).context("signals")?;
    let mut bench = Bench {
        lab: Lab::open(services).await?,
        full: false,
        users,
        saturated: None,
        pg_bin_dir: None,
    };
    // A run that is cut off drops what it holds: the processes that it started are killed with it.
    let outcome = tokio::select! {
        outcome = work(&mut bench) => outcome,
        _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted")),
        _ = terminate.recv() => Err(anyhow!("told to stop")),
    };
    let closed = bench.lab.close().await;
    let text = outcome?;
    closed?;
    Ok(text)
}
