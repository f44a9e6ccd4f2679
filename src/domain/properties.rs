//! What must hold of every decision, over random worlds; and the small world that other tests draw from too.
//!
//! Tests only. Never a copy of `decide`: each property is stated on what goes in and what comes out.

use super::decide::{DedupeKey, POSTINGS_MAX};
use super::*;
use jiff::Timestamp;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

/// The moment at which these tests decide, in microseconds.
pub(crate) const NOW_MICROS: i64 = 1_796_036_400_000_000;

pub(crate) fn at(micros: i64) -> Timestamp {
    Timestamp::from_microsecond(micros).unwrap()
}

pub(crate) fn amount(units: i128) -> Amount {
    Amount::new(units).unwrap()
}

pub(crate) fn subject(name: &str) -> Subject {
    Subject::parse(name).unwrap()
}

pub(crate) fn asset(code: &str) -> Asset {
    Asset::from_canonical(code)
}

const USERS: [&str; 3] = ["alice", "bob", "carol"];
const ASSETS: [&str; 2] = ["EUR/2", "USD/2"];

/// Address, owner, floor if it is guarded, whether a credit may open it.
type Row = (&'static str, Option<&'static str>, Option<i128>, bool);

const ACCOUNTS: [Row; 10] = [
    ("users:alice:available", Some("alice"), Some(0), true),
    ("users:alice:promo", Some("alice"), Some(0), true),
    ("users:bob:available", Some("bob"), Some(-100), true),
    ("users:bob:savings", Some("bob"), Some(50), false),
    ("users:carol:available", Some("carol"), Some(0), true),
    ("users:carol:open", Some("carol"), None, true),
    ("vault", None, Some(0), false),
    ("platform:fees", None, None, true),
    ("platform:closed", None, None, false),
    ("world", None, None, true),
];

pub(crate) fn account(index: usize) -> Account {
    let (address, owner, floor, opened_by_credit) = ACCOUNTS[index % ACCOUNTS.len()];
    Account {
        address: Address::parse(address).unwrap(),
        owner: owner.map(subject),
        guard: floor.map_or(Guard::None, |floor| Guard::Floor(amount(floor))),
        opened_by_credit,
    }
}

fn account_of(address: &Address) -> Account {
    let index = ACCOUNTS.iter().position(|row| row.0 == address.as_str());
    account(index.unwrap())
}

pub(crate) fn named(address: &str) -> Account {
    account_of(&Address::parse(address).unwrap())
}

fn stored(fingerprint: u8) -> Stored {
    Stored {
        event_id: uuid::Uuid::from_bytes([fingerprint; 16]),
        fingerprint: [fingerprint; 32],
        record: "{}".into(),
    }
}

pub(crate) fn draft(moves: Vec<Move>) -> Draft {
    Draft {
        subject: subject("alice"),
        principal: Principal {
            subject: subject("alice"),
            issuer: "issuer".into(),
            token_id: "token".into(),
            issued_at: 0,
            expires_at: 0,
            scopes: [Scope::Write].into_iter().collect(),
        },
        event_type: TypeName::parse("transfer").unwrap(),
        schema: Version { major: 1, minor: 7 },
        input_schema: None,
        time: None,
        expected_sequence: None,
        key: IdempotencyKey::parse("key").unwrap(),
        fingerprint: [1; 32],
        input: serde_json::value::RawValue::from_string("{}".into()).unwrap(),
        passes_freeze: false,
        unknown_account: None,
        failed_check: None,
        moves,
        unique: Vec::new(),
        traceparent: None,
    }
}

fn with_write_any(mut draft: Draft) -> Draft {
    draft.principal.scopes = [Scope::WriteAny].into_iter().collect();
    draft
}

fn transfer(code: &str, units: i128, from: &str, to: &str) -> Move {
    Move {
        asset: asset(code),
        amount: AmountExpr::Known(amount(units)),
        from: vec![named(from)],
        to: vec![Target {
            account: named(to),
            portion: Portion::Rest,
        }],
    }
}

