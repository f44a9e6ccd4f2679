//! The store: every statement the ledger sends to Postgres.
//!
//! No SQL stands anywhere else, and nothing here decides anything.

pub mod outbox;
pub mod session;
