//! Batches that are known ahead: which keys each has, and so when each key is needed next.
//!
//! The uses of all batches have numbers in the order in which they are known; those of one key are
//! a chain. A use is over once its key was found while its batch was gathered, or its batch has
//! ended. Rows in slots that are due lie with the batch that needs them next, so that the farthest
//! one is found at once; one that has gone or is due at another time since then is dropped when
//! somebody looks at it.

use std::collections::{BinaryHeap, VecDeque};
use std::hash::BuildHasher;
use std::ops::Range;

use hashbrown::hash_table::{Entry, OccupiedEntry};
use hashbrown::{DefaultHashBuilder, HashTable};

use super::place::{Place, REFUSALS_MAX, Slot};

/// Says of a use that it is over.
const OVER: u32 = 1 << 31;
/// Uses that are known at a time: their numbers are told apart by what is left beside `OVER`.
const USES_MAX: usize = OVER as usize - 1;

/// See the module's description.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// Of each key that is needed, its uses.
    chains: HashTable<Chain>,
    /// Of each use, in order, its key.
    keys: VecDeque<u64>,
    /// Of each use, the number of the one after it in its chain, and `OVER`.
    nexts: VecDeque<u32>,
    /// Uses before the first of `keys`.
    gone: u64,
    batches: VecDeque<Batch>,
    /// Batches before the first of `batches`.
    ended: u64,
    reached: Option<u64>,
    /// No batch behind this one has rows that are due.
    farthest: u64,
}

/// The uses of a key that are not over; others may lie between them, but neither is `first`.
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
    /// Slots of rows that it needs, and no batch before it, by their uses from `first` on.
    due: BinaryHeap<(u32, Slot)>,
    /// Those that nobody has put in order yet, as only batches do that lose some.
    fresh: Vec<(u32, Slot)>,
    has_ended: bool,
}

impl Window {
    /// Adds a batch, and says its number.
    pub(super) fn add(&mut self) -> u64 {
        self.batches.push_back(Batch {
            first: self.gone + self.keys.len() as u64,
            due: BinaryHeap::new(),
            fresh: Vec::new(),
            has_ended: false,
        });
        self.next_batch() - 1
    }

    /// The number of the batch that is added next.
    pub(super) fn next_batch(&self) -> u64 {
        self.ended + self.batches.len() as u64
    }

    /// Whether all batches that were added have ended.
    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Leaves out a number, of a batch that has ended before anybody looked at it.
    ///
    /// # Panics
    /// If others have not ended.
    pub(super) fn skip(&mut self) {
        assert!(self.batches.is_empty(), "batches end in their order");
        self.ended += 1;
    }

    /// The batch that was added last needs a key. More uses than can be told apart are not known.
    ///
    /// # Returns
    /// Where none of the key was known, this use of it.
    pub(super) fn foresee(
        &mut self,
        hash: u64,
        key: u64,
        hasher: &DefaultHashBuilder,
    ) -> Option<u64> {
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

    /// That batch is being gathered from now on.
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

    /// Somebody looks for a key.
    ///
    /// # Returns
    /// Where that was its use by the batch that is being gathered, the one after it.
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

    /// Where uses of a batch lie.
    pub(super) fn uses(&self, batch: u64) -> Range<usize> {
        let Some(index) = self.batch(batch) else {
            return 0..0;
        };
        self.start(index)..self.start(index + 1)
    }

    /// Where the first use of a batch lies.
    fn start(&self, index: usize) -> usize {
        let batch = self.batches.get(index);
        batch.map_or(self.keys.len(), |batch| (batch.first - self.gone) as usize)
    }

    /// How many uses are known, with those of batches that have ended before others.
    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// The key of a use that is not over.
    pub(super) fn key(&self, at: usize) -> Option<u64> {
        (self.nexts[at] & OVER == 0).then(|| self.keys[at])
    }

    /// A use is over.
    ///
    /// # Returns
    /// Where it was the next one of its key, the one after it.
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

    /// A batch whose uses are all over will not be asked for again.
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

    /// A row in a slot is due at that use. One that is on its way is not among those that may go.
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

    /// The slot of the row that no other one is needed after, and that may go; it has to be needed
    /// after the use `at`.
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

    /// Where a batch that has not ended lies in `batches`.
    fn batch(&self, batch: u64) -> Option<usize> {
        let index = batch.checked_sub(self.ended)? as usize;
        let found = self.batches.get(index)?;
        (!found.has_ended).then_some(index)
    }

    /// Where the batch of a use lies in `batches`.
    fn batch_of(&self, at: u64) -> usize {
        self.batches.partition_point(|batch| batch.first <= at) - 1
    }
}

impl Batch {
    /// Takes out the row that is due last, and after others; `may_go` also says whether to give up.
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

/// Takes the first use off a chain.
///
/// # Returns
/// The one that is the first now. Where there is none there is no chain either.
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

/// The number of a use, as far as it is kept.
fn number(at: u64) -> u32 {
    at as u32 & !OVER
}

/// Where a use lies among those that are known.
fn position(number: u32, gone: u64) -> usize {
    (number.wrapping_sub(gone as u32) & !OVER) as usize
}
