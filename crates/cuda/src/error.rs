//! What goes wrong with a driver.

use std::path::PathBuf;

use crate::raw;
use crate::version::Version;

/// What a driver, or the lack of one, says.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no driver.
    #[error("no CUDA driver {path}: {reason}", path = path.display())]
    NotFound {
        /// Where it was looked for: a path, or a name that the loader knows.
        path: PathBuf,
        /// The loader's words.
        reason: String,
    },
    /// A library without what every driver has.
    #[error("{path} is no CUDA driver that works here: it has no {symbol}", path = path.display())]
    Incomplete {
        /// The library.
        path: PathBuf,
        /// The function that it lacks.
        symbol: &'static str,
    },
    /// There is no cuFile, or one that lacks what every one has.
    #[error("no cuFile {path}: {reason}", path = path.display())]
    NoCuFile {
        /// Where it was looked for: a path, or a name that the loader knows.
        path: PathBuf,
        /// The loader's words, or what is missing.
        reason: String,
    },
    /// A driver that is too old.
    #[error("the CUDA driver is of version {found}, and {needed} is the first that works here")]
    TooOld {
        /// Its version.
        found: Version,
        /// The first that works.
        needed: Version,
    },
    /// A driver without devices.
    #[error("the CUDA driver finds no device")]
    NoDevice,
    /// A device that is not there.
    #[error("there is no CUDA device {ordinal}: the driver has {count}")]
    NoSuchDevice {
        /// The device asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// A device that does not share the host's addresses.
    #[error("CUDA device {ordinal} cannot be used: {reason}")]
    Unusable {
        /// The device.
        ordinal: u32,
        /// Why not.
        reason: String,
    },
    /// A fork of a process that has used the driver.
    #[error("CUDA was used by process {process} before it was forked: no fork of it can use it")]
    Forked {
        /// The process that used it.
        process: u32,
    },
    /// A stream whose work goes into a graph and not to the device.
    #[error("the stream is being captured into a CUDA graph, where nothing can wait for its work")]
    Capturing,
    /// A function of the driver failed.
    #[error("{call}: {name}: {text}")]
    Call {
        /// The function.
        call: &'static str,
        /// `CUresult`.
        code: i32,
        /// The name of the code.
        name: String,
        /// The driver's words for it.
        text: String,
    },
}

impl Error {
    /// `CUresult`, where a function failed.
    pub fn code(&self) -> Option<i32> {
        match self {
            Error::Call { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether memory is what is missing: the device's, or what the system lets be pinned.
    pub fn is_out_of_memory(&self) -> bool {
        self.code() == Some(raw::OUT_OF_MEMORY)
    }

    /// Whether the system does not allow it.
    pub fn is_not_permitted(&self) -> bool {
        self.code() == Some(raw::NOT_PERMITTED)
    }
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
