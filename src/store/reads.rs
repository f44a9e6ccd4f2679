//! Statements of the read endpoints, of readiness and of token revocation.
//!
//! Every text is constant and begins with its function's name; values are parameters, always. Amounts travel as text.

use crate::domain::{Address, IdempotencyKey, Principal, Subject, TypeName};
use deadpool_postgres::Client;
use jiff::{SignedDuration, Timestamp};
use tokio_postgres::Error;
use uuid::Uuid;

/// Most rows of a page.
pub const PAGE_MAX: u16 = 100;
/// Most assets of one account that are answered.
const ASSETS_MAX: i64 = 1_000;

const TOKEN_REVOKED: &str = "-- token_revoked
SELECT EXISTS (SELECT FROM revoked_tokens WHERE issuer = $1 AND token_id = $2)
    OR EXISTS (SELECT FROM revoked_tokens WHERE issuer = $1 AND subject = $3 AND issued_before > $4)";

const EVENT_BY_ID: &str = "-- event_by_id
SELECT e.record, (SELECT u.subject FROM users u WHERE u.user_no = e.user_no)
FROM events e
WHERE e.event_id = $1 AND e.recorded_at >= $2 AND e.recorded_at < $3";

const USER_HEAD: &str = "-- user_head
SELECT user_no, sequence FROM users WHERE subject = $1";

const USER_EVENTS: &str = "-- user_events
SELECT sequence, record FROM events
WHERE user_no = $1 AND sequence > $2 AND sequence <= $3 AND ($4::text IS NULL OR type = $4)
ORDER BY sequence LIMIT $5";

/// OFFSET 0 keeps the look-up by key: for the order and the limit a plan could walk the user's whole history instead.
const USER_EVENTS_BY_KEY: &str = "-- user_events_by_key
SELECT sequence, record FROM (
    SELECT sequence, record, type FROM events
    WHERE user_no = $1 AND hashtextextended(idempotency_key, 0) = hashtextextended($6, 0) AND idempotency_key = $6
    OFFSET 0) e
WHERE sequence > $2 AND sequence <= $3 AND ($4::text IS NULL OR type = $4)
ORDER BY sequence LIMIT $5";

const HORIZON: &str = "-- horizon
SELECT position FROM horizon";

const ALL_EVENTS: &str = "-- all_events
SELECT position, record FROM events
WHERE position > $1 AND position <= $2 AND ($3::text IS NULL OR type = $3)
ORDER BY position LIMIT $4";

// One statement, so that sequence and balances are of one moment.
const USER_STATE: &str = "-- user_state
SELECT u.status, u.sequence, u.head_hash, u.last_at, b.address, b.asset, b.amount
FROM (VALUES ($1::text)) AS asked (subject)
LEFT JOIN users u ON u.subject = asked.subject
LEFT JOIN LATERAL (
    SELECT a.address, b.asset, b.amount::text AS amount
    FROM accounts a JOIN balances b USING (account_no)
    WHERE a.owner = asked.subject AND (a.address, b.asset) > ($2::text, $3::text)
    ORDER BY a.address, b.asset LIMIT $4
) b ON true
ORDER BY b.address, b.asset";

const FLOOR_BALANCES: &str = "-- floor_balances
SELECT b.asset, b.amount::text
FROM accounts a JOIN balances b USING (account_no)
WHERE a.address = $1 ORDER BY b.asset LIMIT $2";

const REVOKE_TOKEN: &str = "-- revoke_token
INSERT INTO revoked_tokens AS old (issuer, token_id, expires_at) VALUES ($1, $2, $3)
ON CONFLICT (issuer, token_id) WHERE token_id IS NOT NULL DO UPDATE SET
    expires_at = CASE WHEN old.expires_at IS NULL OR excluded.expires_at IS NULL THEN NULL
                      ELSE greatest(old.expires_at, excluded.expires_at) END";

