//! Writing the sidecars of a checkpoint, including the index of a group.

use std::borrow::Cow;

use crate::commit::Attempt;
use crate::error::{Error, Result};
use crate::format::description::read_part;
use crate::format::digest::Digest;
use crate::format::index::{INDEX, index};
use crate::format::manifest::{Manifest, SidecarEntry};
use crate::format::name;

/// Sidecars: small files in the directory of a checkpoint, where model loaders look for them.
#[derive(Clone, Debug, Default)]
pub struct Sidecars {
    /// Names and contents.
    pub files: Vec<(String, Vec<u8>)>,
    /// The group to write an index for, if any.
    pub group: Option<String>,
}

impl Sidecars {
    /// Writes the sidecars and the group's index as files of the attempt, and lists them in the
    /// manifest; returns why a requested index was not written. The parts of all ranks must exist.
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
            if !name::is_sidecar(name) {
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
        attempt.write_sidecars(&files)?;
        for (name, text) in files {
            manifest.sidecars.push(SidecarEntry {
                name: name.to_owned(),
                file: name::sidecar_file(attempt.id(), name),
                bytes: text.len() as u64,
                digest: Digest::of(&text),
            });
        }
        Ok(unindexed)
    }
}
