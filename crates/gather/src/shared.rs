//! What a reader and its batches under way have together.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use penstock_io::executor;

use crate::cache::Cache;
use crate::runs::Merging;
use crate::table::Table;

/// What was done so far.
#[derive(Debug, Default)]
pub struct Counts {
    /// Rows that were asked for.
    pub rows: AtomicU64,
    /// Of them, those that were in the cache.
    pub hits: AtomicU64,
    /// Of them, those that another batch was reading.
    pub shared: AtomicU64,
    /// Rows that were read: of those of a batch that are neither, each once.
    pub read_rows: AtomicU64,
    /// Requests that read them.
    pub requests: AtomicU64,
    /// Bytes that those have read.
    pub read_bytes: AtomicU64,
    /// Rows that were read once more, as what came was damaged or another batch's read failed.
    pub read_again: AtomicU64,
    /// Bytes of rows that devices have copied from pinned memory.
    pub device_bytes: AtomicU64,
}

/// The number of a table in a cache, given back when nobody reads the table any more.
#[derive(Debug)]
pub(crate) struct Number {
    cache: Option<Arc<Cache>>,
    value: u64,
    process: u32,
}

impl Number {
    /// One for a table whose rows stay in a cache, if there is one.
    pub(crate) fn of(cache: Option<&Arc<Cache>>) -> Arc<Number> {
        Arc::new(Number {
            cache: cache.cloned(),
            value: cache.map_or(0, |cache| cache.add_table()),
            process: std::process::id(),
        })
    }

    pub(crate) fn value(&self) -> u64 {
        self.value
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        if let Some(cache) = &self.cache
            && self.process == std::process::id()
        {
            cache.remove_table(self.value);
        }
    }
}

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) table: Table,
    pub(crate) cache: Option<Arc<Cache>>,
    pub(crate) counts: Arc<Counts>,
    pub(crate) share: Arc<executor::Share>,
    pub(crate) merging: Merging,
    /// What the cache knows the table by.
    pub(crate) number: Arc<Number>,
    pub(crate) next_batch: AtomicU64,
    pub(crate) process: u32,
}
