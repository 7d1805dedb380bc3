//! The hashes of all files of a checkpoint, to sign them or to compare them with a signature.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use penstock_io::file_system::Files;

use crate::commit::signature::{Other, hash_file, ignored, others};
use crate::error::{Error, Result};
use crate::format::directory::entries;
use crate::format::manifest::Manifest;
use crate::format::name::MANIFEST;
use crate::load::signed::Signed;
use crate::progress::Progress;
use crate::report::Problem;
use crate::sign::{Blake3, Contents};

/// Hashes of the bytes that a verification has read.
#[derive(Default)]
pub(super) struct Hashed {
    /// The manifest, if it could be read.
    pub(super) manifest: Option<Manifest>,
    /// Hashes of the checkpoint's own files that match their digests, and of others in its
    /// directory.
    pub(super) files: BTreeMap<String, Blake3>,
    /// Names of entries that a signature may leave out: leftovers, directories, signatures.
    ignored: Vec<String>,
    /// Names of entries that cannot be signed, such as symbolic links.
    strange: Vec<String>,
}

impl Hashed {
    /// Hashes the files of the directory that are not the checkpoint's own, such as copies of its
    /// small files.
    pub(super) fn add_others(
        &mut self,
        path: &Path,
        files: &dyn Files,
        progress: &Progress,
    ) -> Result<()> {
        for other in others(path, files, entries(path, files)?) {
            match other {
                Other::Ignored(name) => self.ignored.push(name),
                Other::Strange(name) => self.strange.push(name),
                Other::File(name) => {
                    let (hash, _) = hash_file(&path.join(&name), files, progress)?;
                    self.files.insert(name, hash);
                }
            }
        }
        if let Some(manifest) = self.manifest.as_ref().filter(|m| m.sealing.is_none()) {
            let hash = manifest.hash.expect("it was parsed from a file");
            self.files.insert(MANIFEST.to_owned(), hash);
        }
        self.ignored.retain(|name| !self.files.contains_key(name));
        Ok(())
    }

    /// The contents to sign.
    ///
    /// # Errors
    /// [`Error::Signature`] for an entry that cannot be signed.
    pub(super) fn contents(self, path: &Path, manifest: &Manifest) -> Result<Contents> {
        if let Some(name) = self.strange.first() {
            let detail = "it is no regular file, so it cannot be signed: move it elsewhere";
            return Err(Error::signature(path, name, detail));
        }
        Ok(Contents {
            id: manifest.id.clone(),
            manifest: manifest.hash.expect("it was parsed from a file"),
            ignored: ignored(&manifest.id, manifest.sealing.is_some(), self.ignored),
            files: self.files,
        })
    }

    /// Files that are not the signed ones, and those that no signature covers.
    pub(super) fn differences(&self, signed: &Signed) -> Vec<Problem> {
        let signer = &signed.signer;
        let problem = |file: &str, detail: String| Problem {
            file: file.to_owned(),
            offset: None,
            tensor: None,
            detail,
            is_proven: false,
        };
        let listed = &signed.contents.files;
        let is_ignored: BTreeSet<&String> = signed.contents.ignored.iter().collect();
        let mut problems = Vec::new();
        for (name, hash) in &self.files {
            match listed.get(name) {
                Some(expected) if expected == hash => {}
                Some(_) => {
                    let detail = format!("it is not the file that {signer} signed");
                    problems.push(problem(name, detail));
                }
                None if is_ignored.contains(name) => {}
                None => {
                    let detail = format!("the signature of {signer} does not cover it");
                    problems.push(problem(name, detail));
                }
            }
        }
        let own = ignored(&signed.contents.id, false, Vec::new());
        for name in &self.ignored {
            if !is_ignored.contains(name) && !own.contains(name) {
                let detail = "no signature covers it: `penstock sweep` removes leftovers of saves";
                problems.push(problem(name, detail.to_owned()));
            }
        }
        for name in &self.strange {
            let detail = "it is no regular file, and no signature covers it".to_owned();
            problems.push(problem(name, detail));
        }
        for name in listed.keys() {
            if !self.files.contains_key(name) {
                let detail = format!("{signer} signed it, and it is missing or damaged");
                problems.push(problem(name, detail));
            }
        }
        problems
    }
}
