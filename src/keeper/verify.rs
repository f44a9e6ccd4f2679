//! Verification: reads every record again and proves that all other tables agree with it.
//!
//! Changes nothing. Everything is read in one snapshot, so the ledger may serve meanwhile.

use crate::commit::record;
use crate::domain::Amount;
use crate::store::audit;
use crate::store::session::{self, Purpose, SessionError};
use futures_util::TryStreamExt;
use secrecy::SecretString;
use std::collections::{BTreeMap, HashMap};
use tokio_postgres::Client;

/// Faults reported at most.
const FAULTS_MAX: usize = 1_000;

/// What was read and what was found.
#[derive(Debug, Default)]
pub struct Report {
    /// Events read.
    pub events: u64,
    /// Users read.
    pub users: u64,
    /// Postings in the records.
    pub postings: u64,
    /// Account and asset pairs compared.
    pub balances: u64,
    /// What does not agree, one sentence each; empty is proof.
    pub faults: Vec<String>,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// No session.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// What Postgres says.
    #[error("postgres: {0}")]
    Postgres(#[from] tokio_postgres::Error),
}

/// A sum of amounts. That of an account without a guard may have more digits than one amount.
#[derive(Clone, Copy, Default)]
struct Sum {
    high: i128,
    /// From 0 to below [`Sum::BASE`].
    low: i128,
}

impl Sum {
    const BASE: i128 = 10_i128.pow(19);

    fn add(&mut self, amount: Amount) {
        let low = self.low + amount.units().rem_euclid(Self::BASE);
        self.low = low % Self::BASE;
        self.high += amount.units().div_euclid(Self::BASE) + low / Self::BASE;
    }

    fn is_zero(&self) -> bool {
        (self.high, self.low) == (0, 0)
    }
}

impl std::fmt::Display for Sum {
    /// As Postgres writes a NUMERIC without a fraction.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (high, low) = match (self.high < 0, self.low) {
            (false, low) => (self.high, low),
            (true, 0) => (-self.high, 0),
            (true, low) => (-self.high - 1, Self::BASE - low),
        };
        let sign = if self.high < 0 { "-" } else { "" };
        match high {
            0 => write!(f, "{sign}{low}"),
            _ => write!(f, "{sign}{high}{low:019}"),
        }
    }
}

/// The state that the records alone give.
#[derive(Default)]
struct Fold {
    report: Report,
    heads: HashMap<String, (i64, [u8; 32])>,
    sums: HashMap<(String, String), (Sum, i64)>,
}

impl Fold {
    fn fault(&mut self, fault: String) {
        if self.report.faults.len() < FAULTS_MAX {
            self.report.faults.push(fault);
        }
    }

    fn event(&mut self, event: &audit::StoredEvent) {
        let at = format!("{} {}", event.subject, event.sequence);
        let (sequence, head) = self
            .heads
            .get(&event.subject)
            .copied()
            .unwrap_or((0, [0; 32]));
        let hash = record::hash(&event.record);
        self.heads
            .insert(event.subject.clone(), (event.sequence, hash));
        self.report.events += 1;
        if event.sequence != sequence + 1 {
            self.fault(format!("{at}: follows sequence {sequence}"));
        }
        let folded = match record::read(&event.record) {
            Ok(folded) => folded,
            Err(error) => return self.fault(format!("{at}: the record does not parse: {error}")),
        };
        if folded.subject != event.subject
            || folded.usersequence != event.sequence.to_string()
            || folded.id != event.event_id
        {
            self.fault(format!(
                "{at}: the record names another subject, sequence or id"
            ));
        }
        if folded.previoushash != hex::encode(head) {
            self.fault(format!(
                "{at}: previoushash is not the hash of the record before it"
            ));
        }
        self.postings(&at, folded.data.postings);
    }

    fn postings(&mut self, at: &str, postings: Vec<record::FoldedPosting>) {
        let mut zero: BTreeMap<String, Sum> = BTreeMap::new();
        for posting in postings {
            self.report.postings += 1;
            zero.entry(posting.asset.clone())
                .or_default()
                .add(posting.amount);
            let total = self
                .sums
                .entry((posting.account, posting.asset))
                .or_default();
            total.0.add(posting.amount);
            total.1 += 1;
        }
        if let Some((asset, sum)) = zero.iter().find(|(_, sum)| !sum.is_zero()) {
            self.fault(format!(
                "{at}: the record's postings in {asset} sum to {sum}"
            ));
        }
    }

