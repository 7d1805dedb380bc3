//! The newest version of each updated row.

use std::sync::Arc;

use hashbrown::HashMap;

use super::log::STEP_BYTES;

/// A position in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Address(u64);

/// Bits of an address for the position in steps; the log's number is above them.
const PLACE_BITS: u32 = 40;

/// Logs are smaller than this many bytes.
pub(super) const LOG_BYTES_MAX: u64 = STEP_BYTES << PLACE_BITS;

/// Log numbers are below this.
pub(super) const LOGS_MAX: u64 = 1 << (u64::BITS - PLACE_BITS);

impl Address {
    pub(super) fn new(log: u64, place: u64) -> Address {
        Address((log << PLACE_BITS) | (place / STEP_BYTES))
    }

    /// The number of the log.
    pub(super) fn log(self) -> u64 {
        self.0 >> PLACE_BITS
    }

    /// The row's number in the log's table.
    pub(super) fn step(self) -> u64 {
        self.0 & ((1 << PLACE_BITS) - 1)
    }

    /// The position in the log, in bytes.
    pub(super) fn place(self) -> u64 {
        self.step() * STEP_BYTES
    }
}

/// Addresses by row id. Sealed ones belong to the snapshot being compacted and do not change.
#[derive(Debug, Default)]
pub(super) struct Newest {
    fresh: HashMap<u64, Address>,
    sealed: Arc<HashMap<u64, Address>>,
    /// How many ids are in both.
    both: usize,
}

/// The addresses of a snapshot.
pub(super) type Sealed = Arc<HashMap<u64, Address>>;

impl Newest {
    pub(super) fn set(&mut self, id: u64, address: Address) {
        let is_first = self.fresh.insert(id, address).is_none();
        self.both += usize::from(is_first && self.sealed.contains_key(&id));
    }

    /// The address of the newest version; `None` if it is in a piece.
    pub(super) fn get(&self, id: u64) -> Option<Address> {
        let sealed = || self.sealed.get(&id);
        self.fresh.get(&id).or_else(sealed).copied()
    }

    /// Number of updated rows.
    pub(super) fn len(&self) -> usize {
        self.fresh.len() + self.sealed.len() - self.both
    }

    /// Seals all addresses.
    pub(super) fn seal(&mut self) -> Sealed {
        let fresh = std::mem::take(&mut self.fresh);
        self.both = 0;
        if self.sealed.is_empty() {
            self.sealed = Arc::new(fresh);
        } else if !fresh.is_empty() {
            Arc::make_mut(&mut self.sealed).extend(fresh);
        }
        Arc::clone(&self.sealed)
    }

    /// Drops the sealed addresses, whose rows are in pieces now.
    pub(super) fn unseal(&mut self) {
        self.sealed = Arc::default();
        self.both = 0;
    }
}
