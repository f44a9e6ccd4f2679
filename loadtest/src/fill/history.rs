//! A history made up: commands that are drafted, decided and recorded by the library's own rules, only without a database.
//!
//! Never writes a record of its own making and never reads a clock: the seed and the span of time give every byte.

use anyhow::{Context, Result, bail, ensure};
use daybook::commit::record;
use daybook::domain::{
    Accepted, Account, Address, Amount, Asset, Decision, Draft, IdempotencyKey, Principal, Scope,
    Scopes, State, Stored, Subject, UserState, decide,
};
use daybook::schema::Registry;
use jiff::Timestamp;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::{BTreeMap, HashMap};
use std::ops::RangeFrom;
use std::sync::Arc;

/// Whose token wrote it all, as a service that writes for its users would.
const WRITER: &str = "admin";
/// What each user gets first: no history and no run after it is long enough to spend it.
const FUNDING: u64 = 1_000_000_000;
/// Different commands of one user at most; each is drafted once and used again with other keys.
const COMMANDS_OF_A_USER_MAX: u32 = 10;
/// Different commands in all, about: drafting costs far more than deciding, and each is kept.
const COMMANDS_MAX: u32 = 100_000;

/// What moves in a history, once each user got money.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// All pay one another at random.
    Transfers,
    /// `world` pays random users: every event has a leg on that one account.
    Deposits,
}

/// What a history is made of.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How many events.
    pub events: u64,
    /// How many users they are spread over: `u-1`, `u-2` and so on.
    pub users: u32,
    /// What they are.
    pub kind: Kind,
    /// Where chance begins.
    pub seed: u64,
    /// Whether the indexes stay while it is copied, and grow as they do in service; that takes several times as long.
    pub keep_indexes: bool,
}

/// An event and the numbers that its rows go by.
pub struct Event<'a> {
    /// Its place among all events, from 1.
    pub position: i64,
    /// Number of its user.
    pub user_no: i64,
    /// What was asked.
    pub draft: &'a Draft,
    /// What was decided.
    pub accepted: Accepted,
    /// The account's number of each posting.
    pub account_nos: Vec<i64>,
    /// Its id.
    pub event_id: uuid::Uuid,
    /// Its record.
    pub record: Arc<str>,
}

/// The commands, and the ledger as they have left it so far.
pub struct History {
    plan: Plan,
    source: String,
    drafts: Vec<(i64, Draft)>,
    /// So many drafts are used once and in order, before any other.
    first: usize,
    accounts: BTreeMap<i64, Account>,
    account_nos: HashMap<Address, i64>,
    /// Numbers of accounts that no user owns.
    others: RangeFrom<i64>,
    state: State,
    made: u64,
    /// From the first event to the last.
    span: (Timestamp, Timestamp),
    random: StdRng,
}

impl History {
    /// Drafts the commands.
    ///
    /// # Errors
    /// When the plan is empty, or the shipped event types do not take the commands.
    pub fn new(plan: Plan, ledger: &str, span: (Timestamp, Timestamp)) -> Result<Self> {
        if plan.users == 0 || (plan.kind == Kind::Transfers && plan.users < 2) {
            bail!("a history of {:?} takes more users", plan.kind);
        }
        if span.1 < span.0 {
            bail!("a history cannot end before it begins");
        }
        let mut history = History {
            source: format!("/daybook/{ledger}"),
            drafts: Vec::new(),
            first: 0,
            accounts: BTreeMap::new(),
            account_nos: HashMap::new(),
            others: i64::from(plan.users) + 1..,
            state: State::default(),
            made: 0,
            span,
            random: StdRng::seed_from_u64(plan.seed),
            plan,
        };
        history.draft_all()?;
        Ok(history)
    }

    fn draft_all(&mut self) -> Result<()> {
        let registry = Registry::load(None)?;
        let principal = Principal {
            subject: Subject::parse(WRITER).context("the writer")?,
            issuer: "fill".into(),
            token_id: "fill".into(),
            issued_at: 0,
            expires_at: i64::MAX,
            scopes: Scopes::from_iter(Scope::ALL),
        };
        let users = self.plan.users;
        for user in 1..=users {
            self.draft(&registry, &principal, user, &deposit(user, FUNDING))?;
        }
        self.first = self.drafts.len();
        for _ in 0..(COMMANDS_MAX / users).clamp(1, COMMANDS_OF_A_USER_MAX) {
            for user in 1..=users {
                let amount = self.random.random_range(1..=9);
                let body = match self.plan.kind {
                    Kind::Deposits => deposit(user, amount),
                    Kind::Transfers => {
                        let to = 1 + (user - 1 + self.random.random_range(1..users)) % users;
                        transfer(user, to, amount)
                    }
                };
                self.draft(&registry, &principal, user, &body)?;
            }
        }
        Ok(())
    }

    fn draft(&mut self, by: &Registry, as_: &Principal, user: u32, body: &str) -> Result<()> {
        let key = IdempotencyKey::exact("drafted").context("a key")?;
        let draft = by
            .draft(as_, key, None, body.as_bytes())
            .with_context(|| body.to_owned())?;
        for (account, _) in draft.touched() {
            self.open(account)?;
        }
        self.drafts.push((i64::from(user), draft));
        Ok(())
    }

