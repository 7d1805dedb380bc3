//! The content of a bucket and its changes, without HTTP and without waiting.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use crc_fast::{CrcAlgorithm, checksum};

/// The smallest part that S3 accepts, except as the last one.
const PART_BYTES_MIN: usize = 5 << 20;

/// The highest part number.
const PART_NUMBER_MAX: i32 = 10_000;

/// The time of the clock until a test advances it: the first second of 2026.
const EPOCH: Duration = Duration::from_secs(1_767_225_600);

/// The least time between two changes of an object, where changes are limited.
const CHANGE_PAUSE: Duration = Duration::from_secs(1);

/// Makes upload ids unique across buckets.
static UPLOADS_BEGUN: AtomicU64 = AtomicU64::new(1);

/// An object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Its bytes.
    pub bytes: Bytes,
    /// Its ETag, without quotes: equal for the same bytes put in the same way.
    pub tag: String,
    /// CRC-64/NVME of all bytes.
    pub crc: u64,
    /// When it was made.
    pub modified: SystemTime,
    /// Its number among the bucket's objects, ascending with time. A part has 0.
    pub generation: u64,
}

impl Object {
    /// Whether it was assembled from parts, by its tag.
    pub(crate) fn is_of_parts(&self) -> bool {
        self.tag.contains('-')
    }
}

/// An upload that was neither completed nor aborted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenUpload {
    /// The key of the future object.
    pub key: String,
    /// When it was begun.
    pub initiated: SystemTime,
    /// Its parts, by number.
    pub parts: BTreeMap<i32, Object>,
}

/// The reason that a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rejection {
    NoSuchKey,
    NoSuchUpload,
    ConditionFailed,
    BadDigest,
    WrongSize,
    InvalidPart,
    PartTooSmall,
    PartNumber,
    TooOften,
}

/// A condition on the object at a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    Absent,
    Any,
    Tag(String),
    /// The object has this generation; 0 means that there is none.
    Generation(u64),
    /// The version of this generation, among versions that can be requested by name: it is the last
    /// one.
    Version(u64),
}

/// A part as named by the completion of an upload.
pub(crate) struct Named {
    pub(crate) number: i32,
    pub(crate) tag: String,
    pub(crate) crc: Option<u64>,
}

/// The checksum and length that a completion asserts.
#[derive(Default)]
pub(crate) struct Asserted {
    pub(crate) crc: Option<u64>,
    pub(crate) bytes: Option<u64>,
    pub(crate) conditions: Vec<Condition>,
}

/// Some entries of a listing, and the start of the next page.
pub(crate) struct Page {
    pub(crate) objects: Vec<(String, Object)>,
    pub(crate) prefixes: Vec<String>,
    pub(crate) next: Option<String>,
}

/// The most changes that a listing may lag behind.
const PAST_MAX: usize = 8;

/// The content of a bucket.
pub(crate) struct Contents {
    objects: BTreeMap<String, Object>,
    /// The objects before each of the last changes, the newest first.
    past: VecDeque<BTreeMap<String, Object>>,
    uploads: BTreeMap<String, OpenUpload>,
    /// The objects of completed uploads, by upload id.
    completed: BTreeMap<String, Object>,
    /// Uploads that were aborted.
    aborted: BTreeSet<String>,
    /// When each key was last changed.
    changed: BTreeMap<String, SystemTime>,
    pub(crate) now: SystemTime,
    /// The number of times an object was made or removed.
    pub(crate) changes: u64,
    /// Whether a completed upload is forgotten, as on MinIO; S3 repeats its answer.
    pub(crate) forgets_uploads: bool,
    /// Whether changes of one key must be a second apart.
    pub(crate) limits_changes: bool,
}

impl Default for Contents {
    fn default() -> Contents {
        Contents {
            objects: BTreeMap::new(),
            past: VecDeque::new(),
            uploads: BTreeMap::new(),
            completed: BTreeMap::new(),
            aborted: BTreeSet::new(),
            changed: BTreeMap::new(),
            now: SystemTime::UNIX_EPOCH + EPOCH,
            changes: 0,
            forgets_uploads: false,
            limits_changes: false,
        }
    }
}

impl Contents {
    pub(crate) fn objects(&self) -> &BTreeMap<String, Object> {
        &self.objects
    }

