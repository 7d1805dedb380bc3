//! File access of a mutable table.

use std::io;
use std::path::Path;
use std::sync::Arc;

use penstock_io::buffer::{HostRegion, IoBuf, Memory};
use penstock_io::executor::{Kind, Landing, Request, Share, Source, Target, Transfer};
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem};

use crate::error::Result;

/// The file system, and the executor for its bytes.
#[derive(Clone, Debug)]
pub struct Storage {
    /// Creates, renames and syncs files.
    pub file_system: Arc<dyn FileSystem>,
    /// Whether I/O bypasses the page cache.
    pub direct: Direct,
    /// The share of an executor that moves the bytes.
    pub share: Arc<Share>,
}

impl Storage {
    pub(super) fn create(&self, path: &Path) -> Result<Arc<File>> {
        Ok(Arc::new(self.file_system.create(path, self.direct)?))
    }

    /// Creates and fills a file; removes it if that fails.
    pub(super) fn make<T>(
        &self,
        path: &Path,
        fill: impl FnOnce(&Arc<File>) -> Result<T>,
    ) -> Result<T> {
        let file = self.create(path)?;
        let filled = fill(&file);
        if filled.is_err() {
            // The error of filling it is the one to report.
            drop(self.change(Change::RemoveFile(path)));
        }
        filled
    }

    pub(super) fn open(&self, path: &Path) -> Result<Arc<File>> {
        Ok(Arc::new(File::open(path, self.direct)?))
    }

    pub(super) fn change(&self, change: Change<'_>) -> Result<()> {
        Ok(self.file_system.change(change)?)
    }

    /// Gives a file its final length and reserves storage for it. If the file system cannot
    /// reserve, storage is allocated as the file is written.
    pub(super) fn reserve(&self, file: &File, bytes: u64) -> Result<()> {
        match self.file_system.change(Change::Allocate(file, bytes)) {
            Err(error) if error.kind() == Some(io::ErrorKind::Unsupported) => {
                self.change(Change::Truncate(file, bytes))
            }
            reserved => Ok(reserved?),
        }
    }

    /// Begins to write memory to a file, in whole pages.
    pub(super) fn write(
        &self,
        file: &Arc<File>,
        offset: u64,
        memory: &Arc<Memory>,
        bytes: u64,
    ) -> Result<Transfer> {
        let region = HostRegion::within(memory, 0..bytes as usize);
        let request = Request {
            target: target(file),
            offset,
            kind: Kind::Write(Source::Gathered(Arc::new(region))),
        };
        Ok(self.share.submit(vec![request])?)
    }

    /// Reads from a file into memory.
    pub(super) fn read(&self, file: &Arc<File>, offset: u64, memory: IoBuf) -> Result<()> {
        let request = Request {
            target: target(file),
            offset,
            kind: Kind::Read(Landing::Window(memory)),
        };
        self.share.submit(vec![request])?.wait(None)?;
        Ok(())
    }

    /// Reads `bytes` bytes of a file from `offset` on.
    pub(super) fn bytes(&self, file: &Arc<File>, offset: u64, bytes: u64) -> Result<Memory> {
        let (handle, memory) = Memory::allocate(bytes as usize)?.share();
        self.read(file, offset, memory)?;
        Ok(handle.reclaim().expect("the transfer has ended"))
    }
}

/// A file as the target of requests.
pub(super) fn target(file: &Arc<File>) -> Target {
    Target {
        file: Arc::clone(file),
        edges: None,
    }
}
