//! The decision: one draft against the state that the locks protect.
//!
//! Flat guards in the documented order of refusals, then arithmetic. Pure and deterministic: the same state, draft and
//! time always give the same decision.

use super::address::{Account, Address, Guard, Subject};
use super::draft::{AmountExpr, Draft, IdempotencyKey, Move, Portion, UniqueKey};
use super::money::{Amount, AmountError, Asset};
use super::principal::Scope;
use super::rejection::Rejection;
use jiff::{SignedDuration, Timestamp};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Most postings of one event.
pub const POSTINGS_MAX: usize = 512;

/// A user as the lock protects it. A user without a row is [`UserState::default`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserState {
    /// Whether events and debits of this user are refused.
    pub frozen: bool,
    /// Number of events so far.
    pub sequence: u64,
    /// Hash of the latest record; zeros when there is none.
    pub head: [u8; 32],
    /// When the latest event was recorded.
    pub last_at: Timestamp,
}

impl Default for UserState {
    fn default() -> Self {
        UserState {
            frozen: false,
            sequence: 0,
            head: [0; 32],
            last_at: Timestamp::UNIX_EPOCH,
        }
    }
}

/// An event that already is in the ledger under some key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Its id.
    pub event_id: uuid::Uuid,
    /// The hash of the request's meaning.
    pub fingerprint: [u8; 32],
    /// Its record, byte for byte.
    pub record: Arc<str>,
}

/// The scope of deduplication: another writer's key never burns mine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DedupeKey {
    /// Whose event.
    pub subject: Subject,
    /// Who wrote it.
    pub writer: Subject,
    /// Under which key.
    pub key: IdempotencyKey,
}

impl DedupeKey {
    /// Where this draft looks for its duplicate.
    #[must_use]
    pub fn of(draft: &Draft) -> Self {
        DedupeKey {
            subject: draft.subject.clone(),
            writer: draft.principal.subject.clone(),
            key: draft.key.clone(),
        }
    }
}

/// What the locks protect, as it was read under them and as the batch has changed it since.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// Users that have a row.
    pub users: HashMap<Subject, UserState>,
    /// Accounts that exist.
    pub accounts: HashSet<Address>,
    /// Balances of guarded accounts; absent means zero.
    pub balances: HashMap<(Address, Asset), Amount>,
    /// Events found under the keys of the batch.
    pub stored: HashMap<DedupeKey, Stored>,
    /// Revoked tokens among those of the batch: (issuer, token id).
    pub revoked: HashSet<(Arc<str>, Arc<str>)>,
    /// Business keys that are taken, with their end, if any.
    pub unique: HashMap<(String, String), Option<Timestamp>>,
}

/// One leg of an event.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Posting {
    /// Which account.
    pub account: Address,
    /// In what.
    pub asset: Asset,
    /// How much; negative is a debit.
    pub amount: Amount,
    /// The balance after it, on guarded accounts of the subject only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance: Option<Amount>,
}

/// An event that the ledger takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Its place in the user's history, from 1.
    pub sequence: u64,
    /// The hash of the record before it.
    pub previous: [u8; 32],
    /// When it is recorded: the commit clock, never earlier than the user's latest event.
    pub recorded_at: Timestamp,
    /// Its legs; they sum to zero per asset.
    pub postings: Vec<Posting>,
    /// New balances of the guarded accounts it touches.
    pub balances: Vec<((Address, Asset), Amount)>,
    /// Business keys it takes, with their end, if any.
    pub unique: Vec<(UniqueKey, Option<Timestamp>)>,
}

/// The outcome for one draft.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is new and may happen.
    Accept(Accepted),
    /// It already happened; the answer is the stored record.
    Replay(Stored),
    /// It may not happen.
    Refuse(Rejection),
}

