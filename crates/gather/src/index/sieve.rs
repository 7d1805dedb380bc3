//! SIEVE: a queue in the order of arrival, and a hand that goes round in it.
//!
//! Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024: a hit marks a row; the hand goes from the
//! oldest to the newest, takes marks away, and evicts the first row that has none.

use super::Slot;

const NONE: Slot = Slot::MAX;

/// The queue, as links among slots.
#[derive(Debug)]
pub(super) struct Sieve {
    newer: Vec<Slot>,
    older: Vec<Slot>,
    is_used: Vec<bool>,
    newest: Slot,
    oldest: Slot,
    hand: Slot,
}

impl Sieve {
    pub(super) fn new(slots: Slot) -> Sieve {
        Sieve {
            newer: vec![NONE; slots as usize],
            older: vec![NONE; slots as usize],
            is_used: vec![false; slots as usize],
            newest: NONE,
            oldest: NONE,
            hand: NONE,
        }
    }

    pub(super) fn used(&mut self, slot: Slot) {
        self.is_used[slot as usize] = true;
    }

    pub(super) fn insert(&mut self, slot: Slot) {
        self.is_used[slot as usize] = false;
        self.older[slot as usize] = self.newest;
        self.newer[slot as usize] = NONE;
        match self.newest {
            NONE => self.oldest = slot,
            newest => self.newer[newest as usize] = slot,
        }
        self.newest = slot;
    }

    /// Takes one out that may go; `None` where after two rounds nobody may.
    pub(super) fn evict(&mut self, mut may_go: impl FnMut(Slot) -> bool) -> Option<Slot> {
        let mut hand = match self.hand {
            NONE => self.oldest,
            hand => hand,
        };
        for _ in 0..2 * self.newer.len() + 1 {
            if hand == NONE {
                hand = self.oldest;
            }
            if hand == NONE {
                return None;
            }
            if !self.is_used[hand as usize] && may_go(hand) {
                self.hand = self.newer[hand as usize];
                self.unlink(hand);
                return Some(hand);
            }
            self.is_used[hand as usize] = false;
            hand = self.newer[hand as usize];
        }
        self.hand = hand;
        None
    }

    pub(super) fn remove(&mut self, slot: Slot) {
        if self.hand == slot {
            self.hand = self.newer[slot as usize];
        }
        self.unlink(slot);
    }

    fn unlink(&mut self, slot: Slot) {
        let (newer, older) = (self.newer[slot as usize], self.older[slot as usize]);
        match newer {
            NONE => self.newest = older,
            newer => self.older[newer as usize] = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.newer[older as usize] = newer,
        }
    }
}
