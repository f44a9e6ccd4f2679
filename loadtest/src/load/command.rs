//! The commands of a run, made from a seed and a number: a run can be repeated, and a duplicate be made again.
//!
//! Never keeps what was sent, and never looks at an answer.

use super::event::{Event, Name, Party, VERSION_LAST};
use super::mix::{Kind, Mix, Spread};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};

/// How far back a duplicate reaches, in commands.
const DUPLICATE_REACH: u64 = 4_096;
/// How often a first command is sought for a duplicate.
const DUPLICATE_TRIES: u32 = 16;
/// More than any user of a load test has, in minor units.
const BEYOND_FUNDS: u64 = 9_000_000_000_000_000_000;

/// What has to come of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// 201.
    Created,
    /// Its key may be sent more than once: 201 for the first that arrives, 200 with the same record for the others.
    CreatedOnce,
    /// This status with this problem code.
    Refused(u16, &'static str),
}

/// One command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shot {
    /// Its idempotency key.
    pub key: String,
    /// Its body, as it is sent.
    pub body: String,
    /// Which of the tokens it is sent with.
    pub token: usize,
    /// The user whose event it is: `u-<subject>`.
    pub subject: u32,
    /// What has to come of it.
    pub expect: Expect,
    /// What leaves its source, in minor units.
    pub amount: u64,
    /// By how much each balance changes when it is accepted. They sum to zero.
    pub moves: Vec<(Party, i128)>,
}

/// What a command is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    New,
    Duplicate,
    Refused,
}

/// Makes the commands of a mix that was checked.
#[derive(Debug)]
pub struct Commands {
    mix: Mix,
    /// The sum of the weights of all users up to each; empty when they are uniform.
    weights: Vec<f64>,
    versions_total: u32,
}

impl Commands {
    /// Prepares what every command needs.
    pub fn new(mix: Mix) -> Self {
        let weights = match mix.spread {
            Spread::Uniform => Vec::new(),
            Spread::Zipf { exponent } => (1..=mix.users)
                .scan(0.0, |sum, user| {
                    *sum += f64::from(user).powf(-exponent);
                    Some(*sum)
                })
                .collect(),
        };
        Commands {
            weights,
            versions_total: mix
                .versions
                .iter()
                .fold(0, |sum, weight| sum.saturating_add(*weight)),
            mix,
        }
    }

    /// Command number `index`; the same number gives the same command.
    pub fn shot(&self, index: u64) -> Shot {
        let (role, mut random) = self.role(index);
        match role {
            Role::New => self.new_command(index, &mut random),
            Role::Refused => self.refused(index, &mut random),
            Role::Duplicate => self
                .duplicate(index, &mut random)
                .unwrap_or_else(|| self.new_command(index, &mut random)),
        }
    }

    /// What a command is for, and random numbers of its own.
    fn role(&self, index: u64) -> (Role, Xoshiro256PlusPlus) {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(self.mix.seed.rotate_left(32) ^ index);
        let draw: f64 = random.random();
        let role = if draw < self.mix.duplicates {
            Role::Duplicate
        } else if draw < self.mix.duplicates + self.mix.refusals {
            Role::Refused
        } else {
            Role::New
        };
        (role, random)
    }

    /// A new command from not long ago once more. None when none is found, as at the beginning.
    fn duplicate(&self, index: u64, random: &mut Xoshiro256PlusPlus) -> Option<Shot> {
        let reach = index.min(DUPLICATE_REACH);
        if reach == 0 {
            return None;
        }
        (0..DUPLICATE_TRIES).find_map(|_| {
            let first = index - random.random_range(1..=reach);
            let (role, mut its_own) = self.role(first);
            (role == Role::New).then(|| self.new_command(first, &mut its_own))
        })
    }

