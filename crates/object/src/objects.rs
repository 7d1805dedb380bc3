//! A bucket as a file system.

mod conditional;
mod engine;
mod handle;
pub(crate) mod resume_upload;

use std::collections::HashMap;
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use bytes::Bytes;
use object_store::path::Path as Key;
use object_store::{Attribute, GetOptions, GetRange, ObjectMeta};
use penstock_io::device::Device;
use penstock_io::engine::Opened;
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{self, Change, Entry, FileStat, FileSystem, Files, Kind, Seen};
use penstock_io::{Error, Result};

use self::conditional::Place;
use self::engine::Requests;
use self::handle::{Object, Upload, Written};
use crate::address::Address;
use crate::client::BucketClient;
use crate::client::requests::Got;
use crate::client::uploads::{OpenUpload, PARTS_MAX};
use crate::provider::Provider;
use crate::remote::Remote;
use crate::request_error::RequestError;
use crate::runtime;

const MIB: u64 = 1 << 20;

/// The objects of a bucket, as files.
#[derive(Debug)]
pub struct Objects {
    address: Address,
    remote: Remote,
    /// The client, and the process that made it.
    bucket_client: Mutex<(u32, BucketClient)>,
    /// Small files that have only a temporary name.
    unnamed: Mutex<HashMap<PathBuf, Arc<Upload>>>,
}

impl Objects {
    /// Opens the bucket at an address.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for options that no client can be made from.
    pub fn open(address: Address, remote: &Remote) -> io::Result<Objects> {
        Ok(Objects {
            bucket_client: Mutex::new((std::process::id(), BucketClient::of(&address, remote)?)),
            address,
            remote: remote.clone(),
            unnamed: Mutex::default(),
        })
    }

    /// An engine that moves bytes of files of this bucket.
    ///
    /// # Errors
    /// [`Error::Engine`] if its threads cannot be started.
    pub fn engine(&self, queue_depth: usize) -> Result<Opened> {
        let requests = self
            .bucket_client()
            .and_then(|bucket_client| Requests::new(bucket_client, self.part_bytes(), queue_depth));
        let requests = requests.map_err(|source| Error::Engine {
            operation: "start a runtime",
            source,
        })?;
        Ok(Opened {
            engine: Box::new(requests),
            fallback: None,
        })
    }

    /// Bytes of one write, except for the last of a file.
    pub fn part_bytes(&self) -> usize {
        self.remote.part_bytes()
    }

    /// Refuses an object that would have too many parts, before any of it is sent.
    ///
    /// # Errors
    /// [`io::ErrorKind::FileTooLarge`], which names the part size that would do.
    pub fn check_size(&self, bytes: u64) -> io::Result<()> {
        let (parts, part_bytes) = (u64::from(PARTS_MAX), self.part_bytes() as u64);
        if bytes <= parts * part_bytes {
            return Ok(());
        }
        let wanted_mib = bytes.div_ceil(parts).div_ceil(MIB);
        let text = format!(
            "an object of {bytes} bytes has more than {parts} parts of {} MiB, and no store takes more: \
             reach the bucket with part_bytes of at least {wanted_mib} MiB, or save with a lower shard_bytes",
            part_bytes / MIB
        );
        Err(RequestError::new(io::ErrorKind::FileTooLarge, text).into())
    }

    pub(crate) fn provider(&self) -> Provider {
        self.address.provider
    }

    /// The number of concurrent requests.
    pub fn connections(&self) -> usize {
        self.remote.connections()
    }

    /// The open uploads below a path.
    ///
    /// # Errors
    /// The store's error.
    pub fn open_uploads(&self, prefix: &Path) -> io::Result<Vec<OpenUpload>> {
        let key = self.address.key(prefix)?;
        let prefix = match key.as_ref() {
            "" => String::new(),
            key => format!("{key}/"),
        };
        self.run(
            |bucket_client| async move { Ok(bucket_client.signed.open_uploads(&prefix).await?) },
        )
    }

    pub(crate) fn run<T, F>(&self, work: impl FnOnce(BucketClient) -> F) -> io::Result<T>
    where
        T: Send + 'static,
        F: Future<Output = io::Result<T>> + Send + 'static,
    {
        runtime::wait(work(self.bucket_client()?))
    }

