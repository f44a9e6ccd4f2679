//! `NUMERIC(38,0)` on the wire: the binary format of Postgres from and to [`Amount`], exact.
//!
//! Groups of four decimal digits, most significant first; trailing zero groups are left out.

use crate::domain::Amount;
use bytes::{BufMut, BytesMut};
use std::error::Error;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, accepts, to_sql_checked};

/// An amount as a statement's parameter or result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numeric(pub Amount);

const BASE: u128 = 10_000;
const POSITIVE: u16 = 0x0000;
const NEGATIVE: u16 = 0x4000;

/// Why a value of the database is no amount.
#[derive(Debug, thiserror::Error)]
#[error("a NUMERIC that is no amount: {0}")]
struct Unfit(&'static str);

impl ToSql for Numeric {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        let units = self.0.units();
        let mut left = units.unsigned_abs();
        let mut groups: Vec<i16> = Vec::with_capacity(10);
        while left > 0 {
            groups.push(i16::try_from(left % BASE)?);
            left /= BASE;
        }
        let weight = i16::try_from(groups.len())?.saturating_sub(1);
        groups.reverse();
        while groups.last() == Some(&0) {
            groups.pop();
        }
        out.put_i16(i16::try_from(groups.len())?);
        out.put_i16(weight.max(0));
        out.put_u16(if units < 0 { NEGATIVE } else { POSITIVE });
        out.put_i16(0);
        for group in groups {
            out.put_i16(group);
        }
        Ok(IsNull::No)
    }

    accepts!(NUMERIC);
    to_sql_checked!();
}

impl<'a> FromSql<'a> for Numeric {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        let mut words = raw
            .chunks_exact(2)
            .map(|pair| i16::from_be_bytes([pair[0], pair[1]]));
        let mut word = || words.next().ok_or(Unfit("cut short"));
        let count = word()?;
        let weight = word()?;
        let sign = word()?.cast_unsigned();
        let _display_scale = word()?;
        if sign != POSITIVE && sign != NEGATIVE {
            return Err(Unfit("not a number").into());
        }
        let mut units: i128 = 0;
        for index in 0..=weight.max(-1) {
            let group = if index < count { word()? } else { 0 };
            if !(0..10_000).contains(&group) {
                return Err(Unfit("has a group that is no four digits").into());
            }
            units = units
                .checked_mul(10_000)
                .and_then(|units| units.checked_add(i128::from(group)))
                .ok_or(Unfit("beyond 38 digits"))?;
        }
        if count > weight.saturating_add(1).max(0) {
            return Err(Unfit("has a fraction").into());
        }
        let units = if sign == NEGATIVE { -units } else { units };
        Ok(Numeric(Amount::new(units)?))
    }

    accepts!(NUMERIC);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(units in Amount::MIN.units()..=Amount::MAX.units(), shift in 0u32..38) {
            let amount = Amount::new(units / 10i128.pow(shift)).unwrap();
            let mut bytes = BytesMut::new();
            Numeric(amount).to_sql(&Type::NUMERIC, &mut bytes).unwrap();
            prop_assert_eq!(Numeric::from_sql(&Type::NUMERIC, &bytes).unwrap(), Numeric(amount));
        }

        /// Well-formed but for the groups themselves, so that the arithmetic is reached.
        #[test]
        fn no_groups_panic(groups in prop::collection::vec(any::<i16>(), 10), negative in any::<bool>()) {
            let sign = if negative { 0x4000 } else { 0 };
            let words = [10, 9, sign, 0].into_iter().chain(groups);
            let bytes: Vec<u8> = words.flat_map(i16::to_be_bytes).collect();
            let _ = Numeric::from_sql(&Type::NUMERIC, &bytes);
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Numeric::from_sql(&Type::NUMERIC, &bytes);
        }
    }
}
