//! What the shipped types and the rails around an operator's types must hold.
//!
//! Uses no service: drafts are decided in memory.

use super::*;
use crate::domain::decide::{Accepted, Decision, State};
use crate::domain::{Address, Amount, AmountExpr, Scopes, decide};
use jiff::Timestamp;
use proptest::prelude::*;
use rstest::rstest;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

static SHIPPED: LazyLock<Registry> = LazyLock::new(|| Registry::load(None).unwrap());

fn principal(subject: &str, scopes: &[Scope]) -> Principal {
    Principal {
        subject: Subject::parse(subject).unwrap(),
        issuer: "test".into(),
        token_id: "t".into(),
        issued_at: 0,
        expires_at: 1,
        scopes: scopes.iter().copied().collect::<Scopes>(),
    }
}

fn send_as(registry: &Registry, writer: &Principal, body: &str) -> Result<Draft, Refused> {
    let key = IdempotencyKey::parse("k").unwrap();
    registry.draft(writer, key, None, body.as_bytes())
}

fn send(registry: &Registry, body: &Value) -> Result<Draft, Refused> {
    let alice = principal("alice", &[Scope::Write]);
    send_as(registry, &alice, &body.to_string())
}

fn transfer(data: &Value) -> Value {
    json!({"type": "transfer", "schema": "1.7", "data": data})
}

