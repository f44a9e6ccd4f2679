//! The statements of one batch: lock, read, write. All of them run in one transaction of a lane's session.
//!
//! A statement that reads what a lock protects is a later statement than the lock: a lock wait does not refresh the
//! snapshot of its own statement. Statements of a phase are pipelined, each bound when it runs, and polled in order.

mod numbers;
mod write;

pub use numbers::Numbers;
pub use write::{NewEvent, write};

use super::numeric::Numeric;
use super::tid::Tid;
use crate::domain::decide::DedupeKey;
use crate::domain::{
    Address, Amount, Asset, Draft, Guard, IdempotencyKey, State, Stored, Subject, UserState,
};
use futures_util::future::{join, join4};
use jiff::Timestamp;
use numbers::Found;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use tokio_postgres::{Client, Error, Row, Statement};

/// The numbers of names. They never change, so they are read before the locks.
const FIND_USERS: &str = "-- find_users
SELECT user_no, subject FROM users WHERE subject = ANY($1::text[])";

const FIND_ACCOUNTS: &str = "-- find_accounts
SELECT account_no, address FROM accounts WHERE address = ANY($1::text[])";

/// Lock the users that the batch needs, in the order of their numbers: that of the sorted sub-select, since LATERAL with LIMIT leaves
/// nothing but a nested loop over it. While somebody holds a snapshot, an index has an entry for each of a row's last versions, the
/// current one mostly last: so it is walked backwards, which takes a range, and no further than to the row.
const LOCK_USERS: &str = "-- lock_users
SELECT u.user_no, u.status, u.sequence, u.head_hash, u.last_at, u.ctid
FROM (SELECT user_no FROM unnest($1::bigint[]) AS t(user_no) ORDER BY user_no) t
CROSS JOIN LATERAL (
    SELECT user_no, status, sequence, head_hash, last_at, ctid FROM users
    WHERE user_no >= t.user_no AND user_no <= t.user_no
    ORDER BY user_no DESC LIMIT 1 FOR NO KEY UPDATE) u";

