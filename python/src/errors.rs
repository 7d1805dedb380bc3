//! The one place that turns the engine's errors into exceptions of `penstock.errors`.

use std::any::Any;
use std::ffi::OsString;
use std::io;
use std::path::Path;

use penstock_keys::KeyError;
use penstock_store::Error;
use penstock_store::format::header::InvalidHeader;
use pyo3::exceptions::{PyIndexError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// `errno` for errors without a system error number, such as those of buckets.
const ENOENT: i32 = 2;
const EIO: i32 = 5;
const EBADF: i32 = 9;
const ENOMEM: i32 = 12;
const EACCES: i32 = 13;
const EBUSY: i32 = 16;
const ENOTDIR: i32 = 20;
const EINVAL: i32 = 22;
const EMFILE: i32 = 24;
const ENOTEMPTY: i32 = 39;
const ENODATA: i32 = 61;

/// The exception for an error: message with remedy, and the facts as attributes.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let mut message = error.full_message();
    let remedy = error.remedy();
    if !remedy.is_empty() {
        message = format!("{message}; {remedy}");
    }
    exception(py, &message, error).unwrap_or_else(|failure| failure)
}

/// The result of a transfer or of its preparation, with the exception for Python.
pub(crate) fn transferred<T>(py: Python<'_>, result: penstock_io::Result<T>) -> PyResult<T> {
    result.map_err(|error| raise_transfer(py, &error))
}

/// The exception for an error of a transfer or of its preparation.
pub(crate) fn raise_transfer(py: Python<'_>, error: &penstock_io::Error) -> PyErr {
    let fields = PyDict::new(py);
    let described = match error {
        penstock_io::Error::Cancelled => Ok("TransferCancelledError"),
        penstock_io::Error::Forked { .. } => Ok("PenstockError"),
        error => io_error(&fields, error),
    };
    let message = format!("{}; {}", in_full(error), transfer_remedy(error));
    described
        .and_then(|class| construct(py, class, &message, &fields))
        .unwrap_or_else(|failure| failure)
}

/// The exception for a key that is not available.
pub(crate) fn raise_key(py: Python<'_>, error: &KeyError) -> PyErr {
    if let KeyError::Kms {
        source: Some(source),
        ..
    } = error
        && let Some(raised) = source.downcast_ref::<PyErr>()
    {
        return raised.clone_ref(py);
    }
    let message = match error {
        KeyError::Io { source, .. } => format!("{error}: {source}; {}", key_remedy(error)),
        _ => format!("{error}; {}", key_remedy(error)),
    };
    let fields = PyDict::new(py);
    of_key(&fields, error)
        .and_then(|class| construct(py, class, &message, &fields))
        .unwrap_or_else(|failure| failure)
}

fn key_remedy(error: &KeyError) -> &'static str {
    match error {
        KeyError::NoIdentity { .. } => "give the identity of one of these recipients",
        KeyError::WrongKey { .. } => "give the key that the checkpoint was sealed for",
        KeyError::BadWrap { .. } => "restore the manifest from a copy",
        KeyError::BadFile { .. } | KeyError::BadText { .. } => "`penstock keys generate` makes one",
        KeyError::Recipients { .. } => "`penstock keys add` adds others, `keys list` shows all",
        KeyError::BadSigner { .. } => {
            "`ssh-keygen -t ed25519` makes a key that signs, and `openssl genpkey -algorithm EC \
             -pkeyopt ec_paramgen_curve:P-256` one for OpenSSF bundles"
        }
        KeyError::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists => {
            "choose another file: a key is never overwritten"
        }
        KeyError::Io { .. } => "check the path, the mode of the file and its owner",
        _ => "see the message",
    }
}

