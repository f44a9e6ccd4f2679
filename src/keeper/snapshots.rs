//! Snapshots of the balances of accounts that no write locks: folds what has settled, a little at a time.
//!
//! Never reads beyond the safe horizon, never holds up the keeper's other work (it has a session of its own), and claims progress
//! only for what was settled before it began to look.

use super::Settings;
use crate::store::session::{self, Purpose};
use crate::store::snapshots::{self, Mark, PAIRS_MAX, Pair, Progress, ROWS_MAX};
use jiff::SignedDuration;
use std::convert::Infallible;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::{Client, Error};

/// How often it folds. The tail of a busy account is what came in meanwhile.
const TICK: Duration = Duration::from_millis(500);
/// The pause while it is behind, so that catching up leaves the database to others at least half of the time.
const BEHIND_PAUSE: Duration = Duration::from_millis(200);
/// How long one step folds before it gives way.
const STEP_BUDGET: Duration = Duration::from_millis(200);
/// Accounts looked at in one step. With more there are than that, each has its turn every few steps.
const SLICE: i64 = 250;
/// Postings in one step from which a pair is busy: it is folded in every step, not only when its turn comes.
const BUSY_ROWS: i64 = 100;
/// When nothing happens, how old a claim may become: a bound from months ago would make reads open partitions for nothing.
const CLAIM_AGE_MAX: SignedDuration = SignedDuration::from_hours(1);

/// Folds until its future is dropped, over as many sessions as it takes.
pub(super) async fn run(settings: &Settings) -> Infallible {
    loop {
        let Err(error) = serve(settings).await;
        tracing::warn!(%error, "balance snapshots pause");
        sleep(super::PAUSE.mul_f64(1.0 + rand::random::<f64>())).await;
    }
}

async fn serve(settings: &Settings) -> Result<Infallible, super::Ended> {
    let (client, _driver) =
        session::connect(&settings.database_url, &settings.ledger, Purpose::Keeper).await?;
    let mut folder = Folder::default();
    loop {
        let caught_up = timeout(super::STEP_TIMEOUT, folder.step(&client)).await??;
        sleep(if caught_up { TICK } else { BEHIND_PAUSE }).await;
    }
}

/// Where folding stands. All of it may be lost: what is folded is in the database.
#[derive(Debug, Default)]
pub struct Folder {
    /// The next claim, as soon as it has settled. Made early: under load the horizon is always a little behind.
    mark: Option<Mark>,
    turn: Option<Turn>,
    /// Busy pairs, at most [`PAIRS_MAX`].
    busy: Vec<Pair>,
}

/// One walk over all accounts that no write locks.
#[derive(Clone, Copy, Debug)]
struct Turn {
    generation: i64,
    /// What may be claimed at its end: it had settled before the walk began, so an account that the walk does not see has no
    /// posting up to there.
    claim: Option<Mark>,
    /// The last account that is done.
    after: i64,
}

/// What became of some pairs.
#[derive(PartialEq, Eq)]
enum Folded {
    /// Up to the horizon.
    Whole,
    /// The time was up.
    Partly,
    /// The snapshots were deleted meanwhile.
    Forgotten,
}

impl Folder {
    /// One step: folds the busy pairs, then the next accounts whose turn it is, for a limited time. Returns whether it got through
    /// them; step again soon if not.
    ///
    /// # Errors
    /// What Postgres says.
    pub async fn step(&mut self, client: &Client) -> Result<bool, Error> {
        let until = Instant::now() + STEP_BUDGET;
        let mark = match self.mark {
            Some(mark) => mark,
            None => snapshots::mark(client).await?,
        };
        // In a later statement than the mark: what has settled by now was drawn by then.
        let progress = snapshots::progress(client).await?;
        let settled_mark = Some(mark).filter(|mark| mark.position <= progress.settled);
        self.mark = if settled_mark.is_some() {
            Some(snapshots::mark(client).await?)
        } else {
            Some(mark)
        };
        if progress.folded.position >= progress.settled {
            self.turn = None;
            renew(client, settled_mark, &progress).await?;
            return Ok(true);
        }
        let turn = self
            .turn
            .take_if(|turn| turn.generation == progress.generation)
            .unwrap_or(Turn {
                generation: progress.generation,
                claim: settled_mark,
                after: 0,
            });
        let busy = std::mem::take(&mut self.busy);
        if self.fold(client, busy, &progress, until).await? == Folded::Forgotten {
            return Ok(false);
        }
        self.walk(client, turn, &progress, until).await
    }

    /// Folds the accounts whose turn it is.
    async fn walk(
        &mut self,
        client: &Client,
        turn: Turn,
        progress: &Progress,
        until: Instant,
    ) -> Result<bool, Error> {
        let accounts = snapshots::unlocked_accounts(client, turn.after, SLICE).await?;
        let pairs = snapshots::unfolded(client, &accounts, progress).await?;
        match self.fold(client, pairs, progress, until).await? {
            Folded::Whole => {}
            Folded::Partly => {
                self.turn = Some(turn);
                return Ok(false);
            }
            Folded::Forgotten => return Ok(false),
        }
        let more = i64::try_from(accounts.len()).is_ok_and(|found| found == SLICE);
        if let Some(after) = accounts.last().copied().filter(|_| more) {
            self.turn = Some(Turn { after, ..turn });
        } else if let Some(mark) = turn.claim {
            snapshots::claim(client, mark, turn.generation).await?;
        }
        Ok(true)
    }

    /// Folds these pairs up to the horizon, if time allows.
    async fn fold(
        &mut self,
        client: &Client,
        mut pairs: Vec<Pair>,
        progress: &Progress,
        until: Instant,
    ) -> Result<Folded, Error> {
        while !pairs.is_empty() {
            let rest = pairs.split_off(pairs.len().min(PAIRS_MAX));
            let folded = snapshots::fold(client, &pairs, progress).await?;
            if folded.len() < pairs.len() {
                return Ok(Folded::Forgotten);
            }
            pairs = rest;
            for (pair, rows) in folded {
                if rows >= BUSY_ROWS && self.busy.len() < PAIRS_MAX && !self.busy.contains(&pair) {
                    self.busy.push(pair.clone());
                }
                if rows >= ROWS_MAX {
                    pairs.push(pair);
                }
            }
            if !pairs.is_empty() && Instant::now() >= until {
                return Ok(Folded::Partly);
            }
        }
        Ok(Folded::Whole)
    }
}

/// Everything settled is folded. The claim is only made younger when it has become old: nothing happens most of the time.
async fn renew(client: &Client, mark: Option<Mark>, progress: &Progress) -> Result<(), Error> {
    match mark {
        Some(mark) if mark.drawn_at.duration_since(progress.folded.drawn_at) > CLAIM_AGE_MAX => {
            snapshots::claim(client, mark, progress.generation).await
        }
        _ => Ok(()),
    }
}
