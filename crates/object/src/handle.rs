//! What the files of this crate stand for.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use bytes::Bytes;
use object_store::ObjectMeta;
use object_store::path::Path as Key;
use penstock_io::file::Elsewhere;
use tokio::sync::OnceCell;

use crate::kin::Kin;
use crate::refusal::Refusal;
use crate::runtime;
use crate::uploads::{Begun, PARTS_MAX, Part, crc32c};

/// An object that is read.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) key: Key,
    pub(crate) bytes: u64,
    /// Which one it is, once that is known: another one by its name is none of its bytes. Where nobody
    /// looked at it when it was opened, the answer that comes first tells.
    tag: OnceLock<Option<String>>,
}

impl Object {
    /// One that was looked at.
    pub(crate) fn of(meta: ObjectMeta) -> Object {
        Object {
            key: meta.location,
            bytes: meta.size,
            tag: OnceLock::from(meta.e_tag),
        }
    }

    /// One that somebody knows the length of.
    pub(crate) fn known(key: Key, bytes: u64) -> Object {
        Object {
            key,
            bytes,
            tag: OnceLock::new(),
        }
    }

    /// The tag that an object has to have to be this one, where that is known.
    pub(crate) fn tag(&self) -> Option<String> {
        self.tag.get().cloned().flatten()
    }

    /// Why an answer is none of this object, if it is none. Those to requests that were under way together
    /// when its tag was not known had no condition, so each is compared with the one that came first.
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

/// Why what is there by an object's name is not that object.
pub(crate) const CHANGED: &str = "another object has its place since it was opened";

impl Elsewhere for Object {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.bytes)
    }
}

/// An object that is written: a text in memory, or parts on their way. Dropped before it is there, it
/// gives up what the store has of it.
///
/// Of one whose size is known beforehand the end begins when its last part is there, as some stores then
/// copy all of its bytes; and where one part is all of it, it is put at once.
#[derive(Debug)]
pub(crate) struct Upload {
    pub(crate) key: Key,
    kin: Kin,
    /// The upload of parts, once there is one, or why there can be none: each part would ask again.
    begun: OnceCell<Result<Begun, Refusal>>,
    /// That its end has come; one at a time asks for that.
    completed: OnceCell<()>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    text: Bytes,
    /// Bytes that it will have, where that is known beforehand.
    bytes: Option<u64>,
    /// The object is there, or what the store has of it stays for somebody else.
    is_kept: bool,
    /// Somebody has waited for the end, and it was a good one.
    is_finished: bool,
    /// Nobody has its file any more.
    is_closed: bool,
    /// Why nothing is to become of it any more.
    lost: Option<Refusal>,
    /// The checksums of parts that are about to be sent, by their offsets.
    expected: HashMap<u64, u64>,
    /// The parts that the store has, by their offsets.
    parts: BTreeMap<u64, Part>,
}

/// The file of an upload, which requests under way have a share in.
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
    pub(crate) fn new(key: Key, kin: Kin) -> Upload {
        Upload {
            key,
            kin,
            begun: OnceCell::new(),
            completed: OnceCell::new(),
            state: Mutex::default(),
        }
    }

    /// One that somebody has begun, with the parts that the store has.
    pub(crate) fn resumed(
        key: Key,
        kin: Kin,
        id: String,
        parts: Vec<Part>,
        part_bytes: u64,
    ) -> Upload {
        let is_checked = kin.are_checked(&parts);
        let at = |part: Part| (u64::from(part.number - 1) * part_bytes, part);
        let state = State {
            parts: parts.into_iter().map(at).collect(),
            is_kept: true,
            ..State::default()
        };
        Upload {
            key,
            kin,
            begun: OnceCell::from(Ok(Begun { id, is_checked })),
            completed: OnceCell::new(),
            state: Mutex::new(state),
        }
    }

    /// One that is begun at once, and stays when it is dropped.
    pub(crate) async fn lasting(key: Key, kin: Kin) -> io::Result<Upload> {
        let begun = kin.signed.begin(&key, kin.has_checksums).await?;
        let state = State {
            is_kept: true,
            ..State::default()
        };
        Ok(Upload {
            key,
            kin,
            begun: OnceCell::from(Ok(begun)),
            completed: OnceCell::new(),
            state: Mutex::new(state),
        })
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

    /// Has the end of the upload look for these bytes in a part that somebody else has sent.
    pub(crate) fn vouch(&self, number: u32, bytes: &[u8]) {
        let mut state = self.state();
        let mut parts = state.parts.values_mut();
        if let Some(part) = parts.find(|part| part.number == number) {
            part.crc32c = Some(crc32c(bytes));
        }
    }

    /// Has so many bytes sent, and no more.
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
        let Kin {
            signed,
            has_checksums,
            ..
        } = &self.kin;
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
        let upload = upload.map_err(Refusal::clone)?;
        let part = signed.put_part(&self.key, upload, number, bytes, expected);
        let part = part.await?;
        let is_whole = {
            let mut state = self.state();
            state.parts.insert(offset, part);
            whole == Some(state.parts.values().map(|part| part.bytes).sum())
        };
        if is_whole {
            let upload = Arc::clone(self);
            // Not here: whoever waits for this part wants its memory back.
            tokio::spawn(async move { upload.complete_early().await });
        }
        Ok(())
    }

    /// Makes an object of what was sent, or of the text where nothing was.
    pub(crate) async fn finish(&self) -> io::Result<()> {
        if !self.begun.initialized() && !self.completed.initialized() {
            self.kin.put(&self.key, self.text()).await?;
            self.state().is_kept = true;
            return Ok(());
        }
        self.completed.get_or_try_init(|| self.complete()).await?;
        self.state().is_finished = true;
        Ok(())
    }

    async fn complete(&self) -> Result<(), Refusal> {
        let upload = self.begun.get().expect("parts were sent").as_ref();
        let upload = upload.map_err(Refusal::clone)?;
        let parts = self.parts()?;
        if let Some(refusal) = &self.state().lost {
            return Err(refusal.clone());
        }
        let completed = self.kin.signed.complete(&self.key, upload, &parts).await;
        if let Err(refusal) = &completed
            && refusal.is_of_other_bytes()
        {
            self.state().lost = Some(refusal.clone());
        }
        completed?;
        self.state().is_kept = true;
        Ok(())
    }

    /// Completes before anybody asks for it. Whoever has closed the file meanwhile has given the object
    /// up, perhaps before it was there.
    async fn complete_early(&self) {
        let completed = self.completed.get_or_try_init(|| self.complete()).await;
        let is_unwanted = {
            let state = self.state();
            state.is_closed && !state.is_finished
        };
        if completed.is_ok() && is_unwanted {
            let _ = self.kin.signed.delete(&self.key).await;
        }
    }

    /// The parts in order, which have to be all there are.
    fn parts(&self) -> Result<Vec<Part>, Refusal> {
        let mut end = 0;
        let mut parts = Vec::new();
        for (offset, part) in &self.state().parts {
            if *offset != end {
                let detail = format!("bytes {end} to {offset} were never uploaded");
                return Err(Refusal::new(io::ErrorKind::Other, detail));
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
            let (kin, key) = (self.kin.clone(), self.key.clone());
            // Best effort: a sweep finds what stays. The last reference may go on a thread that must
            // not wait.
            if let Ok(handle) = runtime::handle() {
                handle.spawn(async move {
                    let _ = kin.signed.abort(&key, &upload.id).await;
                });
            }
        }
    }
}
