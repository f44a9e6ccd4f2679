//! What most scenarios stand on: users with money, a server, perhaps a consumer, and the gate around all of it.
//!
//! Returns no tally that the gate has not been told of.

use super::Bench;
use crate::cgroup::Usage;
use crate::consumer::Consumer;
use crate::fill::{self, fill};
use crate::gate::Gate;
use crate::lab::Ledger;
use crate::load::{self, Arrivals, Kind, Mix, Pace, Plan, Reads, Spread, Tally, Target, VERSIONS};
use crate::server::{Server, Setup};
use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use std::time::Duration;
use tokio::time::Instant;

/// What each user gets: no run is long enough to spend it.
const FUNDS: u64 = 1_000_000_000;
/// How long giving every user money may take.
const FUNDING_LIMIT: Duration = Duration::from_secs(600);
/// Requests in flight meanwhile.
const FUNDING_IN_FLIGHT: u32 = 64;
/// Connections of an open loop: more than are ever in flight at half of saturation.
const ARRIVALS_IN_FLIGHT: u32 = 512;
/// Arrivals that may wait for a free connection.
const QUEUE_MAX: usize = 100_000;
/// Users of a load on a ledger that is one user's: that one, and those that he pays.
const ONE_AND_OTHERS: u32 = 3;
/// Driven before each measured time.
const WARM_UP: Duration = Duration::from_secs(1);
/// How long a run takes that does not say otherwise.
const LASTS: Duration = Duration::from_secs(5);

/// Everything that is needed to drive load and to prove it.
#[derive(Debug)]
pub struct Stand<'a> {
    /// The ledger.
    pub ledger: &'a Ledger,
    /// The server that the load goes to.
    pub server: Server,
    /// Receives everything, when the server has a relay.
    pub consumer: Option<Consumer>,
    gate: Gate,
    tokens: Vec<String>,
    users: u32,
}

/// What came of a run that was delivered, too.
#[derive(Debug)]
pub struct Delivered {
    /// The run.
    pub tally: Tally,
    /// Events a second: those accepted within the measured time, over that time and what the relay was behind at its end. What the
    /// slower of service and relay manages.
    pub rate: f64,
    /// How long the relay still had to work after the last answer.
    pub behind: Duration,
}

impl<'a> Stand<'a> {
    /// Gives users money by a server of its own, which is stopped again; then starts the one that will be measured. One with a
    /// relay gets a consumer, which has received all of that before this returns.
    ///
    /// # Errors
    /// When a server does not get ready, or not every user got money.
    pub async fn raise(bench: &Bench, ledger: &'a Ledger, setup: &Setup) -> Result<Self> {
        let consumer = match setup.has_relay() {
            true => Some(Consumer::start(ledger).await?),
            false => None,
        };
        let stand = Self::raise_with(bench, ledger, setup, consumer).await?;
        stand.drained().await?;
        Ok(stand)
    }

    /// The same with a consumer and without a relay: that one is started later, by whoever wants a backlog.
    ///
    /// # Errors
    /// As [`Stand::raise`].
    pub async fn raise_for_later(bench: &Bench, ledger: &'a Ledger, setup: &Setup) -> Result<Self> {
        let consumer = Consumer::start(ledger).await?;
        Self::raise_with(bench, ledger, setup, Some(consumer)).await
    }

    async fn raise_with(
        bench: &Bench,
        ledger: &'a Ledger,
        setup: &Setup,
        consumer: Option<Consumer>,
    ) -> Result<Self> {
        let tokens = bench.lab.tokens().writers().to_vec();
        let users = bench.users;
        let mut gate = Gate::open(ledger).await?;
        let funder = ledger.serve(&Setup::roles("api")).await?;
        let funded = load::drive(funding(&funder, tokens.clone(), users)?).await?;
        gate.add(&funded)?;
        ensure!(
            funded.created == u64::from(users),
            "only {} of {users} users got their money: {}",
            funded.created,
            funded.trouble()
        );
        funder.stop().await?;
        ledger.database.analyze().await?;
        ledger.database.checkpoint().await?;
        Ok(Stand {
            server: ledger.serve(setup).await?,
            ledger,
            consumer,
            gate,
            tokens,
            users,
        })
    }

    /// The same on a ledger that was filled: its users, `u-1` and so on, have money. The load's may be more of them.
    ///
    /// # Errors
    /// When the server does not get ready.
    pub async fn raise_filled(
        bench: &Bench,
        ledger: &'a Ledger,
        setup: &Setup,
        users: u32,
    ) -> Result<Self> {
        Ok(Stand {
            gate: Gate::open(ledger).await?,
            server: ledger.serve(setup).await?,
            ledger,
            consumer: None,
            tokens: bench.lab.tokens().writers().to_vec(),
            users,
        })
    }

