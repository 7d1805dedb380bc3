//! Signing a checkpoint in its commit, before it is published.
//!
//! The hashes of shards were made while they were written, so nothing is read but parts and small
//! files. A shard that was there before the save, or that a rank wrote without hashes, is read.
//! Other files that lie in the directory are not the save's: they are not signed.

use std::collections::BTreeMap;

use crate::commit::Attempt;
use crate::commit::signature::{hash_file, ignored};
use crate::error::Result;
use crate::format::description::read_part_hashed;
use crate::format::manifest::Manifest;
use crate::format::name::MANIFEST;
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
        ignored: ignored(&parsed.id, is_sealed, Vec::new()),
    };
    attempt.write_signatures(&contents, keys)
}