fn of_key(fields: &Bound<'_, PyDict>, error: &KeyError) -> PyResult<&'static str> {
    Ok(match error {
        KeyError::NoIdentity { .. } | KeyError::WrongKey { .. } | KeyError::BadWrap { .. } => {
            "WrongKeyError"
        }
        KeyError::BadFile { path, .. } => {
            fields.set_item("path", path.as_os_str())?;
            "KeyFileError"
        }
        KeyError::BadText { .. } | KeyError::BadSigner { .. } | KeyError::Recipients { .. } => {
            "KeyFileError"
        }
        KeyError::Io { path, source } => {
            storage(fields, path.as_os_str().to_owned(), errno(source))?
        }
        KeyError::Kms { uri, .. } => {
            fields.set_item("uri", uri)?;
            "KmsError"
        }
        _ => "PenstockError",
    })
}

/// The value, or the exception for rows that could not be gathered or written.
pub(crate) fn gathered<T>(py: Python<'_>, result: penstock_gather::Result<T>) -> PyResult<T> {
    result.map_err(|error| raise_gather(py, &error))
}

pub(crate) fn raise_gather(py: Python<'_>, error: &penstock_gather::Error) -> PyErr {
    use penstock_gather::Error as Gather;
    match error {
        Gather::Io(error) => return raise_transfer(py, error),
        Gather::OutOfRange { .. } | Gather::NoSuchRow { .. } => {
            return PyIndexError::new_err(error.to_string());
        }
        _ => {}
    }
    let message = format!("{error}; {}", gather_remedy(error));
    of_table(py, &message, error).unwrap_or_else(|failure| failure)
}

fn gather_remedy(error: &penstock_gather::Error) -> &'static str {
    use penstock_gather::Error as Gather;
    match error {
        Gather::Damaged { .. } | Gather::Broken { .. } => "restore the table from a copy",
        Gather::Tampered { .. } => {
            "find out who can write there, and restore the table from a copy that nobody else can \
             write to"
        }
        Gather::NoTable { .. } => "make one with penstock.features.Table.create",
        Gather::Exists { .. } => "open it, or remove the directory first",
        Gather::Busy { .. } => "close it there: one process has a table, once",
        Gather::Newer { .. } => "update Penstock",
        Gather::NotEmpty { .. } => "choose another directory, or remove what is there",
        Gather::Moved { .. } => "close the table, and open it where it is now",
        Gather::Held { .. } => "end that first",
        Gather::Failed { .. } => "close the table and open it: what was flushed is there",
        _ => "see the message",
    }
}

fn of_table(py: Python<'_>, message: &str, error: &penstock_gather::Error) -> PyResult<PyErr> {
    use penstock_gather::Error as Gather;
    let fields = PyDict::new(py);
    let class = match error {
        Gather::Damaged { path, .. } | Gather::Broken { path, .. } => {
            fields.set_item("path", path.parent().map(Path::as_os_str))?;
            fields.set_item("file", path.file_name())?;
            "CorruptCheckpointError"
        }
        Gather::Tampered { path, offset, .. } => {
            fields.set_item("path", path.parent().map(Path::as_os_str))?;
            fields.set_item("file", path.file_name())?;
            fields.set_item("offset", offset)?;
            "TamperedError"
        }
        Gather::NoTable { path } => {
            fields.set_item("path", path.as_os_str())?;
            "CheckpointNotFoundError"
        }
        Gather::Exists { path } => {
            fields.set_item("path", path.as_os_str())?;
            "CheckpointExistsError"
        }
        Gather::Busy { path } => storage(&fields, path.as_os_str().to_owned(), EBUSY)?,
        Gather::NotEmpty { path, .. } => storage(&fields, path.as_os_str().to_owned(), ENOTEMPTY)?,
        Gather::Moved { path } | Gather::Failed { path, .. } => {
            storage(&fields, path.as_os_str().to_owned(), EIO)?
        }
        Gather::Newer {
            path,
            version,
            supported,
        } => {
            fields.set_item("path", path.parent().map(Path::as_os_str))?;
            fields.set_item("found", version)?;
            fields.set_item("supported", supported)?;
            "FormatVersionError"
        }
        _ => "PenstockError",
    };
    construct(py, class, message, &fields)
}

/// The exception for a safetensors file whose header cannot be read.
pub(crate) fn raise_header(py: Python<'_>, path: &Path, error: &InvalidHeader) -> PyErr {
    of_header(py, path, error).unwrap_or_else(|failure| failure)
}

