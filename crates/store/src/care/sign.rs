//! Signing a finished checkpoint: every file is verified, hashed from the same bytes, and listed.

use std::path::Path;
use std::time::Instant;

use crate::care::hashed::Hashed;
use crate::care::verify::verify_hashed;
use crate::commit::signature;
use crate::error::{Error, Result};
use crate::lease::Lease;
use crate::options::Options;
use crate::pipeline::read::OnDamage;
use crate::progress::Progress;
use crate::sign::SigningKey;

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

/// Signs the checkpoint at `path` with each key, durably; a signature of the same form is replaced.
/// Whoever signs vouches for what is there now: sign what you have just saved, or have verified.
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
    signature::put(path, options.file_system.as_ref(), &contents, keys)?;
    Ok(SignReport {
        id: manifest.id,
        signers: keys.iter().map(SigningKey::signer).collect(),
        files: contents.files.len() + usize::from(manifest.sealing.is_some()),
        bytes: report.bytes_checked,
        seconds: begun.elapsed().as_secs_f64(),
    })
}
