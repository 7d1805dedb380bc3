//! What can go wrong in this crate, by what a caller would do about it.
//!
//! Failures of single operations do not appear here: they arrive as the `io::Error` of their
//! [`Completion`](crate::engine::Completion), next to the buffer that they return.

use std::io;
use std::path::PathBuf;

/// The result of every fallible call in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything the world can do to this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file system refused an operation on a path.
    #[error("cannot {operation} {}", path.display())]
    Storage {
        /// What was attempted, as a verb: "open", "create", "allocate", "fdatasync", ...
        operation: &'static str,
        /// The file it was attempted on.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The engine that was asked for cannot run here; another one may.
    #[error("the {engine} engine is unavailable: {reason}")]
    EngineUnavailable {
        /// The engine, by its configuration word.
        engine: &'static str,
        /// Why, in words a user can act on.
        reason: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A running engine failed as a whole, rather than one of its operations.
    #[error("the I/O engine failed in {operation}")]
    Engine {
        /// The system call or step that failed.
        operation: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Direct I/O was demanded and the file system, or this file, does not offer it.
    #[error("direct I/O is not available for {}: {reason}", path.display())]
    DirectUnavailable {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The system has no memory left for a buffer.
    #[error("cannot allocate {bytes} bytes of memory")]
    OutOfMemory {
        /// The size that was asked for.
        bytes: usize,
        /// The kernel's answer.
        source: io::Error,
    },
    /// An operation of an executor failed.
    #[error("cannot {operation} {} at byte {offset}", path.display())]
    Transfer {
        /// What was attempted: "read", "write" or "fdatasync".
        operation: &'static str,
        /// The file it was attempted on.
        path: PathBuf,
        /// Where in the file, in bytes; of a file that ends too early, where that is.
        offset: u64,
        /// The kernel's answer, or [`io::ErrorKind::UnexpectedEof`].
        source: io::Error,
    },
    /// A transfer was given up by whoever asked for it.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// Threads do not live on in a fork.
    #[error("process {process} moves these bytes, of which this one is a fork")]
    Forked {
        /// The process that does.
        process: u32,
    },
    /// A driver of devices, or the lack of one, is in the way.
    #[error(transparent)]
    Cuda(#[from] penstock_cuda::Error),
    /// A kernel has asked for more rows at once than its FIFO has room for.
    #[error("a kernel has posted more than {most} ids at once")]
    Posted {
        /// What a post can have.
        most: usize,
    },
    /// A word that is none of those a setting takes.
    #[error("{setting} cannot be {word:?}: expected {expected}")]
    UnknownWord {
        /// The setting.
        setting: &'static str,
        /// What was given.
        word: String,
        /// What could have been given.
        expected: &'static str,
    },
}

impl Error {
    /// The system's answer by kind, where the file system refused an operation on a path.
    pub fn kind(&self) -> Option<io::ErrorKind> {
        match self {
            Error::Storage { source, .. } => Some(source.kind()),
            _ => None,
        }
    }
}