/// Lock the guarded balances that it touches, likewise.
const LOCK_BALANCES: &str = "-- lock_balances
SELECT t.n, b.amount, b.ctid
FROM (SELECT * FROM unnest($1::bigint[], $2::text[]) WITH ORDINALITY AS t(account_no, asset, n)
      ORDER BY account_no, asset COLLATE \"C\") t
CROSS JOIN LATERAL (
    SELECT amount, ctid FROM balances
    WHERE (account_no, asset) >= (t.account_no, t.asset) AND (account_no, asset) <= (t.account_no, t.asset)
    ORDER BY account_no DESC, asset DESC LIMIT 1 FOR NO KEY UPDATE) b";

/// Lock the business keys that it takes, likewise.
const LOCK_KEYS: &str = "-- lock_keys
SELECT k.namespace, k.key, k.position, k.until_at
FROM unnest($1::text[], $2::text[]) AS t(namespace, key)
JOIN business_keys k ON k.namespace = t.namespace AND k.key = t.key
ORDER BY k.namespace, k.key FOR NO KEY UPDATE OF k";

/// The upper bound of `recorded_at` spares the look into the partitions made ahead. OFFSET 0 keeps each look-up one of its own:
/// joined freely, a plan made while the tables were small reads the whole partition once a batch (measured: 670 ms).
const READ_DUPLICATES: &str = "-- read_duplicates
SELECT t.n, e.event_id, e.fingerprint, e.record
FROM unnest($1::bigint[], $2::text[], $3::text[]) WITH ORDINALITY AS t(user_no, writer, key, n)
CROSS JOIN LATERAL (
    SELECT event_id, fingerprint, record FROM events
    WHERE user_no = t.user_no AND hashtextextended(idempotency_key, 0) = hashtextextended(t.key, 0)
      AND idempotency_key = t.key AND writer = t.writer AND recorded_at > $4 AND recorded_at < $5
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
INSERT INTO postings (position, leg, account_no, asset, amount, recorded_at)
SELECT * FROM unnest($1::bigint[], $2::smallint[], $3::bigint[], $4::text[], $5::numeric[], $6::timestamptz[])";

const INSERT_OUTBOX: &str = "-- insert_outbox
INSERT INTO outbox (position, shard, user_no, recorded_at, traceparent)
SELECT position, (user_no % 16)::smallint, user_no, recorded_at, traceparent
FROM unnest($1::bigint[], $2::bigint[], $3::timestamptz[], $4::text[]) AS t(position, user_no, recorded_at, traceparent)";

/// Locked rows stay where they are. To go there spares a second look-up in an index which, while somebody holds a snapshot, has an entry
/// for each of a row's last versions. The number is compared all the same; `+ 0` keeps the planner from looking it up.
const UPDATE_USERS: &str = "-- update_users
UPDATE users u SET sequence = t.sequence, head_hash = t.head_hash, last_at = t.last_at
FROM unnest($1::tid[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bytea[], $6::timestamptz[])
     AS t(place, user_no, sequence_before, sequence, head_hash, last_at)
WHERE u.ctid = t.place AND u.user_no + 0 = t.user_no AND u.sequence = t.sequence_before";

const UPDATE_BALANCES: &str = "-- update_balances
UPDATE balances b SET amount = t.amount
FROM unnest($1::tid[], $2::bigint[], $3::numeric[], $4::numeric[]) AS t(place, account_no, amount_before, amount)
WHERE b.ctid = t.place AND b.account_no + 0 = t.account_no AND b.amount = t.amount_before";

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
    FIND_USERS,
    FIND_ACCOUNTS,
    LOCK_USERS,
    LOCK_BALANCES,
    LOCK_KEYS,
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
    find_users: Statement,
    find_accounts: Statement,
    lock_users: Statement,
    lock_balances: Statement,
    lock_keys: Statement,
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
            find_users: client.prepare(FIND_USERS).await?,
            find_accounts: client.prepare(FIND_ACCOUNTS).await?,
            lock_users: client.prepare(LOCK_USERS).await?,
            lock_balances: client.prepare(LOCK_BALANCES).await?,
            lock_keys: client.prepare(LOCK_KEYS).await?,
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

/// What a batch names, without repetition; what is locked by name is sorted.
#[derive(Default)]
struct Wanted<'a> {
    users: BTreeSet<&'a Subject>,
    accounts: BTreeSet<&'a Address>,
    balances: HashSet<(&'a Address, &'a Asset)>,
    keys: BTreeSet<(&'a str, &'a str)>,
    duplicates: HashSet<(&'a Subject, &'a Subject, &'a IdempotencyKey)>,
    tokens: BTreeSet<(&'a str, &'a str, &'a str, i64)>,
}

impl<'a> Wanted<'a> {
    fn by(drafts: &[&'a Draft]) -> Self {
        let mut wanted = Wanted::default();
        for draft in drafts {
            wanted.users.extend(draft.locked_users());
            for (account, asset) in draft.touched() {
                wanted.accounts.insert(&account.address);
                if let Guard::Floor(_) = account.guard {
                    wanted.balances.insert((&account.address, asset));
                }
            }
            for unique in &draft.unique {
                wanted.keys.insert((&unique.namespace, &unique.key));
            }
            let by = &draft.principal;
            wanted
                .duplicates
                .insert((&draft.subject, &by.subject, &draft.key));
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
    users_before: HashMap<Subject, (Tid, UserState)>,
    balances_before: HashMap<(Address, Asset), (Tid, Amount)>,
}

/// Finds the numbers of the names, then begins the transaction, takes the locks, and reads what they protect: one round trip, two
/// when there are names that the session has not met. `patience` shortens the wait for a lock, in milliseconds.
///
/// # Errors
/// [`BatchError`]; the transaction is then to be rolled back.
pub async fn lock(
    client: &Client,
    statements: &Statements,
    numbers: &mut Numbers,
    drafts: &[&Draft],
    remembered_since: Timestamp,
    patience: Option<u16>,
) -> Result<Locked, BatchError> {
    let wanted = Wanted::by(drafts);
    let found = numbers.find(client, statements, &wanted).await?;
    let begin = match patience {
        Some(patience) => format!("BEGIN; SET LOCAL lock_timeout = {patience}"),
        None => "BEGIN".to_owned(),
    };
    let users: Vec<i64> = found.users.values().copied().collect();
    let places = Places::of(&wanted, &found);
    let (namespaces, keys): (Vec<&str>, Vec<&str>) = wanted.keys.iter().copied().unzip();
    let asked = Asked::of(&wanted, &found);
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
    let ((begun, users, balances, keys), (duplicates, revoked, clock, positions)) = join(
        join4(
            client.batch_execute(&begin),
            client.query(&statements.lock_users, &[&users]),
            client.query(
                &statements.lock_balances,
                &[&places.accounts, &places.assets],
            ),
            keys_or_none,
        ),
        join4(
            client.query(
                &statements.read_duplicates,
                &[
                    &asked.users,
                    &asked.writers,
                    &asked.keys,
                    &remembered_since,
                    &until,
                ],
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
    let mut locked = Locked::new(found, users?, keys?)?;
    locked.read_balances(&places, balances?)?;
    locked.read(&asked, duplicates?, revoked?)?;
    locked.now = clock?.try_get(0)?;
    locked.positions = positions?
        .iter()
        .map(|row| row.try_get(0))
        .collect::<Result<_, _>>()?;
    Ok(locked)
}

/// The guarded balances of accounts that exist, column by column.
#[derive(Default)]
struct Places<'a> {
    names: Vec<(&'a Address, &'a Asset)>,
    accounts: Vec<i64>,
    assets: Vec<&'a str>,
}

impl<'a> Places<'a> {
    fn of(wanted: &Wanted<'a>, found: &Found) -> Self {
        let mut places = Places::default();
        for (address, asset) in &wanted.balances {
            if let Some(account) = found.accounts.get(*address) {
                places.names.push((address, asset));
                places.accounts.push(*account);
                places.assets.push(asset.as_str());
            }
        }
        places
    }
}

/// The duplicates that are looked for, of users that exist, column by column.
#[derive(Default)]
struct Asked<'a> {
    names: Vec<(&'a Subject, &'a Subject, &'a IdempotencyKey)>,
    users: Vec<i64>,
    writers: Vec<&'a str>,
    keys: Vec<&'a str>,
}

impl<'a> Asked<'a> {
    fn of(wanted: &Wanted<'a>, found: &Found) -> Self {
        let mut asked = Asked::default();
        for (subject, writer, key) in &wanted.duplicates {
            if let Some(user) = found.users.get(*subject) {
                asked.names.push((subject, writer, key));
                asked.users.push(*user);
                asked.writers.push(writer.as_str());
                asked.keys.push(key.as_str());
            }
        }
        asked
    }
}

/// What the row's first column, an ordinality, counts in.
fn counted_in<T: Copy>(names: &[T], row: &Row) -> Result<T, BatchError> {
    let nth: i64 = row.try_get(0)?;
    usize::try_from(nth)
        .ok()
        .and_then(|nth| names.get(nth.checked_sub(1)?).copied())
        .ok_or(BatchError::Corrupt("ordinality"))
}

fn second(at: i64) -> Timestamp {
    // Verified tokens carry times within the range of a Timestamp; the end of time counts as revoked by any revocation.
    Timestamp::from_second(at).unwrap_or(Timestamp::MIN)
}

impl Locked {
    fn new(found: Found, users: Vec<Row>, keys: Vec<Row>) -> Result<Self, BatchError> {
        let names: HashMap<i64, &Subject> = found.users.iter().map(|(s, n)| (*n, s)).collect();
        if users.len() != names.len() {
            return Err(BatchError::Corrupt("a user that is gone"));
        }
        let mut state = State::default();
        state.users.reserve(users.len());
        let mut users_before = HashMap::with_capacity(users.len());
        for row in users {
            let status: &str = row.try_get(1)?;
            let sequence: i64 = row.try_get(2)?;
            let user = UserState {
                frozen: status != "active",
                sequence: u64::try_from(sequence).map_err(|_| BatchError::Corrupt("sequence"))?,
                head: hash(&row, 3)?,
                last_at: row.try_get(4)?,
            };
            let subject = names
                .get(&row.try_get(0)?)
                .ok_or(BatchError::Corrupt("user"))?;
            users_before.insert((*subject).clone(), (row.try_get(5)?, user.clone()));
            state.users.insert((*subject).clone(), user);
        }
        state.accounts.extend(found.accounts.keys().cloned());
        let mut key_positions = HashMap::new();
        for row in keys {
            let name: (String, String) = (row.try_get(0)?, row.try_get(1)?);
            key_positions.insert(name.clone(), row.try_get(2)?);
            state.unique.insert(name, row.try_get(3)?);
        }
        Ok(Locked {
            users_before,
            state,
            now: Timestamp::UNIX_EPOCH,
            positions: Vec::new(),
            user_nos: found.users,
            account_nos: found.accounts,
            key_positions,
            balances_before: HashMap::new(),
        })
    }

    fn read_balances(&mut self, places: &Places<'_>, rows: Vec<Row>) -> Result<(), BatchError> {
        self.state.balances.reserve(rows.len());
        for row in rows {
            let (address, asset) = counted_in(&places.names, &row)?;
            let amount = row.try_get::<_, Numeric>(1)?.0;
            let name = (address.clone(), asset.clone());
            self.balances_before
                .insert(name.clone(), (row.try_get(2)?, amount));
            self.state.balances.insert(name, amount);
        }
        Ok(())
    }

    fn read(
        &mut self,
        asked: &Asked<'_>,
        duplicates: Vec<Row>,
        revoked: Vec<Row>,
    ) -> Result<(), BatchError> {
        for row in duplicates {
            let (subject, writer, key) = counted_in(&asked.names, &row)?;
            let key = DedupeKey {
                subject: subject.clone(),
                writer: writer.clone(),
                key: key.clone(),
            };
            let stored = Stored {
                event_id: row.try_get(1)?,
                fingerprint: hash(&row, 2)?,
                record: Arc::from(row.try_get::<_, &str>(3)?),
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
