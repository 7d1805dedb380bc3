//! The synchronous backend: `pread`, `pwrite` and `fdatasync` on the thread that submits.
//!
//! For files in memory, where an operation is a copy. A ring hands such an operation to a thread of
//! the kernel, as tmpfs has no way to perform it without waiting: the bytes are then in the caches
//! of another processor when the caller digests them.

use std::io;
use std::time::Duration;

use super::{Capabilities, Completion, Engine, Op, OpKind, Rejected, TRANSFER_BYTES_MAX};
use crate::Result;
use crate::file::File;
use crate::trace;

/// Operations that are performed, and not returned yet.
pub(super) struct Sync {
    queue_depth: usize,
    performed: Vec<Completion>,
}

impl Sync {
    pub(super) fn new(queue_depth: usize) -> Sync {
        Sync {
            queue_depth,
            performed: Vec::with_capacity(queue_depth),
        }
    }
}

impl Engine for Sync {
    fn submit(&mut self, op: Op) -> std::result::Result<(), Rejected> {
        if self.performed.len() == self.queue_depth {
            return Err(Rejected { op });
        }
        let _span = trace::span("submit");
        self.performed.push(perform(op));
        Ok(())
    }

    fn poll(
        &mut self,
        _min: usize,
        _timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<()> {
        completed.append(&mut self.performed);
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "sync",
            queue_depth_max: self.queue_depth,
            setup: "pread, pwrite and fdatasync",
        }
    }

    fn in_flight(&self) -> usize {
        self.performed.len()
    }
}

/// Performs an operation on this thread.
pub(super) fn perform(op: Op) -> Completion {
    let Op { token, file, kind } = op;
    match kind {
        OpKind::Read { offset, mut buf } => {
            let len = buf.len().min(TRANSFER_BYTES_MAX);
            let result = rustix::io::pread(file.as_ref(), &mut buf.as_mut_slice()[..len], offset);
            Completion {
                token,
                buf: Some(buf),
                result: result.map_err(io::Error::from),
            }
        }
        OpKind::Write { offset, buf } => {
            let len = buf.len().min(TRANSFER_BYTES_MAX);
            let result = rustix::io::pwrite(file.as_ref(), &buf.as_slice()[..len], offset);
            Completion {
                token,
                buf: Some(buf),
                result: result.map_err(io::Error::from),
            }
        }
        OpKind::SyncData => Completion {
            token,
            buf: None,
            result: sync(&file),
        },
    }
}

fn sync(file: &File) -> io::Result<usize> {
    rustix::fs::fdatasync(file)?;
    Ok(0)
}
