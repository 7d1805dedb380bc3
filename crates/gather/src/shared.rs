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
}

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) table: Table,
    pub(crate) cache: Option<Arc<Cache>>,
    pub(crate) counts: Counts,
    pub(crate) share: executor::Share,
    pub(crate) merging: Merging,
    /// What the cache knows its rows by.
    pub(crate) number: u64,
    pub(crate) next_batch: AtomicU64,
    pub(crate) process: u32,
}
