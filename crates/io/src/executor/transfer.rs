//! The progress and result of requests that were submitted together.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::engine::Deadline;
use crate::file::File;
use crate::{Error, Result};

/// Requests that were submitted together: done when all of them are, or when one has failed and no
/// operation of the others is in flight any more.
///
/// Dropping it does not stop it; its memory is released at the end.
#[derive(Clone)]
pub struct Transfer {
    pub(super) state: Arc<TransferState>,
}

/// How long a waiting thread spins before it sleeps: a short read takes less than a wake-up.
const SPIN_MAX: Duration = Duration::from_micros(100);

/// Whether a thread is spinning: only one may at a time, as it occupies a processor.
static IS_SPINNING: AtomicBool = AtomicBool::new(false);

/// Bytes moved, in all and by path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes of the caller.
    pub bytes: u64,
    /// Of those, the bytes that were copied to or from staging.
    pub staged_bytes: u64,
    /// Of those, the bytes that went through the page cache.
    pub cached_bytes: u64,
}

pub(super) struct TransferState {
    /// Whether operations that have not begun are to be skipped.
    is_over: AtomicBool,
    /// Whether it is done, readable without the lock.
    is_ended: AtomicBool,
    progress: Mutex<Progress>,
    ended: Condvar,
    /// The process whose threads carry it out.
    process: u32,
}

struct Progress {
    /// Requests that have not begun completely, plus pieces in flight.
    left: usize,
    moved: Moved,
    failure: Option<Failure>,
    is_cancelled: bool,
    /// Files to sync once everything is written.
    syncs: Vec<Arc<File>>,
    is_done: bool,
    began: Instant,
    /// Its run time, once it is done.
    took: Duration,
    watchers: Vec<Box<dyn FnOnce() + Send>>,
}

/// The reason that a transfer failed, kept so that every call can return it.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) operation: &'static str,
    pub(super) path: Arc<Path>,
    pub(super) offset: u64,
    pub(super) cause: Cause,
}

#[derive(Clone, Debug)]
pub(super) enum Cause {
    Os(i32),
    Other(io::ErrorKind, String),
    /// The file ended early.
    End,
}

impl Cause {
    pub(super) fn of(error: &io::Error) -> Cause {
        match error.raw_os_error() {
            Some(errno) => Cause::Os(errno),
            None => Cause::Other(error.kind(), error.to_string()),
        }
    }
}

impl Failure {
    /// The failure of all work that a worker leaves undone.
    pub(super) fn of_worker(why: &str) -> Failure {
        let text = format!("the executor has given up: {why}");
        Failure {
            operation: "reach",
            path: Arc::from(Path::new("")),
            offset: 0,
            cause: Cause::Other(io::ErrorKind::Other, text),
        }
    }

    fn error(&self) -> Error {
        let source = match &self.cause {
            Cause::Os(errno) => io::Error::from_raw_os_error(*errno),
            Cause::Other(kind, text) => io::Error::new(*kind, text.clone()),
            Cause::End => io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends before"),
        };
        Error::Transfer {
            operation: self.operation,
            path: self.path.to_path_buf(),
            offset: self.offset,
            source,
        }
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer")
            .field("is_done", &self.is_done())
            .finish_non_exhaustive()
    }
}

impl Transfer {
    pub(super) fn new(requests: usize, syncs: Vec<Arc<File>>, process: u32) -> Transfer {
        let progress = Progress {
            left: requests,
            moved: Moved::default(),
            failure: None,
            is_cancelled: false,
            syncs,
            is_done: false,
            began: Instant::now(),
            took: Duration::ZERO,
            watchers: Vec::new(),
        };
        Transfer {
            state: Arc::new(TransferState {
                is_over: AtomicBool::new(false),
                is_ended: AtomicBool::new(false),
                progress: Mutex::new(progress),
                ended: Condvar::new(),
                process,
            }),
        }
    }

    /// Whether it has ended, with success or failure. Always false in a fork of the process that
    /// moves the bytes.
    pub fn is_done(&self) -> bool {
        self.state.check_process().is_ok() && self.state.lock().is_done
    }

