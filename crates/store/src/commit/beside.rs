//! Small files that lie in the directory of a checkpoint under names of their own.
//!
//! What readers of models look for (`model.safetensors.index.json`, `config.json`, …) is called the
//! same in every checkpoint. So it is there twice: as a file of the attempt, which the manifest
//! vouches for, and as a copy under its own name, which nothing depends on and anybody may edit.
//!
//! A copy is put in its place when all that it speaks of is durable: before the manifest, so that
//! whoever finds that finds the copy, or, where another checkpoint is replaced, right after it, as
//! until then the old copies are those of the checkpoint that is there. A crash in between leaves
//! those, with the shards that they name; whoever removes these puts the new copies in place first
//! ([`settle`]).

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use penstock_io::file_system::{Change, Entry, FileSystem};

use super::files::discard;
use crate::error::{Error, Result};
use crate::format::name::{self, beside_of};

/// Puts copies of an attempt's files in their places.
pub(super) fn place<'a>(
    path: &Path,
    file_system: &dyn FileSystem,
    id: &str,
    names: impl Iterator<Item = &'a str>,
) -> Result<()> {
    for name in names {
        let file = path.join(name::beside_file(id, name));
        let text = file_system.files().read(&file);
        let text = text.map_err(Error::storage("read", &file))?;
        put(path, file_system, id, name, &text)?;
    }
    Ok(())
}

fn put(path: &Path, file_system: &dyn FileSystem, id: &str, name: &str, text: &[u8]) -> Result<()> {
    let (temporary, copy) = (path.join(name::temporary_copy(id)), path.join(name));
    if file_system.files().has_directories() {
        // Of whoever died here before. Elsewhere it has no name before it has its own.
        discard(&temporary, file_system)?;
    }
    let file = file_system.create_temporary(&temporary)?;
    file_system.change(Change::Write(&file, text))?;
    file_system.change(Change::SyncData(&file))?;
    drop(file);
    let (from, to) = (temporary.as_path(), copy.as_path());
    Ok(file_system.change(Change::Rename { from, to })?)
}

/// What is there of one name.
#[derive(Default)]
struct Copies {
    /// Contents of the files that go.
    going: Vec<Vec<u8>>,
    /// The attempt of one that stays, and its contents.
    staying: Option<(String, Vec<u8>)>,
}

/// Does to the copies what becomes of the attempt files among `entries` that `is_going` picks, before those are
/// removed: a copy of one goes too, or gives way to that of one that stays. What somebody has edited
/// stays as it is.
pub(crate) fn settle(
    path: &Path,
    file_system: &dyn FileSystem,
    entries: &[Entry],
    is_going: impl Fn(&str) -> bool,
) -> Result<()> {
    let mut all: BTreeMap<String, Copies> = BTreeMap::new();
    let files = file_system.files();
    for file in entries.iter().filter_map(|entry| entry.name.to_str()) {
        let (Some(name), Some(id)) = (beside_of(file), name::attempt_of(file)) else {
            continue;
        };
        // Somebody else may remove it at the same time, and what cannot be read has no copy here.
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
            // A directory, say: somebody's own.
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
        // Without its file, nobody would know any more whose a copy is.
        file_system.change(Change::SyncDirectory(path))?;
    }
    Ok(())
}