fn of_header(py: Python<'_>, path: &Path, error: &InvalidHeader) -> PyResult<PyErr> {
    let fields = PyDict::new(py);
    let at = path.display();
    match error {
        InvalidHeader::Damaged { tensor, .. } => {
            fields.set_item("path", path.parent().map(Path::as_os_str))?;
            fields.set_item("file", path.file_name())?;
            fields.set_item("tensor", tensor)?;
            let message = format!("{at}: {error}: get the file again");
            construct(py, "CorruptCheckpointError", &message, &fields)
        }
        InvalidHeader::Unsupported { tensor, .. } => {
            fields.set_item("key", tensor.as_deref().unwrap_or_default())?;
            let remedy = "load it with the program that wrote it, and save it again from there";
            let message = format!("{at}: {error}: {remedy}");
            construct(py, "UnsupportedStateError", &message, &fields)
        }
        error => construct(py, "PenstockError", &format!("{at}: {error}"), &fields),
    }
}

/// The error and its source in one text.
fn in_full(error: &penstock_io::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

const TOO_MANY_OPEN: &str = "close files, or raise their number (ulimit -n)";

fn transfer_remedy(error: &penstock_io::Error) -> &'static str {
    use penstock_io::Error as Io;
    match error {
        Io::Transfer { source, .. } => answer_remedy(source).unwrap_or("see the system's message"),
        Io::Storage {
            operation, source, ..
        } => match (*operation, source.kind()) {
            ("open", io::ErrorKind::InvalidInput) => "name a regular file",
            _ => answer_remedy(source).unwrap_or("see the system's message"),
        },
        Io::Engine { source, .. } if source.raw_os_error() == Some(EMFILE) => TOO_MANY_OPEN,
        Io::EngineUnavailable { .. } => "use engine=\"auto\" or engine=\"threads\"",
        Io::DirectUnavailable { .. } => "use direct=\"auto\" or direct=\"off\"",
        Io::OutOfMemory { .. } => "free memory or raise its limit",
        Io::Cancelled => "what had begun was finished",
        Io::Forked { .. } => "hand requests over in the process that waits for them",
        Io::Cuda(error) => cuda_remedy(error),
        _ => "see the system's message",
    }
}

/// The remedy for a system error that means the same for every operation on a file.
fn answer_remedy(source: &io::Error) -> Option<&'static str> {
    Some(match source.kind() {
        io::ErrorKind::UnexpectedEof => "ask for what the file holds, as its size says",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space, or write elsewhere"
        }
        io::ErrorKind::NotFound => "check the path; a write makes the file, not its directory",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "check the mode of the file, its owner, and how it is mounted"
        }
        io::ErrorKind::IsADirectory => "name a regular file",
        io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => {
            "the file system or its device cannot do that: use direct=\"off\", or choose a directory \
             on another one"
        }
        io::ErrorKind::FileTooLarge => "check the offset, and the limit of file sizes",
        io::ErrorKind::OutOfMemory => "free memory, or give less staging_bytes",
        _ if source.raw_os_error() == Some(EIO) => {
            "the device or what it is reached by fails: see the kernel's log"
        }
        _ if source.raw_os_error() == Some(EBADF) => "open the file for this",
        _ if source.raw_os_error() == Some(EMFILE) => TOO_MANY_OPEN,
        _ => return None,
    })
}

fn cuda_remedy(error: &penstock_cuda::Error) -> &'static str {
    use penstock_cuda::Error as Cuda;
    match error {
        Cuda::Capturing => "ask for it outside of the capture, before it or after it",
        Cuda::Forked { .. } => "start processes with spawn or forkserver",
        _ => "see the driver's message",
    }
}

/// The exception for a broken invariant, which asks for a report.
pub(crate) fn internal(py: Python<'_>, panic: &(dyn Any + Send)) -> PyErr {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("unknown");
    let message = format!("internal error, please report it: {text}");
    construct(py, "PenstockError", &message, &PyDict::new(py)).unwrap_or_else(|failure| failure)
}

