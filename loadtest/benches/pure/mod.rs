//! The pure path of one event, in its parts: what both kinds of micro-benchmark set up, and what they call.
//!
//! Measures nothing and opens no connection. Each part has run once when its set-up is done, so that what is made on first use is
//! not counted.

// A benchmark says by a panic what went wrong, as a test does.
#![allow(clippy::unwrap_used, clippy::panic)]

use daybook::auth::{Verifier, generate_dev_keys, issue};
use daybook::commit::record;
use daybook::domain::{
    Accepted, Amount, Decision, Draft, IdempotencyKey, Principal, Scope, State, Subject, UserState,
    decide,
};
use daybook::schema::Registry;
use jiff::Timestamp;
use std::sync::Arc;
use std::time::Duration;

/// The server's allocator: what an allocation costs is part of what is measured.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The oldest version: its data takes two upcasts.
pub const OLDEST: &str =
    r#"{"type":"transfer","schema":"1.0","data":{"to":"bob","currency":"EUR","amount":2500}}"#;
/// The current version: its data stays as it is.
pub const CURRENT: &str =
    r#"{"type":"transfer","schema":"1.7","data":{"to":"bob","asset":"EUR/2","amount":"2500"}}"#;

const NOW_S: i64 = 1_800_000_000;
const HOUR: Duration = Duration::from_secs(3_600);

fn now() -> Timestamp {
    Timestamp::from_second(NOW_S).unwrap()
}

fn alice() -> Subject {
    Subject::parse("alice").unwrap()
}

/// A token that its verifier has seen before.
pub struct Token {
    verifier: Verifier,
    text: String,
}

impl Token {
    /// Signs it with keys of its own, and verifies it once.
    pub fn known() -> Self {
        let name = format!("daybook-bench-{}.json", std::process::id());
        let keys = std::env::temp_dir().join(name);
        generate_dev_keys(&keys).unwrap();
        let scopes = [Scope::Read, Scope::Write];
        let token = Token {
            verifier: Verifier::load(&keys).unwrap(),
            text: issue(&keys, &alice(), &scopes, HOUR, now()).unwrap(),
        };
        std::fs::remove_file(&keys).unwrap();
        token.verify();
        token
    }

    /// The token becomes its principal.
    pub fn verify(&self) -> Arc<Principal> {
        self.verifier.verify(&self.text, now()).unwrap()
    }
}

/// A request's body and what reads it.
pub struct Request {
    registry: Registry,
    principal: Arc<Principal>,
    body: &'static str,
}

impl Request {
    /// With the types that ship.
    pub fn of(body: &'static str) -> Self {
        let request = Request {
            registry: Registry::load(None).unwrap(),
            principal: Token::known().verify(),
            body,
        };
        request.draft();
        request
    }

    /// The body is validated, upcast and evaluated.
    pub fn draft(&self) -> Draft {
        let key = IdempotencyKey::parse("k-1").unwrap();
        self.registry
            .draft(&self.principal, key, None, self.body.as_bytes())
            .unwrap()
    }
}

/// A draft and what the locks protect.
pub struct Locked {
    state: State,
    draft: Draft,
}

impl Locked {
    /// Both users have money and a history.
    pub fn of(body: &'static str) -> Self {
        let draft = Request::of(body).draft();
        let mut state = State::default();
        for (account, asset) in draft.touched() {
            let place = (account.address.clone(), asset.clone());
            state.accounts.insert(account.address.clone());
            state
                .balances
                .insert(place, Amount::new(1_000_000).unwrap());
            let owner = account.owner.clone().unwrap();
            state.users.insert(owner, UserState::default());
        }
        let locked = Locked { state, draft };
        locked.decide();
        locked
    }

    /// The draft is decided.
    pub fn decide(&self) -> Decision {
        decide(&self.state, &self.draft, now())
    }

    /// It was accepted.
    pub fn accepted(self) -> Taken {
        let Decision::Accept(accepted) = self.decide() else {
            panic!("a transfer with money behind it was not accepted");
        };
        let taken = Taken {
            draft: self.draft,
            accepted,
        };
        taken.record();
        taken
    }
}

/// An accepted draft.
pub struct Taken {
    draft: Draft,
    accepted: Accepted,
}

impl Taken {
    /// Its record is written and hashed.
    pub fn record(&self) -> (String, [u8; 32]) {
        let event_id = record::event_id(self.accepted.recorded_at, [7; 10]);
        let text = record::write(&self.draft, &self.accepted, event_id, "/daybook/main").unwrap();
        let hash = record::hash(&text);
        (text, hash)
    }
}
