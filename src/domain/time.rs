//! Text forms of points in time.
//!
//! Reads no clock: every time is a value that comes in.

use jiff::Timestamp;

/// RFC 3339 in UTC with exactly six decimals, such as `2026-11-30T11:00:00.123456Z`: sorts as text.
#[must_use]
pub fn micros(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string()
}

/// Cuts a time to whole microseconds, the resolution of the database.
#[must_use]
pub fn truncate(at: Timestamp) -> Timestamp {
    Timestamp::from_microsecond(at.as_microsecond()).unwrap_or(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn always_six_decimals() {
        let whole: Timestamp = "2026-11-30T11:00:00Z".parse().unwrap();
        assert_eq!(micros(whole), "2026-11-30T11:00:00.000000Z");
        let fine: Timestamp = "2026-11-30T11:00:00.1234569Z".parse().unwrap();
        assert_eq!(micros(fine), "2026-11-30T11:00:00.123456Z");
        assert_eq!(micros(truncate(fine)), "2026-11-30T11:00:00.123456Z");
    }
}
