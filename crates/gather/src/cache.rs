//! Cached rows of all tables that share a row size and a budget.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use penstock_io::buffer::{IoBuf, Slots};
use slab::Slab;

use crate::batch::state::Waiting;
use crate::error::Result;
use crate::index::key::TABLES_MAX;
use crate::index::{Index, Policy, Slot};

/// Rows of tables, each in a slot.
#[derive(Debug)]
pub struct Cache {
    slots: Arc<Slots>,
    inner: Mutex<Inner>,
    /// Rows that have been read, and are not in the cache yet: the thread that reads rows does not
    /// wait for one that looks thousands of them up, as the device would be idle meanwhile.
    arrivals: Mutex<Vec<Claimed>>,
}

/// The lock of a cache. Rows that arrive meanwhile are added when it is released.
#[derive(Debug)]
pub(crate) struct Locked<'a> {
    cache: &'a Cache,
    inner: Option<MutexGuard<'a, Inner>>,
}

impl Deref for Locked<'_> {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        self.inner.as_deref().expect("it is there until the drop")
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Inner {
        let inner = self.inner.as_deref_mut();
        inner.expect("it is there until the drop")
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        drop(self.inner.take());
        self.cache.deliver();
    }
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) index: Index,
    /// The rows that are being read.
    coming: Coming,
    /// Kept to reuse its memory.
    arrived: Vec<Claimed>,
    next_table: u64,
    /// Numbers of removed tables, to be used again.
    free_tables: Vec<u64>,
}

/// The rows that are being read, by the slots that they are read into.
///
/// Their entries are reused: memory that the thread which begins a read allocates, and the thread
/// that ends it frees, costs both of them more than the rest of their bookkeeping.
#[derive(Debug)]
struct Coming {
    /// For each slot the key of its entry, or `NONE`.
    keys: Box<[u32]>,
    entries: Slab<ComingRow>,
}

/// A row that is being read.
#[derive(Debug, Default)]
struct ComingRow {
    /// Table and number of the batch that reads it.
    batch: (u64, u64),
    waiting: Vec<Waiting>,
    /// Whether the row was updated since: the bytes being read are only for earlier requests, and
    /// later lookups do not find them.
    is_stale: bool,
}

/// Rows being read whose memory is kept for the next ones: the budget of the cache does not include
/// them.
const COMING_KEPT: usize = 1 << 14;

/// No more rows are being read than there are slots, whose number is less than this.
const NONE: u32 = u32::MAX;

impl Coming {
    fn new(slots: Slot) -> Coming {
        Coming {
            keys: vec![NONE; slots as usize].into_boxed_slice(),
            entries: Slab::new(),
        }
    }

    fn has(&self, slot: Slot) -> bool {
        self.keys[slot as usize] != NONE
    }

    fn get(&self, slot: Slot) -> Option<&ComingRow> {
        self.entries.get(self.keys[slot as usize] as usize)
    }

    fn get_mut(&mut self, slot: Slot) -> Option<&mut ComingRow> {
        self.entries.get_mut(self.keys[slot as usize] as usize)
    }

    fn insert(&mut self, slot: Slot, row: ComingRow) {
        self.keys[slot as usize] = self.entries.insert(row) as u32;
    }

    /// Releases memory that a large batch has left.
    fn shrink(&mut self) {
        if self.entries.is_empty() && self.entries.capacity() > COMING_KEPT {
            self.entries = Slab::new();
        }
    }

    fn take(&mut self, slot: Slot) -> Option<ComingRow> {
        let key = std::mem::replace(&mut self.keys[slot as usize], NONE);
        self.entries.try_remove(key as usize)
    }
}

/// Result of a lookup.
pub(crate) enum CachedRow {
    /// The row is cached.
    Here,
    /// A batch is reading it: this one, or another one.
    Comes { is_own: bool },
    /// The caller has to read it, into a slot if one is free.
    Missing(Option<Claimed>),
}

/// A slot claimed for a row that is to be read.
#[derive(Debug)]
pub(crate) struct Claimed {
    pub(crate) key: u64,
    pub(crate) slot: Slot,
    pub(crate) memory: IoBuf,
}

impl Cache {
    /// A cache of `slots` rows of `row_bytes` bytes.
    ///
    /// # Errors
    /// The system has no memory for it.
    pub fn new(slots: Slot, row_bytes: usize, policy: Policy) -> Result<Cache> {
        Ok(Cache {
            slots: Slots::allocate(slots, row_bytes)?,
            inner: Mutex::new(Inner {
                index: Index::new(slots, policy),
                coming: Coming::new(slots),
                arrived: Vec::new(),
                next_table: 0,
                free_tables: Vec::new(),
            }),
            arrivals: Mutex::default(),
        })
    }

    /// Bytes of a slot.
    pub fn row_bytes(&self) -> usize {
        self.slots.stride_bytes()
    }

    /// Assigns a number to a table of so many rows, which becomes part of its rows' keys.
    ///
    /// # Panics
    /// If more tables share the cache than keys can number.
    pub(crate) fn add_table(&self, rows: u64) -> u64 {
        let mut inner = self.lock();
        let number = inner.free_tables.pop().unwrap_or_else(|| {
            inner.next_table += 1;
            assert!(
                inner.next_table <= TABLES_MAX,
                "too many tables share a cache"
            );
            inner.next_table - 1
        });
        inner.index.add_table(number, rows);
        number
    }