/// The pointers of an invalid request.
fn pointers(outcome: Result<Draft, Refused>) -> Vec<String> {
    match outcome {
        Err(Refused::Invalid(errors)) => errors.into_iter().map(|e| e.pointer).collect(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_binary_holds_every_file_of_schema() {
    fn walk(root: &Path, below: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(below).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(root, &path, found);
            } else {
                let name = path.strip_prefix(root).unwrap().to_str().unwrap();
                found.push(name.to_owned());
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema");
    let mut found = Vec::new();
    walk(&root, &root, &mut found);
    found.sort();
    let mut listed: Vec<&str> = embedded::FILES.iter().map(|(path, _)| *path).collect();
    listed.sort_unstable();
    assert_eq!(found, listed);
}

#[test]
fn every_example_file_holds() {
    let mut wrong = Vec::new();
    for kind in SHIPPED.types() {
        for version in kind.versions() {
            let (accepted, refused): (Vec<_>, Vec<_>) = version
                .examples()
                .iter()
                .partition(|example| example.accepted);
            assert!(
                !accepted.is_empty() && refused.len() >= 2,
                "{} {}",
                kind.name(),
                version.version()
            );
            for example in version.examples() {
                if let Err(reason) = SHIPPED.run_example(kind, version, example) {
                    wrong.push(format!(
                        "{} {} {}: {reason}",
                        kind.name(),
                        version.version(),
                        example.name
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn deposit_and_transfer_accept_eight_versions() {
    for name in ["deposit", "transfer"] {
        let kind = SHIPPED.event_type(name).unwrap();
        let versions: Vec<String> = kind
            .versions()
            .map(|one| one.version().to_string())
            .collect();
        assert_eq!(
            versions,
            ["1.0", "1.1", "1.2", "1.3", "1.4", "1.5", "1.6", "1.7"]
        );
        assert_eq!(kind.current().to_string(), "1.7");
    }
    let names: Vec<&str> = SHIPPED.types().map(|kind| kind.name().as_str()).collect();
    assert_eq!(names, ["deposit", "transfer", "withdrawal"]);
}

#[test]
fn records_of_every_type_have_a_schema() {
    for kind in SHIPPED.types() {
        let schema = SHIPPED.record_schema(kind);
        jsonschema::options().offline().build(&schema).unwrap();
    }
    let input = SHIPPED.event_type("deposit").unwrap().input_schema();
    assert!(input.pointer("/properties/dropped").is_some());
}

#[rstest]
#[case("USD")]
#[case("USD/0")]
#[case("USD/256")]
#[case("usd/2")]
#[case(" USD/2")]
#[case("USD/2 ")]
#[case("USD/02")]
#[case("XXX/2")]
fn m1_an_asset_has_one_spelling(#[case] spelling: &str) {
    assert_eq!(SHIPPED.asset(spelling), None);
    for name in ["deposit", "withdrawal", "transfer"] {
        let mut data = json!({"asset": spelling, "amount": "1"});
        if name == "transfer" {
            data["to"] = json!("bob");
        }
        let schema = SHIPPED.event_type(name).unwrap().current();
        let body = json!({"type": name, "schema": schema, "data": data});
        assert_eq!(pointers(send(&SHIPPED, &body)), ["/data/asset"]);
    }
}

#[test]
fn the_list_has_the_scales_of_iso_4217() {
    for spelling in ["JPY/0", "EUR/2", "KWD/3", "CLF/4", "USD/2"] {
        assert_eq!(SHIPPED.asset(spelling).unwrap().as_str(), spelling);
    }
    assert!(SHIPPED.assets().count() > 150);
}

#[rstest]
#[case("9007199254740993")]
#[case("9007199254740992")]
#[case("18446744073709551616")]
#[case("1e3")]
#[case("1.0")]
#[case("2500.0")]
#[case("-1")]
#[case("0")]
#[case("-0")]
fn an_integer_amount_is_exact_or_refused(#[case] number: &str) {
    let body = format!(
        r#"{{"type":"transfer","schema":"1.0","data":{{"to":"bob","currency":"EUR","amount":{number}}}}}"#
    );
    let alice = principal("alice", &[Scope::Write]);
    assert_eq!(pointers(send_as(&SHIPPED, &alice, &body)), ["/data/amount"]);
}

#[rstest]
#[case(r#"{"type":"transfer","schema":"1.7","data":{},"extra":1}"#, "/extra")]
#[case(
    r#"{"type":"transfer","type":"deposit","schema":"1.7","data":{}}"#,
    "/type"
)]
#[case(
    r#"{"type":"transfer","schema":"1.7","data":{"asset":"EUR/2","a":{"x~/y":1,"x~/y":1}}}"#,
    "/data/a/x~0~1y"
)]
#[case(r#"{"type":7,"schema":"1.7","data":{}}"#, "/type")]
#[case(r#"{"type":"transfer","schema":1.7,"data":{}}"#, "/schema")]
#[case(r#"{"type":"transfer","schema":true,"data":{}}"#, "/schema")]
#[case(r#"{"type":"transfer","schema":"1.7"}"#, "/data")]
#[case(r#"{"type":"transfer","schema":"1.7","data":null}"#, "/data")]
#[case(r#"{"type":"transfer","schema":"1.7","data":[]}"#, "/data")]
#[case(
    r#"{"type":"transfer","schema":"1.7","data":{},"subject":""}"#,
    "/subject"
)]
#[case(
    r#"{"type":"transfer","schema":"1.7","data":{},"subject":"a b"}"#,
    "/subject"
)]
#[case(
    r#"{"type":"transfer","schema":"1.7","data":{},"time":"2026-11-30T10:59:00"}"#,
    "/time"
)]
#[case(
    r#"{"type":"transfer","schema":"1.7","data":{},"time":"2026-11-30 10:59:00Z"}"#,
    "/time"
)]
#[case(
    r#"{"type":"transfer","schema":"1.7","data":{},"time":"1969-12-31T23:59:59Z"}"#,
    "/time"
)]
#[case(
    r#"{"type":"transfer","schema":"1.7","data":{},"time":"2026-02-30T00:00:00Z"}"#,
    "/time"
)]
#[case(r#"{"type":"transfer","schema":"1.7","data":{},"time":1}"#, "/time")]
#[case(
    r#"{"type":"transfer","schema":"1.7","data":{},"expected_sequence":-1}"#,
    "/expected_sequence"
)]
#[case(
    r#"{"type":"transfer","schema":"1.7","data":{},"expected_sequence":"01"}"#,
    "/expected_sequence"
)]
#[case(
    r#"{"type":"transfer","schema":"1.7","data":{},"expected_sequence":null}"#,
    "/expected_sequence"
)]
#[case("[]", "")]
#[case("", "")]
#[case("{", "")]
#[case("{} {}", "")]
fn a_malformed_envelope_is_refused_with_a_pointer(#[case] body: &str, #[case] pointer: &str) {
    let alice = principal("alice", &[Scope::Write]);
    let found = pointers(send_as(&SHIPPED, &alice, body));
    assert!(found.iter().any(|one| one == pointer), "{found:?}");
}

#[test]
fn deep_nesting_and_bad_utf8_are_refused() {
    let alice = principal("alice", &[Scope::Write]);
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        let nested = format!("{}1{}", open.repeat(10_000), close.repeat(10_000));
        let body = format!(r#"{{"type":"transfer","schema":"1.7","data":{nested}}}"#);
        assert_eq!(pointers(send_as(&SHIPPED, &alice, &body)), [""]);
    }
    let key = IdempotencyKey::parse("k").unwrap();
    let body = b"{\"type\":\"transfer\",\"schema\":\"1.7\",\"data\":{\"a\":\"\xff\"}}";
    assert_eq!(pointers(SHIPPED.draft(&alice, key, None, body)).len(), 1);
}

