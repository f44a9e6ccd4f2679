//! Numbers of users and accounts that a session has read: spares most batches looking them up by name.
//!
//! Lives and dies with its session. A database that was restored, or that lost its latest commits in a failover, may give a number
//! to another name, and no session survives that. Keeps only what it read: a number that this session drew may be rolled back.

use super::{BatchError, Statements, Wanted, address, subject};
use crate::domain::{Address, Subject};
use futures_util::future::join;
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use tokio_postgres::Client;

/// Names of one kind that are kept at most, of about 100 bytes each.
const KEPT_MAX: usize = 16_384;

/// What one session knows.
#[derive(Debug, Default)]
pub struct Numbers {
    users: HashMap<Subject, i64>,
    accounts: HashMap<Address, i64>,
}

/// The numbers of one batch's names; who is not in it has none yet.
#[derive(Default)]
pub(super) struct Found {
    pub(super) users: HashMap<Subject, i64>,
    pub(super) accounts: HashMap<Address, i64>,
}

impl Numbers {
    /// The numbers of what a batch names: in one round trip, or in none when all are known. Who has no number now is new; if another
    /// pod opens him meanwhile, the insert of this batch meets it.
    pub(super) async fn find(
        &mut self,
        client: &Client,
        statements: &Statements,
        wanted: &Wanted<'_>,
    ) -> Result<Found, BatchError> {
        let mut found = Found::default();
        let users = look_up(&self.users, &wanted.users, &mut found.users);
        let accounts = look_up(&self.accounts, &wanted.accounts, &mut found.accounts);
        if users.is_empty() && accounts.is_empty() {
            return Ok(found);
        }
        let subjects: Vec<&str> = users.iter().map(|subject| subject.as_str()).collect();
        let addresses: Vec<&str> = accounts.iter().map(|address| address.as_str()).collect();
        let (users, accounts) = join(
            client.query(&statements.find_users, &[&subjects]),
            client.query(&statements.find_accounts, &[&addresses]),
        )
        .await;
        for row in users? {
            let (name, number) = (subject(&row, 1)?, row.try_get(0)?);
            keep(&mut self.users, name.clone(), number);
            found.users.insert(name, number);
        }
        for row in accounts? {
            let (name, number) = (address(&row, 1)?, row.try_get(0)?);
            keep(&mut self.accounts, name.clone(), number);
            found.accounts.insert(name, number);
        }
        Ok(found)
    }
}

/// Puts what is known into `found` and returns the rest.
fn look_up<'a, Name: Clone + Eq + Hash>(
    known: &HashMap<Name, i64>,
    wanted: &BTreeSet<&'a Name>,
    found: &mut HashMap<Name, i64>,
) -> Vec<&'a Name> {
    let mut missing = Vec::new();
    for name in wanted {
        match known.get_key_value(*name) {
            Some((name, number)) => {
                found.insert(name.clone(), *number);
            }
            None => missing.push(*name),
        }
    }
    missing
}

/// Forgetting everything at the limit costs a round trip now and then; choosing what to forget would cost something always.
fn keep<Name: Eq + Hash>(known: &mut HashMap<Name, i64>, name: Name, number: i64) {
    if known.len() >= KEPT_MAX {
        known.clear();
    }
    known.insert(name, number);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_has_a_limit() {
        let mut known = HashMap::new();
        for number in 0..3 * i64::try_from(KEPT_MAX).unwrap() {
            keep(&mut known, number, number);
            assert!(known.len() <= KEPT_MAX);
            assert_eq!(known.get(&number), Some(&number));
        }
    }

    #[test]
    fn the_known_are_found_and_the_rest_is_missing() {
        let known = HashMap::from([("a", 1), ("b", 2)]);
        let mut found = HashMap::new();
        let missing = look_up(&known, &BTreeSet::from([&"b", &"c"]), &mut found);
        assert_eq!(missing, [&"c"]);
        assert_eq!(found, HashMap::from([("b", 2)]));
    }
}
