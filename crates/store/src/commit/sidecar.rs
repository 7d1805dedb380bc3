//! Sidecars: small files in a checkpoint's directory that also exist under fixed names.
//!
//! Programs that load models look for fixed names (`model.safetensors.index.json`, `config.json`,
//! …). So each sidecar exists twice: as a file of the attempt, whose digest is in the manifest, and
//! as a copy under the fixed name, which nothing depends on and anybody may edit.
//!
//! A copy is put in place once everything that it refers to is durable: before the manifest, so
//! that a reader of the manifest finds the copy too, or, when another checkpoint is replaced, right
//! after it, since the old copies belong to the checkpoint that is still current. A crash in
//! between leaves the old copies together with the shards that they name; a later removal of those
//! shards puts the new copies in place first ([`reconcile`]).

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use penstock_io::file_system::{Change, Entry, FileSystem};

use super::files::discard;
use crate::error::{Error, Result};
use crate::format::name::{self, sidecar_of};

/// Puts copies of an attempt's sidecars in place.
pub(super) fn place<'a>(
    path: &Path,
    file_system: &dyn FileSystem,
    id: &str,
    names: impl Iterator<Item = &'a str>,
) -> Result<()> {
    for name in names {
        let file = path.join(name::sidecar_file(id, name));
        let text = file_system.files().read(&file);
        let text = text.map_err(Error::storage("read", &file))?;
        put(path, file_system, id, name, &text)?;
    }
    Ok(())
}

fn put(path: &Path, file_system: &dyn FileSystem, id: &str, name: &str, text: &[u8]) -> Result<()> {
    let (temporary, copy) = (path.join(name::temporary_copy(id)), path.join(name));
    if file_system.files().has_directories() {
        // Left by a save that died. On storage without directories a temporary file is never
        // visible.
        discard(&temporary, file_system)?;
    }
    let file = file_system.create_temporary(&temporary)?;
    file_system.change(Change::Write(&file, text))?;
    file_system.change(Change::SyncData(&file))?;
    drop(file);
    let (from, to) = (temporary.as_path(), copy.as_path());
    Ok(file_system.change(Change::Rename { from, to })?)
}

/// The contents that a copy of one name can have.
#[derive(Default)]
struct Copies {
    /// Contents of the sidecars about to be removed.
    going: Vec<Vec<u8>>,
    /// The attempt and contents of one that remains.
    staying: Option<(String, Vec<u8>)>,
}

/// Updates the copies before the sidecars among `entries` that `is_going` selects are removed: each
/// copy of one is removed too, or replaced by a copy of a sidecar that remains. Copies edited by
/// users stay.
pub(crate) fn reconcile(
    path: &Path,
    file_system: &dyn FileSystem,
    entries: &[Entry],
    is_going: impl Fn(&str) -> bool,
) -> Result<()> {
    let mut all: BTreeMap<String, Copies> = BTreeMap::new();
    let files = file_system.files();
    for file in entries.iter().filter_map(|entry| entry.name.to_str()) {
        let (Some(name), Some(id)) = (sidecar_of(file), name::attempt_of(file)) else {
            continue;
        };
        // Somebody else may remove it meanwhile, and an unreadable sidecar has no copy here.
        let Ok(text) = files.read(&path.join(file)) else {
            continue;
        };
        let copies = all.entry(name.to_owned()).or_default();
        match is_going(file) {
            true => copies.going.push(text),
            false => copies.staying = Some((id.to_owned(), text)),
        }
    }
    let mut is_changed = false;
    for (name, copies) in all {
        let copy = path.join(&name);
        let found = match files.read(&copy) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            // Not a readable file, for example a user's directory.
            Err(_) => continue,
        };
        let is_free = found
            .as_ref()
            .is_none_or(|text| copies.going.contains(text));
        match &copies.staying {
            Some((_, text)) if found.as_ref() == Some(text) => {}
            Some((id, text)) if is_free => {
                put(path, file_system, id, &name, text)?;
                is_changed = true;
            }
            None if is_free && found.is_some() => {
                discard(&copy, file_system)?;
                is_changed = true;
            }
            _ => {}
        }
    }
    if is_changed {
        // Once the sidecars are gone, nothing shows which attempt a copy belongs to.
        file_system.change(Change::SyncDirectory(path))?;
    }
    Ok(())
}
