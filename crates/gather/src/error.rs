//! What can go wrong in this crate.

use std::path::PathBuf;

/// The result of every fallible call in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why rows are not there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Bytes could not be read.
    #[error(transparent)]
    Io(#[from] penstock_io::Error),
    /// There is no such row.
    #[error("ids[{position}] is {id}: the table has rows 0 to {}", rows.saturating_sub(1))]
    OutOfRange {
        /// Where in the ids, from 0.
        position: usize,
        /// The id.
        id: i128,
        /// Rows that the table has.
        rows: u64,
    },
    /// What was read, twice, is not what was written.
    #[error(
        "row {row} is damaged: bytes {offset} to {} of {} are not those that were written",
        offset + bytes - 1, path.display()
    )]
    Damaged {
        /// The first row that has some of it.
        row: u64,
        /// The file.
        path: PathBuf,
        /// Where in the file, in bytes.
        offset: u64,
        /// How many.
        bytes: u64,
    },
}
