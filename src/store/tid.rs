//! `tid` on the wire: where a row's version lies. Certain only for as long as the transaction that read it has the row locked.

use bytes::{BufMut, BytesMut};
use std::error::Error;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, accepts, to_sql_checked};

/// The place of a row's version: block and line, as Postgres writes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tid([u8; 6]);

impl ToSql for Tid {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.put_slice(&self.0);
        Ok(IsNull::No)
    }

    accepts!(TID);
    to_sql_checked!();
}

impl<'a> FromSql<'a> for Tid {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Tid(raw.try_into()?))
    }

    accepts!(TID);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_six_bytes_either_way() {
        let place = Tid::from_sql(&Type::TID, &[0, 0, 1, 2, 0, 3]).unwrap();
        let mut out = BytesMut::new();
        place.to_sql(&Type::TID, &mut out).unwrap();
        assert_eq!(&out[..], [0, 0, 1, 2, 0, 3]);
        assert!(Tid::from_sql(&Type::TID, &[0; 5]).is_err());
    }
}
