//! Why memory cannot be watched.

use std::io;

/// Why regions cannot be watched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unwatchable {
    /// The system lacks a call that the watch needs, or forbids it.
    #[error("the kernel does not tell of writes here ({what}: {source})")]
    Refused {
        /// The call or file that was refused.
        what: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// A process has one watch at a time.
    #[error("another state is watched at the moment")]
    Busy,
    /// Other processes could write to it undetected.
    #[error("memory that several processes share")]
    Shared {
        /// Index of the region.
        region: usize,
    },
    /// Its pages that nobody has written to change with the file.
    #[error("memory that a file is mapped to, which others may write to")]
    Mapped {
        /// Index of the region.
        region: usize,
    },
    /// It would use too many of the mappings that the process may have.
    #[error("memory in too many places")]
    Scattered,
}

pub(super) fn refused<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Unwatchable {
    move |error| Unwatchable::Refused {
        what,
        source: error.into(),
    }
}
