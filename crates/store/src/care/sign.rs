//! Signing a finished checkpoint: every file is verified, hashed from the same bytes, and listed.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use penstock_io::file_system::Files;

use crate::care::hashed::Hashed;
use crate::care::verify::verify_hashed;
use crate::commit::signature::{self, hash_file};
use crate::error::{Error, Result};
use crate::lease::Lease;
use crate::options::Options;
use crate::pipeline::read::OnDamage;
use crate::progress::Progress;
use crate::sign::{Contents, Sha256s, SignatureForm, SigningKey};

/// The result of signing.
#[derive(Clone, Debug)]
pub struct SignReport {
    /// Identity of the checkpoint.
    pub id: String,
    /// The keys that signed, in public.
    pub signers: Vec<String>,
    /// Number of files that the signatures cover.
    pub files: usize,
    /// Bytes that were read and hashed.
    pub bytes: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Files that are read at the same time: SHA-256 takes a core for each 2 GB/s.
const READERS_MAX: usize = 8;

/// Signs the checkpoint at `path` with each key, durably; a signature of the same form is replaced.
/// A signature vouches for the bytes that are there now: sign what was just saved or verified.
///
/// # Errors
/// [`Error::Corrupt`] if the checkpoint is damaged, [`Error::Signature`] if its directory holds
/// something that cannot be signed, and those of an open.
pub fn sign(
    path: &Path,
    keys: &[SigningKey],
    options: &Options,
    progress: &Progress,
) -> Result<SignReport> {
    let begun = Instant::now();
    let files = options.file_system.files();
    let _lease = Lease::share_to_read(path, files);
    let mut hashed = Hashed::default();
    let list = OnDamage::List;
    let report = verify_hashed(path, list, options, progress, Some(&mut hashed))?;
    if let Some(problem) = report.problems.into_iter().next() {
        return Err(Error::Corrupt {
            path: path.to_owned(),
            file: Some(problem.file),
            offset: problem.offset,
            tensor: problem.tensor,
            detail: problem.detail,
        });
    }
    hashed.add_others(path, files, progress)?;
    let manifest = hashed
        .manifest
        .take()
        .expect("it was read without problems");
    let contents = hashed.contents(path, &manifest)?;
    let needs_sha256 = keys.iter().any(|key| key.form() == SignatureForm::Bundle);
    let sha256s = needs_sha256.then(|| sha256s(path, files, &contents, progress));
    let sha256s = sha256s.transpose()?;
    let file_system = options.file_system.as_ref();
    signature::put(path, file_system, &contents, sha256s.as_ref(), keys)?;
    Ok(SignReport {
        id: manifest.id,
        signers: keys.iter().map(SigningKey::signer).collect(),
        files: contents.files.len() + usize::from(manifest.sealing.is_some()),
        bytes: report.bytes_checked,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// The SHA-256 of all files, which a bundle lists. It has no tree, so each file is read once more
/// from its begin to its end; the same bytes must have the BLAKE3 that was found before.
fn sha256s(
    path: &Path,
    files: &dyn Files,
    contents: &Contents,
    progress: &Progress,
) -> Result<Sha256s> {
    let names: Vec<_> = contents.files.iter().collect();
    let readers = thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let read = || -> Result<Vec<_>> {
        let mut hashes = Vec::new();
        while let Some(&(name, expected)) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (found, sha256) = hash_file(&path.join(name), files, progress)?;
            if found != *expected {
                let detail = "it was changed while it was signed: sign it again";
                return Err(Error::signature(path, name, detail));
            }
            hashes.push((name.clone(), sha256));
        }
        Ok(hashes)
    };
    let hashes: Vec<Result<Vec<_>>> = thread::scope(|scope| {
        let readers = readers.min(READERS_MAX).min(names.len());
        let readers: Vec<_> = (0..readers).map(|_| scope.spawn(read)).collect();
        let join = |reader: thread::ScopedJoinHandle<'_, _>| reader.join().expect("it reads");
        readers.into_iter().map(join).collect()
    });
    let hashes = hashes.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(hashes.into_iter().flatten().collect())
}