fn units() -> impl Strategy<Value = i128> {
    prop_oneof![
        12 => 0i128..300,
        1 => -5i128..0,
        1 => Just(Amount::MAX.units()),
        1 => (Amount::MAX.units() - 300)..=Amount::MAX.units(),
    ]
}

fn expression() -> impl Strategy<Value = AmountExpr> {
    let leaf = prop_oneof![
        8 => units().prop_map(|units| AmountExpr::Known(amount(units))),
        1 => (0usize..3, 0usize..3).prop_map(|(of_move, source)| AmountExpr::Taken { of_move, source }),
    ];
    leaf.prop_recursive(2, 6, 2, |inner| {
        let pair = (inner.clone(), inner.clone());
        prop_oneof![
            2 => pair.clone().prop_map(|(a, b)| AmountExpr::Plus(a.into(), b.into())),
            1 => pair.prop_map(|(a, b)| AmountExpr::Minus(a.into(), b.into())),
            2 => (inner, 0u32..=12_000).prop_map(|(a, points)| AmountExpr::BasisPoints(a.into(), points)),
        ]
    })
}

/// Shares in basis points that sum to 10,000.
fn shares(most: usize) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0u32..=10_000, 0..most).prop_map(|mut cuts| {
        cuts.sort_unstable();
        cuts.push(10_000);
        let mut last = 0;
        cuts.into_iter()
            .map(|cut| cut - std::mem::replace(&mut last, cut))
            .collect()
    })
}

/// The portions of a move of this amount; mostly such as sum to it.
fn portions(whole: AmountExpr) -> impl Strategy<Value = Vec<Portion>> {
    let fixed = || expression().prop_map(Portion::Amount);
    prop_oneof![
        3 => Just(vec![Portion::Rest]),
        2 => Just(vec![Portion::Amount(whole)]),
        3 => shares(4).prop_map(|all| all.into_iter().map(Portion::Share).collect()),
        2 => shares(4).prop_map(|mut all| {
            all.pop();
            all.into_iter().map(Portion::Share).chain([Portion::Rest]).collect()
        }),
        2 => ((0i128..9).prop_map(|u| Portion::Amount(AmountExpr::Known(amount(u)))), shares(3))
            .prop_map(|(first, all)| [first].into_iter().chain(all.into_iter().map(Portion::Share)).collect()),
        1 => prop::collection::vec(prop_oneof![fixed(), (0u32..9_000).prop_map(Portion::Share), Just(Portion::Rest)], 0..4),
    ]
}

fn a_move() -> impl Strategy<Value = Move> {
    let places = || prop::collection::vec(0..ACCOUNTS.len(), 1..4);
    (
        prop::sample::select(&ASSETS[..]),
        expression(),
        places(),
        places(),
        0..20,
    )
        .prop_flat_map(|(code, whole, from, to, luck)| {
            let apart: Vec<usize> = to.iter().copied().filter(|i| !from.contains(i)).collect();
            let to = if luck == 0 || apart.is_empty() {
                to
            } else {
                apart
            };
            portions(whole.clone()).prop_map(move |portions| Move {
                asset: asset(code),
                amount: whole.clone(),
                from: from.iter().map(|i| account(*i)).collect(),
                to: portions
                    .into_iter()
                    .enumerate()
                    .map(|(i, portion)| Target {
                        account: account(to[i % to.len()]),
                        portion,
                    })
                    .collect(),
            })
        })
}

fn unique_key() -> impl Strategy<Value = UniqueKey> {
    (0..6, prop::option::of(0u32..100)).prop_map(|(key, seconds)| UniqueKey {
        namespace: "orders".into(),
        key: format!("o-{key}"),
        code: "order_exists".into(),
        seconds,
    })
}

