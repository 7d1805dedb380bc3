//! The errors of this crate, one variant for each reaction that a caller may have.

mod remedy;

use std::io;
use std::path::{Path, PathBuf};

use penstock_keys::KeyError;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// All errors of saving, loading, verifying and deleting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The path does not exist.
    #[error("no checkpoint at {path}")]
    NotFound {
        /// The requested directory.
        path: PathBuf,
    },
    /// The directory is a store of checkpoints, not a checkpoint.
    #[error("{path} is a store of checkpoints, not a checkpoint; its newest step is {newest}")]
    Store {
        /// The requested directory.
        path: PathBuf,
        /// Path of its newest step.
        newest: PathBuf,
    },
    /// A complete checkpoint already exists, and `overwrite` is not set.
    #[error("{path} already holds a complete checkpoint")]
    Exists {
        /// The checkpoint directory.
        path: PathBuf,
    },
    /// A directory without a manifest: an unfinished save, or no checkpoint at all.
    #[error("{path} holds no complete checkpoint: {detail}")]
    Incomplete {
        /// The directory.
        path: PathBuf,
        /// The missing item.
        detail: String,
    },
    /// The checkpoint holds only what was salvaged from another one.
    #[error("{path} is partial: it holds what was salvaged from a damaged checkpoint")]
    Partial {
        /// The checkpoint directory.
        path: PathBuf,
    },
    /// The step is protected from deletion, and an override was not requested.
    #[error("{path} is protected from deletion")]
    Protected {
        /// The step's directory.
        path: PathBuf,
    },
    /// A directory that is to be deleted may be in use: it has no readable manifest, and the file
    /// system has no locks that every host sees.
    #[error(
        "cannot delete {path}: {detail}, and without locks that every host sees nothing tells its \
         files from those of a save under way"
    )]
    Undecided {
        /// The step's directory.
        path: PathBuf,
        /// The reason why the state of the directory is unknown.
        detail: String,
    },
    /// The storage did not report whether it published the manifest, does not show it, and may yet
    /// publish it.
    #[error("nobody knows whether {path} was committed: attempt {attempt} may yet appear there")]
    CommitUndecided {
        /// The checkpoint directory.
        path: PathBuf,
        /// Identity of the checkpoint, if it was committed.
        attempt: String,
        /// Last answer of the storage.
        source: io::Error,
    },
    /// The checkpoint was replaced or removed while it was being read.
    #[error("{path} was replaced while it was being read")]
    Replaced {
        /// The checkpoint directory.
        path: PathBuf,
    },
    /// Stored bytes differ from those written.
    #[error("{}", corrupt_message(path, file.as_deref(), *offset, tensor.as_deref(), detail))]
    Corrupt {
        /// The checkpoint directory.
        path: PathBuf,
        /// The damaged file's name inside it, where one is known.
        file: Option<String>,
        /// Position of the damage in the file, in bytes.
        offset: Option<u64>,
        /// A tensor that the damage touches.
        tensor: Option<String>,
        /// Description of the damage.
        detail: String,
    },
    /// The digests match, so nothing was damaged after it was written, but the contents are
    /// invalid.
    #[error("{}", corrupt_message(path, file.as_deref(), None, tensor.as_deref(), detail))]
    Malformed {
        /// The checkpoint directory.
        path: PathBuf,
        /// The file's name inside the directory, if one is concerned.
        file: Option<String>,
        /// The tensor concerned, if any.
        tensor: Option<String>,
        /// Description of the flaw.
        detail: String,
    },
    /// The digests match, but the contents use a part of the format that this version does not
    /// know.
    #[error("{}: {detail}", path.join(file).display())]
    Unknown {
        /// The checkpoint directory.
        path: PathBuf,
        /// The file's name inside it.
        file: String,
        /// The unknown element.
        detail: String,
    },
    /// The checkpoint was written by a newer Penstock.
    #[error("{path} has format version {found}, this build reads up to {supported}")]
    Version {
        /// The checkpoint directory.
        path: PathBuf,
        /// The version in the file.
        found: u64,
        /// The newest version this build reads.
        supported: u64,
    },
    /// Something in the state cannot be represented in the format.
    #[error("{key}: {detail}")]
    Unsupported {
        /// Dotted name of the leaf.
        key: String,
        /// Why it cannot be stored.
        detail: String,
    },
    /// The caller's request does not fit what is stored.
    #[error("{key}: {detail}")]
    Mismatch {
        /// Dotted name of the tensor.
        key: String,
        /// Both sides of the disagreement.
        detail: String,
    },
    /// Somebody wrote to a tensor before a watched job had copied it, so the snapshot would mix two
    /// moments.
    #[error("{path}: {key:?} changed before a lazy save had copied it, so the save was given up")]
    SourceModified {
        /// The checkpoint directory.
        path: PathBuf,
        /// Dotted name of the tensor, or of one that shares a memory page with it.
        key: String,
    },
    /// The operating system refused or failed.
    #[error("cannot {operation} {path}")]
    Storage {
        /// The failed operation.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file system cannot give a file a name only if that name is free, which keeps two savers
    /// of one checkpoint apart.
    #[error(
        "cannot publish {path}: its file system makes no hard links and cannot rename without replacing"
    )]
    NoFreeNames {
        /// The file that was to get the name.
        path: PathBuf,
        /// The system's answer to the rename.
        source: io::Error,
    },
    /// A checkpoint is in place but could not be made durable.
    #[error("{path} is in place, but may not survive a crash: its directory could not be synced")]
    Unsynced {
        /// The checkpoint directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The storage has too little space for the save.
    #[error(
        "cannot {operation} {path}: {needed_bytes} bytes are needed there and {free_bytes} were free"
    )]
    Full {
        /// The failed operation.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// Total size of all files to be written there.
        needed_bytes: u64,
        /// Free bytes before the first file was written.
        free_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The checkpoint is sealed, and no identities were given.
    #[error("{path} is sealed")]
    Sealed {
        /// The checkpoint directory.
        path: PathBuf,
    },
    /// A load, which opens chunks, asks for a tensor that is sealed by blocks.
    #[error("{}: {key} is a table whose rows are sealed by blocks, and is not loaded as a whole", path.display())]
    SealedByBlocks {
        /// The checkpoint directory.
        path: PathBuf,
        /// Dotted name of the tensor.
        key: String,
    },
    /// The checkpoint is clear where a sealed one is demanded.
    #[error("{path} is not sealed, and a sealed checkpoint is demanded")]
    NotSealed {
        /// The checkpoint directory.
        path: PathBuf,
    },
    /// The key that the identities give is that of another checkpoint.
    #[error("{path}: the identities give a key that is not the key of this checkpoint")]
    WrongKey {
        /// The checkpoint directory.
        path: PathBuf,
    },
    /// The digests match, but somebody without the key has changed or exchanged sealed bytes.
    #[error("{}", corrupt_message(path, file.as_deref(), *offset, tensor.as_deref(), detail))]
    Tampered {
        /// The checkpoint directory.
        path: PathBuf,
        /// The file's name inside it, where one is known.
        file: Option<String>,
        /// Position of the chunk in the file, in bytes.
        offset: Option<u64>,
        /// A tensor in the chunk.
        tensor: Option<String>,
        /// Description of the mismatch.
        detail: String,
    },
    /// A signature is demanded, and the checkpoint has none.
    #[error("{path} is not signed, and a signature is demanded")]
    NotSigned {
        /// The checkpoint directory.
        path: PathBuf,
    },
    /// The signature of the checkpoint is none that is accepted, or a file is not the signed one.
    #[error("{}", corrupt_message(path, file.as_deref(), *offset, tensor.as_deref(), detail))]
    Signature {
        /// The checkpoint directory.
        path: PathBuf,
        /// The file's name inside it, where one is known.
        file: Option<String>,
        /// Position of the chunk in the file, in bytes.
        offset: Option<u64>,
        /// A tensor in the chunk.
        tensor: Option<String>,
        /// Description of the mismatch.
        detail: String,
    },
    /// This job cannot seal what it would write, or cannot read what is sealed.
    #[error("{path}: {detail}")]
    CannotSeal {
        /// The checkpoint directory.
        path: PathBuf,
        /// The part that is not sealed.
        detail: String,
    },
    /// A key is not available.
    #[error("cannot find the key of {path}")]
    Key {
        /// The checkpoint directory.
        path: PathBuf,
        /// The reason.
        source: KeyError,
    },
    /// The I/O engine or its memory failed.
    #[error(transparent)]
    Io(penstock_io::Error),
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl From<penstock_io::Error> for Error {
    fn from(error: penstock_io::Error) -> Error {
        match error {
            penstock_io::Error::Storage {
                operation,
                path,
                source,
            } => Error::Storage {
                operation,
                path,
                source,
            },
            error => Error::Io(error),
        }
    }
}

fn corrupt_message(
    path: &Path,
    file: Option<&str>,
    offset: Option<u64>,
    tensor: Option<&str>,
    detail: &str,
) -> String {
    let mut message = match file {
        Some(file) => path.join(file).display().to_string(),
        None => path.display().to_string(),
    };
    if let Some(offset) = offset {
        message.push_str(&format!(", offset {offset}"));
    }
    if let Some(tensor) = tensor {
        message.push_str(&format!(", tensor {tensor:?}"));
    }
    format!("{message}: {detail}")
}

impl Error {
    /// Wraps a system error with the operation and the path.
    pub(crate) fn storage(
        operation: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Error {
        let path = path.into();
        move |source| Error::Storage {
            operation,
            path,
            source,
        }
    }

    /// Damage in a named file, at an unknown position.
    pub(crate) fn corrupt(path: &Path, file: &str, detail: impl Into<String>) -> Error {
        Error::Corrupt {
            path: path.to_owned(),
            file: Some(file.to_owned()),
            offset: None,
            tensor: None,
            detail: detail.into(),
        }
    }

    /// A named file that is not the signed one, or a signature that is not accepted.
    pub(crate) fn signature(path: &Path, file: &str, detail: impl Into<String>) -> Error {
        Error::Signature {
            path: path.to_owned(),
            file: Some(file.to_owned()),
            offset: None,
            tensor: None,
            detail: detail.into(),
        }
    }

    /// Invalid contents in a named file whose digest matches.
    pub(crate) fn malformed(path: &Path, file: &str, detail: impl Into<String>) -> Error {
        Error::Malformed {
            path: path.to_owned(),
            file: Some(file.to_owned()),
            tensor: None,
            detail: detail.into(),
        }
    }

    /// Tampering with a named file, at an unknown position.
    pub(crate) fn tampered(path: &Path, file: &str, detail: impl Into<String>) -> Error {
        Error::Tampered {
            path: path.to_owned(),
            file: Some(file.to_owned()),
            offset: None,
            tensor: None,
            detail: detail.into(),
        }
    }

    /// The system's answer in its own words, or else the whole message.
    pub(crate) fn source_text(&self) -> String {
        match self {
            Error::Storage { source, .. }
            | Error::Full { source, .. }
            | Error::CommitUndecided { source, .. }
            | Error::NoFreeNames { source, .. }
            | Error::Unsynced { source, .. } => source.to_string(),
            error => error.to_string(),
        }
    }

    /// The kind of the system's answer, if the system refused an operation on a path.
    pub(crate) fn kind(&self) -> Option<io::ErrorKind> {
        match self {
            Error::Storage { source, .. }
            | Error::Full { source, .. }
            | Error::CommitUndecided { source, .. }
            | Error::NoFreeNames { source, .. }
            | Error::Unsynced { source, .. } => Some(source.kind()),
            _ => None,
        }
    }

    /// Whether the error concerns this process only, not the stored data: too many open files, or
    /// no memory.
    pub(crate) fn is_of_process(&self) -> bool {
        match self {
            Error::Storage { source, .. } => {
                is_out_of_files(source) || source.kind() == io::ErrorKind::OutOfMemory
            }
            _ => false,
        }
    }

    /// Adds the required and the available space to an error that says that storage is full.
    pub(crate) fn with_room(self, needed_bytes: u64, free_bytes: Option<u64>) -> Error {
        let is_full = matches!(
            self.kind(),
            Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        );
        match (self, free_bytes) {
            (
                Error::Storage {
                    operation,
                    path,
                    source,
                },
                Some(free_bytes),
            ) if is_full => Error::Full {
                operation,
                path,
                needed_bytes,
                free_bytes,
                source,
            },
            (error, _) => error,
        }
    }

    /// The message, followed by those of all causes.
    pub fn full_message(&self) -> String {
        let mut message = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            message.push_str(&format!(": {error}"));
            cause = error.source();
        }
        message
    }
}

/// The standard library has no error kind for EMFILE and ENFILE.
fn is_out_of_files(source: &io::Error) -> bool {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    matches!(source.raw_os_error(), Some(ENFILE | EMFILE))
}