#[test]
fn at_most_twenty_errors_are_listed_and_nothing_sent_is_repeated() {
    let lines: Vec<Value> = (0..50)
        .map(|_| json!({"to": "b o b secret", "amount": "x"}))
        .collect();
    let outcome = send(
        &SHIPPED,
        &transfer(&json!({"asset": "EUR/2", "lines": lines})),
    );
    let Err(Refused::Invalid(errors)) = outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!(errors.len(), 20);
    assert!(
        errors.iter().all(|error| !error.detail.contains("secret")),
        "{errors:?}"
    );
}

#[test]
fn refusals_come_in_the_documented_order() {
    let body = |subject: &str, kind: &str, schema: &str| {
        json!({"type": kind, "schema": schema, "subject": subject, "data": {}}).to_string()
    };
    let reader = principal("alice", &[Scope::Read]);
    let writer = principal("alice", &[Scope::Write]);
    assert_eq!(
        send_as(&SHIPPED, &reader, &body("bob", "transfer", "9.9")).unwrap_err(),
        Refused::ScopeMissing("ledger:write")
    );
    assert_eq!(
        send_as(&SHIPPED, &writer, &body("bob", "nothing", "1.7")).unwrap_err(),
        Refused::UnknownType("nothing".to_owned())
    );
    assert_eq!(
        send_as(&SHIPPED, &writer, &body("bob", "transfer", "1.8")).unwrap_err(),
        Refused::UnknownSchema("1.8".to_owned())
    );
    assert!(matches!(
        send_as(&SHIPPED, &writer, &body("bob", "transfer", "1.7")),
        Err(Refused::Invalid(_))
    ));
    let good = json!({"type": "transfer", "schema": "1.7", "subject": "bob",
        "data": {"to": "carol", "asset": "EUR/2", "amount": "1"}})
    .to_string();
    assert_eq!(
        send_as(&SHIPPED, &writer, &good).unwrap_err(),
        Refused::SubjectNotYours
    );
    let any = principal("alice", &[Scope::WriteAny]);
    assert_eq!(
        send_as(&SHIPPED, &any, &good).unwrap().subject.as_str(),
        "bob"
    );
}

#[test]
fn the_fingerprint_is_of_the_meaning_as_sent() {
    let alice = principal("alice", &[Scope::Write]);
    let hash = |body: &str| send_as(&SHIPPED, &alice, body).unwrap().fingerprint;
    let first = hash(
        r#"{"type":"transfer","schema":"1.7","data":{"to":"bob","asset":"EUR/2","amount":"1","metadata":{"a":"1","b":"2"}}}"#,
    );
    let same = [
        r#" { "data" : {"metadata":{"b":"2","a":"1"},"amount":"1","asset":"EUR\/2","to":"b\u006fb"}, "schema":"1.7","type":"transfer" }"#,
        r#"{"type":"transfer","schema":"1.7","subject":"alice","expected_sequence":4,"data":{"to":"bob","asset":"EUR/2","amount":"1","metadata":{"a":"1","b":"2"}}}"#,
    ];
    for body in same {
        assert_eq!(hash(body), first, "{body}");
    }
    let others = [
        r#"{"type":"transfer","schema":"1.6","data":{"to":"bob","asset":"EUR/2","amount":"1","metadata":{"a":"1","b":"2"}}}"#,
        r#"{"type":"transfer","schema":"1.7","data":{"to":"bob","asset":"EUR/2","amount":"2","metadata":{"a":"1","b":"2"}}}"#,
        r#"{"type":"transfer","schema":"1.7","data":{"to":"bob","asset":"EUR/2","amount":"1","metadata":{"a":"2","b":"1"}}}"#,
        r#"{"type":"transfer","schema":"1.7","time":"2026-11-30T10:59:00Z","data":{"to":"bob","asset":"EUR/2","amount":"1","metadata":{"a":"1","b":"2"}}}"#,
    ];
    for body in others {
        assert_ne!(hash(body), first, "{body}");
    }
    let zoned = |time: &str| {
        hash(&format!(
            r#"{{"type":"transfer","schema":"1.7","time":"{time}","data":{{"to":"bob","asset":"EUR/2","amount":"1"}}}}"#
        ))
    };
    assert_eq!(
        zoned("2026-11-30T10:59:00Z"),
        zoned("2026-11-30T12:59:00.0000001+02:00")
    );
}

#[test]
fn members_are_kept_sorted_and_the_envelope_is_carried() {
    let alice = principal("alice", &[Scope::Write]);
    let body = r#"{"type":"transfer","schema":"1.7","time":"2026-11-30T10:59:00.1234569Z","expected_sequence":"7",
        "data":{"to":"bob", "asset":"EUR/2","amount":"2500"}}"#;
    let draft = send_as(&SHIPPED, &alice, body).unwrap();
    assert_eq!(
        draft.input.get(),
        r#"{"amount":"2500","asset":"EUR/2","to":"bob"}"#
    );
    assert_eq!(draft.expected_sequence, Some(7));
    assert_eq!(
        draft.time.unwrap().to_string(),
        "2026-11-30T10:59:00.123456Z"
    );
    assert_eq!(
        (draft.schema.to_string(), draft.input_schema),
        ("1.7".to_owned(), None)
    );
}

