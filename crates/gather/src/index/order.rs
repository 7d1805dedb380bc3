//! The eviction order of rows whose next use is unknown, by either policy.

use super::place::{Place, Slot};
use super::s3fifo::{self, S3Fifo};
use super::sieve::{self, Sieve};

/// Rows that are neither pinned nor announced.
#[derive(Debug)]
pub(super) enum Order {
    Sieve(Sieve),
    S3Fifo(S3Fifo),
}

impl Order {
    /// Adds a new row.
    pub(super) fn insert(&mut self, places: &mut [Place], slot: Slot) {
        match self {
            Order::Sieve(sieve) => sieve.insert(places, slot),
            Order::S3Fifo(s3fifo) => s3fifo.insert(places, slot),
        }
    }

    /// Adds back a row that was taken out as due when its turn came, and is not due any more.
    pub(super) fn rejoin(&mut self, places: &mut [Place], slot: Slot) {
        match self {
            Order::Sieve(sieve) => sieve.rejoin(places, slot),
            Order::S3Fifo(s3fifo) => s3fifo.rejoin(places, slot),
        }
    }

    /// Up to which number uses of a row are counted, with [`Place::count_use`].
    pub(super) fn uses_max(&self) -> u8 {
        match self {
            Order::Sieve(_) => sieve::USES_MAX,
            Order::S3Fifo(_) => s3fifo::USES_MAX,
        }
    }

    pub(super) fn remove(&mut self, places: &mut [Place], slot: Slot) {
        match self {
            Order::Sieve(sieve) => sieve.remove(places, slot),
            Order::S3Fifo(s3fifo) => s3fifo.remove(places, slot),
        }
    }

    pub(super) fn evict(
        &mut self,
        places: &mut [Place],
        may_go: &mut impl FnMut(Slot) -> bool,
    ) -> Option<Slot> {
        match self {
            Order::Sieve(sieve) => sieve.evict(places, may_go),
            Order::S3Fifo(s3fifo) => s3fifo.evict(places, may_go),
        }
    }
}
