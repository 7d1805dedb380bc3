//! Lookups: files of a bucket found, listed, opened and read.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use object_store::path::Path as Key;
use object_store::{Attribute, GetOptions, GetRange, ObjectMeta};
use penstock_io::device::Device;
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Entry, FileStat, Files, Kind, Seen};
use penstock_io::{Error, Result};

use super::handle::Object;
use super::{Objects, failed};
use crate::client::requests::Got;

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
    /// The metadata of the object at a path.
    pub(super) fn head(&self, path: &Path) -> io::Result<ObjectMeta> {
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

fn hash(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}