#[test]
fn the_first_lines_of_the_readme_are_valid() {
    let admin = principal("admin", &[Scope::WriteAny]);
    let deposit = r#"{"type":"deposit","schema":"1.7","subject":"alice","data":{"asset":"EUR/2","amount":"10000"}}"#;
    let mut state = State::default();
    apply(&mut state, &send_as(&SHIPPED, &admin, deposit).unwrap()).unwrap();
    let moved = send(
        &SHIPPED,
        &transfer(&json!({"to": "bob", "asset": "EUR/2", "amount": "2500"})),
    );
    let accepted = apply(&mut state, &moved.unwrap()).unwrap();
    assert_eq!(
        legs(&accepted),
        ["users:alice:available -2500", "users:bob:available 2500"]
    );
    let out = json!({"type": "withdrawal", "schema": "1.0", "data": {"asset": "EUR/2", "amount": "7500"}});
    let accepted = apply(&mut state, &send(&SHIPPED, &out).unwrap()).unwrap();
    assert_eq!(
        legs(&accepted),
        ["users:alice:available -7500", "world 7500"]
    );
    let own = send(
        &SHIPPED,
        &transfer(&json!({"to": "alice", "asset": "EUR/2", "amount": "1"})),
    );
    assert_eq!(
        apply(&mut state, &own.unwrap()).unwrap_err(),
        "same_account"
    );
    let body =
        json!({"type": "deposit", "schema": "1.7", "data": {"asset": "EUR/2", "amount": "1"}});
    let own = send(&SHIPPED, &body).unwrap();
    assert_eq!(apply(&mut state, &own).unwrap_err(), "account_not_yours");
}

/// Decides a draft and keeps the new balances.
fn apply(state: &mut State, draft: &Draft) -> Result<Accepted, String> {
    match decide(state, draft, Timestamp::UNIX_EPOCH) {
        Decision::Accept(accepted) => {
            state.balances.extend(accepted.balances.clone());
            Ok(accepted)
        }
        Decision::Refuse(rejection) => Err(rejection.code().into_owned()),
        Decision::Replay(_) => Err("replay".to_owned()),
    }
}

fn legs(accepted: &Accepted) -> Vec<String> {
    accepted
        .postings
        .iter()
        .map(|leg| format!("{} {}", leg.account, leg.amount))
        .collect()
}

fn funded(account: &str, units: i128) -> State {
    let mut state = State::default();
    let place = (
        Address::parse(account).unwrap(),
        SHIPPED.asset("EUR/2").unwrap(),
    );
    state.balances.insert(place, Amount::new(units).unwrap());
    state
}

#[test]
fn equal_lines_are_one_and_conflicting_lines_are_refused() {
    let line = |to: &str, amount: &str, reference: Option<&str>| match reference {
        Some(reference) => json!({"to": to, "amount": amount, "reference": reference}),
        None => json!({"to": to, "amount": amount}),
    };
    let lines = [
        line("bob", "10", Some("a")),
        line("bob", "10", None),
        line("bob", "10", Some("a")),
        line("carol", "5", None),
        line("bob", "10", Some("a")),
        line("bob", "20", Some("b")),
    ];
    let draft = send(
        &SHIPPED,
        &transfer(&json!({"asset": "EUR/2", "lines": lines})),
    )
    .unwrap();
    assert_eq!(draft.failed_check, None);
    let input: Value = serde_json::from_str(draft.input.get()).unwrap();
    assert_eq!(input["dropped"], 2);
    assert_eq!(input["lines"].as_array().unwrap().len(), 4);
    let accepted = apply(&mut funded("users:alice:available", 45), &draft).unwrap();
    assert_eq!(
        legs(&accepted),
        [
            "users:alice:available -45",
            "users:bob:available 10",
            "users:bob:available 10",
            "users:carol:available 5",
            "users:bob:available 20"
        ]
    );
    let lines = [line("bob", "10", None), line("bob", "11", None)];
    let draft = send(
        &SHIPPED,
        &transfer(&json!({"asset": "EUR/2", "lines": lines})),
    )
    .unwrap();
    assert_eq!(
        draft.failed_check.as_ref().unwrap().code,
        "conflicting_lines"
    );
    let refused = apply(&mut funded("users:alice:available", 45), &draft);
    assert_eq!(refused.unwrap_err(), "conflicting_lines");
}

