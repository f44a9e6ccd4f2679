//! Balances of accounts that no write locks: a snapshot of what their postings sum to, and the postings after it.
//!
//! A snapshot is an absolute truth ("the postings up to this position sum to this"), so it does not matter who writes it, how often,
//! or whether it is lost. Nothing here locks, and no write of an event knows of it.
//!
//! Every statement that reads postings has a lower bound of `recorded_at`, so that it touches the partitions of the tail only, at 60
//! partitions as at two. It is safe: a transaction reads the clock before it draws its positions (`ledger::READ_CLOCK`,
//! `ledger::DRAW_POSITIONS`), `recorded_at` is that clock or later, and the time-outs of a lane's session and phases end a
//! transaction within a minute. So what was drawn after a moment was not recorded a day before it. The bound stands at the
//! beginning of a partition (`partitions::begins`): it must not refuse rows one by one, which would cost a look at each.

use super::partitions;
use super::reads::Balance;
use futures_util::future::join3;
use jiff::{SignedDuration, Timestamp};
use tokio_postgres::{Client, Error, Statement};

/// How much earlier than a position was drawn its event may be recorded, generously: stepped clocks, too.
const MARGIN: SignedDuration = SignedDuration::from_hours(24);
/// How old the claim of the keeper may be for the first attempt of a read.
const CLAIM_AGE_MAX: SignedDuration = SignedDuration::from_hours(24);
/// Most assets of one account that are answered.
const ASSETS_MAX: i64 = 1_000;
/// Account and asset pairs of one fold.
pub const PAIRS_MAX: usize = 25;
/// Postings of one pair that one fold adds. More than an event can have in 64 KiB, so that each fold gets on; few enough for the
/// statement's time-out when every one of them is read from disk.
pub const ROWS_MAX: i64 = 2_000;

/// `held` finds an account's assets one by one, each by a look into the index: a DISTINCT would read all postings. Snapshot and tail
/// are read by one statement, in one snapshot of the database: a newer row beside an older tail would count postings twice.
/// Without a claim as young as $2 it finds no asset: the bound $3 would then leave postings out. An account that was opened with a
/// floor has no snapshots.
pub const SUMMED_BALANCES: &str = "-- summed_balances
WITH RECURSIVE account AS (
    SELECT a.account_no, CASE WHEN a.guard = 'floor' THEN timestamptz 'epoch' ELSE f.drawn_at END AS drawn_at
    FROM snapshot_horizon f LEFT JOIN accounts a ON a.address = $1::text
), held AS (
    SELECT account_no, '' COLLATE \"C\" AS asset FROM account WHERE drawn_at >= $2::timestamptz
    UNION ALL
    SELECT h.account_no, n.asset
    FROM held h CROSS JOIN LATERAL (
        SELECT min(either.asset) AS asset FROM (
            (SELECT p.asset FROM postings p
             WHERE p.account_no = h.account_no AND p.asset > h.asset AND p.recorded_at >= $3::timestamptz
             ORDER BY p.asset LIMIT 1)
            UNION ALL
            (SELECT s.asset FROM balance_snapshots s
             WHERE s.account_no = h.account_no AND s.asset > h.asset ORDER BY s.asset LIMIT 1)) either
        HAVING min(either.asset) IS NOT NULL) n
)
SELECT account.drawn_at, sums.asset, sums.amount::text
FROM account LEFT JOIN (
    SELECT h.asset, coalesce(s.amount, 0) + coalesce(t.amount, 0) AS amount
    FROM held h
    LEFT JOIN LATERAL (
        SELECT s.position, s.amount FROM balance_snapshots s
        WHERE s.account_no = h.account_no AND s.asset = h.asset ORDER BY s.day DESC LIMIT 1) s ON true
    CROSS JOIN LATERAL (
        SELECT sum(p.amount) AS amount FROM postings p
        WHERE p.account_no = h.account_no AND p.asset = h.asset AND p.position > coalesce(s.position, 0)
          AND p.recorded_at >= $3) t
    WHERE h.asset <> '') sums ON true
ORDER BY sums.asset LIMIT $4::bigint";

/// Planning takes several times as long as reading, so a session plans once. The partitions that the bound rules out are then left
/// out when the plan begins to run; left to itself the server would compare the costs of all partitions, and plan anew each time.
const ONE_PLAN: &str = "SET plan_cache_mode = force_generic_plan";

const ANY_PLAN: &str = "RESET plan_cache_mode";

const MARK: &str = "-- mark_snapshots
SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END, clock_timestamp() FROM events_position_seq";

const PROGRESS: &str = "-- progress_of_snapshots
SELECT h.position, f.position, f.drawn_at, f.generation FROM horizon h CROSS JOIN snapshot_horizon f";

const CLAIM: &str = "-- claim_snapshots
UPDATE snapshot_horizon SET position = $1, drawn_at = $2 WHERE generation = $3 AND position <= $1";

