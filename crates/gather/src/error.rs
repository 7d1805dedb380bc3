//! Errors of this crate.

use std::path::PathBuf;

/// The result of every fallible call in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why rows are not available.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Bytes could not be read.
    #[error(transparent)]
    Io(#[from] penstock_io::Error),
    /// A requested row does not exist.
    #[error("ids[{position}] is {id}: the table has rows 0 to {}", rows.saturating_sub(1))]
    OutOfRange {
        /// Index in the ids, from 0.
        position: usize,
        /// The id.
        id: i128,
        /// Rows that the table has.
        rows: u64,
    },
    /// A kernel has requested a row that does not exist.
    #[error("a kernel has asked for row {id}: the table has rows 0 to {}", rows.saturating_sub(1))]
    NoSuchRow {
        /// The id.
        id: i64,
        /// Rows that the table has.
        rows: u64,
    },
    /// Two reads returned other bytes than were written.
    #[error(
        "row {row} is damaged: bytes {offset} to {} of {} are not those that were written",
        offset + bytes - 1, path.display()
    )]
    Damaged {
        /// The first row that overlaps the damage.
        row: u64,
        /// The file.
        path: PathBuf,
        /// Offset in the file, in bytes.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// A block is whole, and is not the one that was sealed for its place.
    #[error(
        "row {row} was tampered with: bytes {offset} to {} of {} are not those that were sealed",
        offset + bytes - 1, path.display()
    )]
    Tampered {
        /// The first row that overlaps the block.
        row: u64,
        /// The file.
        path: PathBuf,
        /// Offset in the file, in bytes.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// The directory has no mutable table.
    #[error("{}: no table is there", path.display())]
    NoTable {
        /// The directory.
        path: PathBuf,
    },
    /// The directory already has a table.
    #[error("{}: a table is there already", path.display())]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// The table is open elsewhere.
    #[error("{}: the table is open, in this process or in another one", path.display())]
    Busy {
        /// The directory.
        path: PathBuf,
    },
    /// A file of a table is not as it was written.
    #[error("{}: {detail}", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// The defect.
        detail: String,
    },
    /// The table was written by a later version.
    #[error(
        "{}: the table has version {version} of the format, {supported} is the newest that is read",
        path.display()
    )]
    Newer {
        /// Its manifest.
        path: PathBuf,
        /// The version.
        version: u64,
        /// The newest version that this release reads.
        supported: u64,
    },
    /// A write of the table has failed, with an unknown result.
    #[error("{}: an earlier write has failed: {detail}", path.display())]
    Failed {
        /// The table.
        path: PathBuf,
        /// The failure.
        detail: String,
    },
    /// A table cannot be created in a directory with other files.
    #[error("{}: there is {name} already: a table is made in a directory of its own", path.display())]
    NotEmpty {
        /// The directory.
        path: PathBuf,
        /// One of them.
        name: String,
    },
    /// The path of the table leads to another directory now.
    #[error("{}: the directory was moved or replaced since the table was opened", path.display())]
    Moved {
        /// The path.
        path: PathBuf,
    },
    /// This thread already holds the snapshot that it waits for.
    #[error("{}: this thread compacts the table, or reads all of it", path.display())]
    Held {
        /// The table.
        path: PathBuf,
    },
}
