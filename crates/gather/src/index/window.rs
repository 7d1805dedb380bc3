//! Announced batches: the keys of each, and so the next use of each key.
//!
//! The uses of all batches are numbered in the order of announcement; the uses of one key form a
//! chain. A use is over once its key was looked up while its batch was gathered, or once its batch
//! has ended. A cached row that is due is listed with the batch that needs it next, so the
//! farthest one is found at once; entries of rows that were evicted or are due at another time are
//! dropped on sight.

use std::collections::{BinaryHeap, VecDeque};
use std::hash::BuildHasher;
use std::ops::Range;

use hashbrown::hash_table::{Entry, OccupiedEntry};
use hashbrown::{DefaultHashBuilder, HashTable};

use super::place::{Place, REFUSALS_MAX, Slot};

/// Marks a use as over.
const OVER: u32 = 1 << 31;
/// Most uses known at a time: `OVER` leaves this many numbers.
const USES_MAX: usize = OVER as usize - 1;

/// The announced batches, and the next use of each of their keys.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// The chain of uses of each key.
    chains: HashTable<Chain>,
    /// The key of each use, in order.
    keys: VecDeque<u64>,
    /// The number of the next use in each use's chain, and `OVER`.
    nexts: VecDeque<u32>,
    /// Number of uses before the first of `keys`.
    gone: u64,
    batches: VecDeque<Batch>,
    /// Number of batches before the first of `batches`.
    ended: u64,
    reached: Option<u64>,
    /// No batch after this one has rows that are due.
    farthest: u64,
}

/// The uses of a key that are not over. Uses between `first` and `last` may be over, but `first`
/// is not.
#[derive(Debug)]
struct Chain {
    key: u64,
    first: u32,
    last: u32,
}

#[derive(Debug)]
struct Batch {
    /// The number of its first use.
    first: u64,
    /// Slots of rows that it needs before any other batch, by their uses counted from `first`.
    due: BinaryHeap<(u32, Slot)>,
    /// Further entries of `due`, not sorted yet: only batches that lose rows are sorted.
    fresh: Vec<(u32, Slot)>,
    has_ended: bool,
}

impl Window {
    /// Adds a batch and returns its number.
    pub(super) fn add(&mut self) -> u64 {
        self.batches.push_back(Batch {
            first: self.gone + self.keys.len() as u64,
            due: BinaryHeap::new(),
            fresh: Vec::new(),
            has_ended: false,
        });
        self.next_batch() - 1
    }

    /// The number of the next batch.
    pub(super) fn next_batch(&self) -> u64 {
        self.ended + self.batches.len() as u64
    }

    /// Whether all batches have ended.
    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Skips the number of a batch that ended unsorted.
    ///
    /// # Panics
    /// If others have not ended.
    pub(super) fn skip(&mut self) {
        assert!(self.batches.is_empty(), "batches end in their order");
        self.ended += 1;
    }

    /// Adds a key to the last batch. Uses beyond [`USES_MAX`] are ignored.
    ///
    /// # Returns
    /// This use, if it is the first one known of the key.
    pub(super) fn hint(&mut self, hash: u64, key: u64, hasher: &DefaultHashBuilder) -> Option<u64> {
        if self.keys.len() >= USES_MAX {
            return None;
        }
        let at = self.gone + self.keys.len() as u64;
        let last = number(at);
        self.keys.push_back(key);
        self.nexts.push_back(0);
        let hash_of = |chain: &Chain| hasher.hash_one(chain.key);
        match self.chains.entry(hash, |chain| chain.key == key, hash_of) {
            Entry::Vacant(entry) => {
                let first = last;
                entry.insert(Chain { key, first, last });
                Some(at)
            }
            Entry::Occupied(mut entry) => {
                let before = std::mem::replace(&mut entry.get_mut().last, last);
                let before = &mut self.nexts[position(before, self.gone)];
                *before = *before & OVER | last;
                None
            }
        }
    }

    /// The batch that is being gathered, unless it has ended.
    pub(super) fn reached(&self) -> Option<u64> {
        self.reached
    }

    /// Begins a batch.
    pub(super) fn reach(&mut self, batch: u64) {
        self.reached = self.batch(batch).map(|_| batch);
    }

    /// The next use of a key.
    pub(super) fn next(&self, hash: u64, key: u64) -> Option<u64> {
        if self.chains.is_empty() {
            return None;
        }
        let chain = self.chains.find(hash, |chain| chain.key == key)?;
        Some(self.gone + position(chain.first, self.gone) as u64)
    }

    /// The use that a place stores the number of.
    pub(super) fn use_of(&self, due: u32) -> u64 {
        self.gone + position(due, self.gone) as u64
    }

    /// Records a lookup of a key.
    ///
    /// # Returns
    /// If the batch being gathered has used the key with it: the key's following use.
    pub(super) fn used(&mut self, hash: u64, key: u64) -> Option<Option<u64>> {
        let uses = self.uses(self.reached?);
        if uses.is_empty() {
            return None;
        }
        let entry = self.chains.find_entry(hash, |chain| chain.key == key);
        let entry = entry.ok()?;
        let at = position(entry.get().first, self.gone);
        if !uses.contains(&at) {
            return None;
        }
        self.nexts[at] |= OVER;
        let first = follow(entry, &self.nexts, self.gone);
        Some(first.map(|first| self.gone + position(first, self.gone) as u64))
    }

    /// Positions of a batch's uses in `keys`.
    pub(super) fn uses(&self, batch: u64) -> Range<usize> {
        let Some(index) = self.batch(batch) else {
            return 0..0;
        };
        self.start(index)..self.start(index + 1)
    }

