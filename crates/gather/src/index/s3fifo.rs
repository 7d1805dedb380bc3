//! S3-FIFO: a small queue that most rows pass only once, and a main queue for the others.
//!
//! Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1: a row
//! enters the small queue, which has a tenth of the rows. A row at the end of that queue moves to
//! the main queue if it was used more than once; else it is evicted, and remembered for a while. A
//! row that returns while it is remembered enters the main queue, which gives used rows another
//! round. Unlike there, the main queue also takes new rows while slots are free.

use super::ghost::Ghost;
use super::place::{NEVER, NONE, Place, REFUSALS_MAX, Slot, SlotState};
use super::queue::Queue;

/// The small queue has one of this many rows.
const SMALL_SHARE: usize = 10;
/// Uses are counted up to this.
pub(super) const USES_MAX: u8 = 3;

#[derive(Debug)]
pub(super) struct S3Fifo {
    small: Queue,
    main: Queue,
    ghost: Ghost,
    /// Rows of the small queue while slots are free.
    small_max: usize,
    has_evicted: bool,
}

impl S3Fifo {
    /// Remembers as many keys as the main queue has rows.
    pub(super) fn new(slots: Slot) -> S3Fifo {
        let slots = slots as usize;
        S3Fifo {
            small: Queue::default(),
            main: Queue::default(),
            ghost: Ghost::new(slots - slots / SMALL_SHARE),
            small_max: slots / SMALL_SHARE,
            has_evicted: false,
        }
    }

    pub(super) fn insert(&mut self, places: &mut [Place], slot: Slot) {
        // While slots are free, the main queue takes the rows beyond the small one's share, as in
        // the authors' simulator: a loop over more rows than slots then finds those again.
        let is_first = !self.has_evicted && self.small.len >= self.small_max;
        if self.ghost.take(places[slot as usize].key) || is_first {
            return self.keep(places, slot);
        }
        let place = &mut places[slot as usize];
        (place.state, place.uses) = (SlotState::Queued, 0);
        self.small.push(places, slot);
    }

    /// Adds back a row that was due when its turn came, so used more than once.
    pub(super) fn rejoin(&mut self, places: &mut [Place], slot: Slot) {
        self.keep(places, slot);
    }

    /// Adds a row to the main queue.
    fn keep(&mut self, places: &mut [Place], slot: Slot) {
        let place = &mut places[slot as usize];
        (place.state, place.uses) = (SlotState::Main, 0);
        self.main.push(places, slot);
    }

    pub(super) fn remove(&mut self, places: &mut [Place], slot: Slot) {
        match places[slot as usize].state {
            SlotState::Main => self.main.remove(places, slot),
            _ => self.small.remove(places, slot),
        }
    }

    /// Removes a row that is not due and may go.
    pub(super) fn evict(
        &mut self,
        places: &mut [Place],
        may_go: &mut impl FnMut(Slot) -> bool,
    ) -> Option<Slot> {
        self.has_evicted = true;
        let mut refusals = 0;
        let mut may_go = |slot| {
            let may_go = may_go(slot);
            refusals += u32::from(!may_go);
            (may_go, refusals >= REFUSALS_MAX)
        };
        let rows = self.small.len + self.main.len;
        if self.small.len * SMALL_SHARE >= rows {
            self.evict_small(places, &mut may_go)
                .or_else(|| self.evict_main(places, &mut may_go))
        } else {
            self.evict_main(places, &mut may_go)
                .or_else(|| self.evict_small(places, &mut may_go))
        }
    }

    /// `may_go` also says whether to give up. Rows that may not go keep their position.
    fn evict_small(
        &mut self,
        places: &mut [Place],
        may_go: &mut impl FnMut(Slot) -> (bool, bool),
    ) -> Option<Slot> {
        let mut slot = self.small.oldest;
        while slot != NONE {
            let Place {
                newer,
                uses,
                key,
                due,
                ..
            } = places[slot as usize];
            if due != NEVER {
                self.small.remove(places, slot);
                places[slot as usize].state = SlotState::Out;
            } else if uses > 1 {
                self.small.remove(places, slot);
                self.keep(places, slot);
            } else {
                match may_go(slot) {
                    (true, _) => {
                        self.small.remove(places, slot);
                        self.ghost.remember(key);
                        return Some(slot);
                    }
                    (false, true) => return None,
                    (false, false) => {}
                }
            }
            slot = newer;
        }
        None
    }

    fn evict_main(
        &mut self,
        places: &mut [Place],
        may_go: &mut impl FnMut(Slot) -> (bool, bool),
    ) -> Option<Slot> {
        let mut slot = self.main.oldest;
        while slot != NONE {
            let newer = places[slot as usize].newer;
            if places[slot as usize].due != NEVER {
                self.main.remove(places, slot);
                places[slot as usize].state = SlotState::Out;
                slot = newer;
                continue;
            }
            if places[slot as usize].uses > 0 {
                places[slot as usize].uses -= 1;
                self.main.remove(places, slot);
                self.main.push(places, slot);
                // A single row is its own successor.
                slot = if newer == NONE { slot } else { newer };
                continue;
            }
            match may_go(slot) {
                (true, _) => {
                    self.main.remove(places, slot);
                    return Some(slot);
                }
                (false, true) => return None,
                (false, false) => slot = newer,
            }
        }
        None
    }
}
