//! The statements of one batch: lock, read, write. All of them run in one transaction of a lane's session.
//!
//! A statement that reads what a lock protects is a later statement than the lock: a lock wait does not refresh the
//! snapshot of its own statement. Statements of a phase are pipelined, each bound when it runs, and polled in order.

mod write;

pub use write::{NewEvent, write};

use super::numeric::Numeric;
use crate::domain::decide::DedupeKey;
use crate::domain::{
    Address, Amount, Asset, Draft, Guard, IdempotencyKey, State, Stored, Subject, UserState,
};
use futures_util::future::{join, join4, join5};
use jiff::Timestamp;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use tokio_postgres::{Client, Error, Row, Statement};

/// Lock the users that the batch needs, in the order of their numbers.
const LOCK_USERS: &str = "-- lock_users
SELECT user_no, subject, status, sequence, head_hash, last_at
FROM users WHERE subject = ANY($1::text[]) ORDER BY user_no FOR NO KEY UPDATE";

/// Lock the guarded balances that it touches, likewise. The ORDER BY stands in the locking statement itself.
const LOCK_BALANCES: &str = "-- lock_balances
SELECT a.address, b.asset, b.amount
FROM unnest($1::text[], $2::text[]) AS t(address, asset)
JOIN accounts a ON a.address = t.address
JOIN balances b ON b.account_no = a.account_no AND b.asset = t.asset
ORDER BY b.account_no, b.asset FOR NO KEY UPDATE OF b";

/// Lock the business keys that it takes, likewise.
const LOCK_KEYS: &str = "-- lock_keys
SELECT k.namespace, k.key, k.position, k.until_at
FROM unnest($1::text[], $2::text[]) AS t(namespace, key)
JOIN business_keys k ON k.namespace = t.namespace AND k.key = t.key
ORDER BY k.namespace, k.key FOR NO KEY UPDATE OF k";

const READ_ACCOUNTS: &str = "-- read_accounts
SELECT account_no, address FROM accounts WHERE address = ANY($1::text[])";

/// The upper bound of `recorded_at` spares the look into the partitions made ahead. OFFSET 0 keeps each look-up one of its own:
/// joined freely, a plan made while the tables were small reads the whole partition once a batch (measured: 670 ms).
const READ_DUPLICATES: &str = "-- read_duplicates
SELECT t.subject, t.writer, t.key, e.event_id, e.fingerprint, e.record
FROM unnest($1::text[], $2::text[], $3::text[]) AS t(subject, writer, key)
CROSS JOIN LATERAL (SELECT user_no FROM users WHERE subject = t.subject OFFSET 0) u
CROSS JOIN LATERAL (
    SELECT event_id, fingerprint, record FROM events
    WHERE user_no = u.user_no AND idempotency_key = t.key AND writer = t.writer AND recorded_at > $4 AND recorded_at < $5
    OFFSET 0) e";

const READ_REVOKED: &str = "-- read_revoked
SELECT t.issuer, t.token_id
FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[]) AS t(issuer, token_id, subject, issued_at)
WHERE EXISTS (SELECT FROM revoked_tokens r WHERE r.issuer = t.issuer AND r.token_id = t.token_id)
   OR EXISTS (SELECT FROM revoked_tokens r WHERE r.issuer = t.issuer AND r.subject = t.subject AND r.issued_before > t.issued_at)";

/// The transaction takes its id here, before it draws a position: the safe horizon rests on that order.
const READ_CLOCK: &str = "-- read_clock
SELECT clock_timestamp(), pg_current_xact_id()::text";

const DRAW_POSITIONS: &str = "-- draw_positions
SELECT nextval('events_position_seq') FROM generate_series(1, $1::int)";

const INSERT_USERS: &str = "-- insert_users
INSERT INTO users (subject, sequence, head_hash, last_at)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::bytea[], $4::timestamptz[]) AS t(subject, sequence, head_hash, last_at)
ORDER BY subject RETURNING user_no, subject";

const INSERT_ACCOUNTS: &str = "-- insert_accounts
INSERT INTO accounts (address, owner, guard, floor)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::numeric[]) AS t(address, owner, guard, floor)
ORDER BY address RETURNING account_no, address";

const INSERT_BALANCES: &str = "-- insert_balances
INSERT INTO balances (account_no, asset, amount)
SELECT * FROM unnest($1::bigint[], $2::text[], $3::numeric[]) AS t(account_no, asset, amount)
ORDER BY account_no, asset";

const INSERT_EVENTS: &str = "-- insert_events
INSERT INTO events (position, user_no, sequence, event_id, type, writer, idempotency_key, fingerprint, record,
                    recorded_at, effective_at)
SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::uuid[], $5::text[], $6::text[], $7::text[],
                     $8::bytea[], $9::text[], $10::timestamptz[], $11::timestamptz[])";

