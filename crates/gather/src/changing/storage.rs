//! How a table that changes reaches its files.

use std::io;
use std::path::Path;
use std::sync::Arc;

use penstock_io::buffer::{HostRegion, IoBuf, Memory};
use penstock_io::executor::{Kind, Landing, Request, Share, Source, Target, Transfer};
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem};

use crate::error::Result;

/// What writes, names, and moves bytes.
#[derive(Clone, Debug)]
pub struct Storage {
    /// Through which files are made, named and synced.
    pub file_system: Arc<dyn FileSystem>,
    /// Whether bytes go past the page cache.
    pub direct: Direct,
    /// The claim on an executor that moves them.
    pub share: Arc<Share>,
}

impl Storage {
    pub(super) fn create(&self, path: &Path) -> Result<Arc<File>> {
        Ok(Arc::new(self.file_system.create(path, self.direct)?))
    }

    /// Makes a file with what is to be in it; of one that fails nothing stays.
    pub(super) fn make<T>(
        &self,
        path: &Path,
        fill: impl FnOnce(&Arc<File>) -> Result<T>,
    ) -> Result<T> {
        let file = self.create(path)?;
        let filled = fill(&file);
        if filled.is_err() {
            // What it was that failed is what is told.
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

    /// Makes a file as long as it will be, with room for all of it. Where the file system cannot reserve
    /// room, the file takes it as it is written.
    pub(super) fn reserve(&self, file: &File, bytes: u64) -> Result<()> {
        match self.file_system.change(Change::Allocate(file, bytes)) {
            Err(error) if error.kind() == Some(io::ErrorKind::Unsupported) => {
                self.change(Change::Truncate(file, bytes))
            }
            reserved => Ok(reserved?),
        }
    }

    /// Begins to write memory to a place of a file, both whole pages.
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

    /// Reads memory from a place of a file.
    pub(super) fn read(&self, file: &Arc<File>, offset: u64, memory: IoBuf) -> Result<()> {
        let request = Request {
            target: target(file),
            offset,
            kind: Kind::Read(Landing::Window(memory)),
        };
        self.share.submit(vec![request])?.wait(None)?;
        Ok(())
    }

    /// So many bytes of a file, from a place on.
    pub(super) fn bytes(&self, file: &Arc<File>, offset: u64, bytes: u64) -> Result<Memory> {
        let (handle, memory) = Memory::allocate(bytes as usize)?.share();
        self.read(file, offset, memory)?;
        Ok(handle.reclaim().expect("the transfer has ended"))
    }
}

/// A file as requests name it.
pub(super) fn target(file: &Arc<File>) -> Target {
    Target {
        file: Arc::clone(file),
        edges: None,
    }
}