/// Decides one draft.
#[must_use]
pub fn decide(state: &State, draft: &Draft, now: Timestamp) -> Decision {
    let principal = &draft.principal;
    if state
        .revoked
        .contains(&(principal.issuer.clone(), principal.token_id.clone()))
    {
        return Decision::Refuse(Rejection::TokenRevoked);
    }
    if let Some(stored) = state.stored.get(&DedupeKey::of(draft)) {
        return if stored.fingerprint == draft.fingerprint {
            Decision::Replay(stored.clone())
        } else {
            Decision::Refuse(Rejection::KeyReused)
        };
    }
    match accept(state, draft, now) {
        Ok(accepted) => Decision::Accept(accepted),
        Err(rejection) => Decision::Refuse(rejection),
    }
}

fn accept(state: &State, draft: &Draft, now: Timestamp) -> Result<Accepted, Rejection> {
    let user = state.users.get(&draft.subject).cloned().unwrap_or_default();
    guard_sequence(&user, draft)?;
    guard_frozen(state, draft)?;
    guard_ownership(draft)?;
    guard_accounts(state, draft)?;
    let recorded_at = now.max(user.last_at);
    let unique = take_keys(state, draft, recorded_at)?;
    if let Some(failed) = &draft.failed_check {
        return Err(Rejection::CheckFailed {
            code: failed.code.clone(),
            detail: failed.detail.clone(),
        });
    }
    let mut book = Book {
        state,
        draft,
        changed: HashMap::new(),
        postings: Vec::new(),
        taken: Vec::new(),
        short: None,
    };
    for one in &draft.moves {
        book.post(one)?;
    }
    if let Some(short) = book.short {
        return Err(short);
    }
    let mut balances: Vec<_> = book.changed.into_iter().collect();
    balances.sort_unstable();
    Ok(Accepted {
        sequence: user.sequence + 1,
        previous: user.head,
        recorded_at,
        postings: book.postings,
        balances,
        unique,
    })
}

fn guard_sequence(user: &UserState, draft: &Draft) -> Result<(), Rejection> {
    match draft.expected_sequence {
        Some(expected) if expected != user.sequence => Err(Rejection::SequenceConflict {
            expected,
            actual: user.sequence,
        }),
        _ => Ok(()),
    }
}

fn guard_frozen(state: &State, draft: &Draft) -> Result<(), Rejection> {
    if draft.passes_freeze {
        return Ok(());
    }
    let frozen = |subject: &&Subject| state.users.get(*subject).is_some_and(|user| user.frozen);
    match [&draft.subject]
        .into_iter()
        .chain(draft.locked_users())
        .find(frozen)
    {
        Some(subject) => Err(Rejection::UserFrozen(subject.clone())),
        None => Ok(()),
    }
}

fn guard_ownership(draft: &Draft) -> Result<(), Rejection> {
    if draft.principal.scopes.has(Scope::WriteAny) {
        return Ok(());
    }
    match draft
        .debited()
        .find(|account| account.owner.as_ref() != Some(&draft.principal.subject))
    {
        Some(account) => Err(Rejection::AccountNotYours(account.address.clone())),
        None => Ok(()),
    }
}

fn guard_accounts(state: &State, draft: &Draft) -> Result<(), Rejection> {
    if let Some(address) = &draft.unknown_account {
        return Err(Rejection::AccountUnknown(address.clone()));
    }
    let closed = |account: &&Account| {
        !account.opened_by_credit && !state.accounts.contains(&account.address)
    };
    if let Some((account, _)) = draft.touched().find(|(account, _)| closed(account)) {
        return Err(Rejection::AccountUnknown(account.address.clone()));
    }
    for one in &draft.moves {
        let sources: HashSet<&Address> = one.from.iter().map(|source| &source.address).collect();
        let same = one
            .to
            .iter()
            .find(|target| sources.contains(&target.account.address));
        if let Some(target) = same {
            return Err(Rejection::SameAccount(target.account.address.clone()));
        }
    }
    Ok(())
}