const INSERT_POSTINGS: &str = "-- insert_postings
INSERT INTO postings (position, leg, account_no, asset, amount, recorded_at, effective_at)
SELECT * FROM unnest($1::bigint[], $2::smallint[], $3::bigint[], $4::text[], $5::numeric[], $6::timestamptz[],
                     $7::timestamptz[])";

const INSERT_OUTBOX: &str = "-- insert_outbox
INSERT INTO outbox (position, shard, user_no, recorded_at, traceparent)
SELECT position, (user_no % 16)::smallint, user_no, recorded_at, traceparent
FROM unnest($1::bigint[], $2::bigint[], $3::timestamptz[], $4::text[]) AS t(position, user_no, recorded_at, traceparent)";

const UPDATE_USERS: &str = "-- update_users
UPDATE users u SET sequence = t.sequence, head_hash = t.head_hash, last_at = t.last_at
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bytea[], $5::timestamptz[])
     AS t(user_no, sequence_before, sequence, head_hash, last_at)
WHERE u.user_no = t.user_no AND u.sequence = t.sequence_before";

const UPDATE_BALANCES: &str = "-- update_balances
UPDATE balances b SET amount = t.amount
FROM unnest($1::bigint[], $2::text[], $3::numeric[], $4::numeric[]) AS t(account_no, asset, amount_before, amount)
WHERE b.account_no = t.account_no AND b.asset = t.asset AND b.amount = t.amount_before";

const INSERT_KEYS: &str = "-- insert_keys
INSERT INTO business_keys (namespace, key, position, until_at)
SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::timestamptz[]) AS t(namespace, key, position, until_at)
ORDER BY namespace, key";

const UPDATE_KEYS: &str = "-- update_keys
UPDATE business_keys k SET position = t.position, until_at = t.until_at
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::timestamptz[])
     AS t(namespace, key, position_before, position, until_at)
WHERE k.namespace = t.namespace AND k.key = t.key AND k.position = t.position_before";

/// Every statement of this file, for the test that prepares them all.
pub const STATEMENTS: &[&str] = &[
    LOCK_USERS,
    LOCK_BALANCES,
    LOCK_KEYS,
    READ_ACCOUNTS,
    READ_DUPLICATES,
    READ_REVOKED,
    READ_CLOCK,
    DRAW_POSITIONS,
    INSERT_USERS,
    INSERT_ACCOUNTS,
    INSERT_BALANCES,
    INSERT_EVENTS,
    INSERT_POSTINGS,
    INSERT_OUTBOX,
    UPDATE_USERS,
    UPDATE_BALANCES,
    INSERT_KEYS,
    UPDATE_KEYS,
];

/// The statements, prepared on one session.
pub struct Statements {
    lock_users: Statement,
    lock_balances: Statement,
    lock_keys: Statement,
    read_accounts: Statement,
    read_duplicates: Statement,
    read_revoked: Statement,
    read_clock: Statement,
    draw_positions: Statement,
    insert_users: Statement,
    insert_accounts: Statement,
    insert_balances: Statement,
    insert_events: Statement,
    insert_postings: Statement,
    insert_outbox: Statement,
    update_users: Statement,
    update_balances: Statement,
    insert_keys: Statement,
    update_keys: Statement,
}

impl Statements {
    /// Prepares them all.
    ///
    /// # Errors
    /// What Postgres says.
    pub async fn prepare(client: &Client) -> Result<Self, Error> {
        Ok(Statements {
            lock_users: client.prepare(LOCK_USERS).await?,
            lock_balances: client.prepare(LOCK_BALANCES).await?,
            lock_keys: client.prepare(LOCK_KEYS).await?,
            read_accounts: client.prepare(READ_ACCOUNTS).await?,
            read_duplicates: client.prepare(READ_DUPLICATES).await?,
            read_revoked: client.prepare(READ_REVOKED).await?,
            read_clock: client.prepare(READ_CLOCK).await?,
            draw_positions: client.prepare(DRAW_POSITIONS).await?,
            insert_users: client.prepare(INSERT_USERS).await?,
            insert_accounts: client.prepare(INSERT_ACCOUNTS).await?,
            insert_balances: client.prepare(INSERT_BALANCES).await?,
            insert_events: client.prepare(INSERT_EVENTS).await?,
            insert_postings: client.prepare(INSERT_POSTINGS).await?,
            insert_outbox: client.prepare(INSERT_OUTBOX).await?,
            update_users: client.prepare(UPDATE_USERS).await?,
            update_balances: client.prepare(UPDATE_BALANCES).await?,
            insert_keys: client.prepare(INSERT_KEYS).await?,
            update_keys: client.prepare(UPDATE_KEYS).await?,
        })
    }
}

