//! Rows in the binary format of COPY.
//!
//! Sends nothing, and writes no value in a form of its own: each type's own codec does.

use anyhow::{Result, anyhow};
use bytes::{BufMut, Bytes, BytesMut};
use tokio_postgres::types::{IsNull, ToSql, Type};

/// What a stream of rows begins with: the signature, no flags, no extension.
const HEADER: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0";
/// The number of columns that no row has.
const TRAILER: i16 = -1;

/// Rows of one table, on their way into it.
pub struct Rows {
    bytes: BytesMut,
    columns: i16,
}

impl Rows {
    /// The beginning of a stream of rows of so many columns.
    #[must_use]
    pub fn new(columns: i16) -> Self {
        let mut bytes = BytesMut::new();
        bytes.put_slice(HEADER);
        Rows { bytes, columns }
    }

    /// Begins a row; its values have to follow, all of them, in the order of the columns.
    pub fn row(&mut self) -> &mut Self {
        self.bytes.put_i16(self.columns);
        self
    }

    /// The next value of the row.
    ///
    /// # Errors
    /// When it cannot be written as this type.
    pub fn value<T: ToSql>(&mut self, value: T, as_type: &Type) -> Result<&mut Self> {
        let start = self.bytes.len();
        self.bytes.put_i32(-1);
        let written = value
            .to_sql(as_type, &mut self.bytes)
            .map_err(|error| anyhow!(error))?;
        if let IsNull::No = written {
            let length = i32::try_from(self.bytes.len() - start - size_of::<i32>())?;
            if let Some(place) = self.bytes.get_mut(start..start + size_of::<i32>()) {
                place.copy_from_slice(&length.to_be_bytes());
            }
        }
        Ok(self)
    }

    /// Ends the stream.
    pub fn end(&mut self) {
        self.bytes.put_i16(TRAILER);
    }

    /// Takes what there is.
    #[must_use]
    pub fn take(&mut self) -> Bytes {
        self.bytes.split().freeze()
    }

    /// How many bytes there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }
}
