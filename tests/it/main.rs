//! The tests that need real services, in one binary.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "clippy knows test functions, but not what they call"
)]

mod dev;
mod relay;
mod relay_fixture;
