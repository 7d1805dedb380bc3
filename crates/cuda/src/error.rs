//! Errors of a driver.

use std::path::PathBuf;

use crate::raw;
use crate::version::Version;

/// An error of a driver, or the lack of one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No driver was found.
    #[error("no CUDA driver {path}: {reason}", path = path.display())]
    NotFound {
        /// The path, or the name for the loader.
        path: PathBuf,
        /// The loader's message.
        reason: String,
    },
    /// A library that lacks a function of every driver.
    #[error("{path} is no CUDA driver that works here: it has no {symbol}", path = path.display())]
    Incomplete {
        /// The library.
        path: PathBuf,
        /// The missing function.
        symbol: &'static str,
    },
    /// No cuFile was found, or one that lacks a function of every cuFile.
    #[error("no cuFile {path}: {reason}", path = path.display())]
    NoCuFile {
        /// The path, or the name for the loader.
        path: PathBuf,
        /// The loader's message, or the missing function.
        reason: String,
    },
    /// The driver is too old.
    #[error("the CUDA driver is of version {found}, and {needed} is the first that works here")]
    TooOld {
        /// Its version.
        found: Version,
        /// The first version that works.
        needed: Version,
    },
    /// The driver has no devices.
    #[error("the CUDA driver finds no device")]
    NoDevice,
    /// The driver has no device of this number.
    #[error("there is no CUDA device {ordinal}: the driver has {count}")]
    NoSuchDevice {
        /// The requested device.
        ordinal: u32,
        /// The number of devices.
        count: u32,
    },
    /// The device does not share the host's addresses.
    #[error("CUDA device {ordinal} cannot be used: {reason}")]
    Unusable {
        /// The device.
        ordinal: u32,
        /// The reason.
        reason: String,
    },
    /// This process is a fork of one that has used the driver.
    #[error("CUDA was used by process {process} before it was forked: no fork of it can use it")]
    Forked {
        /// The process that used it.
        process: u32,
    },
    /// The stream is being captured: its work goes into a graph and not to the device.
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
    /// The `CUresult` of a function that failed.
    pub fn code(&self) -> Option<i32> {
        match self {
            Error::Call { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether memory is exhausted: the device's, or the amount that the system allows to be
    /// pinned.
    pub fn is_out_of_memory(&self) -> bool {
        self.code() == Some(raw::OUT_OF_MEMORY)
    }

    /// Whether the system does not permit the call.
    pub fn is_not_permitted(&self) -> bool {
        self.code() == Some(raw::NOT_PERMITTED)
    }
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