    pub(crate) fn end_uploads(&mut self) {
        self.uploads.clear();
    }

    pub(crate) fn uploads(&self) -> &BTreeMap<String, OpenUpload> {
        &self.uploads
    }

    pub(crate) fn get(&self, key: &str, conditions: &[Condition]) -> Result<Object, Rejection> {
        let object = self.objects.get(key).ok_or(Rejection::NoSuchKey)?;
        self.check(key, conditions)?;
        Ok(object.clone())
    }

    /// A condition that selects an object (any, by tag, by version) is refused with `NoSuchKey`
    /// where no object matches; every other one with `ConditionFailed`.
    fn check(&self, key: &str, conditions: &[Condition]) -> Result<(), Rejection> {
        let there = self.objects.get(key);
        for condition in conditions {
            match (condition, there) {
                (Condition::Absent, None) | (Condition::Any, Some(_)) => {}
                (Condition::Tag(tag), Some(object)) if object.tag == *tag => {}
                (Condition::Generation(0), None) => {}
                (Condition::Generation(wanted) | Condition::Version(wanted), Some(object))
                    if object.generation == *wanted => {}
                (Condition::Any | Condition::Tag(_), None) | (Condition::Version(_), _) => {
                    return Err(Rejection::NoSuchKey);
                }
                _ => return Err(Rejection::ConditionFailed),
            }
        }
        Ok(())
    }

    fn object(&self, bytes: Bytes) -> Object {
        let crc = checksum(CrcAlgorithm::Crc64Nvme, &bytes);
        Object {
            tag: format!("{crc:016x}"),
            crc,
            modified: self.now,
            generation: 0,
            bytes,
        }
    }

    /// Puts an object in place; returns it with its generation.
    fn insert(&mut self, key: &str, object: Object) -> Object {
        self.note_change(key);
        // Google's generations are microseconds of its clock, but a test's clock may not move.
        let object = Object {
            generation: EPOCH.as_micros() as u64 + self.changes,
            ..object
        };
        self.objects.insert(key.to_owned(), object.clone());
        object
    }

    /// Notes that a key is about to change.
    fn note_change(&mut self, key: &str) {
        self.past.push_front(self.objects.clone());
        self.past.truncate(PAST_MAX);
        self.changes += 1;
        self.changed.insert(key.to_owned(), self.now);
    }

    /// Refuses a change of a key too soon after the last one.
    pub(crate) fn check_pace(&self, key: &str) -> Result<(), Rejection> {
        let last = self.changed.get(key).filter(|_| self.limits_changes);
        match last.is_some_and(|last| self.now < *last + CHANGE_PAUSE) {
            true => Err(Rejection::TooOften),
            false => Ok(()),
        }
    }

    pub(crate) fn put(
        &mut self,
        key: &str,
        bytes: Bytes,
        crc: Option<u64>,
        conditions: &[Condition],
    ) -> Result<Object, Rejection> {
        let object = self.object(bytes);
        if crc.is_some_and(|crc| crc != object.crc) {
            return Err(Rejection::BadDigest);
        }
        self.check(key, conditions)?;
        Ok(self.insert(key, object))
    }

    /// Removes an object; without a condition it need not exist.
    pub(crate) fn delete(&mut self, key: &str, conditions: &[Condition]) -> Result<(), Rejection> {
        self.check(key, conditions)?;
        if self.objects.contains_key(key) {
            self.note_change(key);
            self.objects.remove(key);
        }
        Ok(())
    }

    pub(crate) fn begin_upload(&mut self, key: &str) -> String {
        let id = format!("upload-{}", UPLOADS_BEGUN.fetch_add(1, Ordering::Relaxed));
        let upload = OpenUpload {
            key: key.to_owned(),
            initiated: self.now,
            parts: BTreeMap::new(),
        };
        self.uploads.insert(id.clone(), upload);
        id
    }

    /// The upload with an id, if it is one of that key.
    pub(crate) fn upload(&self, key: &str, id: &str) -> Result<&OpenUpload, Rejection> {
        let upload = self.uploads.get(id).filter(|upload| upload.key == key);
        upload.ok_or(Rejection::NoSuchUpload)
    }

