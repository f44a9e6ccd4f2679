//! Daybook: a self-hosted, event-sourced money ledger.
//!
//! Imports go down only: `dev` > `http`, `relay`, `keeper` > `commit` > `store` > `auth`, `schema` > `domain`, `config`.

pub mod dev;