#[test]
fn m12_a_fee_and_the_rest_sum_exactly() {
    for (amount, fee, rest) in [("999", 14, 985), ("1", 0, 1), ("66", 0, 66), ("67", 1, 66)] {
        let data = json!({"to": "bob", "asset": "EUR/2", "amount": amount, "fee_bps": 150});
        let draft = send(&SHIPPED, &transfer(&data)).unwrap();
        let accepted = apply(&mut funded("users:alice:available", 1_000), &draft).unwrap();
        let mut expected = vec![format!("users:alice:available -{amount}")];
        if fee > 0 {
            expected.push(format!("platform:fees {fee}"));
        }
        expected.push(format!("users:bob:available {rest}"));
        assert_eq!(legs(&accepted), expected);
    }
}

#[test]
fn a_hundred_lines_and_a_sum_beyond_38_digits() {
    let line = |index: usize, amount: &str| json!({"to": format!("u{index}"), "amount": amount});
    let lines: Vec<Value> = (0..100).map(|index| line(index, "3")).collect();
    let draft = send(
        &SHIPPED,
        &transfer(&json!({"asset": "EUR/2", "lines": lines})),
    )
    .unwrap();
    let accepted = apply(&mut funded("users:alice:available", 300), &draft).unwrap();
    assert_eq!(accepted.postings.len(), 101);
    let most = "9".repeat(38);
    let lines = [line(0, &most), line(1, &most)];
    let draft = send(
        &SHIPPED,
        &transfer(&json!({"asset": "EUR/2", "lines": lines})),
    )
    .unwrap();
    assert_eq!(draft.failed_check.unwrap().code, "amount_overflow");
}

#[test]
fn recipients_are_percent_encoded() {
    let data = json!({"to": "a:b/c%", "asset": "EUR/2", "amount": "1"});
    let draft = send(&SHIPPED, &transfer(&data)).unwrap();
    let account = &draft.moves[0].to[0].account;
    assert_eq!(account.address.as_str(), "users:a%3Ab%2Fc%25:available");
    assert_eq!(account.owner.as_ref().unwrap().as_str(), "a:b/c%");
}

fn subjects() -> impl Strategy<Value = String> {
    "[!-~]{1,128}"
}

prop_compose! {
    fn request()(
        minor in 0u16..8,
        deposit: bool,
        to in subjects(),
        pick in any::<prop::sample::Index>(),
        small in 1u64..=9_007_199_254_740_991,
        amount in "[1-9][0-9]{0,30}",
        reference in prop::option::of("\\PC{1,64}"),
        metadata in prop::option::of(prop::collection::btree_map("\\PC{1,40}", "\\PC{0,50}", 0..5)),
        category in prop::option::of("[a-z][a-z0-9_]{0,31}"),
        fee in prop::option::of(0u32..=10_000),
        lines in prop::option::of(prop::collection::vec((subjects(), "[1-9][0-9]{0,10}", prop::option::of("[a-z]{1,3}")), 1..100)),
    ) -> (&'static str, Version, Value) {
        let assets: Vec<&Asset> = SHIPPED.assets().collect();
        let asset = assets[pick.index(assets.len())].as_str();
        let mut data = serde_json::Map::new();
        let mut put = |name: &str, value: Value| data.insert(name.to_owned(), value);
        if minor < 2 {
            put("currency", json!(asset.split('/').next()));
        } else {
            put("asset", json!(asset));
        }
        let lines = lines.filter(|_| minor >= 7);
        if lines.is_none() {
            put("amount", if minor == 0 { json!(small) } else { json!(amount) });
            if !deposit {
                put("to", json!(to));
            }
        }
        if let Some(reference) = reference.filter(|_| minor >= 3) {
            put("reference", json!(reference));
        }
        if let Some(metadata) = metadata.filter(|_| minor >= 4) {
            put("metadata", json!(metadata));
        }
        if let Some(category) = category.filter(|_| minor >= 5) {
            put("category", json!(category));
        }
        if let Some(fee) = fee.filter(|_| minor >= 6) {
            put("fee_bps", json!(fee));
        }
        if let Some(lines) = lines {
            let lines = lines.into_iter().map(|(to, amount, reference)| {
                let mut line = json!({"to": to, "amount": amount});
                if let Some(reference) = reference {
                    line["reference"] = json!(reference);
                }
                line
            });
            put("lines", lines.collect());
        }
        (if deposit { "deposit" } else { "transfer" }, Version { major: 1, minor }, Value::Object(data))
    }
}

