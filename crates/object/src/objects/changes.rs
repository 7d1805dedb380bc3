//! Changes: objects put, renamed and removed.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use object_store::GetOptions;
use object_store::path::Path as Key;
use penstock_io::Result;
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{self, Change, FileSystem, Files};

use super::conditional::{self, Place};
use super::handle::{Upload, Written};
use super::{Objects, failed};
use crate::client::uploads::OpenUpload;
use crate::runtime;

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

impl Objects {
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

    pub(super) fn unnamed(&self, path: &Path) -> Option<Arc<Upload>> {
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

fn upload_of(file: &File) -> io::Result<&Written> {
    let upload = file.stands_for::<Written>();
    upload.ok_or_else(|| io::Error::other("it is not one that is written"))
}
