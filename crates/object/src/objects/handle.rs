//! The objects behind the files of this crate: an object that is read, and an upload.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use bytes::Bytes;
use object_store::ObjectMeta;
use object_store::path::Path as Key;
use penstock_io::file::Elsewhere;
use tokio::sync::OnceCell;

use crate::client::BucketClient;
use crate::client::uploads::{Begun, PARTS_MAX, Part, crc32c};
use crate::request_error::RequestError;
use crate::runtime;

/// An object that is read.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) key: Key,
    pub(crate) bytes: u64,
    /// The object's ETag, so that bytes of another object under the same key are refused. The
    /// first response sets it if the object was opened without a request.
    tag: OnceLock<Option<String>>,
}

impl Object {
    /// An object whose metadata was fetched.
    pub(crate) fn of(meta: ObjectMeta) -> Object {
        Object {
            key: meta.location,
            bytes: meta.size,
            tag: OnceLock::from(meta.e_tag),
        }
    }

    /// An object whose size the caller knows.
    pub(crate) fn known(key: Key, bytes: u64) -> Object {
        Object {
            key,
            bytes,
            tag: OnceLock::new(),
        }
    }

    /// The ETag that a response must have, if it is known.
    pub(crate) fn tag(&self) -> Option<String> {
        self.tag.get().cloned().flatten()
    }

    /// Why a response is not of this object, if so. Requests sent before the ETag was known
    /// carried no condition, so their responses are compared with the first one.
    pub(crate) fn flaw(&self, meta: &ObjectMeta, had_condition: bool) -> Option<String> {
        if meta.size != self.bytes {
            let found = meta.size;
            return Some(format!("it has {found} bytes instead of {}", self.bytes));
        }
        let first = self.tag.get_or_init(|| meta.e_tag.clone());
        let is_another = !had_condition && meta.e_tag.is_some() && *first != meta.e_tag;
        is_another.then(|| CHANGED.to_owned())
    }
}

/// The error when another object has the key.
pub(crate) const CHANGED: &str = "another object has its place since it was opened";

impl Elsewhere for Object {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.bytes)
    }
}

/// An object that is being written: a small text in memory, or parts in flight. Dropping it before
/// completion aborts the upload.
///
/// With a size known in advance, the upload completes as soon as its last part has arrived,
/// because some stores then copy all of its bytes; an object of one part is put with a single
/// request.
#[derive(Debug)]
pub(crate) struct Upload {
    pub(crate) key: Key,
    bucket_client: BucketClient,
    /// The multipart upload once it has begun, or why it cannot begin, so that no part tries
    /// again.
    begun: OnceCell<Result<Begun, RequestError>>,
    /// Set once the object is complete; one task at a time completes it.
    completed: OnceCell<()>,
    state: Mutex<UploadState>,
}

#[derive(Debug, Default)]
struct UploadState {
    text: Bytes,
    /// Size of the whole object in bytes, if known in advance.
    bytes: Option<u64>,
    /// The object exists, or its upload is kept for a later process.
    is_kept: bool,
    /// A caller has waited for completion, and it succeeded.
    is_finished: bool,
    /// The file was dropped.
    is_closed: bool,
    /// Why the upload cannot complete any more.
    lost: Option<RequestError>,
    /// Checksums of the parts about to be sent, by offset.
    expected: HashMap<u64, u64>,
    /// The parts that the store has, by offset.
    parts: BTreeMap<u64, Part>,
}

/// The file of an upload, which requests in flight share.
#[derive(Debug)]
pub(crate) struct Written(pub(crate) Arc<Upload>);

impl Drop for Written {
    fn drop(&mut self) {
        self.0.state().is_closed = true;
    }
}

impl Elsewhere for Written {
    fn bytes(&self) -> io::Result<u64> {
        let state = self.0.state();
        let parts = state.parts.values().map(|part| part.bytes);
        Ok(state.text.len() as u64 + parts.sum::<u64>())
    }

    fn expect(&self, offset: u64, crc64nvme: u64) {
        self.0.state().expected.insert(offset, crc64nvme);
    }
}

impl Upload {
    pub(crate) fn new(key: Key, bucket_client: BucketClient) -> Upload {
        Upload {
            key,
            bucket_client,
            begun: OnceCell::new(),
            completed: OnceCell::new(),
            state: Mutex::default(),
        }
    }

    /// An upload that already exists, with the parts that the store has.
    pub(crate) fn resumed(
        key: Key,
        bucket_client: BucketClient,
        id: String,
        parts: Vec<Part>,
        part_bytes: u64,
    ) -> Upload {
        let is_checked = bucket_client.are_checked(&parts);
        let at = |part: Part| (u64::from(part.number - 1) * part_bytes, part);
        let state = UploadState {
            parts: parts.into_iter().map(at).collect(),
            is_kept: true,
            ..UploadState::default()
        };
        Upload {
            key,
            bucket_client,
            begun: OnceCell::from(Ok(Begun { id, is_checked })),
            completed: OnceCell::new(),
            state: Mutex::new(state),
        }
    }

    /// Begins an upload now that is kept when it is dropped.
    pub(crate) async fn lasting(key: Key, bucket_client: BucketClient) -> io::Result<Upload> {
        let begun = bucket_client
            .signed
            .begin(&key, bucket_client.has_checksums)
            .await?;
        let state = UploadState {
            is_kept: true,
            ..UploadState::default()
        };
        Ok(Upload {
            key,
            bucket_client,
            begun: OnceCell::from(Ok(begun)),
            completed: OnceCell::new(),
            state: Mutex::new(state),
        })
    }