/// The exception for a key of a checkpoint that is not available.
fn of_checkpoint_key(
    py: Python<'_>,
    message: &str,
    path: &Path,
    error: &KeyError,
) -> PyResult<PyErr> {
    match error {
        KeyError::NoIdentity { .. } | KeyError::WrongKey { .. } => {
            let fields = PyDict::new(py);
            fields.set_item("path", path.as_os_str())?;
            construct(py, "WrongKeyError", message, &fields)
        }
        // The digest of the manifest is right, so the wrap was not damaged.
        KeyError::BadWrap { .. } => {
            let fields = PyDict::new(py);
            fields.set_item("path", path.as_os_str())?;
            fields.set_item("file", penstock_store::MANIFEST)?;
            construct(py, "TamperedError", message, &fields)
        }
        error => Ok(raise_key(py, error)),
    }
}

fn exception(py: Python<'_>, message: &str, error: &Error) -> PyResult<PyErr> {
    if let Error::Key { path, source } = error {
        return of_checkpoint_key(py, message, path, source);
    }
    let fields = PyDict::new(py);
    let text = |path: &Path| path.as_os_str().to_owned();
    if let Some((class, path)) = about_a_directory(error) {
        fields.set_item("path", text(path))?;
        return construct(py, class, message, &fields);
    }
    if let Some(class) = about_content(&fields, error)? {
        return construct(py, class, message, &fields);
    }
    let class = match error {
        Error::Version {
            path,
            found,
            supported,
        } => {
            fields.set_item("path", text(path))?;
            fields.set_item("found", found)?;
            fields.set_item("supported", supported)?;
            "FormatVersionError"
        }
        Error::Unsupported { key, .. } | Error::SealedByBlocks { key, .. } => {
            fields.set_item("key", key)?;
            "UnsupportedStateError"
        }
        Error::Mismatch { key, .. } => {
            fields.set_item("key", key)?;
            "StateMismatchError"
        }
        Error::SourceModified { path, key } => {
            fields.set_item("path", text(path))?;
            fields.set_item("key", key)?;
            "StateMismatchError"
        }
        Error::Storage { path, source, .. }
        | Error::NoFreeNames { path, source }
        | Error::Unsynced { path, source } => storage(&fields, text(path), errno(source))?,
        Error::Undecided { path, .. } => storage(&fields, text(path), EBUSY)?,
        Error::CommitUndecided {
            path,
            attempt,
            source,
        } => {
            fields.set_item("attempt", attempt)?;
            storage(&fields, text(path), errno(source))?;
            "CommitUndecidedError"
        }
        Error::Full {
            path,
            source,
            needed_bytes,
            free_bytes,
            ..
        } => {
            fields.set_item("needed_bytes", needed_bytes)?;
            fields.set_item("free_bytes", free_bytes)?;
            storage(&fields, text(path), errno(source))?
        }
        Error::Io(error) => io_error(&fields, error)?,
        Error::Interrupted => {
            return Ok(pyo3::exceptions::PyKeyboardInterrupt::new_err(
                message.to_owned(),
            ));
        }
        _ => "PenstockError",
    };
    construct(py, class, message, &fields)
}