    /// Waits for the end; returns the bytes moved, or `None` after the timeout.
    ///
    /// # Errors
    /// [`Error::Transfer`] with the first failure, [`Error::Cancelled`], or [`Error::Forked`] in a
    /// fork of the process that moves the bytes.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<Moved>> {
        self.state.check_process()?;
        let deadline = Deadline::after(timeout);
        self.state.spin_wait(timeout.unwrap_or(SPIN_MAX));
        let mut progress = self.state.lock();
        while !progress.is_done {
            let ended = &self.state.ended;
            progress = match deadline.left() {
                None => ended.wait(progress).unwrap_or_else(PoisonError::into_inner),
                Some(left) if left.is_zero() => return Ok(None),
                Some(left) => {
                    let waited = ended.wait_timeout(progress, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        match &progress.failure {
            Some(failure) => Err(failure.error()),
            None if progress.is_cancelled => Err(Error::Cancelled),
            None => Ok(Some(progress.moved)),
        }
    }

    /// The time from submission to the end; zero until then.
    pub fn took(&self) -> Duration {
        match self.state.check_process() {
            Ok(()) => self.state.lock().took,
            Err(_) => Duration::ZERO,
        }
    }

    /// Cancels the operations that have not begun; those in flight finish. [`wait`](Transfer::wait)
    /// then returns [`Error::Cancelled`], unless everything was done before.
    pub fn cancel(&self) -> Result<()> {
        self.state.check_process()?;
        let mut progress = self.state.lock();
        if !progress.is_done {
            progress.is_cancelled = true;
            self.state.is_over.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Calls `watcher` at the end, on a thread of the executor, or at once if the transfer is done
    /// already. It must not wait.
    pub fn on_done(&self, watcher: Box<dyn FnOnce() + Send>) -> Result<()> {
        self.state.check_process()?;
        let mut progress = self.state.lock();
        if !progress.is_done {
            progress.watchers.push(watcher);
            return Ok(());
        }
        drop(progress);
        watcher();
        Ok(())
    }
}

impl TransferState {
    /// Spins for a short time until the end, unless another thread is spinning.
    fn spin_wait(&self, timeout: Duration) {
        if IS_SPINNING.swap(true, Ordering::Relaxed) {
            return;
        }
        let until = Instant::now() + timeout.min(SPIN_MAX);
        while !self.is_ended.load(Ordering::Acquire) && Instant::now() < until {
            std::hint::spin_loop();
        }
        IS_SPINNING.store(false, Ordering::Relaxed);
    }

    /// Whether operations that have not begun are to be skipped.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Notes the start of a piece; `is_last` where its request has no more of them.
    pub(super) fn begin(&self, is_last: bool) {
        if !is_last {
            self.lock().left += 1;
        }
    }

    /// Notes the end of a piece, or of a request that was skipped.
    ///
    /// # Returns
    /// The files to sync now, once everything is written.
    #[must_use]
    pub(super) fn end(
        &self,
        result: std::result::Result<Moved, Option<Failure>>,
    ) -> Vec<Arc<File>> {
        let mut progress = self.lock();
        match result {
            Ok(Moved {
                bytes,
                staged_bytes,
                cached_bytes,
            }) => {
                progress.moved.bytes += bytes;
                progress.moved.staged_bytes += staged_bytes;
                progress.moved.cached_bytes += cached_bytes;
            }
            Err(failure) => {
                if progress.failure.is_none() {
                    progress.failure = failure;
                }
                self.is_over.store(true, Ordering::Release);
            }
        }
        progress.left -= 1;
        if progress.left > 0 {
            return Vec::new();
        }
        if !self.is_over() && !progress.syncs.is_empty() {
            let syncs = std::mem::take(&mut progress.syncs);
            progress.left = syncs.len();
            return syncs;
        }
        progress.is_done = true;
        self.is_ended.store(true, Ordering::Release);
        progress.took = progress.began.elapsed();
        let watchers = std::mem::take(&mut progress.watchers);
        drop(progress);
        self.ended.notify_all();
        watchers.into_iter().for_each(|watcher| watcher());
        Vec::new()
    }

    fn check_process(&self) -> Result<()> {
        match crate::process::id() == self.process {
            true => Ok(()),
            false => Err(Error::Forked {
                process: self.process,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
