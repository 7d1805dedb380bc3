//! Rows in memory, for all tables of a size that share a budget.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_io::buffer::{IoBuf, Slots};

use crate::error::Result;
use crate::index::{Index, Policy, Slot};
use crate::key::{TABLES_MAX, table_of};
use crate::state::Waiting;

/// Rows of tables, each in a slot.
#[derive(Debug)]
pub struct Cache {
    slots: Arc<Slots>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) index: Index,
    /// Of each slot, what waits for the row that comes into it.
    coming: Vec<Option<Box<Coming>>>,
    next_table: u64,
    /// Numbers of tables that have gone.
    free_tables: Vec<u64>,
}

/// A row on its way.
#[derive(Debug, Default)]
struct Coming {
    /// The batch that reads it, of which table.
    batch: (u64, u64),
    waiting: Vec<Waiting>,
    /// Whether the row was written anew since: what comes is for whoever asked before, and nobody
    /// finds it any more.
    is_stale: bool,
}

/// What a cache says of a row.
pub(crate) enum Found {
    /// It is there.
    Here,
    /// A batch reads it: this one, or another one.
    Comes { is_own: bool },
    /// It is to be read, into a slot of its own if there is one.
    Missing(Option<Claimed>),
}

/// A slot that a row is to come into.
#[derive(Debug)]
pub(crate) struct Claimed {
    pub(crate) key: u64,
    pub(crate) slot: Slot,
    pub(crate) memory: IoBuf,
}

impl Cache {
    /// Room for so many rows of so many bytes.
    ///
    /// # Errors
    /// The system has no memory for it.
    pub fn new(slots: Slot, row_bytes: usize, policy: Policy) -> Result<Cache> {
        Ok(Cache {
            slots: Slots::allocate(slots, row_bytes)?,
            inner: Mutex::new(Inner {
                index: Index::new(slots, policy),
                coming: (0..slots).map(|_| None).collect(),
                next_table: 0,
                free_tables: Vec::new(),
            }),
        })
    }

    /// Bytes of a slot.
    pub fn row_bytes(&self) -> usize {
        self.slots.stride_bytes()
    }

    /// A number for a table, by which its rows are known.
    ///
    /// # Panics
    /// If more tables have one at a time than can be told apart.
    pub(crate) fn add_table(&self) -> u64 {
        let mut inner = self.lock();
        if let Some(number) = inner.free_tables.pop() {
            return number;
        }
        inner.next_table += 1;
        assert!(
            inner.next_table <= TABLES_MAX,
            "too many tables share a cache"
        );
        inner.next_table - 1
    }

    /// A table has gone, of which nothing is on its way: nobody finds its rows any more.
    pub(crate) fn remove_table(&self, number: u64) {
        let mut inner = self.lock();
        inner.index.forget_all(|key| table_of(key) == number);
        inner.free_tables.push(number);
    }

    pub(crate) fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds a row, or has it come with a batch that is about to read it.
    pub(crate) fn find(&self, inner: &mut Inner, key: u64, batch: (u64, u64)) -> Found {
        let Inner { index, coming, .. } = inner;
        if let Some(slot) = index.find(key) {
            return match &coming[slot as usize] {
                None => Found::Here,
                Some(one) => Found::Comes {
                    is_own: one.batch == batch,
                },
            };
        }
        let may_go = |slot: Slot| coming[slot as usize].is_none() && !self.slots.is_lent(slot);
        let Some(slot) = index.admit_coming(key, may_go) else {
            return Found::Missing(None);
        };
        let Some(memory) = self.slots.claim(slot) else {
            // The memory of one that was lost is on its way back.
            index.forget(key);
            return Found::Missing(None);
        };
        inner.coming[slot as usize] = Some(Box::new(Coming {
            batch,
            ..Coming::default()
        }));
        Found::Missing(Some(Claimed { key, slot, memory }))
    }

    /// Hands over what waits for a row that is on its way; gives it back where the row is not.
    pub(crate) fn wait_for(
        inner: &mut Inner,
        key: u64,
        waiting: Waiting,
    ) -> std::result::Result<(), (Option<Slot>, Waiting)> {
        let slot = inner.index.find(key);
        let coming = slot.and_then(|slot| inner.coming[slot as usize].as_mut());
        match coming {
            Some(coming) => {
                coming.waiting.push(waiting);
                Ok(())
            }
            None => Err((slot, waiting)),
        }
    }

    /// A row has come: whoever waits for it has it.
    pub(crate) fn arrived(inner: &mut Inner, claimed: Claimed) {
        let coming = inner.coming[claimed.slot as usize].take();
        if coming.as_ref().is_none_or(|one| !one.is_stale) {
            inner.index.arrived(claimed.slot);
        }
        for waiting in coming.into_iter().flat_map(|one| one.waiting) {
            waiting.have(claimed.memory.as_slice());
        }
        // Under the lock: nobody finds it here and cannot read it.
        drop(claimed.memory);
    }

    /// A row is written anew: whoever asks for it from now on finds these bytes, or nothing.
    pub(crate) fn put(&self, inner: &mut Inner, key: u64, bytes: &[u8]) {
        let Inner { index, coming, .. } = inner;
        let mut found = index.find(key);
        if let Some(slot) = found
            && let Some(coming) = &mut coming[slot as usize]
        {
            coming.is_stale = true;
            index.forget(key);
            found = None;
        }
        if let Some(slot) = found
            && self.slots.is_lent(slot)
        {
            // Who reads it has asked before.
            index.forget(key);
            found = None;
        }
        let may_go = |slot: Slot| coming[slot as usize].is_none() && !self.slots.is_lent(slot);
        let Some(slot) = found.or_else(|| index.admit(key, may_go)) else {
            return;
        };
        match self.slots.claim(slot) {
            Some(mut memory) => memory.as_mut_slice()[..bytes.len()].copy_from_slice(bytes),
            // The memory of one that was lost is on its way back.
            None => index.forget(key),
        }
    }

    /// A row does not come, whose memory went with what was to bring it.
    pub(crate) fn lost_straight(inner: &mut Inner, key: u64, slot: Slot) {
        let coming = inner.coming[slot as usize].take();
        if coming.as_ref().is_none_or(|one| !one.is_stale) {
            inner.index.forget(key);
        }
    }

    /// A row does not come.
    pub(crate) fn lost(inner: &mut Inner, claimed: Claimed) {
        let Claimed { key, slot, memory } = claimed;
        drop(memory);
        Cache::lost_straight(inner, key, slot);
    }
}
