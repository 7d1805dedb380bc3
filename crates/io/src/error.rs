//! Errors of this crate, one variant for each reaction of a caller.
//!
//! Failures of single operations do not appear here: they are the `io::Error` of their
//! [`Completion`](crate::engine::Completion), next to the buffer that it returns.

use std::io;
use std::path::PathBuf;

/// The result of every fallible call in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors of the system and of requests; broken invariants panic instead.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file system refused an operation on a path.
    #[error("cannot {operation} {}", path.display())]
    Storage {
        /// The attempted operation, as a verb: "open", "create", "allocate", "fdatasync", ...
        operation: &'static str,
        /// The file of the operation.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The requested engine cannot run here; another one may.
    #[error("the {engine} engine is unavailable: {reason}")]
    EngineUnavailable {
        /// The engine, by its configuration word.
        engine: &'static str,
        /// The reason, in words that a user can act on.
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
    /// Direct I/O was required, and the file system, or this file, does not support it.
    #[error("direct I/O is not available for {}: {reason}", path.display())]
    DirectUnavailable {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The system has no memory left for a buffer.
    #[error("cannot allocate {bytes} bytes of memory")]
    OutOfMemory {
        /// The requested size.
        bytes: usize,
        /// The kernel's answer.
        source: io::Error,
    },
    /// An operation of an executor failed.
    #[error("cannot {operation} {} at byte {offset}", path.display())]
    Transfer {
        /// The attempted operation: "read", "write" or "fdatasync".
        operation: &'static str,
        /// The file of the operation.
        path: PathBuf,
        /// Offset in the file, in bytes; for a file that ends too early, the offset of its end.
        offset: u64,
        /// The kernel's answer, or [`io::ErrorKind::UnexpectedEof`].
        source: io::Error,
    },
    /// The caller cancelled the transfer.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// This process is a fork, which does not have the threads of its parent.
    #[error("process {process} moves these bytes, of which this one is a fork")]
    Forked {
        /// The process that has the threads.
        process: u32,
    },
    /// A device driver failed, or is missing.
    #[error(transparent)]
    Cuda(#[from] penstock_cuda::Error),
    /// A kernel has requested more rows at once than a slot of its FIFO can hold.
    #[error("a kernel has posted more than {most} ids at once")]
    Posted {
        /// The most ids of a post.
        most: usize,
    },
    /// A word that the setting does not accept.
    #[error("{setting} cannot be {word:?}: expected {expected}")]
    UnknownWord {
        /// The setting.
        setting: &'static str,
        /// The word.
        word: String,
        /// The accepted words.
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
