//! Signing a checkpoint in its commit, before it is published.
//!
//! The hashes of shards were made while they were written, so nothing is read but parts and small
//! files. A shard that was there before the save, or that a rank wrote without hashes, is read.

use std::collections::{BTreeMap, HashSet};

use crate::commit::Attempt;
use crate::commit::signature::{Other, hash_file, ignored, others};
use crate::error::{Error, Result};
use crate::format::description::read_part_hashed;
use crate::format::directory::entries;
use crate::format::manifest::Manifest;
use crate::format::name::{MANIFEST, sidecar_of};
use crate::progress::Progress;
use crate::sign::{Contents, SigningKey};

/// Signs the checkpoint that an attempt becomes with the manifest of this text.
pub(super) fn sign(
    attempt: &mut Attempt,
    manifest: &Manifest,
    text: &[u8],
    keys: &[SigningKey],
) -> Result<()> {
    let path = attempt.path().to_owned();
    let progress = Progress::default();
    let mut hashes = BTreeMap::new();
    let files = attempt.files();
    let hash_of =
        |name: &str| -> Result<_> { Ok(hash_file(&path.join(name), files, &progress)?.0) };
    for entry in &manifest.parts {
        let (part, hash) = read_part_hashed(&path, files, manifest, entry)?;
        hashes.insert(entry.file.clone(), hash);
        for shard in part.files {
            let hash = match &shard.blake3 {
                Some(chunks) => chunks.root(shard.bytes),
                None => hash_of(&shard.name)?,
            };
            hashes.insert(shard.name, hash);
        }
    }
    for entry in &manifest.sidecars {
        // Its copy is not in place yet.
        let hash = hash_of(&entry.file)?;
        hashes.insert(entry.file.clone(), hash);
        hashes.insert(entry.name.clone(), hash);
    }
    let entries = entries(&path, files)?;
    // Copies of a checkpoint that is replaced go with it.
    let replaced: HashSet<String> = entries
        .iter()
        .filter_map(|entry| Some(sidecar_of(entry.name.to_str()?)?.to_owned()))
        .collect();
    let mut found = Vec::new();
    for other in others(&path, files, entries) {
        match other {
            Other::Ignored(name) if hashes.contains_key(&name) => {}
            Other::Ignored(name) => found.push(name),
            Other::File(name) if hashes.contains_key(&name) || replaced.contains(&name) => {}
            Other::File(name) => {
                let hash = hash_of(&name)?;
                hashes.insert(name, hash);
            }
            Other::Strange(name) => {
                let detail = "it is no regular file, so it cannot be signed: move it elsewhere";
                return Err(Error::signature(&path, &name, detail));
            }
        }
    }
    let parsed = Manifest::parse(text, &path)?;
    let manifest_hash = parsed.hash.expect("it was parsed from a text");
    let is_sealed = parsed.sealing.is_some();
    if !is_sealed {
        hashes.insert(MANIFEST.to_owned(), manifest_hash);
    }
    let contents = Contents {
        id: parsed.id.clone(),
        manifest: manifest_hash,
        files: hashes,
        ignored: ignored(&parsed.id, is_sealed, found),
    };
    attempt.write_signatures(&contents, keys)
}