    /// The client of this process. A forked child has none of the threads that serve its parent's
    /// connections, so it makes its own client and leaks the old one: closing those connections
    /// may close them for both.
    fn bucket_client(&self) -> io::Result<BucketClient> {
        let mut bucket_client = self
            .bucket_client
            .lock()
            .expect("nothing panics with the lock");
        let process = std::process::id();
        if bucket_client.0 != process {
            let own = BucketClient::of(&self.address, &self.remote)?;
            std::mem::forget(std::mem::replace(&mut *bucket_client, (process, own)));
        }
        Ok(bucket_client.1.clone())
    }

    pub(crate) fn key(&self, path: &Path) -> io::Result<Key> {
        self.address.key(path)
    }

    fn head(&self, path: &Path) -> io::Result<ObjectMeta> {
        let key = self.address.key(path)?;
        if key.as_ref().is_empty() {
            // The path names the bucket itself.
            return Err(io::ErrorKind::NotFound.into());
        }
        self.run(|bucket_client| async move { head_of(bucket_client.head(&key).await?) })
    }

    fn found(&self, meta: &ObjectMeta) -> FileStat {
        FileStat {
            kind: Kind::File,
            bytes: meta.size,
            identity: (hash(&self.address), hash(&meta.e_tag)),
        }
    }

    /// Puts a text if its condition holds.
    fn put(&self, key: Key, text: Bytes, place: Place) -> io::Result<()> {
        self.run(|bucket_client| async move {
            conditional::put(&bucket_client, &key, text, place).await
        })
    }

    /// Gives a temporary file its name, or copies a small object to a second key; returns the
    /// version that was copied.
    fn name(&self, from: &Path, to: &Path, place: Place) -> io::Result<Option<String>> {
        let (text, version) = match self.unnamed(from) {
            Some(upload) => (upload.text(), None),
            None => {
                let key = self.address.key(from)?;
                self.run(|bucket_client| async move {
                    let found = bucket_client
                        .get(&key, &GetOptions::default(), u64::MAX)
                        .await?;
                    let version = bucket_client.version(&found.meta);
                    Ok((found.bytes, version))
                })?
            }
        };
        self.put(self.address.key(to)?, text, place)?;
        Ok(version)
    }

    /// Renames a file. A small object is copied to the new key first, and the old key is deleted
    /// only if it still has the copied version, so of several callers one succeeds. A process that
    /// dies between the two requests leaves both keys.
    fn rename(&self, from: &Path, to: &Path, place: Place) -> io::Result<()> {
        let version = self.name(from, to, place)?;
        if self.take_unnamed(from).is_some() {
            return Ok(());
        }
        let key = self.address.key(from)?;
        let removed = self.run(|bucket_client| async move {
            bucket_client
                .signed
                .delete_if(&key, version.as_deref())
                .await
        });
        if let Err(error) = &removed
            && error.kind() == io::ErrorKind::NotFound
        {
            // Another object now has the old key, so the copy is removed. After any other error,
            // and if the old key is gone, the outcome is unknown: a request that was duplicated on
            // its way is refused because its first copy succeeded, and our copy may be the only
            // one left.
            if self.head(from).is_ok() {
                let _ = self.remove(to);
            }
        }
        removed
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        if self.take_unnamed(path).is_some() {
            return Ok(());
        }
        let key = self.address.key(path)?;
        self.run(|bucket_client| async move { bucket_client.signed.delete(&key).await })
    }

    fn unnamed(&self, path: &Path) -> Option<Arc<Upload>> {
        let unnamed = self.unnamed.lock().expect("nothing panics with the lock");
        unnamed.get(path).cloned()
    }

    fn take_unnamed(&self, path: &Path) -> Option<Arc<Upload>> {
        let mut unnamed = self.unnamed.lock().expect("nothing panics with the lock");
        unnamed.remove(path)
    }

    fn carry_out(&self, change: Change<'_>) -> io::Result<()> {
        let unsupported = |detail: &str| Err(io::Error::new(io::ErrorKind::Unsupported, detail));
        match change {
            // Directories are common prefixes of keys, an answered request is durable, and an
            // object's length is that of the bytes sent.
            Change::CreateDirectory(_)
            | Change::RemoveDirectory(_)
            | Change::SyncDirectory(_)
            | Change::Truncate(..) => Ok(()),
            Change::Allocate(file, bytes) => {
                self.check_size(bytes)?;
                upload_of(file)?.0.reserve(bytes);
                Ok(())
            }
            Change::Write(file, text) => {
                upload_of(file)?.0.hold(text);
                Ok(())
            }
            Change::SyncData(file) => {
                if self.unnamed(file.path()).is_some() {
                    return Ok(());
                }
                let upload = Arc::clone(&upload_of(file)?.0);
                runtime::wait(async move { upload.finish().await })
            }
            Change::Clone { .. } => unsupported("objects share no bytes"),
            Change::Rename { from, to } => self.rename(from, to, Place::Any),
            Change::RenameNew { from, to } => self.rename(from, to, Place::Free),
            Change::Replace { from, to, seen } => {
                let bytes = Bytes::copy_from_slice(&seen.bytes);
                self.rename(from, to, Place::Of(bytes, seen.version.clone()))
            }
            Change::Link { from, to } => self.name(from, to, Place::Free).map(drop),
            Change::RemoveFile(path) => self.remove(path),
            Change::RemoveSeen(path, seen) => {
                let key = self.address.key(path)?;
                let bytes = Bytes::copy_from_slice(&seen.bytes);
                let version = seen.version.clone();
                self.run(|bucket_client| async move {
                    conditional::remove(&bucket_client, &key, &bytes, version.as_deref()).await
                })
            }
        }
    }
}

