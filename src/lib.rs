//! Daybook: a self-hosted, event-sourced money ledger.
//!
//! Imports go down only: `dev` > `http`, `relay`, `keeper` > `commit` > `store` > `auth`, `schema` > `domain`, `config`.

pub mod commit;
pub mod config;
pub mod dev;
pub mod domain;
pub mod relay;
pub mod schema;
pub mod store;
pub mod telemetry;
