//! Reading and checking a checkpoint's description: its manifest and its parts.
//!
//! Text is used only if its digest matches, and reported as damaged only after a second read that
//! bypasses the page cache, since a transfer can fail although the stored bytes are right.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use penstock_io::file::Direct;
use penstock_io::file_system::{FileStat, Files, Kind};

use crate::error::{Error, Result};
use crate::format::digest::Digest;
use crate::format::directory::{entries, has, names};
use crate::format::manifest::{Manifest, PartEntry};
use crate::format::name::{MANIFEST, PROTECTED, is_attempt_file, is_step};
use crate::format::part::{FileEntry, Part};
use crate::format::plain;
use crate::format::tombstone::{misplaced, misplaced_among};
use crate::seal::Sha256;
use crate::sign::Blake3;

/// Limit on the size of a manifest, which names parts and holds the user's metadata: megabytes at
/// most.
pub(crate) const MANIFEST_BYTES_MAX: u64 = 64 << 20;

/// How often a missing manifest is looked for elsewhere.
const CHECKS_MAX: usize = 2;

/// Reads and checks the manifest; returns it with its size. A manifest that a deletion has taken by
/// mistake, and is about to put back, is used as well.
pub(crate) fn read_manifest(path: &Path, files: &dyn Files) -> Result<(Manifest, u64)> {
    let file = path.join(MANIFEST);
    let mut found = read_manifest_at(path, &file, files);
    for _ in 0..CHECKS_MAX {
        if !matches!(found, Err(Error::Incomplete { .. })) {
            break;
        }
        let Some(place) = place_of(&file, path, files) else {
            break;
        };
        found = read_manifest_at(path, &place, files);
    }
    found
}

/// Where a missing manifest may be instead.
fn place_of(manifest: &Path, path: &Path, files: &dyn Files) -> Option<PathBuf> {
    if files.has_directories() {
        // If it is nowhere else, it may have been put back since.
        return Some(misplaced(path, files).unwrap_or_else(|| manifest.to_owned()));
    }
    // A list is consistent: a file that it lacks did not exist at that moment.
    let listed = entries(path, files).ok()?;
    let is_back = has(&listed, MANIFEST).then(|| manifest.to_owned());
    is_back.or_else(|| misplaced_among(path, files, &listed))
}

fn read_manifest_at(path: &Path, file: &Path, files: &dyn Files) -> Result<(Manifest, u64)> {
    let failed = |source| no_manifest(path, file, files, source);
    // Opening a FIFO could block, and reading a device might never end.
    let (found, seen) = files
        .stat_and_read(file, MANIFEST_BYTES_MAX)
        .map_err(failed)?;
    if let Some(flaw) = plain::flaw(&found) {
        return Err(Error::corrupt(path, MANIFEST, flaw));
    }
    if found.bytes > MANIFEST_BYTES_MAX {
        let detail = format!("{} bytes are too many for a manifest", found.bytes);
        return Err(Error::corrupt(path, MANIFEST, detail));
    }
    if begins_pointer(&seen.bytes) {
        return Err(Error::corrupt(path, MANIFEST, NOT_FETCHED));
    }
    let again = || read_again(file, files).map_err(failed);
    let manifest = believe(&seen.bytes, again, |text| {
        Ok((Manifest::parse(text, path)?, text.len()))
    })?;
    Ok((manifest.0, manifest.1 as u64))
}

/// Distinguishes a missing path from a directory without a manifest.
fn no_manifest(path: &Path, file: &Path, files: &dyn Files, source: io::Error) -> Error {
    match files.stat_directory(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Error::NotFound {
            path: path.to_owned(),
        },
        Ok(found) if !found.is_directory() => {
            let source = io::Error::from(io::ErrorKind::NotADirectory);
            Error::Storage {
                operation: "open checkpoint",
                path: path.to_owned(),
                source,
            }
        }
        Ok(_) if source.kind() == io::ErrorKind::NotFound => without_manifest(path, files),
        _ => Error::Storage {
            operation: "read",
            path: file.to_owned(),
            source,
        },
    }
}

/// Distinguishes a store, an unfinished save, and any other directory.
fn without_manifest(path: &Path, files: &dyn Files) -> Error {
    let names = names(path, files).unwrap_or_default();
    let path = path.to_owned();
    if let Some(step) = names.iter().filter(|name| is_step(name)).max() {
        let newest = path.join(step);
        return Error::Store { path, newest };
    }
    // A save creates its directory before its first file, so an empty directory may be a save too.
    let is_ours = |name: &String| is_attempt_file(name) || name == PROTECTED;
    if names.is_empty() || names.iter().any(is_ours) {
        let detail = format!("it has no {MANIFEST}");
        return Error::Incomplete { path, detail };
    }
    Error::NotFound { path }
}