const REVOKE_SUBJECT: &str = "-- revoke_subject
INSERT INTO revoked_tokens AS old (issuer, subject, issued_before, expires_at)
VALUES ($1, $2, coalesce($3, clock_timestamp()), $4)
ON CONFLICT (issuer, subject) WHERE subject IS NOT NULL DO UPDATE SET
    issued_before = greatest(old.issued_before, excluded.issued_before),
    expires_at = CASE WHEN old.expires_at IS NULL OR excluded.expires_at IS NULL THEN NULL
                      ELSE greatest(old.expires_at, excluded.expires_at) END";

const READINESS: &str = "-- readiness
SELECT clock_timestamp(),
    (SELECT max(version)::int8 FROM refinery_schema_history),
    (SELECT count(*)
     FROM (VALUES ('events'), ('postings')) AS parents (name)
     CROSS JOIN (VALUES (0), (1)) AS months (ahead)
     JOIN pg_inherits i ON i.inhparent = to_regclass(parents.name)
        AND i.inhrelid = to_regclass(parents.name || to_char(
            date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC') + make_interval(months => months.ahead), '_YYYY_MM'))
        AND NOT i.inhdetachpending)";

/// Every statement of this file, so that a test can prepare each on the migrated schema.
pub const STATEMENTS: &[&str] = &[
    TOKEN_REVOKED,
    EVENT_BY_ID,
    USER_HEAD,
    USER_EVENTS,
    USER_EVENTS_BY_KEY,
    HORIZON,
    ALL_EVENTS,
    USER_STATE,
    FLOOR_BALANCES,
    REVOKE_TOKEN,
    REVOKE_SUBJECT,
    READINESS,
];

/// Whether the token of this principal was revoked, by its id or with all of its subject's.
///
/// # Errors
/// The driver's.
pub async fn token_revoked(client: &Client, principal: &Principal) -> Result<bool, Error> {
    let statement = client.prepare_cached(TOKEN_REVOKED).await?;
    let issued_at = Timestamp::from_second(principal.issued_at).unwrap_or(Timestamp::MIN);
    let row = client
        .query_one(
            &statement,
            &[
                &&*principal.issuer,
                &&*principal.token_id,
                &principal.subject.as_str(),
                &issued_at,
            ],
        )
        .await?;
    row.try_get(0)
}

/// A record and whose it is.
#[derive(Clone, Debug)]
pub struct OwnedRecord {
    /// The record, byte for byte.
    pub record: String,
    /// The event's subject.
    pub subject: String,
}

/// The event of this id. The id's milliseconds are those of `recorded_at`, which leaves one partition to look into.
///
/// # Errors
/// The driver's.
pub async fn event_by_id(client: &Client, id: Uuid) -> Result<Option<OwnedRecord>, Error> {
    let Some((from, to)) = recorded_between(id) else {
        return Ok(None);
    };
    let statement = client.prepare_cached(EVENT_BY_ID).await?;
    let row = client.query_opt(&statement, &[&id, &from, &to]).await?;
    row.map(|row| {
        Ok(OwnedRecord {
            record: row.try_get(0)?,
            subject: row.try_get(1)?,
        })
    })
    .transpose()
}

/// The millisecond of a version 7 id; None for any other id, which no event has.
fn recorded_between(id: Uuid) -> Option<(Timestamp, Timestamp)> {
    let (seconds, nanoseconds) = id
        .get_timestamp()
        .filter(|_| id.get_version_num() == 7)?
        .to_unix();
    let from = Timestamp::from_second(i64::try_from(seconds).ok()?).ok()?;
    let from = from
        .checked_add(SignedDuration::from_nanos(i64::from(nanoseconds)))
        .ok()?;
    let to = from.checked_add(SignedDuration::from_millis(1)).ok()?;
    Some((from, to))
}

/// A user's row and the number of his events.
#[derive(Clone, Copy, Debug)]
pub struct UserHead {
    /// The row's key.
    pub user_no: i64,
    /// Number of events.
    pub sequence: i64,
}

/// The user's head; None for a user without events.
///
/// # Errors
/// The driver's.
pub async fn user_head(client: &Client, subject: &Subject) -> Result<Option<UserHead>, Error> {
    let statement = client.prepare_cached(USER_HEAD).await?;
    let row = client.query_opt(&statement, &[&subject.as_str()]).await?;
    row.map(|row| {
        Ok(UserHead {
            user_no: row.try_get(0)?,
            sequence: row.try_get(1)?,
        })
    })
    .transpose()
}

/// What a page of events holds: numbers in `(after, until]`, at most `limit` of them.
#[derive(Clone, Debug)]
pub struct Page<'a> {
    /// The number before the first.
    pub after: i64,
    /// The last number that is looked at.
    pub until: i64,
    /// Only this type.
    pub event_type: Option<&'a TypeName>,
    /// At most so many.
    pub limit: u16,
}

/// A record and its number in the list: the user's sequence, or the position.
#[derive(Clone, Debug)]
pub struct Numbered {
    /// The number.
    pub number: i64,
    /// The record, byte for byte.
    pub record: String,
}

fn numbered(rows: Vec<tokio_postgres::Row>) -> Result<Vec<Numbered>, Error> {
    rows.into_iter()
        .map(|row| {
            Ok(Numbered {
                number: row.try_get(0)?,
                record: row.try_get(1)?,
            })
        })
        .collect()
}

/// A page of one user's events, by his sequence; of one idempotency key, if one is given.
///
/// # Errors
/// The driver's.
pub async fn user_events(
    client: &Client,
    user_no: i64,
    key: Option<&IdempotencyKey>,
    page: &Page<'_>,
) -> Result<Vec<Numbered>, Error> {
    let event_type = page.event_type.map(TypeName::as_str);
    let limit = i64::from(page.limit);
    let rows = match key {
        None => {
            let statement = client.prepare_cached(USER_EVENTS).await?;
            client
                .query(
                    &statement,
                    &[&user_no, &page.after, &page.until, &event_type, &limit],
                )
                .await?
        }
        Some(key) => {
            let statement = client.prepare_cached(USER_EVENTS_BY_KEY).await?;
            client
                .query(
                    &statement,
                    &[
                        &user_no,
                        &page.after,
                        &page.until,
                        &event_type,
                        &limit,
                        &key.as_str(),
                    ],
                )
                .await?
        }
    };
    numbered(rows)
}

/// The settled position: every position up to it is there, or never will be. Read it in a statement of its own, before
/// the list.
///
/// # Errors
/// The driver's.
pub async fn horizon(client: &Client) -> Result<i64, Error> {
    let statement = client.prepare_cached(HORIZON).await?;
    client.query_one(&statement, &[]).await?.try_get(0)
}

/// A page of all events, by position.
///
/// # Errors
/// The driver's.
pub async fn all_events(client: &Client, page: &Page<'_>) -> Result<Vec<Numbered>, Error> {
    let statement = client.prepare_cached(ALL_EVENTS).await?;
    let event_type = page.event_type.map(TypeName::as_str);
    let limit = i64::from(page.limit);
    let rows = client
        .query(&statement, &[&page.after, &page.until, &event_type, &limit])
        .await?;
    numbered(rows)
}

/// A user as he stands.
#[derive(Clone, Debug)]
pub struct UserRow {
    /// `active` or `frozen`.
    pub status: String,
    /// Number of events.
    pub sequence: i64,
    /// Hash of the latest record.
    pub head: Vec<u8>,
    /// When it was recorded.
    pub last_at: Timestamp,
}

/// What one account holds of one asset.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct AccountBalance {
    /// Its address.
    pub account: String,
    /// Of what.
    pub asset: String,
    /// Minor units, as a decimal string.
    pub balance: String,
}

