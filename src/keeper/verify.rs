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

/// The state that the records alone give.
#[derive(Default)]
struct Fold {
    report: Report,
    heads: HashMap<String, (i64, [u8; 32])>,
    sums: HashMap<(String, String), (Amount, i64)>,
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
        let mut zero: BTreeMap<String, Amount> = BTreeMap::new();
        for posting in postings {
            self.report.postings += 1;
            let sum = zero.entry(posting.asset.clone()).or_default();
            let total = self
                .sums
                .entry((posting.account, posting.asset))
                .or_default();
            match (sum.plus(posting.amount), total.0.plus(posting.amount)) {
                (Ok(new_sum), Ok(new_total)) => {
                    *sum = new_sum;
                    *total = (new_total, total.1 + 1);
                }
                _ => return self.fault(format!("{at}: a sum exceeds 38 digits")),
            }
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
        let mut rows: HashMap<(String, String), (Amount, i64)> = HashMap::new();
        for sum in sums {
            match &sum.address {
                Some(address) => {
                    rows.insert(
                        (address.clone(), sum.asset.clone()),
                        (sum.amount.0, sum.count),
                    );
                }
                None => self.fault(format!(
                    "postings in {} of an account without a row",
                    sum.asset
                )),
            }
        }
        self.report.balances = rows.len() as u64;
        if rows != self.sums {
            let places: std::collections::BTreeSet<_> =
                rows.keys().chain(self.sums.keys()).cloned().collect();
            for place in places {
                let (stored, folded) = (rows.get(&place).copied(), self.sums.get(&place).copied());
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
                .map(|sum| sum.0)
                .unwrap_or_default();
            if balance.amount.0 != folded {
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
