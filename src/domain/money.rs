//! Exact amounts and the assets they are counted in.
//!
//! No floats, no rounding that is not named: every operation is checked and an overflow is a typed error.

use std::fmt;
use std::sync::Arc;

/// A signed amount in minor units; its magnitude is at most 10^38 - 1, the limit of `NUMERIC(38,0)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Amount(i128);

/// Why a text or a number is no [`Amount`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AmountError {
    /// Beyond 10^38 - 1 in magnitude.
    #[error("the amount exceeds 38 digits")]
    Overflow,
    /// Not of the form `-?(0|[1-9][0-9]*)`.
    #[error("an amount is a decimal integer in minor units, such as \"1250\"")]
    Malformed,
}

impl Amount {
    /// 10^38 - 1.
    pub const MAX: Amount = Amount(99_999_999_999_999_999_999_999_999_999_999_999_999);
    /// -(10^38 - 1).
    pub const MIN: Amount = Amount(-Self::MAX.0);
    /// Nothing.
    pub const ZERO: Amount = Amount(0);

    /// Takes a number of minor units.
    ///
    /// # Errors
    /// [`AmountError::Overflow`] beyond 38 digits.
    pub const fn new(units: i128) -> Result<Self, AmountError> {
        if units > Self::MAX.0 || units < Self::MIN.0 {
            Err(AmountError::Overflow)
        } else {
            Ok(Amount(units))
        }
    }

    /// The number of minor units.
    #[must_use]
    pub const fn units(self) -> i128 {
        self.0
    }

    /// Reads the one decimal spelling of an integer: no sign but `-`, no leading zero, no `-0`, no exponent.
    ///
    /// # Errors
    /// [`AmountError::Malformed`] for another spelling, [`AmountError::Overflow`] beyond 38 digits.
    pub fn parse(text: &str) -> Result<Self, AmountError> {
        let digits = text.strip_prefix('-').unwrap_or(text);
        let negative = digits.len() != text.len();
        let canonical = match digits.as_bytes() {
            [b'0'] => !negative,
            [b'1'..=b'9', rest @ ..] => rest.iter().all(u8::is_ascii_digit),
            _ => false,
        };
        if !canonical {
            return Err(AmountError::Malformed);
        }
        let units: i128 = text.parse().map_err(|_| AmountError::Overflow)?;
        Self::new(units)
    }

    /// Whether it is exactly zero.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Whether it is below zero.
    #[must_use]
    pub const fn is_negative(self) -> bool {
        self.0 < 0
    }

    /// The same magnitude with the other sign; cannot overflow, the range is symmetric.
    #[must_use]
    pub const fn negated(self) -> Self {
        Amount(-self.0)
    }

    /// The sum.
    ///
    /// # Errors
    /// [`AmountError::Overflow`] beyond 38 digits.
    pub const fn plus(self, other: Self) -> Result<Self, AmountError> {
        // Checked: the sum of two amounts can pass 2^127, which is about 1.7 * 10^38.
        match self.0.checked_add(other.0) {
            Some(units) => Self::new(units),
            None => Err(AmountError::Overflow),
        }
    }

    /// The difference.
    ///
    /// # Errors
    /// [`AmountError::Overflow`] beyond 38 digits.
    pub const fn minus(self, other: Self) -> Result<Self, AmountError> {
        self.plus(other.negated())
    }

    /// `floor(self * points / 10000)`, exact: quotient and remainder are scaled apart, so nothing can wrap.
    ///
    /// # Errors
    /// [`AmountError::Overflow`] when the result is beyond 38 digits.
    pub fn basis_points(self, points: u32) -> Result<Self, AmountError> {
        let points = i128::from(points);
        let whole = self
            .0
            .div_euclid(10_000)
            .checked_mul(points)
            .ok_or(AmountError::Overflow)?;
        let part = (self.0.rem_euclid(10_000) * points).div_euclid(10_000);
        Self::new(whole.checked_add(part).ok_or(AmountError::Overflow)?)
    }

