//! Which rows have which slots, and who goes when another one comes.
//!
//! Pure: it knows no memory, reads nothing and locks nothing. Whoever holds it asks for one row at a
//! time.

mod sieve;

use hashbrown::HashMap;

use sieve::Sieve;

/// One of the places that rows have in memory.
pub type Slot = u32;

/// Who goes among rows of which nobody knows when they are needed next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// SIEVE (Zhang et al., NSDI 2024).
    Sieve,
    /// Nobody: nothing is kept.
    None,
}

/// See the module's description.
#[derive(Debug)]
pub struct Index {
    slot_of: HashMap<u64, Slot>,
    keys: Vec<Option<u64>>,
    free: Vec<Slot>,
    sieve: Sieve,
    policy: Policy,
}

impl Index {
    /// No row has any of so many slots.
    pub fn new(slots: Slot, policy: Policy) -> Index {
        Index {
            slot_of: HashMap::with_capacity(slots as usize),
            keys: vec![None; slots as usize],
            free: (0..slots).rev().collect(),
            sieve: Sieve::new(slots),
            policy,
        }
    }

    /// The slot of a row that is there or comes: a hit.
    pub fn find(&mut self, key: u64) -> Option<Slot> {
        let slot = *self.slot_of.get(&key)?;
        self.sieve.used(slot);
        Some(slot)
    }

    /// Room for a row that is not there. Who goes for it satisfies `may_go`. `None` where it is not
    /// worth it, or nobody may go.
    pub fn admit(&mut self, key: u64, may_go: impl FnMut(Slot) -> bool) -> Option<Slot> {
        if self.policy == Policy::None {
            return None;
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = self.sieve.evict(may_go)?;
                if let Some(gone) = self.keys[slot as usize].take() {
                    self.slot_of.remove(&gone);
                }
                slot
            }
        };
        self.keys[slot as usize] = Some(key);
        self.slot_of.insert(key, slot);
        self.sieve.insert(slot);
        Some(slot)
    }

    /// What was to come has failed.
    pub fn forget(&mut self, key: u64) {
        if let Some(slot) = self.slot_of.remove(&key) {
            self.keys[slot as usize] = None;
            self.sieve.remove(slot);
            self.free.push(slot);
        }
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.slot_of.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.slot_of.is_empty()
    }
}