/// Why a phase failed.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// What Postgres says; the first statement of the phase that failed.
    #[error("postgres: {0}")]
    Postgres(#[from] Error),
    /// A compare-and-set met another value than was read under the lock.
    #[error("{0} changed under the lock")]
    Changed(&'static str),
    /// A stored value is outside its range.
    #[error("a stored value is out of range: {0}")]
    Corrupt(&'static str),
}

/// What a batch names: every list sorted and without repetition.
#[derive(Default)]
struct Wanted<'a> {
    users: BTreeSet<&'a str>,
    addresses: BTreeSet<&'a str>,
    balances: BTreeSet<(&'a str, &'a str)>,
    keys: BTreeSet<(&'a str, &'a str)>,
    duplicates: BTreeSet<(&'a str, &'a str, &'a str)>,
    tokens: BTreeSet<(&'a str, &'a str, &'a str, i64)>,
}

impl<'a> Wanted<'a> {
    fn by(drafts: &[&'a Draft]) -> Self {
        let mut wanted = Wanted::default();
        for draft in drafts {
            wanted
                .users
                .extend(draft.locked_users().map(Subject::as_str));
            for (account, asset) in draft.touched() {
                wanted.addresses.insert(account.address.as_str());
                if let Guard::Floor(_) = account.guard {
                    wanted
                        .balances
                        .insert((account.address.as_str(), asset.as_str()));
                }
            }
            for unique in &draft.unique {
                wanted.keys.insert((&unique.namespace, &unique.key));
            }
            let by = &draft.principal;
            wanted.duplicates.insert((
                draft.subject.as_str(),
                by.subject.as_str(),
                draft.key.as_str(),
            ));
            wanted
                .tokens
                .insert((&by.issuer, &by.token_id, by.subject.as_str(), by.issued_at));
        }
        wanted
    }
}

/// What a batch read under its locks.
pub struct Locked {
    /// What `decide` sees.
    pub state: State,
    /// The database's clock.
    pub now: Timestamp,
    /// One position for each draft, rising.
    positions: Vec<i64>,
    user_nos: HashMap<Subject, i64>,
    account_nos: HashMap<Address, i64>,
    key_positions: HashMap<(String, String), i64>,
    users_before: HashMap<Subject, UserState>,
    balances_before: HashMap<(Address, Asset), Amount>,
}

/// Begins the transaction, takes the locks, then reads what they protect: one round trip. `patience` shortens the wait for a
/// lock, in milliseconds.
///
/// # Errors
/// [`BatchError`]; the transaction is then to be rolled back.
pub async fn lock(
    client: &Client,
    statements: &Statements,
    drafts: &[&Draft],
    remembered_since: Timestamp,
    patience: Option<u16>,
) -> Result<Locked, BatchError> {
    let wanted = Wanted::by(drafts);
    let begin = match patience {
        Some(patience) => format!("BEGIN; SET LOCAL lock_timeout = {patience}"),
        None => "BEGIN".to_owned(),
    };
    let users: Vec<&str> = wanted.users.into_iter().collect();
    let addresses: Vec<&str> = wanted.addresses.into_iter().collect();
    let (places, assets): (Vec<&str>, Vec<&str>) = wanted.balances.into_iter().unzip();
    let (namespaces, keys): (Vec<&str>, Vec<&str>) = wanted.keys.into_iter().unzip();
    let subjects: Vec<&str> = wanted.duplicates.iter().map(|d| d.0).collect();
    let writers: Vec<&str> = wanted.duplicates.iter().map(|d| d.1).collect();
    let names: Vec<&str> = wanted.duplicates.iter().map(|d| d.2).collect();
    let issuers: Vec<&str> = wanted.tokens.iter().map(|t| t.0).collect();
    let tokens: Vec<&str> = wanted.tokens.iter().map(|t| t.1).collect();
    let holders: Vec<&str> = wanted.tokens.iter().map(|t| t.2).collect();
    let issued: Vec<Timestamp> = wanted.tokens.iter().map(|t| second(t.3)).collect();
    let until = remembered_since.max(Timestamp::now()) + jiff::SignedDuration::from_hours(24);
    let count = i32::try_from(drafts.len()).map_err(|_| BatchError::Corrupt("batch size"))?;

    let keys_or_none = async {
        if keys.is_empty() {
            Ok(Vec::new())
        } else {
            client
                .query(&statements.lock_keys, &[&namespaces, &keys])
                .await
        }
    };
    let ((begun, users, balances, keys, accounts), (duplicates, revoked, clock, positions)) = join(
        join5(
            client.batch_execute(&begin),
            client.query(&statements.lock_users, &[&users]),
            client.query(&statements.lock_balances, &[&places, &assets]),
            keys_or_none,
            client.query(&statements.read_accounts, &[&addresses]),
        ),
        join4(
            client.query(
                &statements.read_duplicates,
                &[&subjects, &writers, &names, &remembered_since, &until],
            ),
            client.query(
                &statements.read_revoked,
                &[&issuers, &tokens, &holders, &issued],
            ),
            client.query_one(&statements.read_clock, &[]),
            client.query(&statements.draw_positions, &[&count]),
        ),
    )
    .await;
    begun?;
    let mut locked = Locked::new(users?, balances?, keys?, accounts?)?;
    locked.read(duplicates?, revoked?)?;
    locked.now = clock?.try_get(0)?;
    locked.positions = positions?
        .iter()
        .map(|row| row.try_get(0))
        .collect::<Result<_, _>>()?;
    Ok(locked)
}

fn second(at: i64) -> Timestamp {
    // Verified tokens carry times within the range of a Timestamp; the end of time counts as revoked by any revocation.
    Timestamp::from_second(at).unwrap_or(Timestamp::MIN)
}

impl Locked {
    fn new(
        users: Vec<Row>,
        balances: Vec<Row>,
        keys: Vec<Row>,
        accounts: Vec<Row>,
    ) -> Result<Self, BatchError> {
        let mut locked = Locked {
            state: State::default(),
            now: Timestamp::UNIX_EPOCH,
            positions: Vec::new(),
            user_nos: HashMap::with_capacity(users.len()),
            account_nos: HashMap::with_capacity(accounts.len()),
            key_positions: HashMap::new(),
            users_before: HashMap::new(),
            balances_before: HashMap::new(),
        };
        for row in users {
            let subject = subject(&row, 1)?;
            let status: &str = row.try_get(2)?;
            let sequence: i64 = row.try_get(3)?;
            locked.user_nos.insert(subject.clone(), row.try_get(0)?);
            let user = UserState {
                frozen: status != "active",
                sequence: u64::try_from(sequence).map_err(|_| BatchError::Corrupt("sequence"))?,
                head: hash(&row, 4)?,
                last_at: row.try_get(5)?,
            };
            locked.state.users.insert(subject, user);
        }
        for row in balances {
            let place = (address(&row, 0)?, Asset::from_canonical(row.try_get(1)?));
            locked
                .state
                .balances
                .insert(place, row.try_get::<_, Numeric>(2)?.0);
        }
        for row in keys {
            let name: (String, String) = (row.try_get(0)?, row.try_get(1)?);
            locked.key_positions.insert(name.clone(), row.try_get(2)?);
            locked.state.unique.insert(name, row.try_get(3)?);
        }
        for row in accounts {
            let address = address(&row, 1)?;
            locked.account_nos.insert(address.clone(), row.try_get(0)?);
            locked.state.accounts.insert(address);
        }
        locked.users_before.clone_from(&locked.state.users);
        locked.balances_before.clone_from(&locked.state.balances);
        Ok(locked)
    }

    fn read(&mut self, duplicates: Vec<Row>, revoked: Vec<Row>) -> Result<(), BatchError> {
        for row in duplicates {
            let key = DedupeKey {
                subject: subject(&row, 0)?,
                writer: subject(&row, 1)?,
                key: IdempotencyKey::exact(row.try_get(2)?)
                    .ok_or(BatchError::Corrupt("idempotency key"))?,
            };
            let stored = Stored {
                event_id: row.try_get(3)?,
                fingerprint: hash(&row, 4)?,
                record: Arc::from(row.try_get::<_, &str>(5)?),
            };
            self.state.stored.insert(key, stored);
        }
        for row in revoked {
            let token = (
                Arc::from(row.try_get::<_, &str>(0)?),
                Arc::from(row.try_get::<_, &str>(1)?),
            );
            self.state.revoked.insert(token);
        }
        Ok(())
    }
}

fn subject(row: &Row, column: usize) -> Result<Subject, BatchError> {
    Subject::parse(row.try_get(column)?).ok_or(BatchError::Corrupt("subject"))
}

fn address(row: &Row, column: usize) -> Result<Address, BatchError> {
    Address::parse(row.try_get(column)?).ok_or(BatchError::Corrupt("address"))
}

fn hash(row: &Row, column: usize) -> Result<[u8; 32], BatchError> {
    let bytes: &[u8] = row.try_get(column)?;
    bytes.try_into().map_err(|_| BatchError::Corrupt("hash"))
}

/// Ends the transaction and keeps it. Called only after every statement of it has succeeded: COMMIT of an aborted
/// transaction reports success.
///
/// # Errors
/// What Postgres says; when the session is lost, the outcome is not known.
pub async fn commit(client: &Client) -> Result<(), Error> {
    client.batch_execute("COMMIT").await
}

/// Ends the transaction and drops what it did.
///
/// # Errors
/// What Postgres says.
pub async fn roll_back(client: &Client) -> Result<(), Error> {
    client.batch_execute("ROLLBACK").await
}