impl FileSystem for Objects {
    fn files(&self) -> &dyn Files {
        self
    }

    /// Sends no request: the caller draws a name that no other process uses.
    fn create(&self, path: &Path, _: Direct) -> Result<File> {
        let upload = || Ok(Upload::new(self.address.key(path)?, self.bucket_client()?));
        let upload = upload().map_err(|source| failed("create", path, source))?;
        Ok(File::elsewhere(path, Arc::new(Written(Arc::new(upload)))))
    }

    fn create_temporary(&self, path: &Path) -> Result<File> {
        let file = self.create(path, Direct::Off)?;
        let upload = upload_of(&file).expect("it was made just now");
        let mut unnamed = self.unnamed.lock().expect("nothing panics with the lock");
        unnamed.insert(path.to_owned(), Arc::clone(&upload.0));
        drop(unnamed);
        Ok(file)
    }

    fn change(&self, change: Change<'_>) -> Result<()> {
        let done = self.carry_out(change);
        done.map_err(|source| failed(change.operation(), change.path(), source))
    }

    fn time_at(&self, path: &Path) -> Result<Option<SystemTime>> {
        let asked = || {
            self.put(self.address.key(path)?, Bytes::new(), Place::Any)?;
            let modified = self.head(path)?.last_modified;
            self.remove(path)?;
            Ok(Some(modified.into()))
        };
        asked().map_err(|source| failed("ask for the time of", path, source))
    }

    fn open_uploads(&self, path: &Path) -> Result<Vec<file_system::OpenUpload>> {
        let found = Objects::open_uploads(self, path);
        let found = found.map_err(|source| failed("list the uploads of", path, source))?;
        let of = |upload: OpenUpload| file_system::OpenUpload {
            path: PathBuf::from(format!("{}/{}", self.address, upload.key)),
            id: upload.id,
            begun: upload.initiated,
        };
        Ok(found.into_iter().map(of).collect())
    }

    fn abandon(&self, upload: &file_system::OpenUpload) -> Result<()> {
        let abandoned = || {
            let (key, id) = (self.key(&upload.path)?, upload.id.clone());
            self.run(
                |bucket_client| async move { Ok(bucket_client.signed.abort(&key, &id).await?) },
            )
        };
        abandoned().map_err(|source| failed("give up the upload of", &upload.path, source))
    }
}

