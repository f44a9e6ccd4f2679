//! Runs an example file: its request must come to what the file expects.
//!
//! Writes nothing; the decision, which needs state, is not part of an example.

use super::declared::ExampleFile;
use super::kind::{EventType, Example, SchemaVersion};
use super::{Refused, Registry};
use crate::domain::{
    Account, AmountExpr, Draft, IdempotencyKey, Portion, Principal, Scope, Scopes, Subject,
};
use serde_json::{Value, json};

/// The one who sends every example.
fn writer() -> Option<Principal> {
    Some(Principal {
        subject: Subject::parse("alice")?,
        issuer: "example".into(),
        token_id: "example".into(),
        issued_at: 0,
        expires_at: i64::MAX,
        scopes: Scopes::default().with(Scope::WriteAny).with(Scope::Admin),
    })
}

fn amount(expr: &AmountExpr) -> Value {
    match expr {
        AmountExpr::Known(amount) => json!(amount),
        AmountExpr::Taken { of_move, source } => json!({"taken": [of_move, source]}),
        AmountExpr::Plus(a, b) => json!({"plus": [amount(a), amount(b)]}),
        AmountExpr::Minus(a, b) => json!({"minus": [amount(a), amount(b)]}),
        AmountExpr::BasisPoints(whole, points) => json!({"bps": [amount(whole), points]}),
    }
}

/// The moves of a draft as an example writes them.
fn moves(draft: &Draft) -> Value {
    let address = |account: &Account| account.address.clone();
    let all = draft.moves.iter().map(|one| {
        let to = one.to.iter().map(|target| {
            let account = &target.account.address;
            match &target.portion {
                Portion::Amount(expr) => json!({"account": account, "amount": amount(expr)}),
                Portion::Share(points) => json!({"account": account, "share": points}),
                Portion::Rest => json!({"account": account, "rest": true}),
            }
        });
        json!({
            "asset": one.asset, "amount": amount(&one.amount),
            "from": one.from.iter().map(address).collect::<Vec<_>>(),
            "to": to.collect::<Vec<_>>(),
        })
    });
    all.collect()
}

impl Registry {
    /// Runs one example.
    ///
    /// # Errors
    /// What came of it instead of what the file expects.
    pub(super) fn run_example(
        &self,
        kind: &EventType,
        version: &SchemaVersion,
        example: &Example,
    ) -> Result<(), String> {
        let file: ExampleFile<'_> =
            serde_json::from_str(&example.text).map_err(|error| error.to_string())?;
        let writer = writer().ok_or("no writer")?;
        let key = IdempotencyKey::parse("example").ok_or("no key")?;
        let body = file.request.get();
        let named: Value = serde_json::from_str(body).map_err(|error| error.to_string())?;
        if named.get("type") != Some(&json!(kind.name()))
            || named.get("schema") != Some(&json!(version.version()))
        {
            return Err("the request is of another type or version than its file".to_owned());
        }
        let made = self.draft(&writer, key, None, body.as_bytes());
        let refused = match &made {
            Ok(draft) => draft
                .failed_check
                .as_ref()
                .map(|failed| (failed.code.clone(), Vec::new())),
            Err(Refused::Invalid(errors)) => Some(("invalid_request".to_owned(), errors.clone())),
            Err(other) => Some((other.to_string(), Vec::new())),
        };
        match (&made, refused) {
            (Ok(draft), None) if example.accepted => {
                let input: Value =
                    serde_json::from_str(draft.input.get()).map_err(|error| error.to_string())?;
                same("input", file.expect.input, &input)?;
                same("moves", file.expect.moves, &moves(draft))
            }
            (_, Some((code, errors))) if !example.accepted => {
                same("code", file.expect.code, &code)?;
                match file.expect.pointer {
                    Some(pointer) if !errors.iter().any(|error| error.pointer == pointer) => {
                        Err(format!("no error at {pointer}: {errors:?}"))
                    }
                    _ => Ok(()),
                }
            }
            (_, Some((code, errors))) => Err(format!("refused: {code} {errors:?}")),
            (_, None) => Err("accepted".to_owned()),
        }
    }
}

/// What a file expects must be there, and the same.
fn same<T: PartialEq + std::fmt::Debug>(
    what: &str,
    expected: Option<T>,
    got: &T,
) -> Result<(), String> {
    match expected {
        Some(expected) if expected == *got => Ok(()),
        expected => Err(format!("{what} is {got:?}, expected {expected:?}")),
    }
}
