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

/// Of the key that a cache knows a row by, the number of the row; above it is that of its table.
const ROW_BITS: u32 = 48;

/// The row of a key.
pub(crate) fn row_of(key: u64) -> u64 {
    key & ((1 << ROW_BITS) - 1)
}

/// What a cache knows a row of a table by.
pub(crate) fn key_of(table: u64, row: u64) -> u64 {
    table << ROW_BITS | row
}

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) table: Table,
    pub(crate) cache: Option<Arc<Cache>>,
    pub(crate) counts: Arc<Counts>,
    pub(crate) share: Arc<executor::Share>,
    pub(crate) merging: Merging,
    /// What the cache knows its rows by.
    pub(crate) number: u64,
    pub(crate) next_batch: AtomicU64,
    pub(crate) process: u32,
}
