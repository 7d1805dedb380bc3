//! The engine contract: many operations in flight, each owning its buffer.
//!
//! An [`Engine`] takes operations ([`Op`]) and returns completions ([`Completion`]), in the order
//! in which they finish. Three backends implement it: `uring` over `io_uring`, a thread pool over
//! `pread` and `pwrite`, and `sync`, which makes these calls as operations are submitted, for files
//! in memory. [`open`] picks one, and code above never asks which.
//!
//! Invariants, proven by the conformance suite on every backend:
//! - an accepted operation completes exactly once, with its token and its buffer;
//! - at most `queue_depth_max` operations are in flight; one more is [`Rejected`] untouched;
//! - waiting happens in the kernel, never in a spin loop;
//! - dropping an engine waits for everything in flight before any buffer is freed.
//!
//! Not promised here: whole transfers (see [`crate::transfer`]), any order among operations in
//! flight, and durability of a write by a sync that was submitted before the write completed.

mod arrivals;
mod choice;
pub mod probe;
mod sync;
mod threads;
#[cfg(feature = "uring")]
mod uring;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Result;
use crate::buffer::IoBuf;
use crate::file::File;
pub use arrivals::Arrivals;
pub use choice::{EngineChoice, EngineConfig, Opened, open};

/// The most bytes that one operation moves; the kernel's own bound is just under 2 GiB. A longer
/// buffer becomes a short transfer, whose rest starts at an offset that is a multiple of any
/// alignment.
const TRANSFER_BYTES_MAX: usize = 1 << 30;

/// Something that performs I/O operations, many at a time.
///
/// An engine is used by the thread that opened it and is not `Send`: the fastest kind of ring
/// defers its work to the thread that owns it, which requires this.
pub trait Engine {
    /// Accepts an operation. Large transfers start at once; small ones may be held until the next
    /// [`poll`](Engine::poll), to be submitted with one system call.
    ///
    /// # Errors
    /// [`Rejected`] with the operation, untouched, while the queue is full.
    fn submit(&mut self, op: Op) -> std::result::Result<(), Rejected>;

    /// Appends completions to `completed`: all that are ready, and at least `min` of them unless
    /// `timeout` passes first. With `min` 0 it does not wait; a `min` above
    /// [`in_flight`](Engine::in_flight) is lowered to that. Without a timeout it waits as long as
    /// it takes.
    ///
    /// # Errors
    /// [`crate::Error::Engine`] when the engine itself fails. Completions appended so far are
    /// valid, and operations in flight still are.
    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<()>;

    /// Announces memory and files that many operations will use, so that the kernel prepares them
    /// once rather than for each. The engine keeps both alive. Operations on other memory and files
    /// work as before. Call it at most once, and before the first operation.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] from a backend that has no use for it, or the system's error,
    /// for instance where the process may lock no more memory; nothing is changed then.
    fn register(&mut self, buffers: &[&IoBuf], files: &[Arc<File>]) -> io::Result<()> {
        let _ = (buffers, files);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns a waker by which any thread ends a waiting [`poll`](Engine::poll), so that the
    /// polling thread can accept new work. That poll appends the completions that are ready,
    /// possibly none. A wake while no poll runs ends the next one. Call it at most once, and before
    /// the first operation.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] from an engine without a waker, or the system's error.
    fn waker(&mut self) -> io::Result<Arc<dyn Wake>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The engine's name, queue depth and setup.
    fn capabilities(&self) -> Capabilities;

    /// Operations accepted and not yet returned.
    fn in_flight(&self) -> usize;
}

/// Ends the wait of an engine; see [`Engine::waker`].
pub trait Wake: Send + Sync {
    /// Ends the poll that is waiting, or the next one. Several wakes may count as one.
    fn wake(&self);
}

/// One operation on an open file.
#[derive(Debug)]
pub struct Op {
    /// Returned with the completion; engines do not interpret it.
    pub token: u64,
    /// The file, kept open until the completion.
    pub file: Arc<File>,
    /// The kind of operation.
    pub kind: OpKind,
}

/// Kinds of operations.
#[derive(Debug)]
pub enum OpKind {
    /// Reads `buf.len()` bytes at `offset` into `buf`.
    Read {
        /// Where to start in the file, in bytes.
        offset: u64,
        /// Filled from its start; bytes beyond the returned count are unspecified.
        buf: IoBuf,
    },
    /// Writes `buf.len()` bytes of `buf` at `offset`.
    Write {
        /// Where to start in the file, in bytes.
        offset: u64,
        /// Returned unchanged.
        buf: IoBuf,
    },
    /// `fdatasync`: makes every write that **completed** before this was submitted durable.
    SyncData,
}

impl OpKind {
    /// The operation's buffer, which its completion returns; `None` for a sync.
    pub fn into_buf(self) -> Option<IoBuf> {
        match self {
            OpKind::Read { buf, .. } | OpKind::Write { buf, .. } => Some(buf),
            OpKind::SyncData => None,
        }
    }
}

/// The end of an operation.
#[derive(Debug)]
pub struct Completion {
    /// The operation's token.
    pub token: u64,
    /// The operation's buffer, with the length it was submitted with; `None` for a sync.
    pub buf: Option<IoBuf>,
    /// Bytes moved (0 for a sync), or the kernel's error.
    pub result: io::Result<usize>,
}

/// An operation that found the queue full.
#[derive(Debug)]
pub struct Rejected {
    /// The operation, untouched, to be submitted again after a completion.
    pub op: Op,
}

impl Capabilities {
    /// The capabilities of an engine outside this crate.
    pub fn new(name: &'static str, queue_depth_max: usize, setup: &'static str) -> Capabilities {
        Capabilities {
            name,
            queue_depth_max,
            setup,
        }
    }
}

/// The name, queue depth and setup of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The backend: "uring", "threads" or "sync".
    pub name: &'static str,
    /// The most operations in flight at a time.
    pub queue_depth_max: usize,
    /// The backend's mode, for reports: the ring flags that the kernel accepted, or the calls that
    /// the threads make.
    pub setup: &'static str,
}

/// The moment at which a poll stops waiting; `None` without a bound, or with one too distant for an
/// `Instant`.
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub(crate) fn after(timeout: Option<Duration>) -> Deadline {
        Deadline(timeout.and_then(|timeout| Instant::now().checked_add(timeout)))
    }

    /// The time left: `None` without a bound, zero once it has passed.
    pub(crate) fn left(&self) -> Option<Duration> {
        self.0
            .map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_too_far_off_is_none() {
        assert_eq!(Deadline::after(Some(Duration::MAX)).left(), None);
        assert_eq!(Deadline::after(None).left(), None);
        assert_eq!(
            Deadline::after(Some(Duration::ZERO)).left(),
            Some(Duration::ZERO)
        );
    }
}