fn take_keys(
    state: &State,
    draft: &Draft,
    at: Timestamp,
) -> Result<Vec<(UniqueKey, Option<Timestamp>)>, Rejection> {
    let mut taken: Vec<(UniqueKey, Option<Timestamp>)> = Vec::with_capacity(draft.unique.len());
    for unique in &draft.unique {
        let name = (unique.namespace.clone(), unique.key.clone());
        let twice = taken
            .iter()
            .any(|(k, _)| k.namespace == name.0 && k.key == name.1);
        let until = match state.unique.get(&name) {
            Some(Some(until)) if *until <= at => None,
            Some(until) => Some(*until),
            None => None,
        };
        if twice || until.is_some() {
            return Err(Rejection::KeyTaken {
                code: unique.code.clone(),
                key: unique.key.clone(),
                until: until.flatten(),
            });
        }
        let end = unique.seconds.map(|seconds| {
            at.checked_add(SignedDuration::from_secs(i64::from(seconds)))
                .unwrap_or(Timestamp::MAX)
        });
        taken.push((unique.clone(), end));
    }
    Ok(taken)
}

impl From<AmountError> for Rejection {
    fn from(_: AmountError) -> Self {
        Rejection::AmountOverflow
    }
}

/// The balances as the moves of one event change them.
struct Book<'a> {
    state: &'a State,
    draft: &'a Draft,
    changed: HashMap<(Address, Asset), Amount>,
    postings: Vec<Posting>,
    /// What each move so far took from each of its sources.
    taken: Vec<Vec<Amount>>,
    /// The first move that its sources could not pay. Refused last: a rule or a range that would be broken even with
    /// enough money is the better answer.
    short: Option<Rejection>,
}

