//! Pauses between attempts: growing, capped, and never the same for two relays.
//!
//! Pure; randomness comes in as a value.

use std::time::Duration;

/// The first pause is at least this long.
const FIRST: Duration = Duration::from_secs(1);
/// A pause is at most this long, before jitter adds up to a half: short enough that a broker that is back is used soon.
const CAP: Duration = Duration::from_secs(10);
/// What worked for so long has not failed in a row.
pub const SOUND: Duration = Duration::from_secs(30);

/// How often in a row something has failed.
#[derive(Debug, Default)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    /// The pause after another failure; `random` is in 0..1.
    pub fn next(&mut self, random: f64) -> Duration {
        let pause = FIRST
            .saturating_mul(2_u32.saturating_pow(self.failures))
            .min(CAP);
        self.failures = self.failures.saturating_add(1);
        pause.mul_f64(1.0 + random.clamp(0.0, 1.0) / 2.0)
    }

    /// It works again.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r12_pauses_grow_from_a_second_to_the_cap_and_differ() {
        let mut backoff = Backoff::default();
        let pauses: Vec<u64> = (0..40).map(|_| backoff.next(0.0).as_secs()).collect();
        assert_eq!(&pauses[..5], [1, 2, 4, 8, 10]);
        assert!(pauses[5..].iter().all(|pause| *pause == 10));
        assert_eq!(backoff.next(1.0), Duration::from_secs(15));
        backoff.reset();
        assert!(backoff.next(0.3) > Duration::from_secs(1));
    }
}