/// Reads a part, checks it against the manifest, and parses it.
pub(crate) fn read_part(
    path: &Path,
    files: &dyn Files,
    manifest: &Manifest,
    entry: &PartEntry,
) -> Result<Part> {
    let is_sealed = manifest.sealing.is_some();
    let read = read_part_with(path, files, &manifest.id, is_sealed, entry, |_| ());
    read.map(|(part, ())| part)
}

/// Reads a part as [`read_part`] does, of an attempt that has no manifest yet.
pub(crate) fn read_part_of(
    path: &Path,
    files: &dyn Files,
    id: &str,
    is_sealed: bool,
    entry: &PartEntry,
) -> Result<Part> {
    let read = read_part_with(path, files, id, is_sealed, entry, |_| ());
    read.map(|(part, ())| part)
}

/// Reads a part as [`read_part`] does, and its hash from the same bytes.
pub(crate) fn read_part_hashed(
    path: &Path,
    files: &dyn Files,
    manifest: &Manifest,
    entry: &PartEntry,
) -> Result<(Part, Blake3)> {
    let is_sealed = manifest.sealing.is_some();
    read_part_with(path, files, &manifest.id, is_sealed, entry, Blake3::of)
}

fn read_part_with<T>(
    path: &Path,
    files: &dyn Files,
    id: &str,
    is_sealed: bool,
    entry: &PartEntry,
    look: impl Fn(&[u8]) -> T,
) -> Result<(Part, T)> {
    let corrupt = |detail: String| Error::corrupt(path, &entry.file, detail);
    let file = path.join(&entry.file);
    let text = read_checked(path, files, &entry.file, entry.bytes)?;
    let again = || read_again(&file, files).map_err(Error::storage("read", &file));
    believe(&text, again, |text| {
        let found = Digest::of(text);
        if text.len() as u64 != entry.bytes || found != entry.digest {
            let expected = entry.digest;
            return Err(corrupt(format!(
                "its digest is {found}, it should be {expected}"
            )));
        }
        // An attacker can give any bytes the digest of others.
        if entry
            .sha256
            .is_some_and(|expected| Sha256::of(text) != expected)
        {
            return Err(Error::tampered(
                path,
                &entry.file,
                "its SHA-256 is not the manifest's",
            ));
        }
        let part = Part::parse(text, path, &entry.file, id, entry.rank)?;
        if part.sealed.is_some() != is_sealed {
            let detail = "a checkpoint is sealed with all its parts, or not at all";
            return Err(Error::malformed(path, &entry.file, detail));
        }
        Ok((part, look(text)))
    })
}

/// Reads a small file of the checkpoint, which must exist, be regular and have the recorded size.
pub(crate) fn read_checked(
    path: &Path,
    files: &dyn Files,
    name: &str,
    expected: u64,
) -> Result<Vec<u8>> {
    let file = path.join(name);
    match files.stat_and_read(&file, expected) {
        Ok((found, seen)) if is_as_recorded(&found, expected) => Ok(seen.bytes),
        found => {
            if matches!(&found, Ok((_, seen)) if begins_pointer(&seen.bytes)) {
                return Err(Error::corrupt(path, name, NOT_FETCHED));
            }
            let found = found.map(|(found, _)| found);
            judge_again(path, files, name, expected, found)?;
            files.read(&file).map_err(Error::storage("read", &file))
        }
    }
}

/// Parses a file; reads it once more before it is reported as damaged.
fn believe<T>(
    text: &[u8],
    again: impl Fn() -> Result<Vec<u8>>,
    parse: impl Fn(&[u8]) -> Result<T>,
) -> Result<T> {
    match parse(text) {
        Err(Error::Corrupt { .. }) => parse(&again()?),
        result => result,
    }
}

/// Reads a whole file, bypassing the page cache.
fn read_again(file: &Path, files: &dyn Files) -> io::Result<Vec<u8>> {
    // The page cache would return the same bytes again; the device may not. Remote storage has no
    // page cache.
    if files.has_directories()
        && let Ok(file) = files.open(file, Direct::Off)
    {
        let _ = file.drop_cache();
    }
    files.read(file)
}

/// The sizes of a checkpoint's files. Where each lookup is a request, one list replaces them; a
/// caller without permission to list falls back to lookups.
pub(crate) struct Sizes<'a> {
    path: &'a Path,
    files: &'a dyn Files,
    listed: HashMap<OsString, Option<u64>>,
}

