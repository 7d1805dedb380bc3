//! What the files of this crate stand for.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use object_store::multipart::PartId;
use object_store::path::Path as Key;
use object_store::{MultipartId, ObjectStoreExt, PutPayload};
use penstock_io::file::Elsewhere;
use tokio::sync::OnceCell;

use crate::kin::{Kin, kind_of};
use crate::runtime;

/// An object that is read.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) key: Key,
    pub(crate) bytes: u64,
    /// Which one it was when it was opened: another one by its name is none of its bytes.
    pub(crate) tag: Option<String>,
}

impl Elsewhere for Object {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.bytes)
    }
}

/// An object that is written: a text in memory, or parts on their way. Dropped before it is there, it
/// gives up what the store has of it.
#[derive(Debug)]
pub(crate) struct Upload {
    pub(crate) key: Key,
    kin: Kin,
    /// The upload of parts, once there is one.
    id: OnceCell<MultipartId>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    text: Bytes,
    is_there: bool,
    /// What the store calls the parts that it has, by their offsets, and their lengths.
    parts: BTreeMap<u64, (String, u64)>,
}

/// The file of an upload, which requests under way have a share in.
#[derive(Debug)]
pub(crate) struct Written(pub(crate) Arc<Upload>);

impl Elsewhere for Written {
    fn bytes(&self) -> io::Result<u64> {
        let state = self.0.state();
        let parts = state.parts.values().map(|(_, bytes)| bytes);
        Ok(state.text.len() as u64 + parts.sum::<u64>())
    }
}

impl Upload {
    pub(crate) fn new(key: Key, kin: Kin) -> Upload {
        Upload {
            key,
            kin,
            id: OnceCell::new(),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics with the lock")
    }

    /// Holds a text.
    pub(crate) fn hold(&self, text: &[u8]) {
        self.state().text = Bytes::copy_from_slice(text);
    }

    /// The text that it holds.
    pub(crate) fn text(&self) -> Bytes {
        self.state().text.clone()
    }

    /// Sends a part.
    pub(crate) async fn send(&self, part: usize, offset: u64, bytes: Bytes) -> io::Result<()> {
        let (uploads, len) = (&self.kin.uploads, bytes.len() as u64);
        let id = self
            .id
            .get_or_try_init(|| uploads.create_multipart(&self.key));
        let id = id.await.map_err(kind_of)?;
        let sent = uploads.put_part(&self.key, id, part, bytes.into()).await;
        let content_id = sent.map_err(kind_of)?.content_id;
        self.state().parts.insert(offset, (content_id, len));
        Ok(())
    }

    /// Makes an object of what was sent, or of the text where nothing was.
    pub(crate) async fn finish(&self) -> io::Result<()> {
        let done = match self.id.get() {
            None => {
                let text = PutPayload::from(self.text());
                self.kin.store.put(&self.key, text).await
            }
            Some(id) => {
                let parts = self.parts()?;
                let uploads = &self.kin.uploads;
                uploads.complete_multipart(&self.key, id, parts).await
            }
        };
        done.map_err(kind_of)?;
        self.state().is_there = true;
        Ok(())
    }

    /// What the store calls the parts, in order.
    fn parts(&self) -> io::Result<Vec<PartId>> {
        let mut end = 0;
        let mut ids = Vec::new();
        for (offset, (content_id, bytes)) in &self.state().parts {
            if *offset != end {
                let detail = format!("bytes {end} to {offset} were never uploaded");
                return Err(io::Error::other(detail));
            }
            end += bytes;
            let content_id = content_id.clone();
            ids.push(PartId { content_id });
        }
        Ok(ids)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let is_there = self.state().is_there;
        if let (Some(id), false) = (self.id.take(), is_there) {
            let (kin, key) = (self.kin.clone(), self.key.clone());
            // Best effort: a sweep finds what stays. The last reference may go on a thread that must
            // not wait.
            if let Ok(handle) = runtime::handle() {
                handle.spawn(async move {
                    let _ = kin.uploads.abort_multipart(&key, &id).await;
                });
            }
        }
    }
}
