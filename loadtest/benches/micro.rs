//! What each part of an event's pure path takes, in time: `make bench-micro`.
//!
//! Time depends on the machine and on what else it does; what must not grow unseen is held by `instructions.rs`.

mod pure;

use criterion::{Criterion, criterion_group, criterion_main};
use pure::{CURRENT, Locked, OLDEST, Request, Token};

fn parts(criterion: &mut Criterion) {
    let token = Token::known();
    criterion.bench_function("verify a known token", |b| b.iter(|| token.verify()));
    for (name, body) in [("1.0", OLDEST), ("1.7", CURRENT)] {
        let request = Request::of(body);
        criterion.bench_function(&format!("draft a transfer {name}"), |b| {
            b.iter(|| request.draft());
        });
    }
    let locked = Locked::of(CURRENT);
    criterion.bench_function("decide a transfer", |b| b.iter(|| locked.decide()));
    let taken = locked.accepted();
    criterion.bench_function("write and hash its record", |b| b.iter(|| taken.record()));
}

criterion_group!(benches, parts);
criterion_main!(benches);
