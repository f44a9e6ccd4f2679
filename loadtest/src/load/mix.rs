//! Which commands a run sends, as plain data, and whether they can be sent.
//!
//! Draws nothing, except a name for a new run.

use super::event::VERSIONS;
use anyhow::{Result, ensure};
use std::ops::RangeInclusive;

/// A transfer by lines has three different users.
const USERS_MIN: u32 = 3;
const USERS_MAX: u32 = 10_000_000;
/// Version 1.0 takes no more.
const AMOUNT_MAX: u64 = (1 << 53) - 1;
/// A key has 128 bytes at most; the command's number follows.
const RUN_BYTES_MAX: usize = 64;
const EXPONENT_MAX: f64 = 10.0;

/// What an event does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A deposit to user 1, 2, 3, ... in turn: gives everybody money.
    DepositEach,
    /// A deposit to a random user.
    Deposit,
    /// A withdrawal of a random user: everybody pays into `world`.
    Withdrawal,
    /// A transfer between two random users.
    Transfer,
    /// A transfer from a random user to this one.
    TransferTo(u32),
    /// A transfer from this user to a random one.
    TransferFrom(u32),
}

/// How random users are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Spread {
    /// Each as often as any other.
    Uniform,
    /// User `n` in proportion to `1 / n^exponent`.
    Zipf {
        /// 0 is uniform; 1 is what is often seen.
        exponent: f64,
    },
}

/// Which commands a run sends.
#[derive(Clone, Debug)]
pub struct Mix {
    /// In front of every idempotency key, so that a second run is not taken for a replay of the first.
    pub run: String,
    /// The same seed and number give the same command.
    pub seed: u64,
    /// What most events do.
    pub kind: Kind,
    /// Users `u-1` to `u-<users>`.
    pub users: u32,
    /// How they are drawn.
    pub spread: Spread,
    /// In minor units of EUR, drawn uniformly.
    pub amounts: RangeInclusive<u64>,
    /// How often each schema version 1.0 to 1.7 is used, in proportion to the sum.
    pub versions: [u32; VERSIONS],
    /// Whether version 1.7 pays two users by `lines`, and not one.
    pub lines: bool,
    /// Share of commands that send an earlier one again, 0 to 1.
    pub duplicates: f64,
    /// Share of commands that have to be refused, 0 to 1.
    pub refusals: f64,
    /// Bearer tokens, of any algorithm, that may write for every user. A command chooses one.
    pub tokens: Vec<String>,
}

impl Mix {
    /// New commands of version 1.7 only, of users drawn uniformly, with amounts from 1 to 9.
    pub fn new(kind: Kind, users: u32, tokens: Vec<String>) -> Self {
        Mix {
            run: format!("load-{:016x}", rand::random::<u64>()),
            seed: 1,
            kind,
            users,
            spread: Spread::Uniform,
            amounts: 1..=9,
            versions: [0, 0, 0, 0, 0, 0, 0, 1],
            lines: false,
            duplicates: 0.0,
            refusals: 0.0,
            tokens,
        }
    }

    /// Whether it can be sent.
    ///
    /// # Errors
    /// When something is out of bounds.
    pub fn check(&self) -> Result<()> {
        ensure!(
            (1..=RUN_BYTES_MAX).contains(&self.run.len()) && is_visible(&self.run),
            "a run is named by 1 to {RUN_BYTES_MAX} visible ASCII characters"
        );
        ensure!(
            (USERS_MIN..=USERS_MAX).contains(&self.users),
            "there are {USERS_MIN} to {USERS_MAX} users"
        );
        if let Kind::TransferTo(user) | Kind::TransferFrom(user) = self.kind {
            ensure!((1..=self.users).contains(&user), "there is no user {user}");
        }
        ensure!(
            !self.amounts.is_empty()
                && *self.amounts.start() > 0
                && *self.amounts.end() <= AMOUNT_MAX,
            "amounts are between 1 and {AMOUNT_MAX}"
        );
        ensure!(
            self.versions.iter().any(|weight| *weight > 0),
            "no version has a weight"
        );
        let shares = [
            self.duplicates,
            self.refusals,
            self.duplicates + self.refusals,
        ];
        ensure!(
            shares.iter().all(|share| (0.0..=1.0).contains(share)),
            "shares are between 0 and 1, together too"
        );
        if let Spread::Zipf { exponent } = self.spread {
            ensure!(
                (0.0..=EXPONENT_MAX).contains(&exponent),
                "a Zipf exponent is between 0 and {EXPONENT_MAX}"
            );
        }
        let sendable = |token: &String| !token.is_empty() && is_visible(token);
        ensure!(
            !self.tokens.is_empty() && self.tokens.iter().all(sendable),
            "there is no token, or one that no header can hold"
        );
        Ok(())
    }
}

fn is_visible(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_sent_is_refused() {
        let good = Mix::new(Kind::Transfer, 3, vec!["a.b.c".to_owned()]);
        good.check().unwrap();
        let changes: [fn(&mut Mix); 15] = [
            |mix| mix.run = String::new(),
            |mix| mix.run = "a b".to_owned(),
            |mix| mix.run = "a".repeat(RUN_BYTES_MAX + 1),
            |mix| mix.users = 2,
            |mix| mix.kind = Kind::TransferTo(4),
            |mix| mix.kind = Kind::TransferFrom(0),
            |mix| mix.amounts = 0..=9,
            |mix| mix.amounts = 1..=AMOUNT_MAX + 1,
            |mix| mix.versions = [0; VERSIONS],
            |mix| mix.duplicates = 1.1,
            |mix| (mix.duplicates, mix.refusals) = (0.6, 0.6),
            |mix| mix.refusals = f64::NAN,
            |mix| mix.spread = Spread::Zipf { exponent: -1.0 },
            |mix| mix.tokens = Vec::new(),
            |mix| mix.tokens = vec!["a\r\nb: c".to_owned()],
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut bad = good.clone();
            change(&mut bad);
            assert!(bad.check().is_err(), "{number}: {bad:?}");
        }
    }

    #[test]
    fn every_run_has_a_name_of_its_own() {
        let mix = || Mix::new(Kind::Transfer, 3, vec!["t".to_owned()]);
        assert_ne!(mix().run, mix().run);
    }
}
