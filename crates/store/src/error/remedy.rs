//! Remedies: what a user can do about an error.

use std::io;

use penstock_keys::KeyError;

use super::{Error, is_out_of_files};

impl Error {
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
            Error::Sealed { .. }
            | Error::SealedByBlocks { .. }
            | Error::NotSealed { .. }
            | Error::WrongKey { .. }
            | Error::Tampered { .. }
            | Error::CannotSeal { .. }
            | Error::NotSigned { .. }
            | Error::Signature { .. }
            | Error::Key { .. } => sealing_remedy(self),
            Error::Io(error) => io_remedy(error),
            Error::Interrupted => "what was stored is as it was",
        }
    }
}

/// The remedy for a failure of the engine, its memory or a device.
fn io_remedy(error: &penstock_io::Error) -> &'static str {
    use penstock_io::Error as Io;
    match error {
        Io::EngineUnavailable {
            engine: "threads", ..
        } => "raise the limit of threads or memory (ulimit -u, ulimit -v, the container's)",
        Io::EngineUnavailable { .. } => "use engine=\"auto\" or engine=\"threads\"",
        Io::DirectUnavailable { .. } => "use direct=\"auto\" or direct=\"off\"",
        Io::OutOfMemory { .. } => {
            "free memory or raise its limit; staging_bytes bounds what a call adds to the state"
        }
        Io::Cuda(error) => device_remedy(error),
        _ => "see the system's message",
    }
}

/// The remedy for an error about a seal.
fn sealing_remedy(error: &Error) -> &'static str {
    match error {
        Error::Sealed { .. } => "pass identities=, or name their file in PENSTOCK_IDENTITIES",
        Error::SealedByBlocks { .. } => {
            "read it with penstock.features.open(path, identities=), or leave it out of the selection"
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
        Error::CannotSeal { .. } => "leave that out, or save all of it sealed or all of it clear",
        Error::NotSigned { .. } => {
            "find out who put it there; `penstock sign PATH --key FILE` signs one that you trust"
        }
        Error::Signature { .. } => {
            "find out who writes to the storage, and load another checkpoint or a copy; `penstock \
             sign` signs again one that you trust"
        }
        Error::Key { source, .. } => key_remedy(source),
        _ => "",
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
