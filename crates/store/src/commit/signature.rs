//! Signatures in a checkpoint's directory: which files they are, and how they get there.

use std::path::Path;

use penstock_io::file_system::{Change, Entry, FileSystem, Files, Kind};

use super::files::discard;
use crate::error::{Error, Result};
use crate::format::name::{self, MANIFEST, PROTECTED, is_attempt_file};
use crate::progress::Progress;
use crate::seal::Sha256;
use crate::sign::{Blake3, Contents, Sha256s, SignatureForm, SigningKey, Statement, StreamHasher};

/// Bytes of one read of a file that is hashed by itself.
const PIECE_BYTES: u64 = 16 << 20;

/// Signs the contents of a checkpoint with each key, durably. A signature of the same form is
/// replaced. Bundles list the SHA-256 of files, if there are any.
pub(crate) fn put(
    path: &Path,
    file_system: &dyn FileSystem,
    contents: &Contents,
    sha256s: Option<&Sha256s>,
    keys: &[SigningKey],
) -> Result<()> {
    let id = &contents.id;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    for key in keys {
        let sha256s = sha256s.filter(|_| key.form() == SignatureForm::Bundle);
        let statement = Statement::new(&name, contents, sha256s).text();
        let signature = key.sign(&statement).map_err(|source| Error::Key {
            path: path.to_owned(),
            source,
        })?;
        let signature = signature.as_bytes();
        match key.form() {
            SignatureForm::Bundle => {
                write(path, file_system, id, &name::bundle_file(id), signature)?;
            }
            SignatureForm::Ssh => {
                // A crash in between leaves a signature of another statement, which is refused.
                let statement_file = name::statement_file(id);
                write(path, file_system, id, &statement_file, &statement)?;
                write(
                    path,
                    file_system,
                    id,
                    &name::ssh_signature_file(id),
                    signature,
                )?;
            }
        }
    }
    Ok(file_system.change(Change::SyncDirectory(path))?)
}

/// The files of a signature of a form.
pub(crate) fn files_of(id: &str, form: SignatureForm) -> Vec<String> {
    match form {
        SignatureForm::Bundle => vec![name::bundle_file(id)],
        SignatureForm::Ssh => vec![name::statement_file(id), name::ssh_signature_file(id)],
    }
}

/// Puts a file of a signature in place, instead of the one of an earlier signature.
pub(crate) fn write(
    path: &Path,
    file_system: &dyn FileSystem,
    id: &str,
    name: &str,
    text: &[u8],
) -> Result<()> {
    let temporary = path.join(name::temporary_signature(id));
    if file_system.files().has_directories() {
        // Left by a process that died.
        discard(&temporary, file_system)?;
    }
    let file = file_system.create_temporary(&temporary)?;
    file_system.change(Change::Write(&file, text))?;
    file_system.change(Change::SyncData(&file))?;
    drop(file);
    let (from, to) = (temporary.as_path(), &path.join(name));
    Ok(file_system.change(Change::Rename { from, to })?)
}

/// An entry of a checkpoint's directory, as a signature sees it.
pub(crate) enum Other {
    /// Of no reader: a leftover, a signature, the mark of protection, a directory.
    Ignored(String),
    /// A file of somebody.
    File(String),
    /// Neither a file nor a directory, or a name that is no text.
    Strange(String),
}

/// Classifies the entries that are no files of the checkpoint with this manifest.
pub(crate) fn others(path: &Path, files: &dyn Files, entries: Vec<Entry>) -> Vec<Other> {
    let classify = |entry: Entry| {
        let name = match entry.name.into_string() {
            Ok(name) => name,
            Err(name) => return Other::Strange(name.to_string_lossy().into_owned()),
        };
        if name == PROTECTED || is_attempt_file(&name) {
            return Other::Ignored(name);
        }
        let stat = || files.stat_file(&path.join(&name)).map(|found| found.kind);
        match entry.kind.map_or_else(stat, Ok) {
            Ok(Kind::File) => Other::File(name),
            Ok(Kind::Directory) => Other::Ignored(name),
            _ => Other::Strange(name),
        }
    };
    let entries = entries.into_iter().filter(|entry| entry.name != MANIFEST);
    entries.map(classify).collect()
}

/// The paths that `model_signing` leaves out of a checkpoint with this id, beside those found.
pub(crate) fn ignored(id: &str, is_sealed: bool, found: Vec<String>) -> Vec<String> {
    let mut ignored: Vec<String> = name::signature_files(id).into();
    ignored.push(PROTECTED.to_owned());
    if is_sealed {
        // Recipients are changed by replacing it; a member of the statement covers the rest of it.
        ignored.push(MANIFEST.to_owned());
    }
    ignored.extend(found);
    ignored.sort();
    ignored.dedup();
    ignored
}

/// Hashes a file from its begin to its end.
pub(crate) fn hash_file(
    file: &Path,
    files: &dyn Files,
    progress: &Progress,
) -> Result<(Blake3, Sha256)> {
    let mut hasher = StreamHasher::new();
    let mut offset = 0;
    loop {
        let piece = files.read_range(file, offset..offset + PIECE_BYTES);
        let piece = piece.map_err(Error::storage("read", file))?;
        progress.check()?;
        progress.pay(piece.len() as u64)?;
        hasher.update(&piece);
        offset += piece.len() as u64;
        if (piece.len() as u64) < PIECE_BYTES {
            return Ok(hasher.finish());
        }
    }
}
