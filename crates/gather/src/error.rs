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
    /// A kernel has asked for a row that there is not.
    #[error("a kernel has asked for row {id}: the table has rows 0 to {}", rows.saturating_sub(1))]
    NoSuchRow {
        /// The id.
        id: i64,
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
    /// There is no table that changes.
    #[error("{}: no table is there", path.display())]
    NoTable {
        /// Where.
        path: PathBuf,
    },
    /// A table is there already.
    #[error("{}: a table is there already", path.display())]
    Exists {
        /// Where.
        path: PathBuf,
    },
    /// Somebody has the table open.
    #[error("{}: the table is open, in this process or in another one", path.display())]
    Busy {
        /// Where.
        path: PathBuf,
    },
    /// A file of a table is not what was written.
    #[error("{}: {detail}", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// In which way.
        detail: String,
    },
    /// The table was written by a later version.
    #[error(
        "{}: the table has version {version} of the format, {supported} is the newest that is read",
        path.display()
    )]
    Newer {
        /// Its head.
        path: PathBuf,
        /// The version.
        version: u64,
        /// The newest one that this one reads.
        supported: u64,
    },
    /// Something of the table could not be written, and nobody knows what of it is there.
    #[error("{}: an earlier write has failed: {detail}", path.display())]
    Failed {
        /// The table.
        path: PathBuf,
        /// What it was.
        detail: String,
    },
    /// A table cannot be made among files of somebody.
    #[error("{}: there is {name} already: a table is made in a directory of its own", path.display())]
    NotEmpty {
        /// The directory.
        path: PathBuf,
        /// What is there.
        name: String,
    },
    /// Another directory has the name of the table's.
    #[error("{}: the directory was moved or replaced since the table was opened", path.display())]
    Moved {
        /// The name.
        path: PathBuf,
    },
    /// Who asks for all rows as they are at one moment has them already.
    #[error("{}: this thread folds the table, or reads all of it", path.display())]
    Held {
        /// The table.
        path: PathBuf,
    },
}