    /// Gives an account its number: a user's has the user's, as in the control, whose script counts on it; the others come after.
    fn open(&mut self, account: &Account) -> Result<()> {
        if self.account_nos.contains_key(&account.address) {
            return Ok(());
        }
        let owner = account.owner.as_ref();
        let number = match owner.and_then(|owner| owner.as_str().strip_prefix("u-")) {
            Some(number) => number.parse()?,
            None => self.others.next().context("an account's number")?,
        };
        self.account_nos.insert(account.address.clone(), number);
        let taken = self.accounts.insert(number, account.clone());
        ensure!(taken.is_none(), "a user of a history has one account");
        Ok(())
    }

    /// The next event; None when the plan is fulfilled.
    ///
    /// # Errors
    /// When the rules refuse it, which would be a mistake of the plan.
    pub fn next(&mut self) -> Result<Option<Event<'_>>> {
        if self.made == self.plan.events {
            return Ok(None);
        }
        let used = usize::try_from(self.made)?;
        let index = if used < self.first {
            used
        } else {
            self.random.random_range(self.first..self.drafts.len())
        };
        let at = self.time_of(self.made)?;
        let (user_no, draft) = self.drafts.get_mut(index).context("a draft")?;
        draft.key = key(&mut self.random)?;
        let accepted = match decide(&self.state, draft, at) {
            Decision::Accept(accepted) => accepted,
            other => bail!("event {}: {other:?}", self.made + 1),
        };
        let account_nos = number(&self.account_nos, &accepted)?;
        let event_id = record::event_id(accepted.recorded_at, self.random.random());
        let record: Arc<str> = record::write(draft, &accepted, event_id, &self.source)?.into();
        let stored = Stored {
            event_id,
            fingerprint: draft.fingerprint,
            record: Arc::clone(&record),
        };
        self.state
            .apply(draft, &accepted, record::hash(&record), stored);
        // Every key is new, so no later command looks for this one.
        self.state.stored.clear();
        self.made += 1;
        Ok(Some(Event {
            position: i64::try_from(self.made)?,
            user_no: *user_no,
            draft,
            accepted,
            account_nos,
            event_id,
            record,
        }))
    }

    /// Evenly over the span, in whole microseconds.
    fn time_of(&self, index: u64) -> Result<Timestamp> {
        let (begin, end) = (self.span.0.as_microsecond(), self.span.1.as_microsecond());
        let part = i128::from(end - begin) * i128::from(index) / i128::from(self.plan.events);
        Ok(Timestamp::from_microsecond(begin + i64::try_from(part)?)?)
    }

    /// Users that have events, by number.
    pub fn users(&self) -> impl Iterator<Item = (i64, &Subject, &UserState)> {
        let drafted = self
            .drafts
            .iter()
            .take(usize::try_from(self.plan.users).unwrap_or(0));
        drafted.filter_map(|(number, draft)| {
            let state = self.state.users.get(&draft.subject)?;
            Some((*number, &draft.subject, state))
        })
    }

    /// Accounts that have postings, by number.
    pub fn accounts(&self) -> impl Iterator<Item = (i64, &Account)> {
        self.accounts
            .iter()
            .filter(|(_, account)| self.state.accounts.contains(&account.address))
            .map(|(number, account)| (*number, account))
    }

    /// Balances of guarded accounts: the account's number, asset, amount.
    pub fn balances(&self) -> impl Iterator<Item = (i64, &Asset, Amount)> {
        let balances = self.state.balances.iter();
        balances.filter_map(|((address, asset), amount)| {
            Some((*self.account_nos.get(address)?, asset, *amount))
        })
    }
}

fn number(account_nos: &HashMap<Address, i64>, accepted: &Accepted) -> Result<Vec<i64>> {
    let postings = accepted.postings.iter();
    let numbers = postings.map(|posting| account_nos.get(&posting.account).copied());
    numbers
        .collect::<Option<_>>()
        .context("a posting to an account that no command names")
}

fn deposit(to: u32, amount: u64) -> String {
    format!(
        r#"{{"type":"deposit","schema":"1.7","subject":"u-{to}","data":{{"asset":"EUR/2","amount":"{amount}"}}}}"#
    )
}

fn transfer(from: u32, to: u32, amount: u64) -> String {
    format!(
        r#"{{"type":"transfer","schema":"1.7","subject":"u-{from}","data":{{"to":"u-{to}","asset":"EUR/2","amount":"{amount}"}}}}"#
    )
}

/// A UUID, as clients use; its 36 characters count in every size.
fn key(random: &mut StdRng) -> Result<IdempotencyKey> {
    let uuid = uuid::Builder::from_random_bytes(random.random()).into_uuid();
    let mut text = uuid::Uuid::encode_buffer();
    IdempotencyKey::exact(uuid.hyphenated().encode_lower(&mut text)).context("a key")
}