    fn users(&mut self, heads: &[audit::Head]) {
        self.report.users = heads.len() as u64;
        for head in heads {
            let (sequence, hash) = self
                .heads
                .get(&head.subject)
                .copied()
                .unwrap_or((0, [0; 32]));
            if head.sequence != sequence || head.hash != hash {
                self.fault(format!(
                    "{}: the head is not that of the latest record ({sequence})",
                    head.subject
                ));
            }
        }
    }

    fn balances(&mut self, balances: &[audit::StoredBalance], sums: &[audit::PostingSum]) {
        let mut rows: HashMap<(String, String), (String, i64)> = HashMap::new();
        for sum in sums {
            match &sum.address {
                Some(address) => {
                    rows.insert(
                        (address.clone(), sum.asset.clone()),
                        (sum.amount.clone(), sum.count),
                    );
                }
                None => self.fault(format!(
                    "postings in {} of an account without a row",
                    sum.asset
                )),
            }
        }
        self.report.balances = rows.len() as u64;
        let sums: HashMap<(String, String), (String, i64)> = std::mem::take(&mut self.sums)
            .into_iter()
            .map(|(place, (sum, count))| (place, (sum.to_string(), count)))
            .collect();
        if rows != sums {
            let places: std::collections::BTreeSet<_> =
                rows.keys().chain(sums.keys()).cloned().collect();
            for place in places {
                let (stored, folded) = (rows.get(&place), sums.get(&place));
                if stored != folded {
                    self.fault(format!(
                        "{} {}: postings {stored:?}, records {folded:?}",
                        place.0, place.1
                    ));
                }
            }
        }
        for balance in balances {
            let Some(address) = &balance.address else {
                self.fault(format!(
                    "a balance in {} of an account without a row",
                    balance.asset
                ));
                continue;
            };
            let folded = rows
                .get(&(address.clone(), balance.asset.clone()))
                .map_or("0", |sum| sum.0.as_str());
            if balance.amount.0.to_string() != folded {
                self.fault(format!(
                    "{address} {}: balance {}, postings {folded}",
                    balance.asset, balance.amount.0
                ));
            }
            if balance.guard.as_deref() != Some("floor") {
                self.fault(format!(
                    "{address} {}: a balance of an account that has no floor",
                    balance.asset
                ));
            }
            if balance
                .floor
                .is_some_and(|floor| balance.amount.0 < floor.0)
            {
                self.fault(format!(
                    "{address} {}: {} is below the floor",
                    balance.asset, balance.amount.0
                ));
            }
        }
    }
}

/// Verifies a ledger. `progress` is told (events read, events in all).
///
/// # Errors
/// [`VerifyError`] when the database cannot be read; a ledger that does not agree is a report with faults.
pub async fn verify(
    url: &SecretString,
    ledger: &str,
    progress: impl Fn(u64, u64),
) -> Result<Report, VerifyError> {
    let (client, _driver) = session::connect(url, ledger, Purpose::Batch).await?;
    audit::begin(&client).await?;
    let total = u64::try_from(audit::count_events(&client).await?).unwrap_or_default();
    let mut fold = Fold::default();
    let mut events = std::pin::pin!(audit::events(&client).await?);
    while let Some(event) = events.try_next().await? {
        fold.event(&event);
        progress(fold.report.events, total);
    }
    compare(&client, &mut fold).await?;
    Ok(fold.report)
}

async fn compare(client: &Client, fold: &mut Fold) -> Result<(), VerifyError> {
    fold.users(&audit::heads(client).await?);
    let balances = audit::balances(client).await?;
    fold.balances(&balances, &audit::posting_sums(client).await?);
    let orphans = audit::orphans(client).await?;
    if orphans > 0 {
        fold.fault(format!("{orphans} events of users without a row"));
    }
    for (address, asset) in audit::guarded_without_balance(client).await? {
        fold.fault(format!(
            "{address} {asset}: has postings and a floor but no balance"
        ));
    }
    for fault in audit::faults(client).await? {
        fold.fault(fault);
    }
    Ok(())
}