    /// The same on a ledger whose events are all deposits of one user, `u-1`; the load has two others besides. The relay is paused.
    ///
    /// # Errors
    /// When the ledger cannot be filled, or the server does not get ready.
    pub async fn raise_one_user(bench: &Bench, ledger: &'a Ledger, events: u64) -> Result<Self> {
        let plan = fill::Plan {
            events,
            users: 1,
            kind: fill::Kind::Deposits,
            seed: 1,
            keep_indexes: false,
        };
        fill(&ledger.database, &ledger.name, plan).await?;
        let setup = Setup::roles("api,keeper");
        Self::raise_filled(bench, ledger, &setup, ONE_AND_OTHERS).await
    }

    /// Reads of these paths in a closed loop of one, to be changed as needed.
    ///
    /// # Errors
    /// When the server has no API.
    pub fn reads(&self, paths: Vec<String>) -> Result<Reads> {
        Ok(Reads {
            target: Target::new(&self.server.url()?)?,
            token: self.tokens.first().context("no token")?.clone(),
            paths,
            connections: 1,
            pace: Pace::Closed,
            warm_up: WARM_UP,
            lasts: Duration::from_secs(1),
        })
    }

    /// A closed loop of commands of this kind, to be changed as needed.
    ///
    /// # Errors
    /// When the server has no API.
    pub fn plan(&self, kind: Kind) -> Result<Plan> {
        let target = Target::new(&self.server.url()?)?;
        let mix = Mix::new(kind, self.users, self.tokens.clone());
        Ok(Plan {
            warm_up: WARM_UP,
            queue_max: QUEUE_MAX,
            ..Plan::closed(target, FUNDING_IN_FLIGHT, LASTS, mix)
        })
    }

    /// Transfers as they come in life: some users are busier than others, clients are of every version, with tokens of every
    /// public-key algorithm, some send again what they have sent, and some are refused.
    ///
    /// # Errors
    /// When the server has no API.
    pub fn mixed(&self, bench: &Bench) -> Result<Plan> {
        let mut plan = self.plan(Kind::Transfer)?;
        plan.mix.tokens = bench.lab.tokens().mixed().to_vec();
        plan.mix.spread = Spread::Zipf { exponent: 0.8 };
        plan.mix.versions = [1; VERSIONS];
        plan.mix.lines = true;
        plan.mix.duplicates = 0.02;
        plan.mix.refusals = 0.02;
        Ok(plan)
    }

    /// Drives a plan to its end.
    ///
    /// # Errors
    /// When it cannot be driven, or an answer should not have been.
    pub async fn drive(&mut self, plan: Plan) -> Result<Tally> {
        if plan.mix.duplicates > 0.0 {
            self.gate.keys_repeat();
        }
        let tally = load::drive(plan).await?;
        self.gate.add(&tally)?;
        Ok(tally)
    }

    /// Drives a plan to its end and waits until all of it was received.
    ///
    /// # Errors
    /// As [`Stand::drive`]; and when the server has no relay, or the relay does not get done.
    pub async fn deliver(&mut self, plan: Plan) -> Result<Delivered> {
        ensure!(self.consumer.is_some(), "nobody receives");
        let tally = self.drive(plan).await?;
        let answered = Instant::now();
        self.drained().await?;
        let behind = answered.elapsed();
        let seconds = (tally.window + behind).as_secs_f64();
        Ok(Delivered {
            rate: tally.created_in_window as f64 / seconds,
            tally,
            behind,
        })
    }

    /// Random transfers that arrive at this rate, whether those before are answered or not, until all of them were received. Comes
    /// with how long their messages were under way from the commit to the consumer, in microseconds.
    ///
    /// # Errors
    /// As [`Stand::deliver`].
    pub async fn arrive(
        &mut self,
        per_second: f64,
        lasts: Duration,
    ) -> Result<(Tally, Histogram<u64>)> {
        let plan = Plan {
            arrivals: Arrivals::Poisson { per_second },
            in_flight: ARRIVALS_IN_FLIGHT,
            lasts,
            ..self.plan(Kind::Transfer)?
        };
        self.deliver_lag(plan).await
    }

    /// Delivers a plan; comes with how long its messages were under way from the commit to the consumer, in microseconds.
    ///
    /// # Errors
    /// As [`Stand::deliver`].
    pub async fn deliver_lag(&mut self, plan: Plan) -> Result<(Tally, Histogram<u64>)> {
        self.take_lag_us()?;
        let delivered = self.deliver(plan).await?;
        Ok((delivered.tally, self.take_lag_us()?))
    }

    /// Waits until everything stored was received; nothing to wait for without a consumer.
    ///
    /// # Errors
    /// When it does not come, or more comes than was stored.
    pub async fn drained(&self) -> Result<()> {
        match &self.consumer {
            Some(consumer) => self.gate.drained(self.ledger, consumer).await,
            None => Ok(()),
        }
    }

    /// How long the messages since the last call were under way from the commit to the consumer, in microseconds.
    ///
    /// # Errors
    /// When the server has no relay.
    fn take_lag_us(&self) -> Result<Histogram<u64>> {
        let consumer = self.consumer.as_ref().context("nobody receives")?;
        Ok(consumer.take_lag_us())
    }

