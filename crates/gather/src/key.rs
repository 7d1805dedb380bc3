//! What a cache knows rows of tables by.

/// Of a key, the number of the row; above it is that of its table.
const ROW_BITS: u32 = 48;

/// So many tables have a number at a time, at most.
pub(crate) const TABLES_MAX: u64 = 1 << (u64::BITS - ROW_BITS);

/// What a cache knows a row of a table by.
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
