//! The development environment: private Postgres and RabbitMQ for `daybook dev` and for the tests.
//!
//! Never used by a server in production, and never touches a service that it did not start itself.

pub mod account;
pub mod broker;
pub mod demo;
pub mod find;
pub mod install;
pub mod postgres;
pub mod process;
pub mod services;

use std::ffi::OsStr;
use std::io::Write;

pub use broker::Broker;
pub use demo::Session;
pub use postgres::Postgres;
pub use services::{Kind, Ready, broker_start, broker_stop, dev, run_with_services};

/// Starts of one service before giving up, each on other ports.
const START_TRIES: u32 = 5;

/// Why the development environment is not there.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or program could not be used.
    #[error("{what}: {source}")]
    Io {
        /// The file or program.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A service ended or did not answer in time.
    #[error("{service} did not get ready. The end of its log:\n{log}")]
    NotReady {
        /// The service.
        service: &'static str,
        /// The last lines of its log.
        log: String,
    },
    /// Somebody asked to stop before everything was ready.
    #[error("stopped before everything was ready")]
    Interrupted,
    /// Anything else, said in full.
    #[error("{0}")]
    Refused(String),
}

/// Names the file or program in an error of the system.
fn at(what: impl AsRef<OsStr>) -> impl FnOnce(std::io::Error) -> Error {
    let what = what.as_ref().to_string_lossy().into_owned();
    move |source| Error::Io { what, source }
}

/// Tells the person at the terminal. A closed terminal is no reason to fail: services still have to be stopped.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// 128 random bits in hex.
fn secret() -> String {
    format!("{:032x}", rand::random::<u128>())
}