/// Any draft over the small world.
pub(crate) fn any_draft() -> impl Strategy<Value = Draft> {
    let rarely = || prop::bool::weighted(0.05);
    (
        prop::sample::select(&USERS[..]),
        prop::option::weighted(0.3, prop::sample::select(&["alice", "bob", "desk"][..])),
        prop::bool::weighted(0.8),
        prop::collection::vec(a_move(), 0..4),
        prop::collection::vec(unique_key(), 0..3),
        prop::option::weighted(0.1, 0u64..4),
        (rarely(), rarely(), prop::bool::ANY),
        (0u32..40, 1u8..3),
    )
        .prop_map(|(of, writer, any, moves, unique, expected, flags, key)| {
            let (unknown, failed, passes) = flags;
            let mut draft = draft(moves);
            draft.subject = subject(of);
            draft.principal.subject = subject(writer.unwrap_or(of));
            if any {
                draft = with_write_any(draft);
            }
            draft.unique = unique;
            draft.expected_sequence = expected;
            draft.unknown_account = unknown.then(|| Address::parse("nowhere").unwrap());
            draft.failed_check = failed.then(|| FailedCheck {
                code: "too_small".into(),
                detail: "is too small".into(),
            });
            draft.passes_freeze = passes;
            draft.key = IdempotencyKey::parse(&format!("k-{}", key.0)).unwrap();
            draft.fingerprint = [key.1; 32];
            draft
        })
}

fn any_state() -> impl Strategy<Value = State> {
    let user =
        (prop::bool::weighted(0.1), 0u64..4, -50i64..50).prop_map(|(frozen, sequence, late)| {
            UserState {
                frozen,
                sequence,
                head: [3; 32],
                last_at: at(NOW_MICROS + late),
            }
        });
    let balance = prop_oneof![
        8 => 0i128..1_000,
        1 => -200i128..0,
        1 => (Amount::MAX.units() - 50)..=Amount::MAX.units(),
    ];
    let places = ACCOUNTS.len() * ASSETS.len();
    (
        prop::collection::vec(prop::option::of(user), USERS.len()),
        prop::collection::vec(prop::option::weighted(0.8, balance), places),
        prop::collection::vec(prop::bool::weighted(0.8), ACCOUNTS.len()),
        prop::collection::vec((0..4, prop::option::of(-50i64..50)), 0..3),
        prop::collection::vec((0u32..40, 1u8..3), 0..4),
        prop::bool::weighted(0.05),
    )
        .prop_map(|(users, balances, open, unique, keys, revoked)| {
            let mut state = State::default();
            for (name, user) in USERS.iter().zip(users) {
                state.users.extend(user.map(|user| (subject(name), user)));
            }
            for (place, units) in balances.into_iter().enumerate() {
                let account = account(place / ASSETS.len());
                let place = (account.address, asset(ASSETS[place % ASSETS.len()]));
                if account.guard != Guard::None {
                    state.balances.extend(units.map(|u| (place, amount(u))));
                }
            }
            let open = open.iter().enumerate().filter(|(_, open)| **open);
            state.accounts = open.map(|(index, _)| account(index).address).collect();
            for (key, end) in unique {
                let end = end.map(|micros| at(NOW_MICROS + micros));
                state
                    .unique
                    .insert(("orders".into(), format!("o-{key}")), end);
            }
            for (key, fingerprint) in keys {
                let key = DedupeKey {
                    subject: subject("alice"),
                    writer: subject("alice"),
                    key: IdempotencyKey::parse(&format!("k-{key}")).unwrap(),
                };
                state.stored.insert(key, stored(fingerprint));
            }
            if revoked {
                state.revoked.insert(("issuer".into(), "token".into()));
            }
            state
        })
}

/// The exact sum of amounts, in two halves so that nothing can wrap.
fn sums_to_zero(amounts: impl Iterator<Item = Amount>) -> bool {
    const HALF: i128 = 10_000_000_000_000_000_000;
    let (high, low) = amounts.fold((0i128, 0i128), |(high, low), amount| {
        let units = amount.units();
        (high + units.div_euclid(HALF), low + units.rem_euclid(HALF))
    });
    high + low / HALF == 0 && low % HALF == 0
}

