//! The effects of a type: compiled from its file, evaluated for one event into what a draft holds.
//!
//! Never fails: the first expression that fails, or check that does not hold, becomes the draft's failed check.

use super::declared::{CheckEntry, MoveEntry, Share, Sources, TargetEntry, Targets, UniqueEntry};
use super::expression::{
    AssetName, Engine, Expression, Failure, Purpose, Surroundings, Variables, with_item,
};
use super::values::Money;
use crate::domain::decide::POSTINGS_MAX;
use crate::domain::{
    Account, Address, AmountExpr, Asset, Chart, FailedCheck, Move, Portion, Target, UniqueKey,
};
use cel::Context;
use serde_json::Value;
use std::collections::BTreeMap;

/// Longest business key, in bytes.
const KEY_LENGTH_MAX: usize = 256;

/// The ledger's assets, found by code.
pub(super) type Assets = BTreeMap<String, Asset>;

/// The asset of this spelling, if it is the one spelling of one of the list.
pub(super) fn asset<'a>(assets: &'a Assets, spelling: &str) -> Option<&'a Asset> {
    let (code, _) = spelling.split_once('/')?;
    assets.get(code).filter(|asset| asset.as_str() == spelling)
}

/// All effects of a type.
#[derive(Debug)]
pub(super) struct Effects {
    checks: Vec<Check>,
    moves: Vec<Movement>,
    unique: Vec<Unique>,
}

#[derive(Debug)]
struct Check {
    when: Option<Expression>,
    that: Expression,
    code: String,
    detail: String,
}

#[derive(Debug)]
struct Movement {
    name: Option<String>,
    when: Option<Expression>,
    asset: Expression,
    amount: Expression,
    from: Vec<Expression>,
    to: Vec<Receiver>,
}

#[derive(Debug)]
struct Receiver {
    when: Option<Expression>,
    each: Option<Vec<String>>,
    account: Expression,
    part: Part,
}

#[derive(Debug)]
enum Part {
    Amount(Expression),
    Points(u32),
    Share(Expression),
    Rest,
}

#[derive(Debug)]
struct Unique {
    when: Option<Expression>,
    key: Expression,
    namespace: String,
    code: String,
    seconds: Option<u32>,
}

/// What the effects of one event come to.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) failed: Option<FailedCheck>,
    pub(super) unknown_account: Option<Address>,
    pub(super) moves: Vec<Move>,
    pub(super) unique: Vec<UniqueKey>,
}

impl Outcome {
    /// Notes a failure; the first one stays.
    pub(super) fn fail(&mut self, failure: Failure, place: &str) {
        self.failed.get_or_insert_with(|| FailedCheck {
            code: failure.code.to_owned(),
            detail: format!("{place}: {}", failure.detail),
        });
    }
}

/// A code that a type may give to its own refusals.
pub(super) fn is_code(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.as_bytes()[0].is_ascii_lowercase()
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

fn code(text: &str) -> Result<String, String> {
    if is_code(text) {
        Ok(text.to_owned())
    } else {
        Err(format!("{text:?} is no code: [a-z][a-z0-9_]*, at most 64"))
    }
}

/// A path such as `data.lines`, to the members of the data it names.
pub(super) fn data_path(text: &str) -> Result<Vec<String>, String> {
    let wrong = || format!("{text:?} is no path such as data.lines");
    let members = text.strip_prefix("data.").ok_or_else(wrong)?;
    let path: Vec<String> = members.split('.').map(str::to_owned).collect();
    if path.iter().any(|name| !is_code(name)) {
        return Err(wrong());
    }
    Ok(path)
}

fn list<'a>(data: &'a Value, path: &[String]) -> Option<&'a Vec<Value>> {
    path.iter()
        .try_fold(data, |value, name| value.get(name))?
        .as_array()
}

/// What all expressions of a type are compiled with.
#[derive(Clone, Copy)]
pub(super) struct Compiler<'a> {
    pub(super) engine: &'a Engine,
    /// The schema that the data satisfies.
    pub(super) schema: &'a Value,
}