    /// Splits a non-negative amount by shares in basis points that sum to 10,000. Each part is floored; the units left
    /// over go one each to the largest remainders, ties to the first. The parts sum to the whole exactly.
    ///
    /// # Errors
    /// [`AmountError::Overflow`] when a product would leave the range.
    pub fn split(self, shares: &[u32]) -> Result<Vec<Self>, AmountError> {
        let mut parts = Vec::with_capacity(shares.len());
        let mut order = Vec::with_capacity(shares.len());
        let mut left = self;
        for (index, share) in shares.iter().enumerate() {
            let part = self.basis_points(*share)?;
            let remainder = (self.0.rem_euclid(10_000) * i128::from(*share)).rem_euclid(10_000);
            left = left.minus(part)?;
            order.push((std::cmp::Reverse(remainder), index));
            parts.push(part);
        }
        order.sort_unstable();
        for (_, index) in order {
            if left.0 <= 0 {
                break;
            }
            parts[index] = parts[index].plus(Amount(1))?;
            left = left.minus(Amount(1))?;
        }
        Ok(parts)
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl serde::Serialize for Amount {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> serde::Deserialize<'de> for Amount {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        Amount::parse(&text).map_err(serde::de::Error::custom)
    }
}

/// An asset in its one spelling, such as `EUR/2`: a code of the ledger's list, a slash, and the number of decimals.
/// Made only by the asset list ([`crate::schema`]), by a stored row, or by a test.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Asset(Arc<str>);

impl Asset {
    /// Longest spelling, in bytes.
    pub const LENGTH_MAX: usize = 24;

    /// Takes a spelling that is known to be canonical.
    #[must_use]
    pub fn from_canonical(text: &str) -> Self {
        Asset(text.into())
    }

    /// The spelling.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Asset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl serde::Serialize for Asset {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_one_spelling_of_an_integer_is_an_amount() {
        for text in [
            "0",
            "1",
            "-1",
            "10",
            "99999999999999999999999999999999999999",
        ] {
            assert_eq!(Amount::parse(text).unwrap().to_string(), text);
        }
        for text in [
            "", "-", "-0", "00", "01", "+1", "1e3", "1.0", " 1", "1 ", "0x1", "١",
        ] {
            assert_eq!(Amount::parse(text), Err(AmountError::Malformed), "{text:?}");
        }
        for text in ["100000000000000000000000000000000000000", &"9".repeat(400)] {
            assert_eq!(Amount::parse(text), Err(AmountError::Overflow));
        }
    }

    #[test]
    fn arithmetic_stops_at_the_limit() {
        let one = Amount::new(1).unwrap();
        assert_eq!(Amount::MAX.plus(one), Err(AmountError::Overflow));
        assert_eq!(Amount::MIN.minus(one), Err(AmountError::Overflow));
        assert_eq!(Amount::MAX.plus(Amount::MAX), Err(AmountError::Overflow));
        assert_eq!(Amount::MIN.plus(Amount::MIN), Err(AmountError::Overflow));
        assert_eq!(Amount::MIN.minus(Amount::MAX), Err(AmountError::Overflow));
        assert_eq!(Amount::MAX.basis_points(10_000), Ok(Amount::MAX));
        assert_eq!(Amount::MAX.basis_points(10_001), Err(AmountError::Overflow));
    }

    #[test]
    fn m12_ten_in_three_parts_loses_nothing() {
        let parts = Amount::new(10)
            .unwrap()
            .split(&[3_334, 3_333, 3_333])
            .unwrap();
        assert_eq!(
            parts.iter().map(|p| p.units()).collect::<Vec<_>>(),
            [4, 3, 3]
        );
        let tie = Amount::new(1).unwrap().split(&[5_000, 5_000]).unwrap();
        assert_eq!(tie.iter().map(|p| p.units()).collect::<Vec<_>>(), [1, 0]);
    }

    proptest! {
        #[test]
        fn m12_every_split_sums_to_the_whole(units in 0..=Amount::MAX.0, cuts in prop::collection::vec(0u32..=10_000, 0..8)) {
            let mut cuts = cuts;
            cuts.sort_unstable();
            let mut shares = Vec::new();
            let mut last = 0;
            for cut in cuts {
                shares.push(cut - last);
                last = cut;
            }
            shares.push(10_000 - last);
            let whole = Amount::new(units).unwrap();
            let parts = whole.split(&shares).unwrap();
            let sum = parts.iter().try_fold(Amount::ZERO, |sum, part| sum.plus(*part)).unwrap();
            prop_assert_eq!(sum, whole);
            for (part, share) in parts.iter().zip(&shares) {
                let exact = whole.basis_points(*share).unwrap();
                prop_assert!(part.units() - exact.units() <= 1 && part.units() >= exact.units());
            }
        }

        #[test]
        fn a_text_round_trips(units in Amount::MIN.0..=Amount::MAX.0) {
            let amount = Amount::new(units).unwrap();
            prop_assert_eq!(Amount::parse(&amount.to_string()), Ok(amount));
        }
    }
}