    /// Proves the ledger and stops the server and the consumer; what the server used comes back when it was limited.
    ///
    /// # Errors
    /// When anything does not agree.
    pub async fn finish(self) -> Result<Option<Usage>> {
        self.drained().await?;
        let usage = self.server.stop().await?;
        if let Some(consumer) = self.consumer {
            consumer.finish().await?;
        }
        self.gate.prove(self.ledger).await.context("the gate")?;
        Ok(usage)
    }
}

/// Money for every user.
fn funding(server: &Server, tokens: Vec<String>, users: u32) -> Result<Plan> {
    let target = Target::new(&server.url()?)?;
    let mut mix = Mix::new(Kind::DepositEach, users, tokens);
    mix.amounts = FUNDS..=FUNDS;
    Ok(Plan {
        count_max: u64::from(users),
        progress: false,
        ..Plan::closed(target, FUNDING_IN_FLIGHT, FUNDING_LIMIT, mix)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::Lab;

    async fn bench() -> Bench {
        Bench {
            lab: Lab::for_test().await,
            full: false,
            users: 64,
            saturated: None,
            pg_bin_dir: None,
        }
    }

    /// Half a second of transfers.
    fn short(stand: &Stand<'_>) -> Plan {
        Plan {
            in_flight: 4,
            warm_up: Duration::ZERO,
            lasts: Duration::from_millis(500),
            progress: false,
            ..stand.plan(Kind::Transfer).unwrap()
        }
    }

    #[tokio::test]
    async fn what_was_accepted_is_stored_delivered_and_proved() {
        let bench = bench().await;
        let work = bench.lab.with_ledger("test", async |ledger| {
            let mut stand = Stand::raise(&bench, ledger, &Setup::everything()).await?;
            let delivered = stand.deliver(short(&stand)).await?;
            assert!(delivered.tally.created > 0 && delivered.rate > 0.0);
            assert!(stand.take_lag_us()?.len() >= delivered.tally.created);
            assert!(stand.server.memory()?.most > 0);
            assert_eq!(stand.finish().await?, None);
            Ok(())
        });
        work.await.unwrap();
        bench.lab.close().await.unwrap();
    }

    #[tokio::test]
    async fn an_event_that_was_not_answered_for_stops_a_run() {
        let bench = bench().await;
        let work = bench.lab.with_ledger("test", async |ledger| {
            let mut stand = Stand::raise(&bench, ledger, &Setup::roles("api")).await?;
            stand.drive(short(&stand)).await?;
            // Behind the gate's back.
            load::drive(short(&stand)).await?;
            stand.finish().await
        });
        let why = format!("{:#}", work.await.unwrap_err());
        assert!(why.contains("more events are stored"), "{why}");
        bench.lab.close().await.unwrap();
    }

    #[tokio::test]
    async fn a_key_that_has_two_events_stops_a_run() {
        let bench = bench().await;
        let work = bench.lab.with_ledger("test", async |ledger| {
            let mut stand = Stand::raise(&bench, ledger, &Setup::roles("api")).await?;
            let mut plan = short(&stand);
            plan.mix.duplicates = 0.5;
            let tally = stand.drive(plan).await?;
            assert!(tally.replayed > 0);
            let client = ledger.database.connect().await?;
            client
                .batch_execute(
                    "SET session_replication_role = replica;
                     UPDATE events e SET writer = first.writer, idempotency_key = first.idempotency_key FROM events first
                     WHERE first.user_no = (SELECT min(user_no) FROM users WHERE sequence > 1) AND first.sequence = 1
                       AND e.user_no = first.user_no AND e.sequence = 2",
                )
                .await?;
            stand.finish().await
        });
        let why = format!("{:#}", work.await.unwrap_err());
        assert!(why.contains("1 idempotency keys have several"), "{why}");
        bench.lab.close().await.unwrap();
    }

    #[tokio::test]
    async fn a_balance_that_nobody_moved_stops_a_run_and_the_ledger_goes() {
        let bench = bench().await;
        let mut name = String::new();
        let work = bench.lab.with_ledger("test", async |ledger| {
            name.clone_from(&ledger.name);
            let mut stand = Stand::raise(&bench, ledger, &Setup::roles("api")).await?;
            stand.drive(short(&stand)).await?;
            let client = ledger.database.connect().await?;
            client
                .batch_execute("UPDATE balances SET amount = amount + 1 WHERE account_no = (SELECT min(account_no) FROM balances)")
                .await?;
            stand.finish().await
        });
        let why = format!("{:#}", work.await.unwrap_err());
        assert!(why.contains("1 balances did not move by"), "{why}");
        let client = bench.lab.postgres().connect().await.unwrap();
        let sql = "SELECT count(*) FROM pg_database WHERE datname = $1";
        let left: i64 = client.query_one(sql, &[&name]).await.unwrap().get(0);
        assert_eq!(left, 0);
        bench.lab.close().await.unwrap();
    }
}
