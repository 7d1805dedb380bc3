//! Deliberate violations of the protocol: reordered steps, missing conditions, unchecked responses.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::{
    ClientOptions, Error as Refused, ObjectStore, ObjectStoreExt, PutMode, PutOptions, RetryConfig,
};
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, Entry, FileStat, FileSystem, Files, Kind, OpenUpload};
use penstock_io::{Error, Result};
use penstock_object_server::{Bucket, SECRET};
use tokio::runtime::Runtime;

use crate::world::SERVER;

/// One way to break the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// Puts a manifest without any condition.
    PutsWithoutCondition,
    /// Puts the manifest before the data.
    PutsManifestFirst,
    /// Takes a refusal as proof that the manifest is another save's, without reading it.
    BelievesRefusals,
    /// Takes a manifest that is absent after a lost response for failed, without putting it again.
    TakesAbsentForLost,
    /// Reports an undecided save as failed.
    TakesUndecidedForFailed,
    /// A deletion removes the data before it takes the manifest.
    DeletesDataFirst,
    /// Removes the replaced files before the replacement exists.
    RemovesReplacedFirst,
    /// Replaces a manifest, or the file of marks, whichever version is there.
    ReplacesWithoutCondition,
    /// Takes a manifest, whichever version is there.
    DeletesWithoutCondition,
    /// A sweep treats young attempts as old.
    SweepsWhatIsYoung,
    /// A sweep removes files without a fence.
    SweepsWithoutFence,
    /// A save does not check the directory after it has put its manifest.
    BelievesItsPublication,
}

/// The mutants that must be caught, each with the scenario that catches it.
pub(crate) const MUTANTS: &[(&str, Mutation)] = &[
    ("two savers", Mutation::PutsWithoutCondition),
    ("save", Mutation::PutsManifestFirst),
    ("save", Mutation::BelievesRefusals),
    ("save", Mutation::TakesAbsentForLost),
    ("save", Mutation::TakesUndecidedForFailed),
    ("delete", Mutation::DeletesDataFirst),
    ("overwrite", Mutation::RemovesReplacedFirst),
    ("overwrite again", Mutation::ReplacesWithoutCondition),
    ("two that mark", Mutation::ReplacesWithoutCondition),
    ("delete and save again", Mutation::DeletesWithoutCondition),
    ("a saver and a sweeper", Mutation::SweepsWhatIsYoung),
    ("a saver taken for dead", Mutation::SweepsWithoutFence),
    ("a saver taken for dead", Mutation::BelievesItsPublication),
    ("an overwrite taken for dead", Mutation::SweepsWithoutFence),
    (
        "an overwrite taken for dead",
        Mutation::BelievesItsPublication,
    ),
];

const MANIFEST: &str = "manifest.json";

/// Length of an attempt's id.
const ATTEMPT_DIGITS: usize = 32;

/// Breaks a store's file system.
#[derive(Debug)]
pub(crate) struct Mutated {
    inner: Arc<dyn FileSystem>,
    mutation: Mutation,
    line: Line,
    /// Texts of files that have no name yet.
    texts: Mutex<HashMap<PathBuf, Vec<u8>>>,
    /// Parts that get their names after the manifest.
    held: Mutex<Vec<(PathBuf, PathBuf)>>,
    /// A refused manifest: the existing one is taken for another save's.
    refused: Mutex<Option<PathBuf>>,
    /// The directory of a manifest that was put.
    published: Mutex<Option<PathBuf>>,
    /// The last listing of each directory.
    listed: Mutex<HashMap<PathBuf, Vec<Entry>>>,
}

/// Requests without their safeguards.
struct Line {
    store: AmazonS3,
    once: AmazonS3,
    runtime: Runtime,
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.store)
    }
}

impl Line {
    fn new(bucket: &Bucket, client: &str) -> Line {
        let builder = AmazonS3Builder::new()
            .with_endpoint(SERVER.endpoint())
            .with_bucket_name(bucket.name())
            .with_access_key_id(client)
            .with_secret_access_key(SECRET)
            .with_client_options(ClientOptions::new().with_allow_http(true));
        let never = RetryConfig {
            max_retries: 0,
            ..RetryConfig::default()
        };
        Line {
            store: builder.clone().build().unwrap(),
            once: builder.with_retry(never).build().unwrap(),
            runtime: Runtime::new().unwrap(),
        }
    }

    fn create(&self, store: &AmazonS3, path: &Path, text: &[u8]) -> object_store::Result<()> {
        let options = PutOptions::from(PutMode::Create);
        let key = key(path);
        let put = store.put_opts(&key, Bytes::copy_from_slice(text).into(), options);
        self.runtime.block_on(put).map(drop)
    }

