//! SIEVE: a queue in the order of arrival, with a hand that circles through it.
//!
//! Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024: a hit marks a row; the hand moves from
//! the oldest to the newest, clears marks, and evicts the first row without one.

use super::place::{NEVER, NONE, Place, REFUSALS_MAX, Slot, SlotState};
use super::queue::Queue;

/// A row has a mark or none.
pub(super) const USES_MAX: u8 = 1;

#[derive(Debug)]
pub(super) struct Sieve {
    queue: Queue,
    /// The next slot to examine; none for the oldest.
    hand: Slot,
}

impl Default for Sieve {
    fn default() -> Sieve {
        Sieve {
            queue: Queue::default(),
            hand: NONE,
        }
    }
}

impl Sieve {
    pub(super) fn insert(&mut self, places: &mut [Place], slot: Slot) {
        let place = &mut places[slot as usize];
        (place.state, place.uses) = (SlotState::Queued, 0);
        self.queue.push(places, slot);
    }

    /// Adds back behind the hand a row that the hand took out: its use since then would have made
    /// the hand pass it.
    pub(super) fn rejoin(&mut self, places: &mut [Place], slot: Slot) {
        places[slot as usize].state = SlotState::Queued;
        self.queue.insert_before(places, slot, self.hand);
    }

    pub(super) fn remove(&mut self, places: &mut [Place], slot: Slot) {
        if self.hand == slot {
            self.hand = places[slot as usize].newer;
        }
        self.queue.remove(places, slot);
    }

    /// Removes a row that is not due and may go. The hand circles at most twice, after which no
    /// marks are left. It moves past rows that may not go, so that the next call examines others,
    /// and takes out rows that are due, so that it meets them once.
    pub(super) fn evict(
        &mut self,
        places: &mut [Place],
        may_go: &mut impl FnMut(Slot) -> bool,
    ) -> Option<Slot> {
        let mut refusals = 0;
        for _ in 0..2 * self.queue.len {
            let slot = match self.hand {
                NONE => self.queue.oldest,
                hand => hand,
            };
            if slot == NONE {
                return None;
            }
            let place = &mut places[slot as usize];
            self.hand = place.newer;
            if place.due != NEVER {
                place.state = SlotState::Out;
                self.queue.remove(places, slot);
            } else if place.uses > 0 {
                place.uses = 0;
            } else if may_go(slot) {
                self.queue.remove(places, slot);
                return Some(slot);
            } else {
                refusals += 1;
                if refusals == REFUSALS_MAX {
                    return None;
                }
            }
        }
        None
    }
}
