//! A bucket as a file system; `lookups` and `changes` implement its two traits.

mod changes;
mod conditional;
mod engine;
mod handle;
mod lookups;
pub(crate) mod resume_upload;

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use object_store::path::Path as Key;
use penstock_io::engine::Opened;
use penstock_io::{Error, Result};

use self::engine::Requests;
use self::handle::Upload;
use crate::address::Address;
use crate::client::BucketClient;
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
}

fn failed(operation: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Storage {
        operation,
        path: path.to_owned(),
        source,
    }
}