    fn delete(&self, path: &Path) -> object_store::Result<()> {
        self.runtime.block_on(self.store.delete(&key(path)))
    }

    fn is_there(&self, path: &Path) -> bool {
        self.runtime.block_on(self.store.head(&key(path))).is_ok()
    }
}

fn key(path: &Path) -> object_store::path::Path {
    let url = path.to_string_lossy();
    let (_, key) = url.trim_start_matches("s3://").split_once('/').unwrap();
    key.into()
}

fn name(path: &Path) -> &str {
    path.file_name().unwrap_or_default().to_str().unwrap()
}

fn is_data(name: &str) -> bool {
    name.starts_with("shard-") || name.starts_with("part-")
}

fn failed(path: &Path, kind: io::ErrorKind) -> Error {
    Error::Storage {
        operation: "link to",
        path: path.to_owned(),
        source: kind.into(),
    }
}

impl Mutated {
    pub(crate) fn new(
        inner: &Arc<dyn FileSystem>,
        mutation: Mutation,
        bucket: &Bucket,
        client: &str,
    ) -> Mutated {
        Mutated {
            inner: Arc::clone(inner),
            mutation,
            texts: Mutex::default(),
            line: Line::new(bucket, client),
            held: Mutex::default(),
            refused: Mutex::default(),
            published: Mutex::default(),
            listed: Mutex::default(),
        }
    }

    /// Gives a manifest its name if the name is free.
    fn publish(&self, from: &Path, to: &Path) -> Result<()> {
        let link = || self.inner.change(Change::Link { from, to });
        let text = self
            .texts
            .lock()
            .unwrap()
            .get(from)
            .cloned()
            .unwrap_or_default();
        match self.mutation {
            Mutation::PutsWithoutCondition => self.inner.change(Change::Rename { from, to }),
            Mutation::PutsManifestFirst => {
                link()?;
                let held = std::mem::take(&mut *self.held.lock().unwrap());
                held.iter()
                    .try_for_each(|(from, to)| self.inner.change(Change::Rename { from, to }))
            }
            Mutation::BelievesRefusals => match self.line.create(&self.line.store, to, &text) {
                Ok(()) => Ok(()),
                Err(Refused::AlreadyExists { .. }) => {
                    *self.refused.lock().unwrap() = Some(to.to_owned());
                    Err(failed(to, io::ErrorKind::AlreadyExists))
                }
                Err(_) => Err(failed(to, io::ErrorKind::Other)),
            },
            Mutation::TakesAbsentForLost => match self.line.create(&self.line.once, to, &text) {
                Ok(()) => Ok(()),
                Err(Refused::AlreadyExists { .. }) => Err(failed(to, io::ErrorKind::AlreadyExists)),
                Err(_) if self.line.is_there(to) => Ok(()),
                Err(_) => Err(failed(to, io::ErrorKind::InvalidInput)),
            },
            Mutation::TakesUndecidedForFailed => link().map_err(|error| match error.kind() {
                Some(io::ErrorKind::Other) => failed(to, io::ErrorKind::InvalidInput),
                _ => error,
            }),
            _ => link(),
        }
    }

    /// Removes data of a checkpoint's directory.
    fn remove_data(&self, directory: &Path, is_it: impl Fn(&str) -> bool) -> Result<()> {
        let listed = self.inner.files().list(directory).unwrap_or_default();
        let names = listed.iter().map(|entry| entry.name.to_str().unwrap());
        let mut removed = names.filter(|name| is_data(name) && is_it(name));
        removed.try_for_each(|name| self.inner.change(Change::RemoveFile(&directory.join(name))))
    }
}

impl FileSystem for Mutated {
    fn files(&self) -> &dyn Files {
        self
    }

    fn create(&self, path: &Path, direct: Direct) -> Result<File> {
        self.inner.create(path, direct)
    }

    fn create_temporary(&self, path: &Path) -> Result<File> {
        self.inner.create_temporary(path)
    }

