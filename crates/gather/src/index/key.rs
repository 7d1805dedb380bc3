//! Keys of rows in a cache.

/// Bits of a key for the row; the table's number is above them.
const ROW_BITS: u32 = 48;

/// Most tables that share a cache.
pub(crate) const TABLES_MAX: u64 = 1 << (u64::BITS - ROW_BITS);

/// The key of a table's row.
pub(crate) fn key_of(table: u64, row: u64) -> u64 {
    table << ROW_BITS | row
}

/// The row of a key.
pub(crate) fn row_of(key: u64) -> u64 {
    key & ((1 << ROW_BITS) - 1)
}

/// The table of a key.
pub(crate) fn table_of(key: u64) -> u64 {
    key >> ROW_BITS
}
