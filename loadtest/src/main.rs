//! Load scenarios for Daybook, each verified afterwards. Picks a scenario and prints what it found.
//!
//! Never prints a number of a run that did not prove right, and never touches anything but loopback.

mod args;
mod control;
mod database;
#[allow(dead_code, unused_imports)] // Scenarios that use all of it come next.
mod load;
mod report;
mod saturation;

use anyhow::Result;
use args::{Args, Scenario};
use clap::Parser;
use database::Database;
use std::process::ExitCode;

/// One thread: the load shares its machine with what it measures, so it may never take more than one core.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    // A run that is cut off drops what it holds: the programs that it started are killed with it.
    let outcome = tokio::select! {
        outcome = run(args) => outcome,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
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

async fn run(args: Args) -> Result<String> {
    let (common, control, service) = match args.scenario {
        Scenario::Control { common, control } => (common, Some(control), None),
        Scenario::Saturation { common, service } => (common, None, Some(service)),
        Scenario::Smoke {
            common,
            control,
            service,
        } => (common, Some(control), Some(service)),
    };
    let database = Database::at(&common.database_url)?;
    let settings = database.settings().await?;
    // What is wrong with the service is found before the control's time is spent.
    let target = match &service {
        Some(service) => Some(saturation::check(service).await?),
        None => None,
    };
    let control = match control {
        Some(control) => Some(control::run(&database, &common, &control).await?),
        None => None,
    };
    let saturation = match service.zip(target) {
        Some((service, target)) => {
            Some(saturation::run(&database, &target, &common, &service).await?)
        }
        None => None,
    };
    Ok(report::table(
        &settings,
        &common,
        control.as_ref(),
        saturation.as_ref(),
    ))
}
