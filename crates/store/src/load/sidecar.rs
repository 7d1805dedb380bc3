//! Sidecars (small files of a checkpoint), read and checked against their digests.

use std::path::Path;

use penstock_io::file_system::Files;

use crate::error::{Error, Result};
use crate::format::description::read_checked;
use crate::format::digest::Digest;
use crate::format::manifest::SidecarEntry;

/// The bytes of one sidecar, checked against its digest.
pub(crate) fn read(path: &Path, files: &dyn Files, entry: &SidecarEntry) -> Result<Vec<u8>> {
    read_as(path, files, &entry.file, entry)
}

/// Reads a sidecar as [`read`] does; if it is damaged, returns its copy, provided that nobody has
/// edited the copy.
pub(crate) fn read_either(path: &Path, files: &dyn Files, entry: &SidecarEntry) -> Result<Vec<u8>> {
    read(path, files, entry)
        .or_else(|error| read_as(path, files, &entry.name, entry).map_err(|_| error))
}

fn read_as(path: &Path, files: &dyn Files, name: &str, entry: &SidecarEntry) -> Result<Vec<u8>> {
    let text = read_checked(path, files, name, entry.bytes)?;
    let (found, expected) = (Digest::of(&text), entry.digest);
    if found == expected {
        return Ok(text);
    }
    let detail = format!("its digest is {found}, it should be {expected}");
    Err(Error::corrupt(path, name, detail))
}
