//! The signature of a checkpoint: found beside its manifest, and checked.
//!
//! A signature is a bundle, or a statement with an ssh signature; one that is accepted suffices. So
//! whoever writes to the storage can add a wrong one, and cannot hide a right one.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

use penstock_io::file_system::Files;

use crate::error::{Error, Result};
use crate::format::description::MANIFEST_BYTES_MAX;
use crate::format::manifest::{Manifest, SidecarEntry};
use crate::format::name::{self, MANIFEST};
use crate::format::part::FileEntry;
use crate::format::plain;
use crate::sign::{Blake3, Contents, Hashes, SignatureFlaw, Signers, Statement};

/// The contents of a checkpoint as somebody who is trusted has signed them.
#[derive(Debug)]
pub(crate) struct Signed {
    pub(crate) contents: Contents,
    /// The key that signed, in public.
    pub(crate) signer: String,
}

impl Signed {
    /// Finds the signature of the checkpoint with this manifest by one of the keys.
    ///
    /// # Errors
    /// [`Error::NotSigned`] if there is none at all, [`Error::Signature`] if none is accepted.
    pub(crate) fn find(
        path: &Path,
        files: &dyn Files,
        manifest: &Manifest,
        signers: &Signers,
    ) -> Result<Signed> {
        let id = &manifest.id;
        let mut flaws: Vec<(String, String)> = Vec::new();
        let names = name::signature_files(id);
        let mut texts = [None, None, None];
        for (name, text) in names.iter().zip(&mut texts) {
            match read(path, files, name) {
                // An entry that is no file hides no signature of the other kind.
                Err(Error::Signature { detail, .. }) => flaws.push((name.clone(), detail)),
                found => *text = found?,
            }
        }
        let ([bundle, _, signature], [bundle_text, statement, signature_text]) = (names, texts);
        if let Some(text) = bundle_text {
            match signers.verify_bundle(&text) {
                Ok((statement, signer)) => match accept(manifest, &statement, signer) {
                    Ok(signed) => return Ok(signed),
                    Err(detail) => flaws.push((bundle, detail)),
                },
                Err(flaw) => flaws.push((bundle, flaw.to_string())),
            }
        }
        if let Some(text) = signature_text {
            let statement = statement.unwrap_or_default();
            let verified = signers.verify_ssh(&statement, &text);
            let found = verified
                .map_err(|flaw: SignatureFlaw| flaw.to_string())
                .and_then(|signer| accept(manifest, &statement, signer));
            match found {
                Ok(signed) => return Ok(signed),
                Err(detail) => flaws.push((signature, detail)),
            }
        }
        Err(match flaws.as_slice() {
            [] => Error::NotSigned {
                path: path.to_owned(),
            },
            [(file, detail)] => Error::signature(path, file, detail),
            [(file, detail), (other, more), ..] => {
                Error::signature(path, file, format!("{detail}; {other}: {more}"))
            }
        })
    }

    /// Checks the hash of a file of the checkpoint.
    ///
    /// # Errors
    /// [`Error::Signature`] if it is not the signed one.
    pub(crate) fn check(&self, path: &Path, file: &str, found: Blake3) -> Result<()> {
        match self.hash_of(path, file)? == found {
            true => Ok(()),
            false => Err(self.other(path, file)),
        }
    }

    /// The signed hash of a file of the checkpoint.
    pub(crate) fn hash_of(&self, path: &Path, file: &str) -> Result<Blake3> {
        let signer = &self.signer;
        let hash = self.contents.files.get(file).copied();
        hash.ok_or_else(|| {
            Error::signature(
                path,
                file,
                format!("the signature of {signer} does not cover it"),
            )
        })
    }

    /// The error for a file with other bytes.
    pub(crate) fn other(&self, path: &Path, file: &str) -> Error {
        let signer = &self.signer;
        Error::signature(
            path,
            file,
            format!("it is not the file that {signer} signed"),
        )
    }
}

/// The signed hashes of the shards, in the order of the merged part.
#[derive(Debug)]
pub(crate) struct SignedShards {
    /// The key that signed, in public.
    pub(crate) signer: String,
    pub(crate) files: Vec<Blake3>,
    /// Hashes of the chunks of each shard, once they are known.
    pub(crate) chunks: Vec<OnceLock<Hashes>>,
    /// Hashes of the small files, by the names of their originals.
    sidecars: HashMap<String, Blake3>,
}

impl SignedShards {
    /// The hashes that a signature lists for these shards.
    ///
    /// # Errors
    /// [`Error::Signature`] if it does not cover one, or a part's hashes are not those of it.
    pub(crate) fn of(
        path: &Path,
        signed: Signed,
        shards: &[FileEntry],
        sidecars: &[SidecarEntry],
    ) -> Result<SignedShards> {
        let mut files = Vec::with_capacity(shards.len());
        let mut chunks = Vec::with_capacity(shards.len());
        for shard in shards {
            let hash = signed.hash_of(path, &shard.name)?;
            let known = OnceLock::new();
            if let Some(hashes) = &shard.blake3 {
                if hashes.root(shard.bytes) != hash {
                    return Err(signed.other(path, &shard.name));
                }
                known.set(hashes.clone()).expect("it is new");
            }
            files.push(hash);
            chunks.push(known);
        }
        let named = |entry: &SidecarEntry| {
            let hash = signed.contents.files.get(&entry.file).copied()?;
            Some((entry.file.clone(), hash))
        };
        Ok(SignedShards {
            sidecars: sidecars.iter().filter_map(named).collect(),
            signer: signed.signer,
            files,
            chunks,
        })
    }

    /// Checks the content of a small file.
    ///
    /// # Errors
    /// [`Error::Signature`] if it is not the signed one.
    pub(crate) fn check_sidecar(&self, path: &Path, file: &str, text: &[u8]) -> Result<()> {
        if self.sidecars.get(file) == Some(&Blake3::of(text)) {
            return Ok(());
        }
        let signer = &self.signer;
        let detail = format!("it is not the file that {signer} signed");
        Err(Error::signature(path, file, detail))
    }
}

/// Checks that a statement is about the checkpoint with this manifest.
fn accept(
    manifest: &Manifest,
    statement: &[u8],
    signer: String,
) -> std::result::Result<Signed, String> {
    let contents = Statement::parse(statement)?;
    if contents.id != manifest.id {
        return Err(format!("{signer} signed another checkpoint with it"));
    }
    if Some(contents.manifest) != manifest.hash {
        return Err(format!("{MANIFEST} is not the one that {signer} signed"));
    }
    Ok(Signed { contents, signer })
}

/// The content of a file of a signature; `None` if it does not exist.
fn read(path: &Path, files: &dyn Files, name: &str) -> Result<Option<Vec<u8>>> {
    let file = path.join(name);
    match files.stat_and_read(&file, MANIFEST_BYTES_MAX) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::storage("read", &file)(source)),
        Ok((found, seen)) => match plain::flaw(&found) {
            Some(flaw) => Err(Error::signature(path, name, flaw)),
            None if found.bytes > MANIFEST_BYTES_MAX => {
                let detail = format!("{} bytes are too many for a signature", found.bytes);
                Err(Error::signature(path, name, detail))
            }
            None => Ok(Some(seen.bytes)),
        },
    }
}