    /// Removes a table none of whose rows are being read, with its cached rows.
    pub(crate) fn remove_table(&self, number: u64) {
        let mut inner = self.lock();
        inner.index.remove_table(number);
        inner.free_tables.push(number);
    }

    pub(crate) fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    pub(crate) fn lock(&self) -> Locked<'_> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        self.add_arrivals(&mut inner);
        Locked {
            cache: self,
            inner: Some(inner),
        }
    }

    /// Delivers rows that have been read to all their consumers, now or when the lock is released.
    pub(crate) fn arrive(&self, claims: impl IntoIterator<Item = Claimed>) {
        self.arrivals().extend(claims);
        self.deliver();
    }

    /// Adds the rows that have arrived, unless another thread has the lock, which adds them once it
    /// has released it: it looks for them after that, and they are there before this fails.
    fn deliver(&self) {
        while !self.arrivals().is_empty() {
            let mut inner = match self.inner.try_lock() {
                Ok(inner) => inner,
                Err(TryLockError::Poisoned(inner)) => inner.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            self.add_arrivals(&mut inner);
        }
    }

    fn add_arrivals(&self, inner: &mut Inner) {
        let mut arrived = std::mem::take(&mut inner.arrived);
        std::mem::swap(&mut *self.arrivals(), &mut arrived);
        for claimed in arrived.drain(..) {
            Cache::arrived(inner, claimed);
        }
        arrived.shrink_to(COMING_KEPT);
        inner.arrived = arrived;
        inner.coming.shrink();
    }

    fn arrivals(&self) -> MutexGuard<'_, Vec<Claimed>> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds a row, or claims a slot for the batch that is about to read it.
    pub(crate) fn find(&self, inner: &mut Inner, key: u64, batch: (u64, u64)) -> CachedRow {
        let Inner { index, coming, .. } = inner;
        if let Some(slot) = index.find(key) {
            return match coming.get(slot) {
                None => CachedRow::Here,
                Some(one) => CachedRow::Comes {
                    is_own: one.batch == batch,
                },
            };
        }
        let may_go = |slot: Slot| !coming.has(slot) && !self.slots.is_lent(slot);
        let Some(slot) = index.admit_coming(key, may_go) else {
            return CachedRow::Missing(None);
        };
        let Some(memory) = self.slots.claim(slot) else {
            // The memory of a lost row has not been returned yet.
            index.forget(key);
            return CachedRow::Missing(None);
        };
        let row = ComingRow {
            batch,
            ..ComingRow::default()
        };
        inner.coming.insert(slot, row);
        CachedRow::Missing(Some(Claimed { key, slot, memory }))
    }

    /// Adds a consumer to a row that is being read; gives it back if the row is not.
    pub(crate) fn wait_for(
        inner: &mut Inner,
        key: u64,
        waiting: Waiting,
    ) -> std::result::Result<(), (Option<Slot>, Waiting)> {
        let slot = inner.index.find(key);
        let coming = slot.and_then(|slot| inner.coming.get_mut(slot));
        match coming {
            Some(coming) => {
                coming.waiting.push(waiting);
                Ok(())
            }
            None => Err((slot, waiting)),
        }
    }

    /// Delivers a row that has been read to all its consumers.
    pub(crate) fn arrived(inner: &mut Inner, claimed: Claimed) {
        let coming = inner.coming.take(claimed.slot);
        if coming.as_ref().is_none_or(|one| !one.is_stale) {
            inner.index.arrived(claimed.slot);
        }
        for waiting in coming.into_iter().flat_map(|one| one.waiting) {
            waiting.have(claimed.memory.as_slice());
        }
        // Under the lock: a row that is found here must be readable.
        drop(claimed.memory);
    }

    /// Updates a row: later lookups find these bytes or nothing.
    pub(crate) fn put(&self, inner: &mut Inner, key: u64, bytes: &[u8]) {
        let Inner { index, coming, .. } = inner;
        let mut found = index.find(key);
        if let Some(slot) = found
            && let Some(coming) = coming.get_mut(slot)
        {
            coming.is_stale = true;
            index.forget(key);
            found = None;
        }
        if let Some(slot) = found
            && self.slots.is_lent(slot)
        {
            // Its readers asked before the update.
            index.forget(key);
            found = None;
        }
        let may_go = |slot: Slot| !coming.has(slot) && !self.slots.is_lent(slot);
        let Some(slot) = found.or_else(|| index.admit(key, may_go)) else {
            return;
        };
        match self.slots.claim(slot) {
            Some(mut memory) => memory.as_mut_slice()[..bytes.len()].copy_from_slice(bytes),
            // The memory of a lost row has not been returned yet.
            None => index.forget(key),
        }
    }

    /// Gives up a row whose memory was lost with the operation that read it.
    pub(crate) fn lost_zero_copy(inner: &mut Inner, key: u64, slot: Slot) {
        let coming = inner.coming.take(slot);
        if coming.as_ref().is_none_or(|one| !one.is_stale) {
            inner.index.forget(key);
        }
    }

    /// Gives up a row that could not be read.
    pub(crate) fn lost(inner: &mut Inner, claimed: Claimed) {
        let Claimed { key, slot, memory } = claimed;
        drop(memory);
        Cache::lost_zero_copy(inner, key, slot);
    }
}