/// The class of an error about stored content, with its facts.
fn about_content(fields: &Bound<'_, PyDict>, error: &Error) -> PyResult<Option<&'static str>> {
    let path = match error {
        Error::Corrupt { path, .. }
        | Error::Tampered { path, .. }
        | Error::Signature { path, .. }
        | Error::Malformed { path, .. }
        | Error::Unknown { path, .. } => path,
        _ => return Ok(None),
    };
    fields.set_item("path", path.as_os_str())?;
    let (class, is_proven) = match error {
        Error::Corrupt { .. } => ("CorruptCheckpointError", Some(true)),
        Error::Tampered { .. } => ("TamperedError", Some(true)),
        Error::Signature { .. } => ("SignatureError", None),
        Error::Malformed { .. } => ("CorruptCheckpointError", None),
        _ => {
            fields.set_item("found", penstock_store::FORMAT_VERSION)?;
            fields.set_item("supported", penstock_store::FORMAT_VERSION)?;
            return Ok(Some("FormatVersionError"));
        }
    };
    if let Some(is_proven) = is_proven {
        fields.set_item("is_proven", is_proven)?;
    }
    if let Error::Corrupt {
        file,
        offset,
        tensor,
        ..
    }
    | Error::Tampered {
        file,
        offset,
        tensor,
        ..
    }
    | Error::Signature {
        file,
        offset,
        tensor,
        ..
    } = error
    {
        fields.set_item("file", file)?;
        fields.set_item("offset", offset)?;
        fields.set_item("tensor", tensor)?;
    }
    if let Error::Malformed { file, tensor, .. } = error {
        fields.set_item("file", file)?;
        fields.set_item("tensor", tensor)?;
    }
    Ok(Some(class))
}

/// The class of an error whose only fact is the checkpoint's directory, and that directory.
fn about_a_directory(error: &Error) -> Option<(&'static str, &Path)> {
    match error {
        Error::NotFound { path } | Error::Replaced { path } | Error::Store { path, .. } => {
            Some(("CheckpointNotFoundError", path))
        }
        Error::Exists { path } => Some(("CheckpointExistsError", path)),
        Error::Partial { path } => Some(("PartialCheckpointError", path)),
        Error::Protected { path } => Some(("ProtectedCheckpointError", path)),
        Error::Incomplete { path, .. } => Some(("IncompleteCheckpointError", path)),
        Error::Sealed { path } => Some(("SealedError", path)),
        Error::NotSealed { path } => Some(("NotSealedError", path)),
        Error::NotSigned { path } => Some(("NotSignedError", path)),
        Error::WrongKey { path } => Some(("WrongKeyError", path)),
        Error::CannotSeal { path, .. } => Some(("CannotSealError", path)),
        _ => None,
    }
}

fn io_error(fields: &Bound<'_, PyDict>, error: &penstock_io::Error) -> PyResult<&'static str> {
    use penstock_io::Error as Io;
    match error {
        Io::Storage { path, source, .. } => {
            storage(fields, path.as_os_str().to_owned(), errno(source))
        }
        Io::Transfer {
            path,
            offset,
            source,
            ..
        } => {
            fields.set_item("offset", offset)?;
            let errno = match source.kind() {
                io::ErrorKind::UnexpectedEof => ENODATA,
                _ => errno(source),
            };
            storage(fields, path.as_os_str().to_owned(), errno)?;
            Ok("TransferError")
        }
        Io::DirectUnavailable { path, .. } => storage(fields, path.as_os_str().to_owned(), EINVAL),
        Io::EngineUnavailable { engine, source, .. } => {
            storage(fields, format!("engine {engine}").into(), errno(source))
        }
        Io::Engine { source, .. } => storage(fields, OsString::new(), errno(source)),
        Io::OutOfMemory { .. } => storage(fields, OsString::new(), ENOMEM),
        Io::Cuda(error) => {
            fields.set_item("code", error.code())?;
            Ok("DeviceError")
        }
        _ => storage(fields, OsString::new(), EIO),
    }
}

fn storage(fields: &Bound<'_, PyDict>, path: OsString, errno: i32) -> PyResult<&'static str> {
    fields.set_item("path", path)?;
    fields.set_item("errno", errno)?;
    Ok("StorageError")
}

fn errno(source: &io::Error) -> i32 {
    source.raw_os_error().unwrap_or(match source.kind() {
        io::ErrorKind::NotFound => ENOENT,
        io::ErrorKind::PermissionDenied => EACCES,
        io::ErrorKind::NotADirectory => ENOTDIR,
        io::ErrorKind::OutOfMemory => ENOMEM,
        io::ErrorKind::ResourceBusy => EBUSY,
        io::ErrorKind::InvalidInput => EINVAL,
        io::ErrorKind::DirectoryNotEmpty => ENOTEMPTY,
        _ => EIO,
    })
}

fn construct(
    py: Python<'_>,
    class: &str,
    message: &str,
    fields: &Bound<'_, PyDict>,
) -> PyResult<PyErr> {
    let module = py.import("penstock.errors").map_err(|error| {
        PyRuntimeError::new_err(format!(
            "{message} (and penstock.errors is missing: {error})"
        ))
    })?;
    Ok(PyErr::from_value(
        module.getattr(class)?.call((message,), Some(fields))?,
    ))
}
