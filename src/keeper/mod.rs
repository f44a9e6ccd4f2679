//! The keeper: housekeeping that one pod at a time does, elected by an advisory lock.
//!
//! Makes partitions ahead, moves the safe horizon, folds balance snapshots, forgets old revocations. No answer of the API waits for it.

pub mod snapshots;
pub mod verify;

use crate::store::session::{self, Purpose};
use crate::store::{horizon, keeper, partitions};
use crate::telemetry::Metrics;
use secrecy::SecretString;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::Client;

/// How often the horizon moves while events come in.
const TICK: Duration = Duration::from_millis(50);
/// How often the slow duties are done.
const DUTIES_EVERY: Duration = Duration::from_secs(60);
/// How often a pod that is not the keeper asks again.
const ELECTION_EVERY: Duration = Duration::from_secs(2);
/// Pause after an error, doubled by jitter at most: a dead database is not hammered.
const PAUSE: Duration = Duration::from_secs(1);
/// How long one step may take.
const STEP_TIMEOUT: Duration = Duration::from_secs(10);

/// What the keeper needs.
#[derive(Clone)]
pub struct Settings {
    /// Postgres, as the runtime role.
    pub database_url: SecretString,
    /// Name of the ledger.
    pub ledger: String,
    /// Where it counts.
    pub metrics: Arc<Metrics>,
}

/// Why a term as keeper ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error(transparent)]
    Session(#[from] session::SessionError),
    #[error("postgres: {0}")]
    Postgres(#[from] tokio_postgres::Error),
    #[error("a step took too long")]
    Slow(#[from] tokio::time::error::Elapsed),
}

/// Serves until told to stop.
pub async fn run(settings: Settings, mut stopped: watch::Receiver<bool>) {
    loop {
        let term = tokio::select! {
            ended = term(&settings) => ended,
            () = async { drop(stopped.wait_for(|stopped| *stopped).await) } => return,
        };
        if let Err(error) = term {
            tracing::warn!(%error, "the keeper pauses");
        }
        let pause = PAUSE.mul_f64(1.0 + rand::random::<f64>());
        tokio::select! {
            () = sleep(pause) => {}
            () = async { drop(stopped.wait_for(|stopped| *stopped).await) } => return,
        }
    }
}

async fn term(settings: &Settings) -> Result<(), Ended> {
    let (client, _driver) =
        session::connect(&settings.database_url, &settings.ledger, Purpose::Keeper).await?;
    while !timeout(STEP_TIMEOUT, keeper::try_lock(&client, &settings.ledger)).await?? {
        sleep(ELECTION_EVERY).await;
    }
    tracing::info!("this pod is the keeper");
    // A fold that is slow or fails must not hold up the horizon, which the relay waits for.
    tokio::select! {
        ended = serve(settings, &client) => ended,
        never = snapshots::run(settings) => match never {},
    }
}

async fn serve(settings: &Settings, client: &Client) -> Result<(), Ended> {
    let mut duties_at = Instant::now();
    let mut settled = timeout(STEP_TIMEOUT, horizon::read(client)).await??;
    // A stall is as old as it is, however often its keeper changed.
    let mut stalled = timeout(STEP_TIMEOUT, horizon::age(client)).await??;
    let mut settled_at = Instant::now();
    let mut pending = None;
    loop {
        if Instant::now() >= duties_at {
            duties(client).await?;
            duties_at = Instant::now() + DUTIES_EVERY;
        }
        let reached = timeout(STEP_TIMEOUT, step(client, settled, &mut pending)).await??;
        if let Some(position) = reached {
            settled = position;
            settled_at = Instant::now();
            stalled = 0.0;
        }
        settings
            .metrics
            .horizon_age_seconds
            .set(stalled + settled_at.elapsed().as_secs_f64());
        sleep(TICK).await;
    }
}

/// One move of the horizon: None when an older transaction still runs. The mark is then kept until it is settled: under load some
/// batch always runs, and a new mark each time would always find one older than itself.
async fn step(
    client: &Client,
    settled: i64,
    pending: &mut Option<horizon::Mark>,
) -> Result<Option<i64>, tokio_postgres::Error> {
    let mark = match *pending {
        Some(mark) => mark,
        None if horizon::drawn(client).await? <= settled => return Ok(Some(settled)),
        None => horizon::mark(client).await?,
    };
    *pending = Some(mark);
    if !horizon::settled(client, mark).await? {
        return Ok(None);
    }
    horizon::settle(client, mark.position).await?;
    *pending = None;
    Ok(Some(mark.position))
}

async fn duties(client: &Client) -> Result<(), Ended> {
    match timeout(STEP_TIMEOUT, partitions::ensure(client)).await? {
        Ok(0) => {}
        Ok(made) => tracing::info!(made, "made partitions"),
        // Behind a long reader, say; there are months of time, and readiness watches the current one.
        Err(error) => tracing::warn!(%error, "partitions could not be made; next try in a minute"),
    }
    let purged = timeout(STEP_TIMEOUT, keeper::purge_revocations(client)).await??;
    if purged > 0 {
        tracing::info!(purged, "forgot revocations of expired tokens");
    }
    Ok(())
}