    fn new_command(&self, index: u64, random: &mut Xoshiro256PlusPlus) -> Shot {
        let version = self.version(random);
        let amount = random.random_range(self.mix.amounts.clone());
        let (name, subject, to) = match self.mix.kind {
            Kind::DepositEach => {
                let turn = index % u64::from(self.mix.users);
                let user = u32::try_from(turn).map_or(1, |turn| turn + 1);
                (Name::Deposit, user, user)
            }
            Kind::Deposit => {
                let user = self.user(random);
                (Name::Deposit, user, user)
            }
            Kind::Withdrawal => {
                let user = self.user(random);
                (Name::Withdrawal, user, user)
            }
            Kind::Transfer => {
                let from = self.user(random);
                (Name::Transfer, from, self.user_but(&[from], random))
            }
            Kind::TransferTo(to) => (Name::Transfer, self.user_but(&[to], random), to),
            Kind::TransferFrom(from) => (Name::Transfer, from, self.user_but(&[from], random)),
        };
        let splits = self.mix.lines && version == VERSION_LAST && name != Name::Withdrawal;
        let event = Event {
            name,
            version,
            subject,
            to,
            and_to: splits.then(|| self.user_but(&[subject, to], random)),
            amount,
        };
        let expect = if self.mix.duplicates > 0.0 {
            Expect::CreatedOnce
        } else {
            Expect::Created
        };
        self.command(index, &event, expect, random)
    }

    /// A transfer that breaks one rule.
    fn refused(&self, index: u64, random: &mut Xoshiro256PlusPlus) -> Shot {
        let subject = self.user(random);
        let mut event = Event {
            name: Name::Transfer,
            version: VERSION_LAST,
            subject,
            to: self.user_but(&[subject], random),
            and_to: None,
            amount: random.random_range(self.mix.amounts.clone()),
        };
        let (status, code) = match random.random_range(0..3) {
            0 => {
                event.amount = BEYOND_FUNDS;
                (422, "insufficient_funds")
            }
            1 => {
                event.to = subject;
                (422, "same_account")
            }
            _ => {
                event.amount = 0;
                (400, "invalid_request")
            }
        };
        self.command(index, &event, Expect::Refused(status, code), random)
    }

    fn command(
        &self,
        index: u64,
        event: &Event,
        expect: Expect,
        random: &mut Xoshiro256PlusPlus,
    ) -> Shot {
        Shot {
            key: format!("{}-{index}", self.mix.run),
            body: event.body(),
            token: random.random_range(0..self.mix.tokens.len()),
            subject: event.subject,
            expect,
            amount: event.total(),
            moves: event.moves(),
        }
    }

    fn version(&self, random: &mut Xoshiro256PlusPlus) -> usize {
        let mut draw = random.random_range(0..self.versions_total);
        for (version, weight) in self.mix.versions.iter().enumerate() {
            match draw.checked_sub(*weight) {
                Some(rest) => draw = rest,
                None => return version,
            }
        }
        VERSION_LAST
    }

    /// A user's number, from 1.
    fn user(&self, random: &mut Xoshiro256PlusPlus) -> u32 {
        let Some(total) = self.weights.last() else {
            return random.random_range(1..=self.mix.users);
        };
        let draw = random.random::<f64>() * total;
        let index = self.weights.partition_point(|sum| *sum <= draw);
        u32::try_from(index)
            .map_or(1, |index| index + 1)
            .min(self.mix.users)
    }

