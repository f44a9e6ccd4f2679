//! A history is its records: what a fold of their bytes gives is what the locks protected.
//!
//! Tests only; no database.

use super::record;
use crate::domain::decide::DedupeKey;
use crate::domain::properties::{NOW_MICROS, amount, any_draft, asset, at, draft, named, subject};
use crate::domain::{
    AmountExpr, Decision, Draft, IdempotencyKey, Move, Portion, Scope, State, Stored, Target,
    decide, time,
};
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;

const SOURCE: &str = "/daybook/test";

/// One draft that gives every user money to move.
fn funding() -> Draft {
    let codes = ["EUR/2", "USD/2"];
    let moves = codes.map(|code| Move {
        asset: asset(code),
        amount: AmountExpr::Known(amount(3_000)),
        from: vec![named("world")],
        to: [
            "users:alice:available",
            "users:bob:available",
            "users:carol:available",
        ]
        .map(|address| Target {
            account: named(address),
            portion: Portion::Amount(AmountExpr::Known(amount(1_000))),
        })
        .into(),
    });
    let mut draft = draft(moves.into());
    draft.principal.scopes = [Scope::WriteAny].into_iter().collect();
    draft.key = IdempotencyKey::parse("funding").unwrap();
    draft
}

/// Decides, writes and applies a history as a lane does; returns the state and the records.
fn run(steps: Vec<(Draft, i64)>) -> (State, Vec<Arc<str>>) {
    let mut state = State::default();
    let mut records: Vec<Arc<str>> = Vec::new();
    for (draft, shift) in steps {
        match decide(&state, &draft, at(NOW_MICROS + shift)) {
            Decision::Accept(accepted) => {
                let mut random = [0; 10];
                random[..8].copy_from_slice(&(records.len() as u64).to_be_bytes());
                let event_id = record::event_id(accepted.recorded_at, random);
                let text = record::write(&draft, &accepted, event_id, SOURCE).unwrap();
                let stored = Stored {
                    event_id,
                    fingerprint: draft.fingerprint,
                    record: text.into(),
                };
                records.push(stored.record.clone());
                let head = record::hash(&stored.record);
                state.apply(&draft, &accepted, head, stored);
            }
            Decision::Replay(stored) => {
                assert!(records.contains(&stored.record), "a replay of nothing");
                assert_eq!(stored, state.stored[&DedupeKey::of(&draft)]);
            }
            Decision::Refuse(_) => {}
        }
    }
    (state, records)
}

/// What the records alone say of one user.
#[derive(Default)]
struct Folded {
    sequence: u64,
    head: [u8; 32],
    last: String,
}

fn check_fold(state: &State, records: &[Arc<str>]) {
    let mut users: HashMap<String, Folded> = HashMap::new();
    let mut balances: HashMap<(String, String), i128> = HashMap::new();
    let mut keys: HashMap<(String, String), Option<String>> = HashMap::new();
    for bytes in records {
        let folded = record::read(bytes).unwrap();
        let whole: serde_json::Value = serde_json::from_str(bytes).unwrap();
        let user = users.entry(folded.subject.clone()).or_default();
        user.sequence += 1;
        assert_eq!(folded.usersequence, user.sequence.to_string(), "a gap");
        assert_eq!(
            folded.previoushash,
            hex::encode(user.head),
            "a broken chain"
        );
        let recorded = whole["recordedtime"].as_str().unwrap().to_owned();
        assert!(recorded >= user.last, "a user's time ran backwards");
        user.last = recorded;
        user.head = record::hash(bytes);
        assert_eq!(folded.id.to_string(), whole["id"]);
        for posting in folded.data.postings {
            let place = (posting.account, posting.asset);
            let balance = balances.entry(place).or_default();
            *balance += posting.amount.units();
            if let Some(shown) = posting.balance {
                assert_eq!(shown.units(), *balance, "a shown balance is not the fold's");
            }
        }
        for taken in whole["data"]["effects"]["unique"]
            .as_array()
            .into_iter()
            .flatten()
        {
            let text = |member: &str| taken[member].as_str().map(str::to_owned);
            let name = (text("namespace").unwrap(), text("key").unwrap());
            keys.insert(name, text("until"));
        }
    }
    assert_eq!(users.len(), state.users.len());
    for (name, folded) in users {
        let user = &state.users[&subject(&name)];
        assert_eq!((user.sequence, user.head), (folded.sequence, folded.head));
        assert_eq!(time::micros(user.last_at), folded.last);
    }
    for ((address, asset), balance) in &state.balances {
        let place = (address.to_string(), asset.to_string());
        assert_eq!(balances[&place], balance.units(), "{place:?}");
    }
    let told = state.unique.iter();
    let told: HashMap<_, _> = told
        .map(|(name, until)| (name.clone(), until.map(time::micros)))
        .collect();
    assert_eq!(told, keys);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_records_alone_give_the_state(steps in prop::collection::vec((any_draft(), -5_000_000i64..5_000_000), 0..30)) {
        let (state, records) = run([(funding(), 0)].into_iter().chain(steps).collect());
        prop_assert!(!records.is_empty());
        check_fold(&state, &records);
    }
}