impl Book<'_> {
    fn post(&mut self, one: &Move) -> Result<(), Rejection> {
        let amount = self.evaluate(&one.amount)?;
        let mut left = amount;
        let mut taken = Vec::with_capacity(one.from.len());
        for source in &one.from {
            let part = self
                .available(source, &one.asset)?
                .map_or(left, |free| free.min(left));
            self.leg(source, &one.asset, part.negated())?;
            left = left.minus(part)?;
            taken.push(part);
        }
        if !left.is_zero() {
            let (Some(last), Some(part)) = (one.from.last(), taken.last_mut()) else {
                return Err(Rejection::type_error("a move has no source"));
            };
            self.short.get_or_insert(Rejection::InsufficientFunds {
                account: last.address.clone(),
                asset: one.asset.clone(),
            });
            // What follows is computed as if the last source could pay the rest.
            *part = part.plus(left)?;
        }
        self.taken.push(taken);
        for (target, part) in one.to.iter().zip(self.portions(one, amount)?) {
            self.leg(&target.account, &one.asset, part)?;
        }
        Ok(())
    }

    /// How much a source can give; None when nothing limits it.
    fn available(&self, account: &Account, asset: &Asset) -> Result<Option<Amount>, Rejection> {
        match account.guard {
            Guard::None => Ok(None),
            Guard::Floor(floor) => {
                let balance = self.balance(&account.address, asset);
                Ok(Some(balance.minus(floor)?.max(Amount::ZERO)))
            }
        }
    }

    fn balance(&self, address: &Address, asset: &Asset) -> Amount {
        let place = (address.clone(), asset.clone());
        let known = self
            .changed
            .get(&place)
            .or_else(|| self.state.balances.get(&place));
        known.copied().unwrap_or_default()
    }

    fn leg(&mut self, account: &Account, asset: &Asset, amount: Amount) -> Result<(), Rejection> {
        if amount.is_zero() {
            return Ok(());
        }
        if self.postings.len() == POSTINGS_MAX {
            return Err(Rejection::type_error("the event has too many postings"));
        }
        let mut shown = None;
        if let Guard::Floor(_) = account.guard {
            let balance = self.balance(&account.address, asset).plus(amount)?;
            self.changed
                .insert((account.address.clone(), asset.clone()), balance);
            if account.owner.as_ref() == Some(&self.draft.subject) {
                shown = Some(balance);
            }
        }
        self.postings.push(Posting {
            account: account.address.clone(),
            asset: asset.clone(),
            amount,
            balance: shown,
        });
        Ok(())
    }

    fn portions(&self, one: &Move, whole: Amount) -> Result<Vec<Amount>, Rejection> {
        let mut left = whole;
        let mut parts = vec![Amount::ZERO; one.to.len()];
        for (part, target) in parts.iter_mut().zip(&one.to) {
            if let Portion::Amount(expr) = &target.portion {
                *part = self.evaluate(expr)?;
                left = left.minus(*part)?;
            }
        }
        if left.is_negative() {
            return Err(Rejection::type_error(
                "the targets of a move receive more than it takes",
            ));
        }
        let shares: Vec<u32> = one
            .to
            .iter()
            .filter_map(|target| target.portion.share())
            .collect();
        let total: u64 = shares.iter().map(|share| u64::from(*share)).sum();
        let rests = one
            .to
            .iter()
            .filter(|target| target.portion == Portion::Rest)
            .count();
        let split = match (shares.is_empty(), rests) {
            (true, 0) if left.is_zero() => Vec::new(),
            (true, 1) => Vec::new(),
            (false, 0) if total == 10_000 => left.split(&shares)?,
            (false, 1) if total <= 10_000 => shares
                .iter()
                .map(|share| left.basis_points(*share))
                .collect::<Result<_, _>>()?,
            _ => {
                return Err(Rejection::type_error(
                    "the targets of a move do not sum to its amount",
                ));
            }
        };
        let mut rest = left;
        let shared = one
            .to
            .iter()
            .enumerate()
            .filter(|(_, t)| t.portion.share().is_some());
        for ((index, _), part) in shared.zip(split) {
            parts[index] = part;
            rest = rest.minus(part)?;
        }
        if let Some(index) = one
            .to
            .iter()
            .position(|target| target.portion == Portion::Rest)
        {
            parts[index] = rest;
        }
        Ok(parts)
    }

    fn evaluate(&self, expr: &AmountExpr) -> Result<Amount, Rejection> {
        let amount = self.value(expr)?;
        if amount.is_negative() {
            return Err(Rejection::type_error("an amount is negative"));
        }
        Ok(amount)
    }

    fn value(&self, expr: &AmountExpr) -> Result<Amount, Rejection> {
        Ok(match expr {
            AmountExpr::Known(amount) => *amount,
            AmountExpr::Taken { of_move, source } => {
                let found = self
                    .taken
                    .get(*of_move)
                    .and_then(|taken| taken.get(*source));
                *found.ok_or_else(|| Rejection::type_error("taken() names no earlier source"))?
            }
            AmountExpr::Plus(a, b) => self.value(a)?.plus(self.value(b)?)?,
            AmountExpr::Minus(a, b) => self.value(a)?.minus(self.value(b)?)?,
            AmountExpr::BasisPoints(a, points) => self.value(a)?.basis_points(*points)?,
        })
    }
}

impl Portion {
    fn share(&self) -> Option<u32> {
        match self {
            Portion::Share(points) => Some(*points),
            _ => None,
        }
    }
}

impl State {
    /// Takes over what an accepted event changes, so that the next draft of the batch sees it.
    pub fn apply(&mut self, draft: &Draft, accepted: &Accepted, head: [u8; 32], stored: Stored) {
        let user = self.users.entry(draft.subject.clone()).or_default();
        user.sequence = accepted.sequence;
        user.head = head;
        user.last_at = accepted.recorded_at;
        self.balances.extend(accepted.balances.iter().cloned());
        self.accounts.extend(
            accepted
                .postings
                .iter()
                .map(|posting| posting.account.clone()),
        );
        for (unique, until) in &accepted.unique {
            self.unique
                .insert((unique.namespace.clone(), unique.key.clone()), *until);
        }
        self.stored.insert(DedupeKey::of(draft), stored);
    }
}
