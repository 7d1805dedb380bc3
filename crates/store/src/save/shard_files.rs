//! The files of shards: made, given room, cut to size and made durable.

use std::io;
use std::sync::Arc;

use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem};

use crate::commit::Attempt;
use crate::error::Result;
use crate::format::shard::PAGE_BYTES;
use crate::report::{FallbackKind, Run};

/// How they are made.
pub(super) struct ShardFiles<'a> {
    pub(super) file_system: &'a dyn FileSystem,
    pub(super) direct: Direct,
}

impl ShardFiles<'_> {
    /// Makes an empty one.
    pub(super) fn create(&self, attempt: &mut Attempt, name: &str) -> Result<Arc<File>> {
        attempt.create(name, self.direct)
    }

    /// Makes room for what is about to be written to a file.
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

    /// Has a file that is empty share the blocks of another one.
    pub(super) fn clone_to(&self, from: &File, to: &File) -> Result<()> {
        Ok(self.file_system.change(Change::Clone { from, to })?)
    }

    /// Cuts one to size and makes it durable.
    pub(super) fn finish(&self, file: &File, bytes: u64) -> Result<()> {
        // A direct write ends on a page; the file ends where its data does.
        if file.is_direct() && !bytes.is_multiple_of(PAGE_BYTES) {
            self.file_system.change(Change::Truncate(file, bytes))?;
        }
        Ok(self.file_system.change(Change::SyncData(file))?)
    }
}
