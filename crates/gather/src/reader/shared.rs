//! The state that a reader and its batches in flight share.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use penstock_io::executor;

use crate::cache::Cache;
use crate::table::Table;
use crate::table::runs::Merging;

/// Counters of a reader.
#[derive(Debug, Default)]
pub struct Counts {
    /// Rows requested.
    pub rows: AtomicU64,
    /// Requested rows that were in the cache.
    pub hits: AtomicU64,
    /// Requested rows that another batch was reading.
    pub shared: AtomicU64,
    /// Rows read: the others, each once in a batch.
    pub read_rows: AtomicU64,
    /// Requests that read them.
    pub requests: AtomicU64,
    /// Bytes that those requests have read.
    pub read_bytes: AtomicU64,
    /// Rows read a second time, because they were damaged or another batch's read failed.
    pub read_again: AtomicU64,
    /// Bytes of rows that devices have copied from pinned memory.
    pub device_bytes: AtomicU64,
}

/// The number of a table in a cache, released with the table's last reader.
#[derive(Debug)]
pub(crate) struct Number {
    cache: Option<Arc<Cache>>,
    value: u64,
    process: u32,
}

impl Number {
    /// A number for a table of so many rows, which are cached if there is a cache.
    pub(crate) fn of(cache: Option<&Arc<Cache>>, rows: u64) -> Arc<Number> {
        Arc::new(Number {
            cache: cache.cloned(),
            value: cache.map_or(0, |cache| cache.add_table(rows)),
            process: penstock_io::process::id(),
        })
    }

    pub(crate) fn value(&self) -> u64 {
        self.value
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        if let Some(cache) = &self.cache
            && self.process == penstock_io::process::id()
        {
            cache.remove_table(self.value);
        }
    }
}

/// A table with everything that reads it, for a reader and its batches in flight.
#[derive(Debug)]
pub(crate) struct ReaderShared {
    pub(crate) table: Table,
    pub(crate) cache: Option<Arc<Cache>>,
    pub(crate) counts: Arc<Counts>,
    pub(crate) share: Arc<executor::Share>,
    pub(crate) merging: Merging,
    /// The table's number in the cache.
    pub(crate) number: Arc<Number>,
    pub(crate) next_batch: AtomicU64,
    pub(crate) process: u32,
}