impl Compiler<'_> {
    fn around<'b>(&'b self, guards: &'b [&'b Expression]) -> Surroundings<'b> {
        Surroundings {
            schema: self.schema,
            each: None,
            moves: &[],
            guards,
        }
    }

    fn when(&self, text: Option<&String>) -> Result<Option<Expression>, String> {
        text.map(|text| self.engine.compile(text, Purpose::Truth, self.around(&[])))
            .transpose()
    }

    /// Compiles an expression outside of any effect.
    pub(super) fn plain(&self, text: &str) -> Result<Expression, String> {
        self.engine.compile(text, Purpose::Any, self.around(&[]))
    }

    fn check(&self, entry: &CheckEntry) -> Result<Check, String> {
        let when = self.when(entry.when.as_ref())?;
        let guards: Vec<&Expression> = when.iter().collect();
        let that = self
            .engine
            .compile(&entry.that, Purpose::Truth, self.around(&guards))?;
        Ok(Check {
            that,
            when,
            code: code(&entry.code)?,
            detail: entry
                .detail
                .clone()
                .unwrap_or_else(|| format!("it does not hold that {}", entry.that)),
        })
    }

    fn unique(&self, entry: &UniqueEntry, type_name: &str) -> Result<Unique, String> {
        let when = self.when(entry.when.as_ref())?;
        let guards: Vec<&Expression> = when.iter().collect();
        let key = self
            .engine
            .compile(&entry.key, Purpose::Any, self.around(&guards))?;
        let seconds = match &entry.lasts {
            None => None,
            Some(lasts) => Some(lasts.seconds().ok_or(
                "`for` is a number of seconds, or a number with s, m, h or d; at least one second",
            )?),
        };
        let namespace = entry.namespace.as_deref().unwrap_or(type_name);
        if namespace.is_empty() || namespace.len() > KEY_LENGTH_MAX {
            return Err("`namespace` is empty or too long".to_owned());
        }
        Ok(Unique {
            key,
            when,
            namespace: namespace.to_owned(),
            code: code(entry.code.as_deref().unwrap_or("key_taken"))?,
            seconds,
        })
    }

    fn movement(
        &self,
        entry: &MoveEntry,
        before: &[(Option<String>, usize)],
    ) -> Result<Movement, String> {
        let when = self.when(entry.when.as_ref())?;
        let guards: Vec<&Expression> = when.iter().collect();
        let around = Surroundings {
            moves: before,
            ..self.around(&guards)
        };
        let compile = |text: &str, purpose| self.engine.compile(text, purpose, around);
        let from: Vec<&String> = match &entry.from {
            Sources::One(account) => vec![account],
            Sources::Many(accounts) => accounts.iter().collect(),
        };
        if from.is_empty() {
            return Err("a move needs a source".to_owned());
        }
        if let Some(name) = &entry.name {
            code(name)?;
            if before.iter().any(|(known, _)| known.as_ref() == Some(name)) {
                return Err(format!("two moves have the name {name:?}"));
            }
        }
        let to = match &entry.to {
            Targets::One(account) => vec![Receiver {
                when: None,
                each: None,
                account: compile(account, Purpose::Account)?,
                part: Part::Rest,
            }],
            Targets::Many(entries) => self.receivers(entries, around)?,
        };
        Ok(Movement {
            name: entry.name.clone(),
            asset: compile(&entry.asset, Purpose::Any)?,
            amount: compile(&entry.amount, Purpose::Amount)?,
            from: from
                .into_iter()
                .map(|account| compile(account, Purpose::Account))
                .collect::<Result<_, _>>()?,
            to,
            when,
        })
    }

    fn receivers(
        &self,
        entries: &[TargetEntry],
        around: Surroundings<'_>,
    ) -> Result<Vec<Receiver>, String> {
        if entries.is_empty() {
            return Err("a move needs a target".to_owned());
        }
        if entries.iter().filter(|entry| entry.rest).count() > 1 {
            return Err("at most one target takes the rest".to_owned());
        }
        let mut receivers = Vec::with_capacity(entries.len());
        for entry in entries {
            let each = entry.each.as_deref().map(data_path).transpose()?;
            let when = entry
                .when
                .as_ref()
                .map(|text| self.engine.compile(text, Purpose::Truth, around))
                .transpose()?;
            let guards: Vec<&Expression> =
                around.guards.iter().copied().chain(when.iter()).collect();
            let around = Surroundings {
                each: each.as_deref(),
                guards: &guards,
                ..around
            };
            let part = match (&entry.amount, &entry.share, entry.rest) {
                (Some(text), None, false) => {
                    Part::Amount(self.engine.compile(text, Purpose::Amount, around)?)
                }
                (None, Some(Share::Points(points)), false) if *points <= 10_000 => {
                    Part::Points(*points)
                }
                (None, Some(Share::Expression(text)), false) => {
                    Part::Share(self.engine.compile(text, Purpose::Any, around)?)
                }
                (None, None, true) if each.is_none() => Part::Rest,
                _ => {
                    return Err("a target has one of amount, share (at most 10000) and rest; rest is not for each".to_owned());
                }
            };
            let account = self
                .engine
                .compile(&entry.account, Purpose::Account, around)?;
            receivers.push(Receiver {
                account,
                part,
                when,
                each,
            });
        }
        Ok(receivers)
    }

    /// Compiles all effects.
    ///
    /// # Errors
    /// Which one is wrong, and why.
    pub(super) fn effects(
        &self,
        type_name: &str,
        checks: &[CheckEntry],
        moves: &[MoveEntry],
        unique: &[UniqueEntry],
    ) -> Result<Effects, String> {
        fn numbered<'a, T, R>(
            kind: &'a str,
            entries: &'a [T],
            mut compile: impl FnMut(&'a T) -> Result<R, String>,
        ) -> Result<Vec<R>, String> {
            let all = entries.iter().enumerate();
            all.map(|(index, entry)| {
                compile(entry).map_err(|reason| format!("[[{kind}]] {}: {reason}", index + 1))
            })
            .collect()
        }
        let mut before = Vec::with_capacity(moves.len());
        Ok(Effects {
            checks: numbered("check", checks, |entry| self.check(entry))?,
            moves: numbered("move", moves, |entry| {
                let movement = self.movement(entry, &before)?;
                before.push((movement.name.clone(), movement.from.len()));
                Ok(movement)
            })?,
            unique: numbered("unique", unique, |entry| self.unique(entry, type_name))?,
        })
    }
}

