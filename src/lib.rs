//! Daybook: a self-hosted, event-sourced money ledger.
//!
//! Imports go down only: `dev` > `http`, `relay`, `keeper` > `commit` > `store` > `auth`, `schema` > `domain`, `config`.

pub mod auth;
pub mod commit;
pub mod config;
pub mod dev;
pub mod domain;
pub mod http;
pub mod keeper;
pub mod relay;
pub mod schema;
pub mod service;
pub mod shutdown;
pub mod store;
pub mod telemetry;
