//! Uploads that go on where an earlier process stopped.
//!
//! What was sent already the store itself knows: it is asked, and nothing is written down here. So there is
//! no moment in which a part is there and nobody knows of it, and any process that has the bytes goes on.

use std::io;
use std::path::Path;
use std::sync::Arc;

use object_store::path::Path as Key;
use penstock_io::file::File;

use crate::handle::{Upload, Written};
use crate::kin::Kin;
use crate::objects::Objects;
use crate::provider::Provider;
use crate::refusal::Refusal;
use crate::uploads::Part;

/// A file of an upload, with what the store has of it.
#[derive(Debug)]
pub struct Continued {
    /// What is not there yet is written to it, and a sync ends it. Dropped before that, the upload stays.
    pub file: File,
    /// The parts that are there.
    pub parts: Vec<Part>,
}

impl Objects {
    /// Goes on with the upload of an object, or begins one. An upload with a part that is not as `is_right`
    /// wants it is given up.
    ///
    /// # Errors
    /// That of the store.
    pub fn go_on(
        &self,
        path: &Path,
        is_right: impl Fn(&Part) -> bool + Send + 'static,
    ) -> io::Result<Continued> {
        let key = self.key(path)?;
        let part_bytes = self.part_bytes() as u64;
        let (upload, parts) = self.run(|kin| async move {
            let found = find(&kin, &key, is_right).await?;
            Ok(match found {
                Some((id, parts)) => {
                    let upload = Upload::resumed(key, kin, id, parts.clone(), part_bytes);
                    (upload, parts)
                }
                None => (Upload::lasting(key, kin).await?, Vec::new()),
            })
        })?;
        let written = Written(Arc::new(upload));
        Ok(Continued {
            file: File::elsewhere(path, Arc::new(written)),
            parts,
        })
    }

    /// Whether the store tells the checksums of parts that it has; else somebody has to
    /// [`vouch`](Objects::vouch) for their bytes.
    pub fn tells_checksums(&self) -> bool {
        self.provider() != Provider::Google
    }

    /// Says which bytes a part of an upload that goes on has to have: the end of the upload looks at the
    /// object that was made, and is an error where the store has others.
    pub fn vouch(&self, file: &File, part: &Part, bytes: &[u8]) {
        if let Some(Written(upload)) = file.stands_for() {
            upload.vouch(part.number, bytes);
        }
    }

    /// Whether an object of so many bytes is there, with this checksum where the store knows one of it.
    ///
    /// # Errors
    /// That of the store.
    pub fn has(&self, path: &Path, bytes: u64, crc64nvme: u64) -> io::Result<bool> {
        let key = self.key(path)?;
        self.run(|kin| async move {
            let is_there = kin.signed.is_there(&key, bytes, Some(crc64nvme));
            Ok(is_there.await?)
        })
    }
}

/// The newest upload of a key that has parts, all of them right, with those. The others are given up.
async fn find(
    kin: &Kin,
    key: &Key,
    is_right: impl Fn(&Part) -> bool,
) -> Result<Option<(String, Vec<Part>)>, Refusal> {
    let mut found = None;
    for (id, parts) in kin.signed.uploads_of(key).await? {
        // One without parts does not tell whether it has checksums.
        if found.is_none() && !parts.is_empty() && parts.iter().all(&is_right) {
            found = Some((id, parts));
        } else {
            kin.signed.abort(key, &id).await?;
        }
    }
    Ok(found)
}
