//! What can go wrong above the engine, sorted by what a caller would do about it.

use std::io;
use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that saving, loading, verifying and deleting can report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is nothing at the path.
    #[error("no checkpoint at {path}")]
    NotFound {
        /// The directory that was asked for.
        path: PathBuf,
    },
    /// The directory is a store of checkpoints, not one of them.
    #[error("{path} is a store of checkpoints, not a checkpoint; its newest step is {newest}")]
    Store {
        /// The directory that was asked for.
        path: PathBuf,
        /// Its newest step.
        newest: PathBuf,
    },
    /// A complete checkpoint is already there and replacing it was not asked for.
    #[error("{path} already holds a complete checkpoint")]
    Exists {
        /// The checkpoint directory.
        path: PathBuf,
    },
    /// A directory without a manifest: a save that never committed, or no checkpoint at all.
    #[error("{path} holds no complete checkpoint: {detail}")]
    Incomplete {
        /// The directory.
        path: PathBuf,
        /// What is missing.
        detail: String,
    },
    /// The checkpoint holds only what was salvaged from another one.
    #[error("{path} is partial: it holds what was salvaged from a damaged checkpoint")]
    Partial {
        /// The checkpoint directory.
        path: PathBuf,
    },
    /// The step is protected, and deleting it all the same was not asked for.
    #[error("{path} is protected from deletion")]
    Protected {
        /// The step's directory.
        path: PathBuf,
    },
    /// Nothing tells whether somebody is at work in a directory that is to be deleted: it has no
    /// manifest that can be read, and the file system no locks that every host sees.
    #[error(
        "cannot delete {path}: {detail}, and without locks that every host sees nothing tells its \
         files from those of a save under way"
    )]
    Undecided {
        /// The step's directory.
        path: PathBuf,
        /// What would have told.
        detail: String,
    },
    /// The storage did not say whether it published a manifest, may yet do so, and does not show it.
    #[error("nobody knows whether {path} was committed: attempt {attempt} may yet appear there")]
    CommitUndecided {
        /// The checkpoint directory.
        path: PathBuf,
        /// The identity that the checkpoint has, if it was.
        attempt: String,
        /// What it said last.
        source: io::Error,
    },
    /// The checkpoint was replaced or removed while it was being read.
    #[error("{path} was replaced while it was being read")]
    Replaced {
        /// The checkpoint directory.
        path: PathBuf,
    },
    /// Stored bytes are not what was written.
    #[error("{}", corrupt_message(path, file.as_deref(), *offset, tensor.as_deref(), detail))]
    Corrupt {
        /// The checkpoint directory.
        path: PathBuf,
        /// The damaged file's name inside it, where one is known.
        file: Option<String>,
        /// Where in the file the damage was seen, in bytes.
        offset: Option<u64>,
        /// A tensor that the damage touches.
        tensor: Option<String>,
        /// What was found.
        detail: String,
    },
    /// The digests are right, so nothing was damaged since it was written; but what they vouch for
    /// makes no sense.
    #[error("{}", corrupt_message(path, file.as_deref(), None, tensor.as_deref(), detail))]
    Malformed {
        /// The checkpoint directory.
        path: PathBuf,
        /// The file's name inside it, where it is one.
        file: Option<String>,
        /// The tensor that it is about, where it is one.
        tensor: Option<String>,
        /// What was found.
        detail: String,
    },
    /// The digests are right, and what they vouch for has something of the format that this version
    /// does not know.
    #[error("{}: {detail}", path.join(file).display())]
    Unknown {
        /// The checkpoint directory.
        path: PathBuf,
        /// The file's name inside it.
        file: String,
        /// What is not known.
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
    /// Something in the state has no place in the format.
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
    /// Somebody wrote to a tensor before a watched job had copied it, so that the snapshot would be
    /// of no moment.
    #[error("{path}: {key:?} changed before a lazy save had copied it, so the save was given up")]
    Torn {
        /// The checkpoint directory.
        path: PathBuf,
        /// Dotted name of the tensor, or of one that has a page of memory in common with it.
        key: String,
    },
    /// The operating system refused or failed.
    #[error("cannot {operation} {path}")]
    Storage {
        /// What was being done.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The file system has no way to give a file a name only if that is free, which keeps two savers of one
    /// checkpoint apart.
    #[error(
        "cannot publish {path}: its file system makes no hard links and cannot rename without replacing"
    )]
    NoFreeNames {
        /// The file that was to get the name.
        path: PathBuf,
        /// The system's answer to the rename.
        source: io::Error,
    },
    /// A checkpoint is in place, and could not be made durable.
    #[error("{path} is in place, but may not survive a crash: its directory could not be synced")]
    Unsynced {
        /// The checkpoint directory.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// There is no room for what is to be saved.
    #[error(
        "cannot {operation} {path}: {needed_bytes} bytes are needed there and {free_bytes} were free"
    )]
    Full {
        /// What was being done.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// Bytes of all files to be written there.
        needed_bytes: u64,
        /// Bytes that were free before the first of them was.
        free_bytes: u64,
        /// The system's reason.
        source: io::Error,
    },
    /// The engine or memory below this crate failed.
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
    /// Wraps a system error with what was being done to which path.
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

    /// Damage in a named file, without a position.
    pub(crate) fn corrupt(path: &Path, file: &str, detail: impl Into<String>) -> Error {
        Error::Corrupt {
            path: path.to_owned(),
            file: Some(file.to_owned()),
            offset: None,
            tensor: None,
            detail: detail.into(),
        }
    }

    /// Something in a named file that its digest vouches for and that makes no sense.
    pub(crate) fn malformed(path: &Path, file: &str, detail: impl Into<String>) -> Error {
        Error::Malformed {
            path: path.to_owned(),
            file: Some(file.to_owned()),
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

    /// The system's answer by kind, where the system refused an operation on a path.
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

    /// Whether it says nothing of what is stored: this process has too many files open, or no
    /// memory.
    pub(crate) fn is_of_process(&self) -> bool {
        match self {
            Error::Storage { source, .. } => {
                is_out_of_files(source) || source.kind() == io::ErrorKind::OutOfMemory
            }
            _ => false,
        }
    }

    /// An error for want of room, with the room that was needed and that there was.
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

    /// The message with that of every cause behind it.
    pub fn full_message(&self) -> String {
        let mut message = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            message.push_str(&format!(": {error}"));
            cause = error.source();
        }
        message
    }

    /// What the user can do about it, as a clause that follows the message; nothing where that says it.
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
            Error::Torn { .. } => {
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

/// What to do about a device. Nothing is committed of a save that it fails.
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

/// EMFILE and ENFILE have no kind of their own.
fn is_out_of_files(source: &io::Error) -> bool {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    matches!(source.raw_os_error(), Some(ENFILE | EMFILE))
}

/// The remedy for an operation that the system refused. One answer has several meanings, by the
/// operation: `EINVAL` is a directory that is not empty for a salvage, and a missing ability for a rename.
fn storage_remedy(operation: &str, source: &io::Error) -> &'static str {
    #[cfg(feature = "objects")]
    if penstock_object::says_what_to_do(source) {
        return "";
    }
    remedy_of_ability(operation, source).unwrap_or_else(|| remedy_of_answer(operation, source))
}

/// The same where the file system lacks what the operation takes.
fn remedy_of_ability(operation: &str, source: &io::Error) -> Option<&'static str> {
    use io::ErrorKind::{CrossesDevices, InvalidInput, PermissionDenied, Unsupported};
    Some(match (operation, source.kind()) {
        ("set aside", CrossesDevices | InvalidInput | PermissionDenied | Unsupported) => {
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

/// The same of answers that mean one thing of every operation, or of nearly all.
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
        // Of a save whose files were removed under it.
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
        // Its own words say what it is.
        ErrorKind::InvalidInput if source.get_ref().is_some() => "check the path",
        _ if is_out_of_files(source) => {
            "raise the limit of open files (ulimit -n), or shard_bytes for fewer of them"
        }
        _ => "try again, or check the device and the kernel log",
    }
}
