//! Saturation: a closed loop of transfers between random users over HTTP, and the proof that every 201 is a stored event.
//!
//! Never returns numbers that were not proved.

use crate::args::{Common, Service};
use crate::database::Database;
use crate::load::{Kind, Mix, Plan, Tally, Target, drive};
use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::timeout;

/// How long giving every user money may take.
const FUNDING_LIMIT: Duration = Duration::from_secs(300);
/// How long `daybook verify` may take.
const VERIFY_LIMIT: Duration = Duration::from_secs(900);
/// What each user gets: no run is long enough to spend it by ones.
const FUNDING_AMOUNT: u64 = 100_000_000;

/// What a proved run measured.
#[derive(Debug)]
pub struct Saturation {
    /// Connections, each with one request in flight.
    pub connections: u32,
    /// From the first request to the last answer.
    pub elapsed: Duration,
    /// How long a 201 took, in microseconds.
    pub latency_us: Histogram<u64>,
    /// Answers 503.
    pub unavailable: u64,
    /// Outbox rows left at the end: how far the relay is behind.
    pub outbox: u64,
}

impl Saturation {
    /// Events accepted.
    pub fn events(&self) -> u64 {
        self.latency_us.len()
    }
}

/// Finds out beforehand whether a run could succeed.
///
/// # Errors
/// When the service is not there or not on this machine, or the program that verifies is missing.
pub async fn check(service: &Service) -> Result<Target> {
    let target = Target::new(&service.url)?;
    ensure!(
        service.program.is_file(),
        "{} is not there: cargo build --release --bin daybook",
        service.program.display()
    );
    target.connect().await?;
    Ok(target)
}

/// Gives every user money, measures, and proves what was measured.
///
/// # Errors
/// When anything does not hold; there is nothing to report then.
pub async fn run(
    database: &Database,
    target: &Target,
    common: &Common,
    service: &Service,
) -> Result<Saturation> {
    let tokens = vec![service.token.clone()];
    let mut deposits = Mix::new(Kind::DepositEach, common.users, tokens.clone());
    deposits.amounts = FUNDING_AMOUNT..=FUNDING_AMOUNT;
    let users = u64::from(common.users);
    let funding = Plan {
        count_max: users,
        ..Plan::closed(target.clone(), service.connections, FUNDING_LIMIT, deposits)
    };
    let funded = drive(funding).await?;
    ensure!(
        funded.created == users,
        "only {} of {users} users got their money; {}",
        funded.created,
        funded.trouble()
    );
    database.checkpoint().await?;

    let (before, _) = database.stored(&service.ledger).await?;
    let transfers = Mix::new(Kind::Transfer, common.users, tokens);
    let lasts = Duration::from_secs(u64::from(common.seconds));
    let saturating = Plan {
        count_max: service.events_max,
        ..Plan::closed(target.clone(), service.connections, lasts, transfers)
    };
    let tally = drive(saturating).await?;
    let (after, outbox) = database.stored(&service.ledger).await?;
    proves(&tally, after.saturating_sub(before))?;
    verify(&service.program, database.url(), &service.ledger).await?;
    Ok(Saturation {
        connections: service.connections,
        elapsed: tally.elapsed,
        unavailable: tally.unavailable,
        latency_us: tally.latency_us,
        outbox,
    })
}

/// That there were only answers that may be, and as many 201s as the ledger grew by.
fn proves(tally: &Tally, grown: u64) -> Result<()> {
    ensure!(
        tally.created > 0 && tally.is_clean(),
        "{} events were accepted; {}",
        tally.created,
        tally.trouble()
    );
    ensure!(
        tally.created == grown,
        "{} answers 201, but {grown} more events are stored",
        tally.created
    );
    Ok(())
}

/// Lets the service's own program read the whole ledger again.
async fn verify(program: &Path, database_url: &str, ledger: &str) -> Result<()> {
    let mut command = Command::new(program);
    // The configuration refuses variables that it does not know, and this process has some that are not the service's.
    for (name, _) in std::env::vars_os() {
        if is_settings(&name) {
            command.env_remove(name);
        }
    }
    command
        .arg("verify")
        .env("DAYBOOK_DATABASE_URL", database_url)
        .env("DAYBOOK_LEDGER", ledger)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = timeout(VERIFY_LIMIT, command.output())
        .await
        .context("daybook verify does not end")?
        .with_context(|| program.display().to_string())?;
    ensure!(
        output.status.success(),
        "daybook verify failed, {}:\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn is_settings(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b"DAYBOOK_")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[tokio::test]
    async fn verification_counts_by_its_exit_code() {
        let dir = std::env::temp_dir().join(format!("daybook-load-{:016x}", rand::random::<u64>()));
        std::fs::create_dir(&dir).unwrap();
        let program = dir.join("daybook");
        let script = "#!/bin/sh\necho \"$1 $DAYBOOK_LEDGER $DAYBOOK_DATABASE_URL\"; [ \"$DAYBOOK_LEDGER\" = good ]\n";
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
        verify(&program, "postgres://x", "good").await.unwrap();
        let why = verify(&program, "postgres://x", "bad").await.unwrap_err();
        assert!(why.to_string().contains("verify bad postgres://x"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
