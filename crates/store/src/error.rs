//! The errors of this crate, one variant for each reaction that a caller may have.

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
    /// This job cannot seal what it would write, or cannot read what is sealed.
    #[error("{path}: {detail}")]
    CannotSeal {
        /// The checkpoint directory.
        path: PathBuf,
        /// What is not sealed.
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

    /// The user's remedy, as a clause that follows the message; empty if the message already says
    /// it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Error::NotFound { .. } => "check the path, or list a store with `penstock ls ROOT`",
            Error::Store { .. } => "load that path, or use CheckpointStore(path).load()",
            Error::Exists { .. } => "pass overwrite=True to replace it, or save to another path",
            Error::Incomplete { .. } => {
                "load an older checkpoint; if this one was complete once, `penstock verify --explain` \
                 tells what is left of it before `penstock sweep` removes that"
            }
            Error::Partial { .. } => "load another one, or pass allow_partial=True",
            Error::Protected { .. } => "unprotect it first, or pass force=True",
            Error::Undecided { .. } => {
                "where no save is under way on any host, remove the directory by hand"
            }
            Error::CommitUndecided { .. } => {
                "its data stays for now: ask `penstock inspect` in some minutes, which shows this id \
                 where it was, and else save it again under another name"
            }
            Error::Replaced { .. } => "read it again",
            Error::Corrupt { .. } => {
                "load another checkpoint, or restore the file from a copy; \
                 `penstock verify` lists all damage"
            }
            Error::Malformed { .. } => {
                "its digests are right, so it was written like this: read it with the version of \
                 Penstock that wrote it, or load another checkpoint"
            }
            Error::Version { .. } | Error::Unknown { .. } => {
                "read it with the version of Penstock that wrote it, or load another checkpoint"
            }
            Error::Unsupported { .. } => "convert the value or leave it out of the state",
            Error::Mismatch { .. } => "compare with `penstock inspect`",
            Error::SourceModified { .. } => {
                "call pending.stage() before the change, or save with lazy=False, which copies at \
                 the call; for an optimizer that no Training holds, penstock.guard(optimizer) \
                 calls it before each step"
            }
            Error::NoFreeNames { .. } => {
                "where nobody else saves to this path, overwrite=True needs neither; else choose another \
                 file system, or save to a mounted bucket by its URL (s3://, gs://, az://); \
                 `penstock doctor DIRECTORY` tells it before a save does"
            }
            Error::Unsynced { .. } => {
                "check the device and the kernel log, then save it again with overwrite=True"
            }
            Error::Storage {
                operation, source, ..
            }
            | Error::Full {
                operation, source, ..
            } => storage_remedy(operation, source),
            Error::Sealed { .. } => {
                "pass identities=, or name their file in PENSTOCK_IDENTITIES"
            }
            Error::NotSealed { .. } => {
                "find out who put it there; to read a clear checkpoint, pass no identities"
            }
            Error::WrongKey { .. } => {
                "its wraps are those of another checkpoint: restore manifest.json from a copy"
            }
            Error::Tampered { .. } => {
                "find out who writes to the storage, and load another checkpoint or a copy"
            }
            Error::CannotSeal { .. } => "leave that out, or save without sealing=",
            Error::Key { source, .. } => key_remedy(source),
            Error::Io(penstock_io::Error::EngineUnavailable {
                engine: "threads", ..
            }) => "raise the limit of threads or memory (ulimit -u, ulimit -v, the container's)",
            Error::Io(penstock_io::Error::EngineUnavailable { .. }) => {
                "use engine=\"auto\" or engine=\"threads\""
            }
            Error::Io(penstock_io::Error::DirectUnavailable { .. }) => {
                "use direct=\"auto\" or direct=\"off\""
            }
            Error::Io(penstock_io::Error::OutOfMemory { .. }) => {
                "free memory or raise its limit; staging_bytes bounds what a call adds to the state"
            }
            Error::Io(penstock_io::Error::Cuda(error)) => device_remedy(error),
            Error::Io(_) => "see the system's message",
            Error::Interrupted => "what was stored is as it was",
        }
    }
}

/// The remedy for a key that is not available.
fn key_remedy(error: &KeyError) -> &'static str {
    match error {
        KeyError::NoIdentity { .. } | KeyError::WrongKey { .. } => {
            "pass the identity of one of the recipients; `penstock keys list PATH` shows them"
        }
        KeyError::Kms { .. } => "check the service and its credentials",
        KeyError::Entropy => "check the random device of the system",
        _ => "",
    }
}

