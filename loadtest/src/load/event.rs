//! One event as a client writes it, in every version of its schema, and what it does to balances.
//!
//! Draws nothing and sends nothing.

/// Versions of `deposit` and `transfer`: 1.0 to 1.7.
pub const VERSIONS: usize = 8;
/// 1.7, as an index.
pub const VERSION_LAST: usize = VERSIONS - 1;
/// The version that has a fee.
const VERSION_WITH_FEE: usize = 6;
/// High enough that an amount of a few minor units has a fee at all.
const FEE_BPS: u64 = 2_500;

/// Whose balance changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    /// `world`.
    World,
    /// `platform:fees`.
    Fees,
    /// `users:u-<number>:available`.
    User(u32),
}

/// The types that ship.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// From `world` to the subject.
    Deposit,
    /// From the subject to `world`; it has one version.
    Withdrawal,
    /// From the subject to another user.
    Transfer,
}

/// One event.
#[derive(Clone, Debug)]
pub struct Event {
    /// Its type.
    pub name: Name,
    /// 0 is 1.0; 7 is 1.7.
    pub version: usize,
    /// Whose event it is.
    pub subject: u32,
    /// Who gets the money, of a transfer or by lines.
    pub to: u32,
    /// Who gets as much again, by lines; for the last version of a deposit or a transfer only.
    pub and_to: Option<u32>,
    /// To each, in minor units of EUR.
    pub amount: u64,
}

impl Event {
    /// The body of `POST /v1/events`.
    pub fn body(&self) -> String {
        let (name, version) = match self.name {
            Name::Deposit => ("deposit", self.version),
            Name::Withdrawal => ("withdrawal", 0),
            Name::Transfer => ("transfer", self.version),
        };
        format!(
            r#"{{"type":"{name}","schema":"1.{version}","subject":"u-{}","data":{{{}}}}}"#,
            self.subject,
            self.data()
        )
    }

    /// The members of `data`. Each version shows what it brought.
    fn data(&self) -> String {
        let amount = self.amount;
        if self.name == Name::Withdrawal {
            return format!(r#""asset":"EUR/2","amount":"{amount}""#);
        }
        if let Some(and_to) = self.and_to {
            return format!(
                r#""asset":"EUR/2","lines":[{{"to":"u-{}","amount":"{amount}"}},{{"to":"u-{and_to}","amount":"{amount}"}}]"#,
                self.to
            );
        }
        let to = match self.name {
            Name::Transfer => format!(r#""to":"u-{}","#, self.to),
            Name::Deposit | Name::Withdrawal => String::new(),
        };
        let money = match self.version {
            0 => format!(r#""currency":"EUR","amount":{amount}"#),
            1 => format!(r#""currency":"EUR","amount":"{amount}""#),
            _ => format!(r#""asset":"EUR/2","amount":"{amount}""#),
        };
        let more = match self.version {
            3 => r#","reference":"invoice-7""#.to_owned(),
            4 => r#","metadata":{"order":"o-1","channel":"web"}"#.to_owned(),
            5 => r#","category":"payroll""#.to_owned(),
            VERSION_WITH_FEE => format!(r#","fee_bps":{FEE_BPS}"#),
            _ => String::new(),
        };
        format!("{to}{money}{more}")
    }

    /// What leaves the source, in minor units.
    pub fn total(&self) -> u64 {
        let parts = 1 + u64::from(self.and_to.is_some());
        self.amount.saturating_mul(parts)
    }

    /// By how much each balance changes; zero in sum.
    pub fn moves(&self) -> Vec<(Party, i128)> {
        let total = i128::from(self.total());
        let amount = i128::from(self.amount);
        let source = match self.name {
            Name::Deposit => Party::World,
            Name::Withdrawal | Name::Transfer => Party::User(self.subject),
        };
        let mut moves = vec![(source, -total)];
        if self.name == Name::Withdrawal {
            moves.push((Party::World, total));
        } else if let Some(and_to) = self.and_to {
            moves.extend([
                (Party::User(self.to), amount),
                (Party::User(and_to), amount),
            ]);
        } else if self.version == VERSION_WITH_FEE {
            let fee = amount * i128::from(FEE_BPS) / 10_000;
            moves.extend([(Party::User(self.to), amount - fee), (Party::Fees, fee)]);
        } else {
            moves.push((Party::User(self.to), amount));
        }
        moves
    }
}
