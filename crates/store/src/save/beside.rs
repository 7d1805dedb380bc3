//! Small files that go with a checkpoint, and the index of a group among them.

use std::borrow::Cow;

use crate::commit::Attempt;
use crate::error::{Error, Result};
use crate::format::description::read_part;
use crate::format::digest::Digest;
use crate::format::index::{INDEX, index};
use crate::format::manifest::{BesideEntry, Manifest};
use crate::format::name;

/// Small files in the directory of a checkpoint, which readers of models look for there.
#[derive(Clone, Debug, Default)]
pub struct Beside {
    /// Their names and contents.
    pub files: Vec<(String, Vec<u8>)>,
    /// The group of which there is an index, if there is one.
    pub group: Option<String>,
}

impl Beside {
    /// Writes them, and the index of the group, as files of the attempt, which the manifest is to list;
    /// tells why there is no index, if one was asked for. The parts of all ranks are there.
    pub(super) fn write(
        &self,
        manifest: &mut Manifest,
        attempt: &mut Attempt,
    ) -> Result<Option<String>> {
        let unsupported = |key: &str, detail: String| Error::Unsupported {
            key: key.to_owned(),
            detail,
        };
        let mut files: Vec<(&str, Cow<'_, [u8]>)> = Vec::new();
        for (name, text) in &self.files {
            if !name::is_beside(name) {
                let detail = "is no name that a file may have beside the shards".to_owned();
                return Err(unsupported(name, detail));
            }
            files.push((name, Cow::Borrowed(text)));
        }
        let mut unindexed = None;
        if let Some(group) = &self.group {
            let read = |entry| read_part(attempt.path(), attempt.files(), manifest, entry);
            let parts = manifest
                .parts
                .iter()
                .map(read)
                .collect::<Result<Vec<_>>>()?;
            let index = index(&parts, group);
            let index = index.map_err(|detail| unsupported("groups", detail))?;
            match index {
                Ok(text) => files.push((INDEX, Cow::Owned(text))),
                Err(reason) => unindexed = Some(reason),
            }
        }
        attempt.write_beside(&files)?;
        for (name, text) in files {
            manifest.beside.push(BesideEntry {
                name: name.to_owned(),
                file: name::beside_file(attempt.id(), name),
                bytes: text.len() as u64,
                digest: Digest::of(&text),
            });
        }
        Ok(unindexed)
    }
}