impl Files for Objects {
    fn stat(&self, path: &Path) -> io::Result<FileStat> {
        match self.stat_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.stat_below(path),
            found => found,
        }
    }

    fn stat_file(&self, path: &Path) -> io::Result<FileStat> {
        if let Some(upload) = self.unnamed(path) {
            return Ok(FileStat {
                kind: Kind::File,
                bytes: upload.text().len() as u64,
                identity: (hash(&self.address), hash(&path)),
            });
        }
        Ok(self.found(&self.head(path)?))
    }

    fn stat_again(&self, path: &Path) -> io::Result<FileStat> {
        let key = self.address.key(path)?;
        let meta =
            self.run(
                |bucket_client| async move { head_of(bucket_client.head_of_known(&key).await?) },
            )?;
        Ok(self.found(&meta))
    }

    fn stat_directory(&self, path: &Path) -> io::Result<FileStat> {
        match self.stat_below(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.stat_file(path),
            found => found,
        }
    }

    fn follow(&self, path: &Path) -> io::Result<FileStat> {
        self.stat(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Entry>> {
        let key = self.address.key(path)?;
        let listed =
            self.run(|bucket_client| async move { Ok(bucket_client.list(&key).await?) })?;
        let name = |key: &Key| key.filename().unwrap_or_default().into();
        let directories = listed.directories.iter().map(|key| Entry {
            name: name(key),
            kind: Some(Kind::Directory),
            bytes: None,
            modified: None,
        });
        let files = listed.objects.iter().map(|meta| Entry {
            name: name(&meta.location),
            kind: Some(Kind::File),
            bytes: Some(meta.size),
            modified: Some(meta.last_modified.into()),
        });
        let entries: Vec<Entry> = directories.chain(files).collect();
        match entries.is_empty() {
            true => Err(io::ErrorKind::NotFound.into()),
            false => Ok(entries),
        }
    }

    fn resolve(&self, path: &Path) -> io::Result<PathBuf> {
        let key = self.address.key(path)?;
        Ok(PathBuf::from(format!("{}/{key}", self.address)))
    }

    fn open(&self, path: &Path, direct: Direct) -> Result<File> {
        if direct == Direct::On {
            return Err(Error::DirectUnavailable {
                path: path.to_owned(),
                reason: "it is an object".to_owned(),
            });
        }
        let object = self.head(path).map(Object::of);
        let object = object.map_err(|source| failed("open", path, source))?;
        Ok(File::elsewhere(path, Arc::new(object)))
    }

    fn open_known(&self, path: &Path, direct: Direct, bytes: u64) -> Result<File> {
        if direct == Direct::On {
            return self.open(path, direct);
        }
        let key = self.address.key(path);
        let key = key.map_err(|source| failed("open", path, source))?;
        Ok(File::elsewhere(path, Arc::new(Object::known(key, bytes))))
    }

    fn read_range(&self, path: &Path, range: Range<u64>) -> io::Result<Vec<u8>> {
        let key = self.address.key(path)?;
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let range = match (range.start, range.end) {
            (0, u64::MAX) => None,
            (start, u64::MAX) => Some(GetRange::Offset(start)),
            _ => Some(GetRange::Bounded(range)),
        };
        let options = GetOptions {
            range,
            ..GetOptions::default()
        };
        self.run(|bucket_client| async move {
            let found = bucket_client.get(&key, &options, u64::MAX).await?;
            Ok(found.bytes.to_vec())
        })
    }

    fn stat_and_read(&self, path: &Path, bytes_max: u64) -> io::Result<(FileStat, Seen)> {
        let key = self.address.key(path)?;
        let (meta, seen) = self.run(|bucket_client| async move {
            let found = bucket_client
                .get(&key, &GetOptions::default(), bytes_max)
                .await?;
            let (bytes, version) = (found.bytes.to_vec(), bucket_client.version(&found.meta));
            Ok((head_of(found)?, Seen { bytes, version }))
        })?;
        Ok((self.found(&meta), seen))
    }

    fn check_readable(&self, _: &Path) -> Result<()> {
        Ok(())
    }

    fn may_write(&self, _: &Path) -> bool {
        true
    }

    fn free_bytes(&self, _: &Path) -> Option<u64> {
        None
    }

    fn device(&self, _: &Path) -> Option<Device> {
        None
    }

    fn is_memory(&self, _: &Path) -> bool {
        false
    }

    fn has_directories(&self) -> bool {
        false
    }

    fn open_directory(&self, _: &Path) -> io::Result<std::fs::File> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Objects {
    /// Looks up a directory: whether any key begins with this path.
    fn stat_below(&self, path: &Path) -> io::Result<FileStat> {
        let key = self.address.key(path)?;
        let below = key.clone();
        let found =
            self.run(|bucket_client| async move { Ok(bucket_client.some_below(&below).await?) })?;
        match !found.is_empty() || key.as_ref().is_empty() {
            true => Ok(FileStat {
                kind: Kind::Directory,
                bytes: 0,
                identity: (hash(&self.address), hash(&key)),
            }),
            false => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

/// The metadata of an object in a response. Azure accounts with directories report each as an
/// empty object, which is refused.
fn head_of(found: Got) -> io::Result<ObjectMeta> {
    let mark = Attribute::Metadata("hdi_isfolder".into());
    let is_one = found.attributes.get(&mark);
    match is_one.is_some_and(|value| value.as_ref() == "true") {
        true => Err(io::ErrorKind::NotFound.into()),
        false => Ok(found.meta),
    }
}

fn upload_of(file: &File) -> io::Result<&Written> {
    let upload = file.stands_for::<Written>();
    upload.ok_or_else(|| io::Error::other("it is not one that is written"))
}

fn failed(operation: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Storage {
        operation,
        path: path.to_owned(),
        source,
    }
}

fn hash(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}