    fn change(&self, change: Change<'_>) -> Result<()> {
        match change {
            Change::Write(file, text) => {
                let path = file.path().to_owned();
                self.texts.lock().unwrap().insert(path, text.to_owned());
            }
            Change::SyncData(file)
                if name(file.path()).starts_with("fence-")
                    && self.mutation == Mutation::SweepsWithoutFence =>
            {
                return Ok(());
            }
            Change::Link { to, .. } | Change::Replace { to, .. } | Change::RenameNew { to, .. }
                if name(to) == MANIFEST && self.mutation == Mutation::BelievesItsPublication =>
            {
                self.inner.change(change)?;
                *self.published.lock().unwrap() = to.parent().map(Path::to_owned);
                return Ok(());
            }
            Change::Link { from, to } if name(to) == MANIFEST => {
                return self.publish(from, to);
            }
            Change::Rename { from, to }
                if is_data(name(to)) && self.mutation == Mutation::PutsManifestFirst =>
            {
                let held = (from.to_owned(), to.to_owned());
                self.held.lock().unwrap().push(held);
                return Ok(());
            }
            Change::RemoveSeen(path, _)
                if name(path) == MANIFEST && self.mutation == Mutation::DeletesDataFirst =>
            {
                self.remove_data(path.parent().unwrap(), |_| true)?;
            }
            Change::Rename { from, to } | Change::Replace { from, to, .. }
                if name(to) == MANIFEST && self.mutation == Mutation::RemovesReplacedFirst =>
            {
                let attempt = name(from)
                    .split('.')
                    .find(|part| part.len() == ATTEMPT_DIGITS);
                let attempt = attempt.expect("a temporary name says whose it is");
                self.remove_data(to.parent().unwrap(), |name| !name.contains(attempt))?;
            }
            Change::Replace { from, to, .. }
                if self.mutation == Mutation::ReplacesWithoutCondition =>
            {
                return self.inner.change(Change::Rename { from, to });
            }
            Change::RemoveSeen(path, _)
                if name(path) == MANIFEST && self.mutation == Mutation::DeletesWithoutCondition =>
            {
                let deleted = self.line.delete(path);
                return deleted.map_err(|_| failed(path, io::ErrorKind::Other));
            }
            _ => {}
        }
        self.inner.change(change)
    }

    fn time_at(&self, path: &Path) -> Result<Option<SystemTime>> {
        let young = match self.mutation {
            Mutation::SweepsWhatIsYoung => Duration::from_secs(24 * 60 * 60),
            _ => Duration::ZERO,
        };
        let now = self.inner.time_at(path)?;
        Ok(now.map(|now| now + young))
    }

    fn open_uploads(&self, path: &Path) -> Result<Vec<OpenUpload>> {
        self.inner.open_uploads(path)
    }

    fn abandon(&self, upload: &OpenUpload) -> Result<()> {
        self.inner.abandon(upload)
    }

    fn locks(&self, directory: BorrowedFd<'_>) -> bool {
        self.inner.locks(directory)
    }
}

impl Files for Mutated {
    fn stat(&self, path: &Path) -> io::Result<FileStat> {
        self.inner.files().stat(path)
    }

    fn follow(&self, path: &Path) -> io::Result<FileStat> {
        // A delayed part must look as if it existed.
        let held = self.held.lock().unwrap();
        let held = held.iter().find(|(_, to)| to == path).map(|(from, _)| from);
        self.inner
            .files()
            .follow(held.map_or(path, PathBuf::as_path))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Entry>> {
        let mut published = self.published.lock().unwrap();
        if published.take_if(|directory| directory == path).is_some()
            && let Some(entries) = self.listed.lock().unwrap().get(path)
        {
            return Ok(entries.clone());
        }
        let mut entries = self.inner.files().list(path)?;
        let mut listed = self.listed.lock().unwrap();
        listed.insert(path.to_owned(), entries.clone());
        for (_, to) in self.held.lock().unwrap().iter() {
            entries.push(Entry {
                name: to.file_name().unwrap().to_owned(),
                kind: Some(Kind::File),
                bytes: None,
                modified: None,
            });
        }
        Ok(entries)
    }

    fn resolve(&self, path: &Path) -> io::Result<PathBuf> {
        self.inner.files().resolve(path)
    }

    fn open(&self, path: &Path, direct: Direct) -> Result<File> {
        self.inner.files().open(path, direct)
    }

    fn read_range(&self, path: &Path, range: Range<u64>) -> io::Result<Vec<u8>> {
        let refused = self
            .refused
            .lock()
            .unwrap()
            .take_if(|refused| refused == path);
        match refused {
            Some(_) => Ok(b"another one's".to_vec()),
            None => self.inner.files().read_range(path, range),
        }
    }

    fn check_readable(&self, path: &Path) -> Result<()> {
        self.inner.files().check_readable(path)
    }

    fn may_write(&self, directory: &Path) -> bool {
        self.inner.files().may_write(directory)
    }

    fn free_bytes(&self, path: &Path) -> Option<u64> {
        self.inner.files().free_bytes(path)
    }

    fn has_directories(&self) -> bool {
        self.inner.files().has_directories()
    }

    fn open_directory(&self, path: &Path) -> io::Result<std::fs::File> {
        self.inner.files().open_directory(path)
    }
}
