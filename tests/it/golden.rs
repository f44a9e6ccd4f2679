//! The record, held byte for byte: what is stored, hashed and published may never change its form by accident.
//!
//! The files in `golden/` are the contract. A change of one is a change for every consumer and breaks every chain.

use daybook::commit::record;
use daybook::domain::{
    Accepted, Address, Amount, Asset, Draft, IdempotencyKey, Posting, Principal, Scopes, Subject,
    TypeName, UniqueKey, Version,
};
use std::path::PathBuf;
use std::process::Command;

fn draft(input: &str) -> Draft {
    Draft {
        subject: Subject::parse("alice").unwrap(),
        principal: Principal {
            subject: Subject::parse("alice").unwrap(),
            issuer: "https://issuer.example".into(),
            token_id: "t-1".into(),
            issued_at: 1_796_036_000,
            expires_at: 1_796_039_600,
            scopes: Scopes::default(),
        },
        event_type: TypeName::parse("transfer").unwrap(),
        schema: Version { major: 1, minor: 7 },
        input_schema: None,
        time: None,
        expected_sequence: None,
        key: IdempotencyKey::parse("k-1").unwrap(),
        fingerprint: [1; 32],
        input: serde_json::value::RawValue::from_string(input.into()).unwrap(),
        passes_freeze: false,
        unknown_account: None,
        failed_check: None,
        moves: Vec::new(),
        unique: Vec::new(),
        traceparent: None,
    }
}

fn posting(account: &str, units: i128, balance: Option<i128>) -> Posting {
    Posting {
        account: Address::parse(account).unwrap(),
        asset: Asset::from_canonical("EUR/2"),
        amount: Amount::new(units).unwrap(),
        balance: balance.map(|units| Amount::new(units).unwrap()),
    }
}

fn accepted(postings: Vec<Posting>) -> Accepted {
    Accepted {
        sequence: 42,
        previous: [0xAB; 32],
        recorded_at: "2026-11-30T11:00:00.123456Z".parse().unwrap(),
        postings,
        balances: Vec::new(),
        unique: Vec::new(),
    }
}

/// Writes the record, holds it against its file, and has its hash confirmed by a program that is not ours.
fn check(name: &str, draft: &Draft, accepted: &Accepted) {
    let id = record::event_id(accepted.recorded_at, [0x5A; 10]);
    let text = record::write(draft, accepted, id, "/daybook/main").unwrap();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/golden");
    let path = folder.join(format!("{name}.json"));
    let golden = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}\n{text}", path.display()));
    assert_eq!(
        text,
        golden,
        "the record has another form than {}",
        path.display()
    );
    let sum = Command::new("sha256sum").arg(&path).output().unwrap();
    let line = String::from_utf8(sum.stdout).unwrap();
    let told = line.split_whitespace().next().unwrap();
    assert_eq!(
        told,
        hex::encode(record::hash(&text)),
        "sha256sum of {}",
        path.display()
    );
    let folded = record::read(&text).unwrap();
    assert_eq!(
        (folded.id, folded.subject.as_str()),
        (id, draft.subject.as_str())
    );
    assert_eq!(folded.previoushash, hex::encode(accepted.previous));
    assert_eq!(folded.data.postings.len(), accepted.postings.len());
}

#[test]
fn a_plain_transfer() {
    let draft = draft(r#"{"amount":"100","asset":"EUR/2","to":"bob"}"#);
    let postings = vec![
        posting("users:alice:available", -100, Some(999_900)),
        posting("users:bob:available", 100, None),
    ];
    check("plain", &draft, &accepted(postings));
}

#[test]
fn every_member_that_may_be_there() {
    let mut draft = draft(r#"{"amount":"1","order":"o-1"}"#);
    draft.principal.subject = Subject::parse("payroll").unwrap();
    draft.input_schema = Version::parse("1.2");
    draft.time = Some("2026-11-30T10:59:00Z".parse().unwrap());
    let mut accepted = accepted(vec![
        posting("world", -Amount::MAX.units(), None),
        posting(
            "users:alice:available",
            Amount::MAX.units(),
            Some(Amount::MAX.units()),
        ),
    ]);
    let unique = |key: &str| UniqueKey {
        namespace: "orders".into(),
        key: key.into(),
        code: "order_exists".into(),
        seconds: None,
    };
    let until = "2026-12-30T11:00:00.123456Z".parse().unwrap();
    accepted.unique = vec![
        (unique("o-1"), None),
        (unique("größe \"7\"\n\u{1F4B6}\u{2028}"), Some(until)),
    ];
    check("full", &draft, &accepted);
}

#[test]
fn the_input_is_kept_as_it_came() {
    let draft = draft(
        "{\"note\":\"Grüße, 世界 \u{1F4B6} \u{2028}\u{2029}\\u2028 \\u0000\\u001f\\n\\/ \\ud83d\\udcb6\",\
         \"metadata\":{\"\\u0000\":\"\\u0000\",\"z\":1.50,\"a\":1e2}}",
    );
    check("text", &draft, &accepted(Vec::new()));
}

#[test]
fn the_first_event_of_an_encoded_subject() {
    let mut draft = draft("{}");
    draft.subject = Subject::parse("idp/a:b\"\\%").unwrap();
    draft.principal.subject = draft.subject.clone();
    draft.key = IdempotencyKey::parse("\"quoted\\key\"").unwrap();
    draft.time = Some("2026-11-30T10:59:00.5Z".parse().unwrap());
    let address = Address::from_segments(["users", draft.subject.as_str(), "available"]).unwrap();
    let mut accepted = accepted(vec![
        posting("world", -1, None),
        posting(address.as_str(), 1, Some(1)),
    ]);
    accepted.sequence = 1;
    accepted.previous = [0; 32];
    accepted.recorded_at = "2026-11-30T11:00:00Z".parse().unwrap();
    check("first", &draft, &accepted);
}