/// The user and a page of what his accounts hold, after this account and asset, at one moment. A user without events has
/// no row, and may hold something all the same.
///
/// # Errors
/// The driver's.
pub async fn user_state(
    client: &Client,
    subject: &Subject,
    after: (&str, &str),
    limit: u16,
) -> Result<(Option<UserRow>, Vec<AccountBalance>), Error> {
    let statement = client.prepare_cached(USER_STATE).await?;
    let limit = i64::from(limit);
    let rows = client
        .query(&statement, &[&subject.as_str(), &after.0, &after.1, &limit])
        .await?;
    let mut user = None;
    let mut balances = Vec::with_capacity(rows.len());
    for row in rows {
        if let (None, Some(status)) = (&user, row.try_get::<_, Option<String>>(0)?) {
            user = Some(UserRow {
                status,
                sequence: row.try_get(1)?,
                head: row.try_get(2)?,
                last_at: row.try_get(3)?,
            });
        }
        if let Some(account) = row.try_get(4)? {
            balances.push(AccountBalance {
                account,
                asset: row.try_get(5)?,
                balance: row.try_get(6)?,
            });
        }
    }
    Ok((user, balances))
}

/// What an account holds of one asset.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Balance {
    /// Of what.
    pub asset: String,
    /// Minor units, as a decimal string. A text, because a sum over an unguarded account may have more than 38 digits.
    pub balance: String,
}