impl<'a> Sizes<'a> {
    /// Reads the sizes of `count` files.
    pub(crate) fn of(path: &'a Path, files: &'a dyn Files, count: usize) -> Sizes<'a> {
        let listed = match count > 1 && !files.has_directories() {
            true => files.list(path).unwrap_or_default(),
            false => Vec::new(),
        };
        let listed = listed.into_iter();
        Sizes {
            path,
            files,
            listed: listed.map(|entry| (entry.name, entry.bytes)).collect(),
        }
    }

    /// Checks a file as [`check_size`] does.
    pub(crate) fn check(&self, entry: &FileEntry) -> Result<()> {
        match self.listed.get(OsStr::new(&entry.name)) == Some(&Some(entry.bytes)) {
            true => Ok(()),
            false => check_size(self.path, self.files, entry),
        }
    }
}

/// Checks that a file of the checkpoint exists, is regular, has the recorded size, and is readable
/// by this process: an unreadable checkpoint must not count as one that justifies deleting others.
pub(crate) fn check_size(path: &Path, files: &dyn Files, entry: &FileEntry) -> Result<()> {
    let file = path.join(&entry.name);
    let found = files.stat_file(&file);
    if matches!(&found, Ok(found) if found.bytes < entry.bytes) && is_pointer(&file, files) {
        return Err(Error::corrupt(path, &entry.name, NOT_FETCHED));
    }
    judge_again(path, files, &entry.name, entry.bytes, found)?;
    Ok(files.check_readable(&file)?)
}

const NOT_FETCHED: &str = "it is a pointer of Git LFS, and the file that it stands for was not \
                           fetched: run `git lfs pull` in its repository";

/// The first bytes of the text that Git LFS leaves in place of a file.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/v1";

fn begins_pointer(text: &[u8]) -> bool {
    text.starts_with(POINTER)
}

fn is_pointer(file: &Path, files: &dyn Files) -> bool {
    let start = files.read_range(file, 0..POINTER.len() as u64);
    start.is_ok_and(|start| begins_pointer(&start))
}

fn is_as_recorded(found: &FileStat, expected: u64) -> bool {
    found.kind == Kind::File && found.bytes == expected
}

/// Checks as [`judge`] does; looks a second time before a file counts as changed or missing.
fn judge_again(
    path: &Path,
    files: &dyn Files,
    name: &str,
    expected: u64,
    found: io::Result<FileStat>,
) -> Result<()> {
    let is_in_doubt = match &found {
        Ok(found) => !is_as_recorded(found, expected),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    let found = match is_in_doubt {
        true => files.stat_again(&path.join(name)),
        false => found,
    };
    judge(path, name, expected, found)
}

/// Checks that the file found is regular and of the recorded size.
fn judge(path: &Path, name: &str, expected: u64, found: io::Result<FileStat>) -> Result<()> {
    match found {
        Ok(found) if found.kind != Kind::File => {
            let flaw = plain::flaw(&found).unwrap_or_default();
            Err(Error::corrupt(path, name, flaw))
        }
        Ok(found) if found.bytes != expected => {
            let found = found.bytes;
            Err(Error::corrupt(
                path,
                name,
                format!("it has {found} bytes instead of {expected}"),
            ))
        }
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(Error::corrupt(path, name, "the file is missing"))
        }
        Err(source) => Err(Error::Storage {
            operation: "stat",
            path: path.join(name),
            source,
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use penstock_io::file_system::Native;

    use super::*;

    fn sum(text: &[u8]) -> Result<u8> {
        match text {
            [sum, bytes @ ..] if bytes.iter().sum::<u8>() == *sum => Ok(*sum),
            _ => Err(Error::corrupt(Path::new("c"), MANIFEST, "the sum is wrong")),
        }
    }

    #[test]
    fn a_transfer_that_went_wrong_once_is_no_damage() {
        let again = || Ok(vec![3, 1, 2]);
        assert_eq!(believe(&[3, 1, 9], again, sum).unwrap(), 3);
    }

    #[test]
    fn what_is_wrong_twice_is_damage_and_what_is_right_is_read_once() {
        let count = Cell::new(0);
        let again = || {
            count.set(count.get() + 1);
            Ok(vec![1])
        };
        let damaged = believe(&[1], again, sum);
        assert!(matches!(damaged, Err(Error::Corrupt { .. })));
        assert_eq!(count.take(), 1);
        assert_eq!(believe(&[0], again, sum).unwrap(), 0);
        assert_eq!(count.take(), 0);
    }

    #[test]
    fn a_second_reading_reads_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "text").unwrap();
        assert_eq!(read_again(file.path(), &Native).unwrap(), b"text");
    }
}