proptest! {
    #[test]
    fn valid_data_of_every_version_becomes_valid_current_data((name, version, data) in request()) {
        let body = json!({"type": name, "schema": version, "data": data});
        let draft = send(&SHIPPED, &body).unwrap();
        let failed = draft.failed_check.as_ref().map(|failed| failed.code.as_str());
        prop_assert!(matches!(failed, None | Some("conflicting_lines")), "{:?}", failed);
        let mut input: Value = serde_json::from_str(draft.input.get()).unwrap();
        let kind = SHIPPED.event_type(name).unwrap();
        input.as_object_mut().unwrap().remove("dropped");
        prop_assert!(kind.version(kind.current()).unwrap().accepts(&input));
        prop_assert_eq!(draft.moves.len(), 1);
        prop_assert_eq!(draft.input_schema, (version != kind.current()).then_some(version));
    }

    #[test]
    fn no_body_makes_it_panic(body in prop::collection::vec(any::<u8>(), 0..200)) {
        let alice = principal("alice", &[Scope::Write]);
        let key = IdempotencyKey::parse("k").unwrap();
        prop_assert!(SHIPPED.draft(&alice, key, None, &body).is_err());
    }
}

/// A directory of an operator's, removed when the test ends.
struct Directory(PathBuf);

impl Directory {
    fn new(files: &[(&str, &str)]) -> Self {
        let name = format!("daybook-schema-{}", uuid::Uuid::now_v7());
        let root = std::env::temp_dir().join(name);
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        Directory(root)
    }

    fn load(&self) -> Result<Registry, LoadError> {
        Registry::load(Some(&self.0))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const SALE: &str = r#"{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "properties": {
    "amount": {"type": "string", "format": "amount"},
    "merchant": {"type": "string", "format": "subject"},
    "order": {"type": "string", "minLength": 1, "maxLength": 40},
    "note": {"type": "string"},
    "lines": {"type": "array", "items": {"type": "object", "properties": {"amount": {"type": "string"}, "tags": {"type": "array"}}, "required": ["amount", "tags"]}}
  },
  "required": ["amount", "merchant", "order"],
  "additionalProperties": false
}"#;

const SALE_TYPE: &str = r#"
summary = "A sale"
scope = "ledger:write"
current = "1.0"

[[check]]
that = "money(data.amount) >= money(100)"
code = "sale_too_small"
detail = "a sale is at least 1.00"

[[move]]
name = "pay"
asset = "asset('EUR')"
amount = "data.amount"
from = ["user(subject, 'promo')", "user(subject, 'available')"]
to = "address('platform', 'clearing')"

[[move]]
asset = "'EUR/2'"
amount = "taken('pay', 0) + taken(0, 1)"
from = "platform('clearing')"
to = [
  { account = "user(data.merchant, 'available')", amount = "bps(taken('pay', 1), 1530)" },
  { account = "platform('partner')", share = 2500 },
  { account = "platform('fees')", rest = true },
]

[[unique]]
key = "data.order"
for = "24h"
code = "order_taken"
"#;

fn sale(registry: &Registry, amount: &str) -> Draft {
    let writer = principal("alice", &[Scope::WriteAny]);
    let body = json!({"type": "shop.sale", "schema": "1.0",
        "data": {"amount": amount, "merchant": "shop", "order": "o-1"}});
    send_as(registry, &writer, &body.to_string()).unwrap()
}

#[test]
fn an_operators_type_with_every_effect() {
    let directory = Directory::new(&[
        ("shop.sale/1.0.json", SALE),
        ("shop.sale/type.toml", SALE_TYPE),
        ("assets.toml", "POINTS = 0\n"),
        (
            "accounts.toml",
            "[[account]]\npattern = \"shops:{owner}\"\nguard = \"none\"\nopened_by_credit = true\n",
        ),
        ("README.md", "for people"),
    ]);
    let registry = directory.load().unwrap();
    assert!(registry.asset("POINTS/0").is_some());
    assert!(
        registry
            .chart()
            .account(&Address::parse("shops:x").unwrap())
            .is_some()
    );

    let mut state = funded("users:alice:promo", 300);
    state
        .balances
        .extend(funded("users:alice:available", 10_000).balances);
    let draft = sale(&registry, "1000");
    assert!(matches!(draft.moves[1].amount, AmountExpr::Plus(..)));
    assert_eq!(draft.unique[0].seconds, Some(86_400));
    let accepted = apply(&mut state, &draft).unwrap();
    assert_eq!(
        legs(&accepted),
        [
            "users:alice:promo -300",
            "users:alice:available -700",
            "platform:clearing 1000",
            "platform:clearing -1000",
            // floor(700 * 1530 / 10000)
            "users:shop:available 107",
            // floor((1000 - 107) * 2500 / 10000)
            "platform:partner 223",
            "platform:fees 670",
        ]
    );
    assert_eq!(accepted.unique[0].0.code, "order_taken");
    let small = sale(&registry, "99");
    assert_eq!(apply(&mut state, &small).unwrap_err(), "sale_too_small");
}

