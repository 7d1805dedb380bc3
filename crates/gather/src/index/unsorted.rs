//! Announced batches that have not been sorted: their keys matter only once a row has to be
//! evicted.

use std::collections::VecDeque;

/// Batches after those of the window.
#[derive(Debug, Default)]
pub(super) struct Unsorted {
    batches: VecDeque<Batch>,
    keys: usize,
    /// The number of the first batch.
    first: u64,
    /// The batch that is being gathered, and the keys looked up since.
    reached: Option<u64>,
    used: Vec<u64>,
}

#[derive(Debug)]
pub(super) struct Batch {
    pub(super) keys: Box<[u64]>,
    /// Whether it has ended.
    pub(super) is_over: bool,
}

impl Unsorted {
    /// Adds a batch after all announced ones; `next` is the first number that the window does not
    /// have.
    pub(super) fn add(&mut self, keys: &[u64], next: u64) -> u64 {
        if self.batches.is_empty() {
            self.first = next;
        }
        self.keys += keys.len();
        self.batches.push_back(Batch {
            keys: keys.into(),
            is_over: false,
        });
        self.first + self.batches.len() as u64 - 1
    }

    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Number of their keys.
    pub(super) fn len(&self) -> usize {
        self.keys
    }

    fn batch(&mut self, batch: u64) -> Option<&mut Batch> {
        let index = batch.checked_sub(self.first)?;
        let found = self.batches.get_mut(index as usize)?;
        (!found.is_over).then_some(found)
    }

    /// Whether it has this batch, and the batch has not ended.
    pub(super) fn has(&mut self, batch: u64) -> bool {
        self.batch(batch).is_some()
    }

    pub(super) fn reached(&self) -> Option<u64> {
        self.reached
    }

    /// Begins a batch.
    pub(super) fn reach(&mut self, batch: u64) {
        self.reached = Some(batch);
    }

    /// Records lookups of keys.
    pub(super) fn used(&mut self, keys: &[u64]) {
        if self.reached.is_some() {
            self.used.extend_from_slice(keys);
        }
    }

    /// Ends a batch.
    pub(super) fn end(&mut self, batch: u64) {
        if let Some(found) = self.batch(batch) {
            found.is_over = true;
        }
        if self.reached == Some(batch) {
            self.reached = None;
            self.used.clear();
        }
    }

    /// Removes the first batch if it has ended.
    pub(super) fn take_ended(&mut self) -> bool {
        if !self.batches.front().is_some_and(|batch| batch.is_over) {
            return false;
        }
        let ended = self.batches.pop_front();
        self.keys -= ended.map_or(0, |batch| batch.keys.len());
        self.first += 1;
        true
    }

    /// Removes all batches, with the one that is being gathered and the keys looked up since.
    pub(super) fn take(&mut self) -> (VecDeque<Batch>, Option<u64>, Vec<u64>) {
        self.keys = 0;
        (
            std::mem::take(&mut self.batches),
            self.reached.take(),
            std::mem::take(&mut self.used),
        )
    }
}
