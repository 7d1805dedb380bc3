//! Resumes uploads that an earlier process began.
//!
//! The store itself is asked which parts it has; nothing is recorded locally. So no part can
//! be stored without being known, and any process with the bytes can resume the upload.

use std::io;
use std::path::Path;
use std::sync::Arc;

use object_store::path::Path as Key;
use penstock_io::file::File;

use super::Objects;
use super::handle::{Upload, Written};
use crate::client::BucketClient;
use crate::client::uploads::Part;
use crate::provider::Provider;
use crate::request_error::RequestError;

/// A file of an upload, with the parts that the store has.
#[derive(Debug)]
pub struct ResumedUpload {
    /// The missing parts are written to it, and a sync completes the upload. Dropping it earlier
    /// keeps the upload.
    pub file: File,
    /// The parts that the store has.
    pub parts: Vec<Part>,
}

impl Objects {
    /// Resumes the upload of an object, or begins one. An upload with a part that `is_right`
    /// rejects is aborted.
    ///
    /// # Errors
    /// The store's error.
    pub fn resume_upload(
        &self,
        path: &Path,
        is_right: impl Fn(&Part) -> bool + Send + 'static,
    ) -> io::Result<ResumedUpload> {
        let key = self.key(path)?;
        let part_bytes = self.part_bytes() as u64;
        let (upload, parts) = self.run(|bucket_client| async move {
            let found = find(&bucket_client, &key, is_right).await?;
            Ok(match found {
                Some((id, parts)) => {
                    let upload = Upload::resumed(key, bucket_client, id, parts.clone(), part_bytes);
                    (upload, parts)
                }
                None => (Upload::lasting(key, bucket_client).await?, Vec::new()),
            })
        })?;
        let written = Written(Arc::new(upload));
        Ok(ResumedUpload {
            file: File::elsewhere(path, Arc::new(written)),
            parts,
        })
    }

    /// Whether the store reports the checksums of its parts. If not, the caller passes their bytes
    /// to [`expect_part`](Objects::expect_part).
    pub fn reports_checksums(&self) -> bool {
        self.provider() != Provider::Google
    }

    /// Sets the bytes that a part of a resumed upload must have. Completing the upload compares
    /// them with the object that the store made, and fails if they differ.
    pub fn expect_part(&self, file: &File, part: &Part, bytes: &[u8]) {
        if let Some(Written(upload)) = file.stands_for() {
            upload.expect_part(part.number, bytes);
        }
    }

    /// Whether an object of `bytes` bytes exists, with this checksum if the store knows one.
    ///
    /// # Errors
    /// The store's error.
    pub fn has(&self, path: &Path, bytes: u64, crc64nvme: u64) -> io::Result<bool> {
        let key = self.key(path)?;
        self.run(|bucket_client| async move {
            let is_there = bucket_client.signed.is_there(&key, bytes, Some(crc64nvme));
            Ok(is_there.await?)
        })
    }
}

/// Finds the newest upload of a key whose parts all pass `is_right`; aborts the others and those
/// without parts.
async fn find(
    bucket_client: &BucketClient,
    key: &Key,
    is_right: impl Fn(&Part) -> bool,
) -> Result<Option<(String, Vec<Part>)>, RequestError> {
    let mut found = None;
    for (id, parts) in bucket_client.signed.uploads_of(key).await? {
        // An upload without parts does not show whether it has checksums.
        if found.is_none() && !parts.is_empty() && parts.iter().all(&is_right) {
            found = Some((id, parts));
        } else {
            bucket_client.signed.abort(key, &id).await?;
        }
    }
    Ok(found)
}
