//! The files of shards: creating, preallocating, truncating and syncing them.

use std::io;
use std::sync::Arc;

use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem};

use crate::commit::Attempt;
use crate::error::Result;
use crate::format::shard::PAGE_BYTES;
use crate::report::{FallbackKind, Run};

/// How shard files are made.
pub(super) struct ShardFiles<'a> {
    pub(super) file_system: &'a dyn FileSystem,
    pub(super) direct: Direct,
}

impl ShardFiles<'_> {
    /// Creates an empty file.
    pub(super) fn create(&self, attempt: &mut Attempt, name: &str) -> Result<Arc<File>> {
        attempt.create(name, self.direct)
    }

    /// Reserves space for the data to be written to a file.
    pub(super) fn reserve(&self, file: &File, bytes: u64, run: &mut Run) -> Result<()> {
        if let Some(reason) = file.fallback() {
            run.note(FallbackKind::Buffered, reason.to_owned());
        }
        let length = if file.is_direct() {
            bytes.next_multiple_of(PAGE_BYTES)
        } else {
            bytes
        };
        match self.file_system.change(Change::Allocate(file, length)) {
            Err(error) if error.kind() == Some(io::ErrorKind::Unsupported) => {
                let reason = "the file system cannot reserve space".to_owned();
                run.note(FallbackKind::Unreserved, reason);
            }
            result => result?,
        }
        Ok(())
    }

    /// Makes an empty file share the blocks of another one.
    pub(super) fn clone_to(&self, from: &File, to: &File) -> Result<()> {
        Ok(self.file_system.change(Change::Clone { from, to })?)
    }

    /// Truncates a file to its size and makes it durable.
    pub(super) fn finish(&self, file: &File, bytes: u64) -> Result<()> {
        // A direct write ends on a page boundary; the file ends with its data.
        if file.is_direct() && !bytes.is_multiple_of(PAGE_BYTES) {
            self.file_system.change(Change::Truncate(file, bytes))?;
        }
        Ok(self.file_system.change(Change::SyncData(file))?)
    }
}