fn broken(type_toml: &str) -> LoadError {
    Directory::new(&[
        ("shop.sale/1.0.json", SALE),
        ("shop.sale/type.toml", type_toml),
    ])
    .load()
    .unwrap_err()
}

fn with_move(asset: &str, amount: &str, from: &str, to: &str) -> String {
    let quoted = |text: &str| format!("\"{text}\"");
    let to = if to.starts_with('[') {
        to.to_owned()
    } else {
        quoted(to)
    };
    format!(
        "summary = \"x\"\nscope = \"ledger:write\"\ncurrent = \"1.0\"\n[[move]]\nasset = {}\namount = {}\nfrom = {}\nto = {to}\n",
        quoted(asset),
        quoted(amount),
        quoted(from)
    )
}

#[rstest]
#[case::misspelt_member("data.ammount", "does not require")]
#[case::optional_without_has("data.note", "does not require")]
#[case::misspelt_function("bsp(data.amount, 10)", "no function")]
#[case::wrong_count("bps(data.amount)", "no function")]
#[case::misspelt_variable("dat.amount", "no variable")]
#[case::no_item_here("item.amount", "no variable")]
#[case::type_name("int", "no variable")]
#[case::float("money(1.5)", "neither fractions")]
#[case::concatenated("data.amount + data.amount", "added to")]
#[case::concatenated_inside("bps(data.amount + data.amount, 1)", "added to")]
#[case::no_money("string(1)", "an amount is")]
#[case::later_move("taken('pay', 0)", "no source")]
#[case::two_levels("sum(data.lines.map(a, data.lines.map(b, b.amount)))", "nests")]
#[case::two_levels_tested(
    "has(data.lines) ? sum(data.lines.map(a, sum(data.lines.map(b, b.amount)))) : money(0)",
    "nests"
)]
#[case::not_cel("data.amount +", "")]
#[case::a_map("money({'a': 1}.a)", "neither maps")]
#[case::optional_syntax("data.?amount", "")]
fn an_amount_that_start_refuses(#[case] amount: &str, #[case] reason: &str) {
    let error = broken(&with_move(
        "data.amount",
        amount,
        "world()",
        "platform('x')",
    ));
    assert_eq!(error.file, "shop.sale/type.toml");
    assert!(error.reason.contains(reason), "{error}");
    assert!(error.reason.contains("[[move]] 1"), "{error}");
}

#[rstest]
#[case("'users:' + subject + ':available'")]
#[case("data.merchant")]
#[case("string('world')")]
#[case("user(subject, 'available') + 'x'")]
#[case("true ? user(subject, 'x') : subject")]
fn an_account_is_never_a_text(#[case] account: &str) {
    let error = broken(&with_move("'EUR/2'", "data.amount", account, "world()"));
    assert!(
        error.reason.contains("account is made by") || error.reason.contains("added to"),
        "{error}"
    );
    let error = broken(&with_move("'EUR/2'", "data.amount", "world()", account));
    assert!(error.reason.contains("[[move]] 1"), "{error}");
}

#[rstest]
#[case("[{ account = \"world()\", rest = true }, { account = \"platform('a')\", rest = true }]")]
#[case("[{ account = \"world()\" }]")]
#[case("[{ account = \"world()\", share = 10001 }]")]
#[case("[{ account = \"world()\", rest = true, each = \"data.lines\" }]")]
#[case("[{ account = \"world()\", amount = \"sum(item.tags.map(t, t))\", each = \"data.lines\" }]")]
#[case("[{ account = \"world()\", amount = \"item.amnt\", each = \"data.lines\" }]")]
#[case("[]")]
#[case("[{ account = \"world()\", amuont = \"1\" }]")]
fn targets_that_start_refuses(#[case] to: &str) {
    let error = broken(&with_move("'EUR/2'", "data.amount", "platform('x')", to));
    assert_eq!(error.file, "shop.sale/type.toml");
}

