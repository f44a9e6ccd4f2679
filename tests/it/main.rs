//! The tests that need real services, in one binary.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "clippy knows test functions, but not what they call"
)]

mod app;
mod codec;
mod commit;
mod dev;
mod golden;
mod http;
mod ledger;
mod process;
mod proxy;
mod relay;
mod relay_fixture;
mod snapshots;
mod store;
mod tidy;
mod types;