    pub(crate) fn put_part(
        &mut self,
        (key, id): (&str, &str),
        number: i32,
        bytes: Bytes,
        crc: Option<u64>,
    ) -> Result<Object, Rejection> {
        self.upload(key, id)?;
        if !(1..=PART_NUMBER_MAX).contains(&number) {
            return Err(Rejection::PartNumber);
        }
        let part = self.object(bytes);
        if crc.is_some_and(|crc| crc != part.crc) {
            return Err(Rejection::BadDigest);
        }
        let upload = self.uploads.get_mut(id).expect("it was found just now");
        upload.parts.insert(number, part.clone());
        Ok(part)
    }

    pub(crate) fn abort(&mut self, key: &str, id: &str) -> Result<(), Rejection> {
        self.upload(key, id)?;
        self.uploads.remove(id);
        self.aborted.insert(id.to_owned());
        Ok(())
    }

    pub(crate) fn was_aborted(&self, id: &str) -> bool {
        self.aborted.contains(id)
    }

    /// Makes an object of the named parts. A refused request leaves the upload unchanged.
    pub(crate) fn complete(
        &mut self,
        (key, id): (&str, &str),
        named: &[Named],
        asserted: &Asserted,
    ) -> Result<Object, Rejection> {
        if let Some(object) = self.completed.get(id).filter(|_| !self.forgets_uploads) {
            return Ok(object.clone());
        }
        self.check_pace(key)?;
        let upload = self.upload(key, id)?;
        let mut bytes = Vec::new();
        let mut last = 0;
        for part in named {
            let found = upload.parts.get(&part.number);
            let found = found.filter(|found| found.tag == part.tag && part.number > last);
            let found = found.ok_or(Rejection::InvalidPart)?;
            if part.crc.is_some_and(|crc| crc != found.crc) {
                return Err(Rejection::InvalidPart);
            }
            if last > 0 && upload.parts[&last].bytes.len() < PART_BYTES_MIN {
                return Err(Rejection::PartTooSmall);
            }
            last = part.number;
            bytes.extend_from_slice(&found.bytes);
        }
        let object = self.object(Bytes::from(bytes));
        if asserted
            .bytes
            .is_some_and(|bytes| bytes != object.bytes.len() as u64)
        {
            return Err(Rejection::WrongSize);
        }
        if asserted.crc.is_some_and(|crc| crc != object.crc) {
            return Err(Rejection::BadDigest);
        }
        self.check(key, &asserted.conditions)?;
        let object = Object {
            tag: format!("{}-{}", object.tag, named.len()),
            ..object
        };
        let object = self.insert(key, object);
        self.uploads.remove(id);
        self.completed.insert(id.to_owned(), object.clone());
        Ok(object)
    }

    /// Lists at most `entries_max` objects and common prefixes after a key, in order, as they were
    /// `changes_behind` changes before.
    pub(crate) fn list(
        &self,
        prefix: &str,
        delimiter: Option<&str>,
        after: &str,
        entries_max: usize,
        changes_behind: usize,
    ) -> Page {
        let before = changes_behind.checked_sub(1);
        let before = before.and_then(|before| self.past.get(before).or(self.past.back()));
        let objects = before.unwrap_or(&self.objects);
        let mut page = Page {
            objects: Vec::new(),
            prefixes: Vec::new(),
            next: None,
        };
        let mut last = String::new();
        let later = objects.range::<str, _>((Excluded(after), Unbounded));
        for (key, object) in later.filter(|(key, _)| key.starts_with(prefix)) {
            let rest = &key[prefix.len()..];
            let below = delimiter.and_then(|delimiter| {
                let end = rest.find(delimiter)? + delimiter.len();
                Some(format!("{prefix}{}", &rest[..end]))
            });
            // Keys below a prefix that was listed are covered by it.
            if let Some(below) = &below
                && (page.prefixes.last() == Some(below) || after.starts_with(below.as_str()))
            {
                last.clone_from(key);
                continue;
            }
            if page.objects.len() + page.prefixes.len() == entries_max {
                page.next = Some(last);
                break;
            }
            last.clone_from(key);
            match below {
                Some(below) => page.prefixes.push(below),
                None => page.objects.push((key.clone(), object.clone())),
            }
        }
        page
    }
}