fn check_accepted(state: &State, draft: &Draft, accepted: &Accepted) {
    for code in ASSETS {
        let legs = accepted.postings.iter().filter(|p| p.asset == asset(code));
        assert!(
            sums_to_zero(legs.map(|p| p.amount)),
            "{code} is made or lost"
        );
    }
    assert!(accepted.postings.len() <= POSTINGS_MAX);
    let mut book: HashMap<(Address, Asset), Amount> = HashMap::new();
    for posting in &accepted.postings {
        assert!(!posting.amount.is_zero(), "a posting of nothing");
        let account = account_of(&posting.account);
        let Guard::Floor(_) = account.guard else {
            assert_eq!(posting.balance, None, "a balance that no lock protects");
            continue;
        };
        let place = (posting.account.clone(), posting.asset.clone());
        let before = state.balances.get(&place).copied().unwrap_or_default();
        let balance = book.entry(place).or_insert(before);
        *balance = balance.plus(posting.amount).unwrap();
        let own = account.owner.as_ref() == Some(&draft.subject);
        assert_eq!(posting.balance, own.then_some(*balance));
    }
    let told: HashMap<_, _> = accepted.balances.iter().cloned().collect();
    assert_eq!(told.len(), accepted.balances.len(), "a balance told twice");
    assert_eq!(told, book, "the balances are those before and the postings");
    for (place, after) in book {
        let Guard::Floor(floor) = account_of(&place.0).guard else {
            continue;
        };
        let before = state.balances.get(&place).copied().unwrap_or_default();
        assert!(
            after >= floor.min(before),
            "{}: {before} to {after}, floor {floor}",
            place.0
        );
    }
    let user = state.users.get(&draft.subject).cloned().unwrap_or_default();
    assert_eq!(accepted.sequence, user.sequence + 1);
    assert_eq!(accepted.previous, user.head);
    assert!(accepted.recorded_at >= user.last_at && accepted.recorded_at >= at(NOW_MICROS));
    for (unique, end) in &accepted.unique {
        let name = (unique.namespace.clone(), unique.key.clone());
        let free = match state.unique.get(&name) {
            None => true,
            Some(until) => until.is_some_and(|until| until <= accepted.recorded_at),
        };
        assert!(free, "{name:?} is taken twice");
        assert_eq!(end.is_none(), unique.seconds.is_none());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn every_decision_keeps_the_books(state in any_state(), draft in any_draft()) {
        let decision = decide(&state, &draft, at(NOW_MICROS));
        prop_assert_eq!(&decision, &decide(&state.clone(), &draft.clone(), at(NOW_MICROS)), "not deterministic");
        match &decision {
            Decision::Accept(accepted) => check_accepted(&state, &draft, accepted),
            Decision::Replay(found) => {
                prop_assert_eq!(Some(found), state.stored.get(&DedupeKey::of(&draft)));
                prop_assert_eq!(found.fingerprint, draft.fingerprint);
            }
            Decision::Refuse(rejection) => prop_assert!(!rejection.code().is_empty()),
        }
    }

    /// Whatever else is wrong with it: a debit of another's account takes the right, and a frozen user pays nothing.
    #[test]
    fn what_is_accepted_was_allowed(state in any_state(), draft in any_draft()) {
        if let Decision::Accept(accepted) = decide(&state, &draft, at(NOW_MICROS)) {
            for posting in accepted.postings.iter().filter(|p| p.amount.is_negative()) {
                let owner = account_of(&posting.account).owner;
                prop_assert!(draft.principal.scopes.has(Scope::WriteAny) || owner.as_ref() == Some(&draft.principal.subject));
                let frozen = owner.is_some_and(|owner| state.users.get(&owner).is_some_and(|user| user.frozen));
                prop_assert!(draft.passes_freeze || !frozen);
            }
            for posting in &accepted.postings {
                let account = account_of(&posting.account);
                prop_assert!(account.opened_by_credit || state.accounts.contains(&account.address));
            }
            prop_assert!(draft.expected_sequence.is_none_or(|expected| expected + 1 == accepted.sequence));
            prop_assert!(draft.failed_check.is_none() && draft.unknown_account.is_none());
        }
    }

    /// After an accepted event the same request is a replay, and the same key with another meaning is refused.
    #[test]
    fn an_event_happens_once(state in any_state(), draft in any_draft()) {
        if let Decision::Accept(accepted) = decide(&state, &draft, at(NOW_MICROS)) {
            let mut state = state;
            let known = stored(9);
            let known = Stored { fingerprint: draft.fingerprint, ..known };
            state.apply(&draft, &accepted, [7; 32], known.clone());
            prop_assert_eq!(decide(&state, &draft, at(NOW_MICROS)), Decision::Replay(known));
            let mut other = draft.clone();
            other.fingerprint = [0xFF; 32];
            prop_assert_eq!(decide(&state, &other, at(NOW_MICROS)), Decision::Refuse(Rejection::KeyReused));
        }
    }

    #[test]
    fn m11_same_account_is_refused(one in a_move(), source in 0usize..3, target in 0usize..4) {
        let mut one = one;
        prop_assume!(!one.to.is_empty());
        let (source, target) = (source % one.from.len(), target % one.to.len());
        one.to[target].account = one.from[source].clone();
        let accounts = (0..ACCOUNTS.len()).map(|index| account(index).address).collect();
        let state = State { accounts, ..State::default() };
        let decision = decide(&state, &with_write_any(draft(vec![one])), at(NOW_MICROS));
        prop_assert!(matches!(decision, Decision::Refuse(Rejection::SameAccount(_))), "{decision:?}");
    }

    #[test]
    fn m12_shares_sum_to_the_move(units in 0..=Amount::MAX.units(), shares in shares(6), rest in any::<bool>()) {
        let mut portions: Vec<Portion> = shares.iter().copied().map(Portion::Share).collect();
        if rest {
            portions.pop();
            portions.push(Portion::Rest);
        }
        let to = portions.iter().map(|portion| Target { account: named("platform:fees"), portion: portion.clone() });
        let one = Move { to: to.collect(), ..transfer("EUR/2", units, "world", "platform:fees") };
        let Decision::Accept(accepted) = decide(&State::default(), &with_write_any(draft(vec![one])), at(NOW_MICROS)) else {
            panic!("a split is refused");
        };
        let credits: Vec<Amount> = accepted.postings.iter().skip(1).map(|p| p.amount).collect();
        let whole = accepted.postings.first().map_or(Amount::ZERO, |p| p.amount.negated());
        prop_assert_eq!(whole, amount(units));
        prop_assert!(sums_to_zero(credits.iter().copied().chain([whole.negated()])));
        for share in shares.iter().take(shares.len() - 1) {
            let floored = whole.basis_points(*share).unwrap();
            let near = |part: &Amount| part.units() - floored.units() == 0 || (!rest && part.units() - floored.units() == 1);
            prop_assert!(floored.is_zero() || credits.iter().any(near));
        }
    }

    #[test]
    fn sources_are_emptied_in_order(units in 0i128..400, first in 0i128..200, second in 0i128..200) {
        let mut state = State::default();
        let place = |address: &str| (named(address).address, asset("EUR/2"));
        state.balances.insert(place("users:alice:promo"), amount(first));
        state.balances.insert(place("users:alice:available"), amount(second));
        let mut one = transfer("EUR/2", units, "users:alice:promo", "users:bob:available");
        one.from.push(named("users:alice:available"));
        match decide(&state, &draft(vec![one]), at(NOW_MICROS)) {
            Decision::Accept(accepted) => {
                let took = |address: &str| {
                    let found = accepted.postings.iter().find(|p| p.account == named(address).address);
                    found.map_or(0, |p| -p.amount.units())
                };
                prop_assert_eq!(took("users:alice:promo"), units.min(first));
                prop_assert_eq!(took("users:alice:available"), units - units.min(first));
            }
            Decision::Refuse(Rejection::InsufficientFunds { account, .. }) => {
                prop_assert!(units > first + second);
                prop_assert_eq!(account, named("users:alice:available").address);
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Something wrong with a request, in the documented order of refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Fault {
    Revoked,
    KeyReused,
    Sequence,
    Frozen,
    NotYours,
    Unknown,
    SameAccount,
    KeyTaken,
    Check,
    Overflow,
    Funds,
}

const FAULTS: [(Fault, &str); 11] = [
    (Fault::Revoked, "token_revoked"),
    (Fault::KeyReused, "idempotency_key_reused"),
    (Fault::Sequence, "sequence_conflict"),
    (Fault::Frozen, "user_frozen"),
    (Fault::NotYours, "account_not_yours"),
    (Fault::Unknown, "account_unknown"),
    (Fault::SameAccount, "same_account"),
    (Fault::KeyTaken, "order_exists"),
    (Fault::Check, "too_small"),
    (Fault::Overflow, "amount_overflow"),
    (Fault::Funds, "insufficient_funds"),
];

/// The move that brings a fault about, in one of two ways.
fn bad_move(fault: Fault, way: bool) -> Option<Move> {
    let alice = "users:alice:available";
    let fees = "platform:fees";
    match (fault, way) {
        (Fault::NotYours, true) => Some(transfer("EUR/2", 1, "users:bob:available", fees)),
        (Fault::NotYours, false) => Some(transfer("EUR/2", 1, "world", fees)),
        (Fault::Unknown, false) => Some(transfer("EUR/2", 1, alice, "platform:closed")),
        (Fault::SameAccount, true) => Some(transfer("EUR/2", 1, alice, alice)),
        (Fault::SameAccount, false) => Some(transfer("USD/2", 0, alice, alice)),
        (Fault::Overflow, true) => Some(transfer("EUR/2", 1, alice, "users:carol:available")),
        (Fault::Overflow, false) => {
            let whole = AmountExpr::BasisPoints(AmountExpr::Known(Amount::MAX).into(), 10_001);
            let mut one = transfer("EUR/2", 0, alice, fees);
            one.amount = whole;
            Some(one)
        }
        (Fault::Funds, true) => Some(transfer("USD/2", 1, alice, fees)),
        (Fault::Funds, false) => Some(transfer("EUR/2", 1_001, alice, fees)),
        _ => None,
    }
}

/// Makes a draft and its state wrong in one way more.
fn spoil(state: &mut State, draft: &mut Draft, fault: Fault, way: bool) {
    draft.moves.extend(bad_move(fault, way));
    match fault {
        Fault::Revoked => drop(state.revoked.insert(("issuer".into(), "token".into()))),
        Fault::KeyReused => drop(state.stored.insert(DedupeKey::of(draft), stored(2))),
        Fault::Sequence => draft.expected_sequence = Some(if way { 6 } else { 0 }),
        Fault::Frozen => state.users.get_mut(&draft.subject).unwrap().frozen = true,
        Fault::Unknown if way => draft.unknown_account = Address::parse("nowhere"),
        Fault::KeyTaken => {
            let key = UniqueKey {
                namespace: "orders".into(),
                key: "o-1".into(),
                code: "order_exists".into(),
                seconds: None,
            };
            if way {
                draft.unique.push(key.clone());
            } else {
                state.unique.insert(("orders".into(), "o-1".into()), None);
            }
            draft.unique.push(key);
        }
        Fault::Check => {
            draft.failed_check = Some(FailedCheck {
                code: "too_small".into(),
                detail: "is too small".into(),
            });
        }
        _ => {}
    }
}

fn sound_state() -> State {
    let mut state = State::default();
    let user = UserState {
        sequence: 5,
        ..UserState::default()
    };
    state.users.insert(subject("alice"), user);
    for (address, units) in [
        ("users:alice:available", 1_000),
        ("users:bob:available", 1_000),
        ("users:carol:available", Amount::MAX.units()),
    ] {
        let place = (named(address).address, asset("EUR/2"));
        state.balances.insert(place, amount(units));
    }
    state
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn the_first_fault_in_order_is_the_refusal(
        ways in prop::collection::vec(prop::option::weighted(0.3, any::<bool>()), FAULTS.len()),
        rights in (any::<bool>(), any::<bool>()),
        order in any::<prop::sample::Index>(),
    ) {
        let (write_any, passes) = rights;
        let mut state = sound_state();
        let mut one = draft(vec![transfer("EUR/2", 10, "users:alice:available", "platform:fees")]);
        if write_any {
            one = with_write_any(one);
        }
        one.passes_freeze = passes;
        one.expected_sequence = Some(5);
        let mut wrong = HashSet::new();
        for ((fault, _), way) in FAULTS.iter().zip(ways) {
            if let Some(way) = way {
                spoil(&mut state, &mut one, *fault, way);
                wrong.insert(*fault);
            }
        }
        let turn = order.index(one.moves.len());
        one.moves.rotate_left(turn);
        if write_any {
            wrong.remove(&Fault::NotYours);
        }
        if passes {
            wrong.remove(&Fault::Frozen);
        }
        let expected = FAULTS.iter().find(|(fault, _)| wrong.contains(fault));
        match (decide(&state, &one, at(NOW_MICROS)), expected) {
            (Decision::Refuse(rejection), Some((_, code))) => prop_assert_eq!(rejection.code(), *code),
            (Decision::Accept(accepted), None) => check_accepted(&state, &one, &accepted),
            (decision, expected) => prop_assert!(false, "{decision:?} instead of {expected:?}"),
        }
    }

    /// A replay answers whatever else is wrong now, except with a revoked token.
    #[test]
    fn a_replay_comes_before_every_other_refusal(ways in prop::collection::vec(prop::option::of(any::<bool>()), FAULTS.len())) {
        let mut state = sound_state();
        let mut one = draft(Vec::new());
        for ((fault, _), way) in FAULTS.iter().zip(ways).skip(2) {
            if let Some(way) = way {
                spoil(&mut state, &mut one, *fault, way);
            }
        }
        let known = stored(1);
        state.stored.insert(DedupeKey::of(&one), known.clone());
        prop_assert_eq!(decide(&state, &one, at(NOW_MICROS)), Decision::Replay(known));
        spoil(&mut state, &mut one, Fault::Revoked, true);
        prop_assert_eq!(decide(&state, &one, at(NOW_MICROS)), Decision::Refuse(Rejection::TokenRevoked));
    }
}

#[test]
fn m11_a_detour_through_another_account_is_no_self_posting() {
    let there = transfer("EUR/2", 10, "users:alice:available", "platform:fees");
    let mut back = transfer("EUR/2", 10, "world", "users:alice:available");
    back.from = vec![named("platform:fees")];
    let draft = with_write_any(draft(vec![there, back]));
    let Decision::Accept(accepted) = decide(&sound_state(), &draft, at(NOW_MICROS)) else {
        panic!("it is refused");
    };
    check_accepted(&sound_state(), &draft, &accepted);
    assert_eq!(accepted.balances[0].1, amount(1_000));
}

#[test]
fn m12_the_remainder_goes_to_the_first() {
    let mut one = transfer("EUR/2", 10, "world", "platform:fees");
    one.to = [
        ("users:alice:available", 3_334),
        ("users:bob:available", 3_333),
        ("users:carol:open", 3_333),
    ]
    .map(|(address, share)| Target {
        account: named(address),
        portion: Portion::Share(share),
    })
    .into();
    let draft = with_write_any(draft(vec![one]));
    let Decision::Accept(accepted) = decide(&State::default(), &draft, at(NOW_MICROS)) else {
        panic!("it is refused");
    };
    let parts: Vec<i128> = accepted.postings.iter().map(|p| p.amount.units()).collect();
    assert_eq!(parts, [-10, 4, 3, 3]);
}

#[test]
fn m12_shares_that_do_not_sum_are_refused() {
    for shares in [
        vec![],
        vec![5_000],
        vec![5_000, 5_001],
        vec![u32::MAX, u32::MAX],
    ] {
        let mut one = transfer("EUR/2", 10, "world", "platform:fees");
        one.to = shares
            .into_iter()
            .map(|share| Target {
                account: named("platform:fees"),
                portion: Portion::Share(share),
            })
            .collect();
        let decision = decide(
            &State::default(),
            &with_write_any(draft(vec![one])),
            at(NOW_MICROS),
        );
        let Decision::Refuse(rejection) = decision else {
            panic!("it is accepted");
        };
        assert_eq!(rejection.code(), "type_error");
    }
}