    /// Position of the first use of a batch in `keys`.
    fn start(&self, index: usize) -> usize {
        let batch = self.batches.get(index);
        batch.map_or(self.keys.len(), |batch| (batch.first - self.gone) as usize)
    }

    /// Number of known uses, including those of ended batches behind unfinished ones.
    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// The key of a use that is not over.
    pub(super) fn key(&self, at: usize) -> Option<u64> {
        (self.nexts[at] & OVER == 0).then(|| self.keys[at])
    }

    /// Marks a use as over.
    ///
    /// # Returns
    /// If it was the next use of its key: the use after it.
    pub(super) fn pass(&mut self, at: usize, hash: u64) -> Option<Option<u64>> {
        let key = self.keys[at];
        self.nexts[at] |= OVER;
        let found = self.chains.find_entry(hash, |chain| chain.key == key);
        let entry = found.expect("a use that is not over is in a chain");
        if position(entry.get().first, self.gone) != at {
            return None;
        }
        let first = follow(entry, &self.nexts, self.gone);
        Some(first.map(|first| self.gone + position(first, self.gone) as u64))
    }

    /// Ends a batch whose uses are all over.
    pub(super) fn end(&mut self, batch: u64) {
        let Some(index) = self.batch(batch) else {
            return;
        };
        self.reached.take_if(|reached| *reached == batch);
        let ended = &mut self.batches[index];
        (ended.due, ended.fresh) = (BinaryHeap::new(), Vec::new());
        ended.has_ended = true;
        while self.batches.front().is_some_and(|batch| batch.has_ended) {
            let uses = self.start(1);
            drop(self.keys.drain(..uses));
            drop(self.nexts.drain(..uses));
            self.gone += uses as u64;
            self.batches.pop_front();
            self.ended += 1;
        }
    }

    /// Lists a cached row as due at a use. A row being read is not listed, as it cannot be
    /// evicted.
    pub(super) fn put(&mut self, at: u64, slot: Slot, places: &mut [Place]) {
        let place = &mut places[slot as usize];
        place.due = number(at);
        if place.comes {
            return;
        }
        let index = self.batch_of(at);
        let batch = &mut self.batches[index];
        batch.fresh.push(((at - batch.first) as u32, slot));
        self.farthest = self.farthest.max(self.ended + index as u64);
    }

    /// Takes the slot of the evictable row that is needed last, and after the use `at`.
    pub(super) fn farthest(
        &mut self,
        at: Option<u64>,
        places: &[Place],
        may_go: &mut impl FnMut(Slot) -> bool,
    ) -> Option<Slot> {
        let nearest = at.map_or(0, |at| self.batch_of(at));
        let farthest = (self.farthest + 1).saturating_sub(self.ended) as usize;
        let mut refusals = 0;
        for index in (nearest..self.batches.len().min(farthest)).rev() {
            let batch = &mut self.batches[index];
            let after = at.map_or(0, |at| at.saturating_sub(batch.first)) as u32;
            let found = batch.take_last(after, places, &mut |slot| {
                let may_go = may_go(slot);
                refusals += u32::from(!may_go);
                (may_go, refusals >= REFUSALS_MAX)
            });
            if found.is_some() || refusals >= REFUSALS_MAX {
                return found;
            }
            if batch.due.is_empty() && self.ended + index as u64 == self.farthest {
                self.farthest = self.farthest.saturating_sub(1);
            }
        }
        None
    }

    /// Index in `batches` of a batch that has not ended.
    fn batch(&self, batch: u64) -> Option<usize> {
        let index = batch.checked_sub(self.ended)? as usize;
        let found = self.batches.get(index)?;
        (!found.has_ended).then_some(index)
    }

    /// Index in `batches` of the batch of a use.
    fn batch_of(&self, at: u64) -> usize {
        self.batches.partition_point(|batch| batch.first <= at) - 1
    }
}

impl Batch {
    /// Removes the row that is due last and later than `after`; `may_go` also says whether to give
    /// up.
    fn take_last(
        &mut self,
        after: u32,
        places: &[Place],
        may_go: &mut impl FnMut(Slot) -> (bool, bool),
    ) -> Option<Slot> {
        self.due.extend(std::mem::take(&mut self.fresh));
        let mut found = None;
        let mut refused = Vec::new();
        while let Some(&(at, slot)) = self.due.peek() {
            let is_due = places[slot as usize].due == number(self.first + u64::from(at));
            if is_due && at < after {
                break;
            }
            self.due.pop();
            if !is_due {
                continue;
            }
            let (may_go, is_over) = may_go(slot);
            if may_go {
                found = Some(slot);
                break;
            }
            refused.push((at, slot));
            if is_over {
                break;
            }
        }
        self.due.extend(refused);
        found
    }
}

/// Removes the first use of a chain.
///
/// # Returns
/// The new first use; `None` if the chain is empty and was removed.
fn follow(mut entry: OccupiedEntry<'_, Chain>, nexts: &VecDeque<u32>, gone: u64) -> Option<u32> {
    let Chain { first, last, .. } = *entry.get();
    let mut number = first;
    while number != last {
        number = nexts[position(number, gone)] & !OVER;
        if nexts[position(number, gone)] & OVER == 0 {
            entry.get_mut().first = number;
            return Some(number);
        }
    }
    entry.remove();
    None
}

/// The number of a use, as it is stored.
fn number(at: u64) -> u32 {
    at as u32 & !OVER
}

/// The position of a use in `keys`.
fn position(number: u32, gone: u64) -> usize {
    (number.wrapping_sub(gone as u32) & !OVER) as usize
}