/// One event on its way through the effects of its type.
struct Run<'a, 'v> {
    context: Context<'v, 'v>,
    data: &'v Value,
    assets: &'a Assets,
    chart: &'a Chart,
    /// For each movement of the type, its place in the draft, if it happens.
    places: Vec<Option<usize>>,
    names: Vec<Option<&'a str>>,
    outcome: Outcome,
}

fn holds(when: Option<&Expression>, context: &Context<'_, '_>) -> Result<bool, Failure> {
    when.map_or(Ok(true), |when| when.truth(context))
}

impl Effects {
    /// Evaluates them in the order of the file: checks, moves, unique keys.
    pub(super) fn evaluate(
        &self,
        engine: &Engine,
        variables: &Variables<'_>,
        data: &Value,
        assets: &Assets,
        chart: &Chart,
    ) -> Outcome {
        let mut run = Run {
            context: engine.context(variables),
            data,
            assets,
            chart,
            places: Vec::with_capacity(self.moves.len()),
            names: self.moves.iter().map(|one| one.name.as_deref()).collect(),
            outcome: Outcome::default(),
        };
        for (index, check) in self.checks.iter().enumerate() {
            run.check(check, index);
        }
        for (index, movement) in self.moves.iter().enumerate() {
            let made = run.movement(movement);
            run.places.push(match made {
                Ok(Some(one)) => {
                    run.outcome.moves.push(one);
                    Some(run.outcome.moves.len() - 1)
                }
                Ok(None) => None,
                Err(failure) => {
                    run.outcome.fail(failure, &format!("move {}", index + 1));
                    None
                }
            });
        }
        for (index, unique) in self.unique.iter().enumerate() {
            match run.unique(unique) {
                Ok(key) => run.outcome.unique.extend(key),
                Err(failure) => run.outcome.fail(failure, &format!("unique {}", index + 1)),
            }
        }
        run.outcome
    }
}