const UNLOCKED_ACCOUNTS: &str = "-- unlocked_accounts
SELECT account_no FROM accounts WHERE guard <> 'floor' AND account_no > $1 ORDER BY account_no LIMIT $2";

/// Pairs of these accounts with postings after their snapshot. Two looks into an index for each asset of an account.
const UNFOLDED: &str = "-- unfolded_pairs
WITH RECURSIVE held AS (
    SELECT a.account_no, '' COLLATE \"C\" AS asset FROM unnest($1::bigint[]) AS a(account_no)
    UNION ALL
    SELECT h.account_no, n.asset
    FROM held h CROSS JOIN LATERAL (
        SELECT p.asset FROM postings p
        WHERE p.account_no = h.account_no AND p.asset > h.asset AND p.recorded_at >= $3::timestamptz
        ORDER BY p.asset LIMIT 1) n
)
SELECT h.account_no, h.asset
FROM held h
LEFT JOIN LATERAL (
    SELECT s.position FROM balance_snapshots s
    WHERE s.account_no = h.account_no AND s.asset = h.asset ORDER BY s.day DESC LIMIT 1) s ON true
CROSS JOIN LATERAL (
    SELECT FROM postings p
    WHERE p.account_no = h.account_no AND p.asset = h.asset AND p.position > coalesce(s.position, 0)
      AND p.position <= $2::bigint AND p.recorded_at >= $3
    LIMIT 1) t
WHERE h.asset <> ''";

/// Adds to each pair's latest snapshot at most $5 of the postings after it, up to the position $3. When that many are found, the
/// last position among them may have more legs, so it is left to the next fold. Of two folds at once the further one stays; a day
/// never goes back, so the latest day is the latest position.
const FOLD: &str = "-- fold_snapshots
WITH folded AS (
    SELECT w.account_no, w.asset, greatest(s.day, (clock_timestamp() AT TIME ZONE 'UTC')::date) AS day,
           CASE WHEN t.found < $5::bigint THEN $3::bigint ELSE t.last - 1 END AS position,
           coalesce(s.amount, 0) + t.amount AS amount, t.found
    FROM unnest($1::bigint[], $2::text[]) AS w(account_no, asset)
    JOIN snapshot_horizon f ON f.generation = $6::bigint
    LEFT JOIN LATERAL (
        SELECT s.day, s.position, s.amount FROM balance_snapshots s
        WHERE s.account_no = w.account_no AND s.asset = w.asset ORDER BY s.day DESC LIMIT 1) s ON true
    CROSS JOIN LATERAL (
        SELECT count(*) AS found, max(r.last) AS last,
               sum(r.amount) FILTER (WHERE r.found < $5 OR r.position < r.last) AS amount
        FROM (
            SELECT q.position, q.amount, count(*) OVER () AS found, max(q.position) OVER () AS last
            FROM (
                SELECT p.position, p.amount FROM postings p
                WHERE p.account_no = w.account_no AND p.asset = w.asset AND p.position > coalesce(s.position, 0)
                  AND p.position <= $3 AND p.recorded_at >= $4::timestamptz
                ORDER BY p.position LIMIT $5) q) r) t
), written AS (
    INSERT INTO balance_snapshots AS old (account_no, asset, day, position, amount)
    SELECT account_no, asset, day, position, amount FROM folded WHERE amount IS NOT NULL
    ORDER BY account_no, asset
    ON CONFLICT (account_no, asset, day) DO UPDATE SET position = excluded.position, amount = excluded.amount
    WHERE old.position < excluded.position
)
SELECT account_no, asset, found FROM folded";

/// Every statement of this file.
pub const STATEMENTS: &[&str] = &[
    SUMMED_BALANCES,
    MARK,
    PROGRESS,
    CLAIM,
    UNLOCKED_ACCOUNTS,
    UNFOLDED,
    FOLD,
];

/// The balances of an account that no write locks, all of one moment; `statement` is [`SUMMED_BALANCES`], prepared. Costs the tail
/// since the keeper's last fold; when that was more than a day ago, a second attempt costs the tail since then, or all postings if
/// it never was.
///
/// # Errors
/// The driver's.
pub async fn summed_balances(
    client: &Client,
    statement: &Statement,
    address: &str,
) -> Result<Vec<Balance>, Error> {
    let hoped = Timestamp::now()
        .checked_sub(CLAIM_AGE_MAX)
        .unwrap_or(Timestamp::MIN);
    let (drawn_at, balances) = sums(client, statement, address, hoped).await?;
    if drawn_at >= hoped {
        return Ok(balances);
    }
    // A claim only ever grows younger, unless somebody deletes snapshots between the two statements.
    let (again, balances) = sums(client, statement, address, drawn_at).await?;
    if again >= drawn_at {
        return Ok(balances);
    }
    sums(client, statement, address, Timestamp::UNIX_EPOCH)
        .await
        .map(|(_, balances)| balances)
}

