//! The store: every statement the ledger sends to Postgres.
//!
//! No SQL stands anywhere else, and nothing here decides anything.

pub mod fault;
pub mod ledger;
pub mod numeric;
pub mod session;
