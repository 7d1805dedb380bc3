//! Slots in the order of insertion.

use super::place::{NONE, Place, Slot};

/// A list whose links are in the places.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) newest: Slot,
    pub(super) oldest: Slot,
    pub(super) len: usize,
}

impl Default for Queue {
    fn default() -> Queue {
        Queue {
            newest: NONE,
            oldest: NONE,
            len: 0,
        }
    }
}

impl Queue {
    /// Adds a slot as the newest.
    pub(super) fn push(&mut self, places: &mut [Place], slot: Slot) {
        let place = &mut places[slot as usize];
        (place.older, place.newer) = (self.newest, NONE);
        match self.newest {
            NONE => self.oldest = slot,
            newest => places[newest as usize].newer = slot,
        }
        self.newest = slot;
        self.len += 1;
    }

    /// Adds a slot just before a newer one, or as the newest.
    pub(super) fn insert_before(&mut self, places: &mut [Place], slot: Slot, newer: Slot) {
        if newer == NONE {
            return self.push(places, slot);
        }
        let older = std::mem::replace(&mut places[newer as usize].older, slot);
        let place = &mut places[slot as usize];
        (place.older, place.newer) = (older, newer);
        match older {
            NONE => self.oldest = slot,
            older => places[older as usize].newer = slot,
        }
        self.len += 1;
    }

    /// Removes a slot.
    pub(super) fn remove(&mut self, places: &mut [Place], slot: Slot) {
        let Place { newer, older, .. } = places[slot as usize];
        match newer {
            NONE => self.newest = older,
            newer => places[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => places[older as usize].newer = newer,
        }
        self.len -= 1;
    }
}