/// The moment of the claim, and, if it is at least as young as `drawn_at`, the balances.
async fn sums(
    client: &Client,
    statement: &Statement,
    address: &str,
    drawn_at: Timestamp,
) -> Result<(Timestamp, Vec<Balance>), Error> {
    let since = since(drawn_at);
    // One round trip. The last one is sent whatever becomes of the others.
    let (set, rows, reset) = join3(
        client.batch_execute(ONE_PLAN),
        client.query(statement, &[&address, &drawn_at, &since, &ASSETS_MAX]),
        client.batch_execute(ANY_PLAN),
    )
    .await;
    set?;
    reset?;
    let mut claimed = Timestamp::UNIX_EPOCH;
    let rows = rows?;
    let mut balances = Vec::with_capacity(rows.len());
    for row in rows {
        claimed = row.try_get(0)?;
        if let Some(asset) = row.try_get(1)? {
            balances.push(Balance {
                asset,
                balance: row.try_get(2)?,
            });
        }
    }
    Ok((claimed, balances))
}

/// The bound of `recorded_at` for what was drawn after a moment.
#[must_use]
pub fn since(drawn_at: Timestamp) -> Timestamp {
    partitions::begins(drawn_at.checked_sub(MARGIN).unwrap_or(Timestamp::MIN))
}

/// A position, and a moment before which none beyond it was drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The last position drawn.
    pub position: i64,
    /// When that was so.
    pub drawn_at: Timestamp,
}

/// The last position drawn so far, and the clock.
///
/// # Errors
/// What Postgres says.
pub async fn mark(client: &Client) -> Result<Mark, Error> {
    let row = client.query_one(MARK, &[]).await?;
    Ok(Mark {
        position: row.try_get(0)?,
        drawn_at: row.try_get(1)?,
    })
}

/// How far the ledger is settled, and how far it is folded.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The safe horizon.
    pub settled: i64,
    /// What was claimed last.
    pub folded: Mark,
    /// Of which making of the snapshots that is.
    pub generation: i64,
}

/// Reads both; a mark that is to be compared with it was made in an earlier statement.
///
/// # Errors
/// What Postgres says.
pub async fn progress(client: &Client) -> Result<Progress, Error> {
    let row = client.query_one(PROGRESS, &[]).await?;
    Ok(Progress {
        settled: row.try_get(0)?,
        folded: Mark {
            position: row.try_get(1)?,
            drawn_at: row.try_get(2)?,
        },
        generation: row.try_get(3)?,
    })
}

/// Claims that every posting up to the mark is in the snapshots of this generation.
///
/// # Errors
/// What Postgres says.
pub async fn claim(client: &Client, mark: Mark, generation: i64) -> Result<(), Error> {
    client
        .execute(CLAIM, &[&mark.position, &mark.drawn_at, &generation])
        .await
        .map(drop)
}

/// The next accounts that no write locks, by number, at most `limit`.
///
/// # Errors
/// What Postgres says.
pub async fn unlocked_accounts(client: &Client, after: i64, limit: i64) -> Result<Vec<i64>, Error> {
    let rows = client.query(UNLOCKED_ACCOUNTS, &[&after, &limit]).await?;
    rows.iter().map(|row| row.try_get(0)).collect()
}

/// One account in one asset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The account's number.
    pub account_no: i64,
    /// Of what.
    pub asset: String,
}

/// Those of these accounts' pairs that have settled postings after their snapshot.
///
/// # Errors
/// What Postgres says.
pub async fn unfolded(
    client: &Client,
    accounts: &[i64],
    progress: &Progress,
) -> Result<Vec<Pair>, Error> {
    let since = since(progress.folded.drawn_at);
    let rows = client
        .query(UNFOLDED, &[&accounts, &progress.settled, &since])
        .await?;
    rows.iter().map(pair).collect()
}

fn pair(row: &tokio_postgres::Row) -> Result<Pair, Error> {
    Ok(Pair {
        account_no: row.try_get(0)?,
        asset: row.try_get(1)?,
    })
}

/// Folds settled postings into the snapshots of these pairs, at most [`ROWS_MAX`] of each; returns each pair with how many were
/// found. Fewer than [`ROWS_MAX`] means that it is folded up to the horizon. No pair comes back when the snapshots were deleted
/// since `progress` was read: its bound would leave postings out.
///
/// # Errors
/// What Postgres says.
pub async fn fold(
    client: &Client,
    pairs: &[Pair],
    progress: &Progress,
) -> Result<Vec<(Pair, i64)>, Error> {
    let accounts: Vec<i64> = pairs.iter().map(|pair| pair.account_no).collect();
    let assets: Vec<&str> = pairs.iter().map(|pair| pair.asset.as_str()).collect();
    let since = since(progress.folded.drawn_at);
    let rows = client
        .query(
            FOLD,
            &[
                &accounts,
                &assets,
                &progress.settled,
                &since,
                &ROWS_MAX,
                &progress.generation,
            ],
        )
        .await?;
    rows.iter()
        .map(|row| Ok((pair(row)?, row.try_get(2)?)))
        .collect()
}