    fn state(&self) -> MutexGuard<'_, UploadState> {
        self.state.lock().expect("nothing panics with the lock")
    }

    /// Sets the text.
    pub(crate) fn hold(&self, text: &[u8]) {
        self.state().text = Bytes::copy_from_slice(text);
    }

    /// The text.
    pub(crate) fn text(&self) -> Bytes {
        self.state().text.clone()
    }

    /// Sets the expected bytes of a part that another process has sent; completion compares them.
    pub(crate) fn expect_part(&self, number: u32, bytes: &[u8]) {
        let mut state = self.state();
        let mut parts = state.parts.values_mut();
        if let Some(part) = parts.find(|part| part.number == number) {
            part.crc32c = Some(crc32c(bytes));
        }
    }

    /// Sets the size of the whole object in bytes.
    pub(crate) fn reserve(&self, bytes: u64) {
        self.state().bytes = Some(bytes);
    }

    /// Sends the part at an offset.
    pub(crate) async fn send(
        self: &Arc<Upload>,
        part: usize,
        offset: u64,
        bytes: Bytes,
    ) -> io::Result<()> {
        let number = u32::try_from(part + 1).unwrap_or(u32::MAX);
        if number > PARTS_MAX {
            let detail = format!("an object has at most {PARTS_MAX} parts: make them larger");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, detail));
        }
        let (whole, expected) = {
            let mut state = self.state();
            (state.bytes, state.expected.remove(&offset))
        };
        let BucketClient {
            signed,
            has_checksums,
            ..
        } = &self.bucket_client;
        if offset == 0 && whole == Some(bytes.len() as u64) && !self.begun.initialized() {
            let put = signed.put(&self.key, bytes, *has_checksums, expected);
            let part = put.await?;
            let mut state = self.state();
            state.parts.insert(offset, part);
            state.is_kept = true;
            let _ = self.completed.set(());
            return Ok(());
        }
        let begin = || signed.begin(&self.key, *has_checksums);
        let upload = self.begun.get_or_init(begin).await.as_ref();
        let upload = upload.map_err(RequestError::clone)?;
        let part = signed.put_part(&self.key, upload, number, bytes, expected);
        let part = part.await?;
        let is_whole = {
            let mut state = self.state();
            state.parts.insert(offset, part);
            whole == Some(state.parts.values().map(|part| part.bytes).sum())
        };
        if is_whole {
            let upload = Arc::clone(self);
            // In a task of its own, because the caller of this part waits for its buffer.
            tokio::spawn(async move { upload.complete_early().await });
        }
        Ok(())
    }

    /// Completes the object from its parts, or puts the text if no part was sent.
    pub(crate) async fn finish(&self) -> io::Result<()> {
        if !self.begun.initialized() && !self.completed.initialized() {
            self.bucket_client.put(&self.key, self.text()).await?;
            self.state().is_kept = true;
            return Ok(());
        }
        self.completed.get_or_try_init(|| self.complete()).await?;
        self.state().is_finished = true;
        Ok(())
    }

    async fn complete(&self) -> Result<(), RequestError> {
        let upload = self.begun.get().expect("parts were sent").as_ref();
        let upload = upload.map_err(RequestError::clone)?;
        let parts = self.parts()?;
        if let Some(request_error) = &self.state().lost {
            return Err(request_error.clone());
        }
        let completed = self
            .bucket_client
            .signed
            .complete(&self.key, upload, &parts)
            .await;
        if let Err(request_error) = &completed
            && request_error.is_of_other_bytes()
        {
            self.state().lost = Some(request_error.clone());
        }
        completed?;
        self.state().is_kept = true;
        Ok(())
    }

    /// Completes the upload before a sync asks for it, and deletes the object if its file was
    /// dropped meanwhile.
    async fn complete_early(&self) {
        let completed = self.completed.get_or_try_init(|| self.complete()).await;
        let is_unwanted = {
            let state = self.state();
            state.is_closed && !state.is_finished
        };
        if completed.is_ok() && is_unwanted {
            let _ = self.bucket_client.signed.delete(&self.key).await;
        }
    }

    /// The parts in order, without a gap.
    fn parts(&self) -> Result<Vec<Part>, RequestError> {
        let mut end = 0;
        let mut parts = Vec::new();
        for (offset, part) in &self.state().parts {
            if *offset != end {
                let detail = format!("bytes {end} to {offset} were never uploaded");
                return Err(RequestError::new(io::ErrorKind::Other, detail));
            }
            end += part.bytes;
            parts.push(part.clone());
        }
        Ok(parts)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let is_kept = self.state().is_kept;
        if let (Some(Ok(upload)), false) = (self.begun.take(), is_kept) {
            let (bucket_client, key) = (self.bucket_client.clone(), self.key.clone());
            // Best effort: a later sweep aborts what stays. Spawned because the last reference may
            // be dropped on a thread that must not block.
            if let Ok(handle) = runtime::handle() {
                handle.spawn(async move {
                    let _ = bucket_client.signed.abort(&key, &upload.id).await;
                });
            }
        }
    }
}
