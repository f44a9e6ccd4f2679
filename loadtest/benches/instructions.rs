//! The guard on the pure path: how many instructions each part executes, counted by valgrind. CI runs it (`.ci/run`).
//!
//! Measures no time. A count is the same on every machine of one architecture, but for what hashing with random seeds moves: less
//! than 1 %.

// What the macros make is public and has no documentation.
#![allow(missing_docs)]

mod pure;

use gungraun::prelude::*;
use gungraun::{Callgrind, EventKind};
use pure::{CURRENT, Locked, OLDEST, Request, Taken, Token};
use std::hint::black_box;

/// Fails above a quarter more than was measured: compilers differ by some per cent, mistakes by more. Whoever makes a part cheaper,
/// or dearer for a reason, writes down the new count.
fn measured(instructions: u64) -> LibraryBenchmarkConfig {
    let mut callgrind = Callgrind::default();
    callgrind.hard_limits([(EventKind::Ir, instructions + instructions / 4)]);
    let mut config = LibraryBenchmarkConfig::default();
    config.tool(callgrind);
    config
}

#[library_benchmark]
#[bench::known(args = (Token::known()), config = measured(21_100))]
fn verify(token: Token) -> Token {
    black_box(token.verify());
    token
}

#[library_benchmark]
#[bench::transfer_1_0(args = (Request::of(OLDEST)), config = measured(80_000))]
#[bench::transfer_1_7(args = (Request::of(CURRENT)), config = measured(61_800))]
fn draft(request: Request) -> Request {
    black_box(request.draft());
    request
}

#[library_benchmark]
#[bench::transfer(args = (Locked::of(CURRENT)), config = measured(7_200))]
fn decide(locked: Locked) -> Locked {
    black_box(locked.decide());
    locked
}

#[library_benchmark]
#[bench::transfer(args = (Locked::of(CURRENT).accepted()), config = measured(50_000))]
fn record(taken: Taken) -> Taken {
    black_box(taken.record());
    taken
}

library_benchmark_group!(name = parts, benchmarks = [verify, draft, decide, record]);

main!(library_benchmark_groups = parts);