#[test]
fn an_expression_that_fails_on_a_valid_event_is_a_type_error() {
    for (asset, amount, from) in [
        ("data.order", "data.amount", "world()"),
        ("'EUR/2'", "bps(data.amount, data.order)", "world()"),
        ("'EUR/2'", "data.order", "world()"),
        ("'EUR/2'", "data.amount", "user('', 'available')"),
    ] {
        let directory = Directory::new(&[
            ("shop.sale/1.0.json", SALE),
            (
                "shop.sale/type.toml",
                &with_move(asset, amount, from, "platform('x')"),
            ),
        ]);
        let draft = sale(&directory.load().unwrap(), "1000");
        assert_eq!(draft.failed_check.unwrap().code, "type_error");
    }
    let directory = Directory::new(&[
        ("shop.sale/1.0.json", SALE),
        (
            "shop.sale/type.toml",
            &with_move(
                "'EUR/2'",
                "data.amount",
                "world()",
                "address('no', 'where')",
            ),
        ),
    ]);
    let draft = sale(&directory.load().unwrap(), "1000");
    assert_eq!(draft.unknown_account.unwrap().as_str(), "no:where");
}

#[rstest]
#[case(&[("transfer/1.0.json", SALE)], "transfer/1.0.json", None)]
#[case(&[("assets.toml", "EUR = 2\n")], "assets.toml", None)]
#[case(&[("assets.toml", "A = 1\nB = \n")], "assets.toml", Some(2))]
#[case(&[("assets.toml", "eur = 2\n")], "assets.toml", None)]
#[case(&[("accounts.toml", "[[account]]\npattern = \"world\"\nguard = \"none\"\nopened_by_credit = true\n")], "accounts.toml", None)]
#[case(&[("accounts.toml", "[[account]]\npattern = \"x\"\nguard = \"nine\"\nopened_by_credit = true\n")], "accounts.toml", Some(3))]
#[case(&[("x/type.toml", "summary = \"x\"\nscope = \"ledger:write\"\ncurrent = \"1.0\"\nextra = 1\n")], "x/type.toml", Some(4))]
#[case(&[("x/1.0.json", SALE)], "x/type.toml", None)]
#[case(&[("X/1.0.json", SALE)], "X/1.0.json", None)]
#[case(&[("stray.txt", "")], "stray.txt", None)]
#[case(&[("shop.sale/1.0.json", "{\n\"a\": 1,,}"), ("shop.sale/type.toml", SALE_TYPE)], "shop.sale/1.0.json", Some(2))]
#[case(&[("shop.sale/1.0.json", r#"{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","$ref":"https://example.com/x.json"}"#), ("shop.sale/type.toml", SALE_TYPE)], "shop.sale/1.0.json", None)]
#[case(&[("shop.sale/1.0.json", r#"{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","$ref":"file:///etc/passwd"}"#), ("shop.sale/type.toml", SALE_TYPE)], "shop.sale/1.0.json", None)]
#[case(&[("shop.sale/1.0.json", r#"{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","properties":{"a":{"pattern":"(a)\\1"}}}"#), ("shop.sale/type.toml", SALE_TYPE)], "shop.sale/1.0.json", None)]
#[case(&[("shop.sale/1.0.json", r#"{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","properties":{"a":{"format":"amonut"}}}"#), ("shop.sale/type.toml", SALE_TYPE)], "shop.sale/1.0.json", None)]
#[case(&[("shop.sale/1.0.json", SALE), ("shop.sale/type.toml", SALE_TYPE), ("shop.sale/examples/1.0.accepted.x.json", r#"{"request":{"type":"shop.sale","schema":"1.0","data":{}},"expect":{}}"#)], "shop.sale/examples/1.0.accepted.x.json", None)]
#[case(&[("shop.sale/1.0.json", SALE), ("shop.sale/type.toml", SALE_TYPE), ("shop.sale/examples/9.0.accepted.x.json", "{}")], "shop.sale/type.toml", None)]
fn a_broken_directory_is_an_error_with_its_place(
    #[case] files: &[(&str, &str)],
    #[case] file: &str,
    #[case] line: Option<usize>,
) {
    let error = Directory::new(files).load().unwrap_err();
    assert_eq!((error.file.as_str(), error.line), (file, line), "{error}");
    assert!(!error.reason.is_empty());
}

#[test]
fn zz_timing() {
    let t = std::time::Instant::now();
    let r = Registry::load(None).unwrap();
    eprintln!("load {:?}", t.elapsed());
    let alice = principal("alice", &[Scope::Write]);
    for body in [
        transfer(&json!({"to": "bob", "asset": "EUR/2", "amount": "2500"})).to_string(),
        json!({"type":"transfer","schema":"1.0","data":{"to":"bob","currency":"EUR","amount":2500}}).to_string(),
        transfer(&json!({"asset": "EUR/2", "lines": (0..100).map(|i| json!({"to": format!("u{i}"), "amount": "3"})).collect::<Vec<_>>()})).to_string(),
    ] {
        let t = std::time::Instant::now();
        for _ in 0..1000 {
            let _ = send_as(&r, &alice, &body).unwrap();
        }
        eprintln!("draft {:?}", t.elapsed() / 1000);
    }
}
