//! What the broker decided about each message, from confirms that may carry other messages' returns.
//!
//! Pure. Never takes an acknowledgement alone for delivery: an unroutable message is acknowledged too, and its return is handed
//! over with whichever confirm is completed next.

use std::collections::HashSet;
use uuid::Uuid;

/// One completed confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirmed {
    /// The message it confirms.
    pub id: Uuid,
    /// Acknowledged, or not.
    pub ack: bool,
    /// The message whose return came with it: any of those in flight.
    pub returned: Option<Uuid>,
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every queue bound for it has it.
    Delivered,
    /// No queue is bound for it.
    Returned,
    /// The broker did not take it.
    Refused,
}

/// Matches confirms and returns of one channel by message id.
///
/// The broker sends a return before the acknowledgement of the same message, and lapin hands the returns it holds to completed
/// confirms, first come, first served. So a confirm that carries nothing proves that no return was waiting when it completed. A
/// confirm that carries the return of ANOTHER message leaves its own open: that may still wait for a later confirm.
#[derive(Debug, Default)]
pub struct Verdicts {
    returned: HashSet<Uuid>,
    open: Vec<Confirmed>,
}

impl Verdicts {
    /// Takes all confirms that are complete now, in any order, and how many of the channel are still outstanding.
    pub fn take(&mut self, confirmed: Vec<Confirmed>, outstanding: usize) -> Vec<(Uuid, Verdict)> {
        self.returned
            .extend(confirmed.iter().filter_map(|one| one.returned));
        // Only a confirm later than the open ones proves something about them; those of one call have no order.
        let queue_was_empty =
            outstanding == 0 || confirmed.iter().any(|one| one.returned.is_none());
        let mut certain = Vec::with_capacity(confirmed.len());
        let earlier = std::mem::take(&mut self.open);
        for (one, proof) in earlier.into_iter().map(|one| (one, queue_was_empty)).chain(
            confirmed
                .into_iter()
                .map(|one| (one, outstanding == 0 || one.returned.is_none())),
        ) {
            if self.returned.remove(&one.id) {
                certain.push((one.id, Verdict::Returned));
            } else if !one.ack {
                certain.push((one.id, Verdict::Refused));
            } else if proof {
                certain.push((one.id, Verdict::Delivered));
            } else {
                self.open.push(one);
            }
        }
        certain
    }

    /// Forgets everything: the channel is gone, and what was open will never be known.
    pub fn clear(&mut self) {
        self.returned.clear();
        self.open.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u128) -> Uuid {
        Uuid::from_u128(n)
    }

    fn ack(n: u128, returned: Option<u128>) -> Confirmed {
        Confirmed {
            id: id(n),
            ack: true,
            returned: returned.map(id),
        }
    }

    #[test]
    fn a_return_on_anothers_confirm_is_matched_by_id() {
        let mut verdicts = Verdicts::default();
        let first = verdicts.take(vec![ack(1, None), ack(2, Some(5))], 3);
        assert_eq!(first, [(id(1), Verdict::Delivered)]);
        let rest = verdicts.take(vec![ack(3, None), ack(4, None), ack(5, None)], 0);
        assert_eq!(
            rest,
            [
                (id(2), Verdict::Delivered),
                (id(3), Verdict::Delivered),
                (id(4), Verdict::Delivered),
                (id(5), Verdict::Returned)
            ]
        );
    }

    #[test]
    fn two_returns_that_ride_crosswise_are_both_returned() {
        let mut verdicts = Verdicts::default();
        // 2 is acknowledged first and carries 1's return; its own waits for the next confirm, which is 1's.
        assert_eq!(verdicts.take(vec![ack(2, Some(1))], 1), []);
        assert_eq!(
            verdicts.take(vec![ack(1, Some(2))], 0),
            [(id(2), Verdict::Returned), (id(1), Verdict::Returned)]
        );
    }

    #[test]
    fn the_order_of_one_call_does_not_matter() {
        let confirms = [ack(1, None), ack(2, Some(3)), ack(3, None)];
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]] {
            let mut verdicts = Verdicts::default();
            let mut got = verdicts.take(order.map(|at| confirms[at]).to_vec(), 0);
            got.sort_by_key(|(id, _)| *id);
            assert_eq!(
                got,
                [
                    (id(1), Verdict::Delivered),
                    (id(2), Verdict::Delivered),
                    (id(3), Verdict::Returned)
                ]
            );
        }
    }

    #[test]
    fn a_nack_is_refused() {
        let mut verdicts = Verdicts::default();
        let nack = Confirmed {
            id: id(1),
            ack: false,
            returned: None,
        };
        assert_eq!(verdicts.take(vec![nack], 4), [(id(1), Verdict::Refused)]);
    }
}