    /// A user who is none of these: in place of one of them, the next.
    fn user_but(&self, others: &[u32], random: &mut Xoshiro256PlusPlus) -> u32 {
        let mut user = self.user(random);
        while others.contains(&user) {
            user = user % self.mix.users + 1;
        }
        user
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::VERSIONS;
    use super::*;
    use daybook::domain::{
        Address, Amount, Asset, Decision, IdempotencyKey, Principal, Scope, Scopes, State, Subject,
        UserState, decide,
    };
    use daybook::schema::Registry;
    use std::collections::{BTreeMap, HashSet};

    fn mix(kind: Kind, users: u32) -> Mix {
        Mix::new(kind, users, vec!["a".to_owned(), "b".to_owned()])
    }

    fn shots(mix: Mix, count: u64) -> Vec<Shot> {
        let commands = Commands::new(mix);
        (0..count).map(|index| commands.shot(index)).collect()
    }

    /// The service's own validation and decision, where every user has 1,000.
    struct Ledger {
        registry: Registry,
        state: State,
        writer: Principal,
    }

    impl Ledger {
        fn new(users: u32) -> Self {
            let registry = Registry::load(None).unwrap();
            let asset: Asset = registry.asset("EUR/2").unwrap();
            let mut state = State::default();
            for user in 1..=users {
                let address = Address::parse(&account(Party::User(user))).unwrap();
                state.accounts.insert(address.clone());
                let funds = Amount::parse("1000").unwrap();
                state.balances.insert((address, asset.clone()), funds);
            }
            let writer = Principal {
                subject: Subject::parse("load").unwrap(),
                issuer: "test".into(),
                token_id: "t".into(),
                issued_at: 0,
                expires_at: 0,
                scopes: Scopes::default().with(Scope::Write).with(Scope::WriteAny),
            };
            Ledger {
                registry,
                state,
                writer,
            }
        }

        /// What the event does to balances, by account; or the code of its refusal.
        fn outcome(&self, shot: &Shot) -> Result<BTreeMap<String, i128>, String> {
            let key = IdempotencyKey::parse(&shot.key).unwrap();
            let draft = self
                .registry
                .draft(&self.writer, key, None, shot.body.as_bytes())
                .map_err(|_| "invalid_request".to_owned())?;
            match decide(&self.state, &draft, UserState::default().last_at) {
                Decision::Accept(accepted) => Ok(sums(accepted.postings.iter().map(|posting| {
                    let amount: i128 = posting.amount.to_string().parse().unwrap();
                    (posting.account.to_string(), amount)
                }))),
                Decision::Refuse(rejection) => Err(rejection.code().into_owned()),
                Decision::Replay(_) => panic!("nothing was stored"),
            }
        }
    }

    fn account(party: Party) -> String {
        match party {
            Party::World => "world".to_owned(),
            Party::Fees => "platform:fees".to_owned(),
            Party::User(number) => format!("users:u-{number}:available"),
        }
    }

    fn sums(moves: impl Iterator<Item = (String, i128)>) -> BTreeMap<String, i128> {
        let mut sums = BTreeMap::new();
        for (account, amount) in moves {
            *sums.entry(account).or_default() += amount;
        }
        sums.retain(|_, amount| *amount != 0);
        sums
    }

    #[test]
    fn every_version_of_every_kind_moves_in_the_ledger_what_it_says() {
        let ledger = Ledger::new(9);
        let kinds = [
            Kind::DepositEach,
            Kind::Deposit,
            Kind::Withdrawal,
            Kind::Transfer,
            Kind::TransferTo(4),
            Kind::TransferFrom(4),
        ];
        for kind in kinds {
            for version in 0..VERSIONS {
                for lines in [false, true] {
                    let mut mix = mix(kind, 9);
                    mix.versions = [0; VERSIONS];
                    mix.versions[version] = 1;
                    mix.lines = lines;
                    for shot in shots(mix, 30) {
                        let says = sums(shot.moves.iter().map(|(who, by)| (account(*who), *by)));
                        assert_eq!(ledger.outcome(&shot), Ok(says), "{}", shot.body);
                        let schema = format!(r#""schema":"1.{version}""#);
                        assert!(shot.body.contains(&schema) || kind == Kind::Withdrawal);
                    }
                }
            }
        }
    }

    #[test]
    fn fees_and_lines_are_among_what_is_tested() {
        let mut fees = mix(Kind::Transfer, 9);
        fees.versions = [0, 0, 0, 0, 0, 0, 1, 0];
        let paid: i128 = shots(fees, 100).iter().map(|shot| shot.moves[2].1).sum();
        assert!(paid > 0);
        let mut lines = mix(Kind::Transfer, 3);
        lines.lines = true;
        assert!(shots(lines, 100).iter().all(|shot| shot.moves.len() == 3));
    }

    #[test]
    fn what_has_to_be_refused_is_refused_by_the_ledger() {
        let ledger = Ledger::new(9);
        let mut mix = mix(Kind::Deposit, 9);
        mix.refusals = 1.0;
        let mut codes = HashSet::new();
        for shot in shots(mix, 100) {
            let Expect::Refused(_, code) = shot.expect else {
                panic!("{shot:?}");
            };
            assert_eq!(ledger.outcome(&shot), Err(code.to_owned()));
            codes.insert(code);
        }
        assert_eq!(codes.len(), 3);
    }

    #[test]
    fn a_duplicate_is_an_earlier_command_in_every_byte() {
        let mut mix = mix(Kind::Transfer, 1_000);
        mix.duplicates = 0.3;
        mix.refusals = 0.1;
        mix.versions = [1; VERSIONS];
        let shots = shots(mix, 10_000);
        let mut sent: BTreeMap<&str, &Shot> = BTreeMap::new();
        let mut again = 0;
        for shot in &shots {
            if let Some(first) = sent.insert(&shot.key, shot) {
                assert_eq!(first, shot);
                assert_eq!(shot.expect, Expect::CreatedOnce);
                again += 1;
            }
        }
        assert!((2_700..3_300).contains(&again), "{again}");
        let refused = shots
            .iter()
            .filter(|shot| matches!(shot.expect, Expect::Refused(..)))
            .count();
        assert!((800..1_200).contains(&refused), "{refused}");
    }

    #[test]
    fn the_seed_decides_everything() {
        let of = |seed| {
            let mut mix = mix(Kind::Transfer, 100);
            mix.run = "r".to_owned();
            mix.seed = seed;
            mix.duplicates = 0.2;
            mix.refusals = 0.2;
            mix.versions = [1; VERSIONS];
            mix.spread = Spread::Zipf { exponent: 1.0 };
            shots(mix, 500)
        };
        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
    }

    #[test]
    fn zipf_prefers_the_first_users_and_uniform_nobody() {
        let share_of_first = |spread| {
            let mut mix = mix(Kind::Deposit, 1_000);
            mix.spread = spread;
            let shots = shots(mix, 20_000);
            assert!(shots.iter().all(|shot| (1..=1_000).contains(&shot.subject)));
            shots.iter().filter(|shot| shot.subject == 1).count()
        };
        // The sum of 1/n up to 1,000 is 7.485, so the first of 1,000 gets 13.4 %.
        let first = share_of_first(Spread::Zipf { exponent: 1.0 });
        assert!((2_400..2_950).contains(&first), "{first}");
        assert!(share_of_first(Spread::Uniform) < 60);
        assert!(share_of_first(Spread::Zipf { exponent: 0.0 }) < 60);
    }

    #[test]
    fn versions_and_tokens_are_drawn_by_their_weights() {
        let mut mix = mix(Kind::Transfer, 10);
        mix.versions = [3, 0, 0, 0, 0, 0, 0, 1];
        let shots = shots(mix, 4_000);
        let first = shots
            .iter()
            .filter(|shot| shot.body.contains(r#""schema":"1.0""#))
            .count();
        assert!((2_800..3_200).contains(&first), "{first}");
        let one = shots.iter().filter(|shot| shot.token == 0).count();
        assert!((1_800..2_200).contains(&one), "{one}");
    }

    #[test]
    fn everybody_gets_a_deposit_in_turn() {
        let subjects: Vec<u32> = shots(mix(Kind::DepositEach, 4), 6)
            .iter()
            .map(|shot| shot.subject)
            .collect();
        assert_eq!(subjects, [1, 2, 3, 4, 1, 2]);
    }

    #[test]
    fn one_account_takes_part_in_every_transfer_of_a_hot_one() {
        for shot in shots(mix(Kind::TransferTo(2), 5), 50) {
            assert_eq!(shot.moves[1].0, Party::User(2));
            assert_ne!(shot.subject, 2);
        }
        for shot in shots(mix(Kind::TransferFrom(2), 5), 50) {
            assert_eq!(shot.subject, 2);
            assert_ne!(shot.moves[1].0, Party::User(2));
        }
    }
}
