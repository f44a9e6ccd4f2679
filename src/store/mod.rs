//! The store: every statement the ledger sends to Postgres.
//!
//! No SQL stands anywhere else, and nothing here decides anything.

pub mod audit;
pub mod bootstrap;
pub mod fault;
pub mod handover;
pub mod horizon;
pub mod keeper;
pub mod ledger;
pub mod migrate;
pub mod numeric;
pub mod outbox;
pub mod partitions;
pub mod reads;
pub mod session;
pub mod snapshots;
pub mod tail;
mod tid;

use sha2::{Digest, Sha256};

/// The advisory lock of a ledger for one purpose, in Postgres' form of two numbers.
#[must_use]
pub fn lock_key(ledger: &str, purpose: &str) -> (i32, i32) {
    let digest: [u8; 32] = Sha256::digest(format!("daybook/{ledger}/{purpose}")).into();
    let [a, b, c, d, e, f, g, h, ..] = digest;
    (
        i32::from_be_bytes([a, b, c, d]),
        i32::from_be_bytes([e, f, g, h]),
    )
}

/// Every statement of the store, for the test that prepares them all.
pub fn statements() -> impl Iterator<Item = &'static str> {
    [
        audit::STATEMENTS,
        bootstrap::STATEMENTS,
        horizon::STATEMENTS,
        keeper::STATEMENTS,
        ledger::STATEMENTS,
        migrate::STATEMENTS,
        partitions::STATEMENTS,
        reads::STATEMENTS,
        snapshots::STATEMENTS,
        tail::STATEMENTS,
    ]
    .into_iter()
    .flatten()
    .copied()
    .chain(outbox::STATEMENTS.iter().map(|(_, sql)| *sql))
}