/// The remedy for a device error. A save that hits one commits nothing.
fn device_remedy(error: &penstock_cuda::Error) -> &'static str {
    use penstock_cuda::Error as Cuda;
    match error {
        Cuda::Capturing => "save outside of the capture, before it or after it",
        Cuda::Forked { .. } => {
            "start processes with spawn or forkserver where they save what a device has"
        }
        Cuda::NotFound { .. } | Cuda::Incomplete { .. } | Cuda::TooOld { .. } => {
            "install a driver, or name one by PENSTOCK_CUDA_DRIVER; copied to the host, tensors are saved \
             without one"
        }
        Cuda::NoCuFile { .. } => {
            "pip install nvidia-cufile, or name the library by PENSTOCK_CUFILE; nothing but \
             `penstock bench io` uses it"
        }
        error if error.is_out_of_memory() => "free memory of the device, or let more be pinned",
        error if error.is_not_permitted() => "check who may use the device",
        _ => "the device may need the process to be started anew; what was stored is as it was",
    }
}

/// The standard library has no error kind for EMFILE and ENFILE.
fn is_out_of_files(source: &io::Error) -> bool {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    matches!(source.raw_os_error(), Some(ENFILE | EMFILE))
}

/// The remedy for an operation that the system refused. An answer can depend on the operation:
/// `EINVAL` means a directory that is not empty for a salvage, and a missing ability for a rename.
fn storage_remedy(operation: &str, source: &io::Error) -> &'static str {
    #[cfg(feature = "objects")]
    if penstock_object::says_what_to_do(source) {
        return "";
    }
    remedy_of_ability(operation, source).unwrap_or_else(|| remedy_of_answer(operation, source))
}

/// The remedy for an operation that the file system does not support.
fn remedy_of_ability(operation: &str, source: &io::Error) -> Option<&'static str> {
    use io::ErrorKind::{CrossesDevices, InvalidInput, PermissionDenied, Unsupported};
    Some(match (operation, source.kind()) {
        ("quarantine", CrossesDevices | InvalidInput | PermissionDenied | Unsupported) => {
            "save the step again with overwrite=True, or delete it"
        }
        ("link to", PermissionDenied | Unsupported | InvalidInput) => {
            "the file system may make no hard links, as `penstock doctor DIRECTORY` tells: choose a \
             directory on another one"
        }
        ("rename to", CrossesDevices) => {
            "the directory lies in a lower layer of an overlay, or is a mount of its own: choose \
             another one"
        }
        ("rename to", InvalidInput | Unsupported) => {
            "the file system cannot rename like that, as `penstock doctor DIRECTORY` tells: choose a \
             directory on another one"
        }
        ("sync" | "fsync" | "fdatasync", InvalidInput | Unsupported) => {
            "the file system cannot make it durable, as `penstock doctor DIRECTORY` tells: choose a \
             directory on another one"
        }
        ("lock", InvalidInput | Unsupported) => {
            "the file system has no locks: choose a directory on another one"
        }
        ("create" | "allocate" | "write" | "truncate", InvalidInput | Unsupported) => {
            "the file system cannot do that: choose a directory on another one"
        }
        _ => return None,
    })
}

/// The remedy for answers with one meaning for all operations, or nearly all.
fn remedy_of_answer(operation: &str, source: &io::Error) -> &'static str {
    use io::ErrorKind;
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free space, or save elsewhere",
        ErrorKind::PermissionDenied => "check the owner and the mode of the directory",
        ErrorKind::ReadOnlyFilesystem => "the file system is mounted read-only; save elsewhere",
        ErrorKind::DirectoryNotEmpty | ErrorKind::InvalidInput if operation == "salvage to" => {
            "choose a new or an empty directory"
        }
        ErrorKind::DirectoryNotEmpty => "remove what else is in the directory",
        ErrorKind::InvalidFilename => "choose a shorter name",
        ErrorKind::FileTooLarge => {
            "raise the limit of file sizes (ulimit -f), or lower shard_bytes"
        }
        // The files of the save were removed while it ran.
        ErrorKind::NotFound if operation == "publish" => {
            "save it again, where nobody deletes the step; give sweeps a higher age than saves take"
        }
        ErrorKind::NotFound => "check that the directory is there and can be written to",
        ErrorKind::ResourceBusy => {
            "a save, a load or a removal is at work there; try again when it is done"
        }
        ErrorKind::NotADirectory => {
            "a checkpoint is a directory; something else is in its place or above it"
        }
        ErrorKind::InvalidInput if operation == "delete" => "name the directory of one checkpoint",
        // The message of the source names the cause.
        ErrorKind::InvalidInput if source.get_ref().is_some() => "check the path",
        _ if is_out_of_files(source) => {
            "raise the limit of open files (ulimit -n), or shard_bytes for fewer of them"
        }
        _ => "try again, or check the device and the kernel log",
    }
}