/// The balances of a `floor` account.
///
/// # Errors
/// The driver's.
pub async fn floor_balances(client: &Client, address: &Address) -> Result<Vec<Balance>, Error> {
    let statement = client.prepare_cached(FLOOR_BALANCES).await?;
    let rows = client
        .query(&statement, &[&address.as_str(), &ASSETS_MAX])
        .await?;
    rows.into_iter()
        .map(|row| {
            Ok(Balance {
                asset: row.try_get(0)?,
                balance: row.try_get(1)?,
            })
        })
        .collect()
}

/// Revokes one token; it may be forgotten after `expires_at`, the later of two counts.
///
/// # Errors
/// The driver's.
pub async fn revoke_token(
    client: &Client,
    issuer: &str,
    token_id: &str,
    expires_at: Option<Timestamp>,
) -> Result<(), Error> {
    let statement = client.prepare_cached(REVOKE_TOKEN).await?;
    client
        .execute(&statement, &[&issuer, &token_id, &expires_at])
        .await?;
    Ok(())
}

/// Revokes every token of a subject that was issued before a moment; the database's now, unless one is given. The later
/// of two moments counts.
///
/// # Errors
/// The driver's.
pub async fn revoke_subject(
    client: &Client,
    issuer: &str,
    subject: &Subject,
    issued_before: Option<Timestamp>,
    expires_at: Option<Timestamp>,
) -> Result<(), Error> {
    let statement = client.prepare_cached(REVOKE_SUBJECT).await?;
    client
        .execute(
            &statement,
            &[&issuer, &subject.as_str(), &issued_before, &expires_at],
        )
        .await?;
    Ok(())
}

/// What readiness needs to know of the database.
#[derive(Clone, Copy, Debug)]
pub struct Readiness {
    /// The database's clock.
    pub now: Timestamp,
    /// The latest migration; None when there is none.
    pub schema_version: Option<i64>,
    /// Partitions of this month and the next that are attached, of [`PARTITIONS_NEEDED`].
    pub partitions: i64,
}

/// Partitions that must be there: this month's and the next one's, of events and of postings.
pub const PARTITIONS_NEEDED: i64 = 4;

/// Looks at the database once; the cost does not depend on what it holds.
///
/// # Errors
/// The driver's.
pub async fn readiness(client: &Client) -> Result<Readiness, Error> {
    let statement = client.prepare_cached(READINESS).await?;
    let row = client.query_one(&statement, &[]).await?;
    Ok(Readiness {
        now: row.try_get(0)?,
        schema_version: row.try_get(1)?,
        partitions: row.try_get(2)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_names_its_millisecond() {
        let id: Uuid = "0193b2f5-0c7b-7000-8000-000000000000".parse().unwrap();
        let (from, to) = recorded_between(id).unwrap();
        assert_eq!(from.as_millisecond(), 0x0193_b2f5_0c7b);
        assert_eq!(to.as_millisecond() - from.as_millisecond(), 1);
        assert_eq!(from.as_nanosecond() % 1_000_000, 0);
        assert!(recorded_between(Uuid::nil()).is_none());
        assert!(recorded_between(Uuid::max()).is_none());
    }

    #[test]
    fn every_statement_begins_with_its_name() {
        for text in STATEMENTS {
            assert!(text.starts_with("-- "), "{text}");
        }
    }
}