impl<'v> Run<'_, 'v> {
    fn check(&mut self, check: &Check, index: usize) {
        let held = holds(check.when.as_ref(), &self.context)
            .and_then(|applies| Ok(!applies || check.that.truth(&self.context)?));
        match held {
            Ok(true) => {}
            Ok(false) => {
                self.outcome.failed.get_or_insert_with(|| FailedCheck {
                    code: check.code.clone(),
                    detail: check.detail.clone(),
                });
            }
            Err(failure) => self.outcome.fail(failure, &format!("check {}", index + 1)),
        }
    }

    fn unique(&self, unique: &Unique) -> Result<Option<UniqueKey>, Failure> {
        if !holds(unique.when.as_ref(), &self.context)? {
            return Ok(None);
        }
        let key = unique.key.text(&self.context)?;
        // The database takes no NUL in a text.
        if key.is_empty() || key.len() > KEY_LENGTH_MAX || key.contains('\0') {
            return Err(Failure::new(
                "a business key has 1 to 256 bytes, none of them zero",
            ));
        }
        Ok(Some(UniqueKey {
            namespace: unique.namespace.clone(),
            key,
            code: unique.code.clone(),
            seconds: unique.seconds,
        }))
    }

    fn movement(&mut self, movement: &Movement) -> Result<Option<Move>, Failure> {
        if !holds(movement.when.as_ref(), &self.context)? {
            return Ok(None);
        }
        let name = movement.asset.asset(&self.context)?;
        let found = match &name {
            AssetName::Spelling(spelling) => asset(self.assets, spelling),
            AssetName::Code(code) => self.assets.get(code),
        };
        let Some(asset) = found.cloned() else {
            return Err(Failure::new("the asset is not one of the ledger's"));
        };
        let amount = self.amount(movement.amount.amount(&self.context)?)?;
        let mut from = Vec::with_capacity(movement.from.len());
        for source in &movement.from {
            let address = source.account(&self.context)?;
            from.extend(self.account(address));
        }
        let mut to = Vec::with_capacity(movement.to.len());
        for receiver in &movement.to {
            self.receive(receiver, &mut to)?;
        }
        Ok(Some(Move {
            asset,
            amount,
            from,
            to,
        }))
    }

    fn receive(&mut self, receiver: &Receiver, to: &mut Vec<Target>) -> Result<(), Failure> {
        if !holds(receiver.when.as_ref(), &self.context)? {
            return Ok(());
        }
        let Some(path) = &receiver.each else {
            let made = part(receiver, &self.context)?;
            return self.target(made, to);
        };
        let data = self.data;
        let items = list(data, path).ok_or_else(|| Failure::new("`each` is over no list"))?;
        for item in items {
            let made = part(receiver, &with_item(&self.context, item))?;
            self.target(made, to)?;
        }
        Ok(())
    }

    fn target(
        &mut self,
        (address, portion): (Address, Raw),
        to: &mut Vec<Target>,
    ) -> Result<(), Failure> {
        if to.len() >= POSTINGS_MAX {
            return Err(Failure::new("the move has too many targets"));
        }
        let portion = match portion {
            Raw::Amount(money) => Portion::Amount(self.amount(money)?),
            Raw::Share(points) => Portion::Share(points),
            Raw::Rest => Portion::Rest,
        };
        if let Some(account) = self.account(address) {
            to.push(Target { account, portion });
        }
        Ok(())
    }

    /// The chart's account; an unknown one is noted, and refused by the decision in its place.
    fn account(&mut self, address: Address) -> Option<Account> {
        let account = self.chart.account(&address);
        if account.is_none() {
            self.outcome.unknown_account.get_or_insert(address);
        }
        account
    }

    fn amount(&self, money: Money) -> Result<AmountExpr, Failure> {
        let both = |a: Box<Money>, b: Box<Money>| {
            Ok::<_, Failure>((Box::new(self.amount(*a)?), Box::new(self.amount(*b)?)))
        };
        Ok(match money {
            Money::Known(amount) => AmountExpr::Known(amount),
            Money::Plus(a, b) => {
                let (a, b) = both(a, b)?;
                AmountExpr::Plus(a, b)
            }
            Money::Minus(a, b) => {
                let (a, b) = both(a, b)?;
                AmountExpr::Minus(a, b)
            }
            Money::BasisPoints(whole, points) => {
                AmountExpr::BasisPoints(Box::new(self.amount(*whole)?), points)
            }
            Money::Taken { of, source } => {
                let index = self
                    .names
                    .iter()
                    .position(|name| *name == Some(of.as_str()))
                    .or_else(|| of.parse().ok());
                let of_move = index.and_then(|index| self.places.get(index).copied().flatten());
                AmountExpr::Taken {
                    of_move: of_move
                        .ok_or_else(|| Failure::new("taken() of a move that does not happen"))?,
                    source,
                }
            }
        })
    }
}

enum Raw {
    Amount(Money),
    Share(u32),
    Rest,
}

fn part(receiver: &Receiver, context: &Context<'_, '_>) -> Result<(Address, Raw), Failure> {
    let raw = match &receiver.part {
        Part::Amount(amount) => Raw::Amount(amount.amount(context)?),
        Part::Points(points) => Raw::Share(*points),
        Part::Share(share) => Raw::Share(share.share(context)?),
        Part::Rest => Raw::Rest,
    };
    Ok((receiver.account.account(context)?, raw))
}
