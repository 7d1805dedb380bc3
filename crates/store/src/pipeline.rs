//! Carrying out a plan: workers that overlap copying and digesting with the device.
//!
//! Each worker owns an engine and takes work from a shared cursor. Staging memory comes from one
//! pool with a budget; waiting for a buffer is the back-pressure. The first failure stops all
//! workers; operations in flight complete before any memory is released.

pub(crate) mod copy;
mod crew;
pub(crate) mod damage;
mod device_copies;
mod pages;
mod placed;
pub mod read;
mod replica;
#[cfg(feature = "objects")]
pub(crate) mod send;
pub(crate) mod staging_queue;
pub(crate) mod target;
pub mod write;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use penstock_io::engine::{Engine, Op, OpKind};
use penstock_io::trace;
use penstock_io::transfer::WholeTransfers;

use crate::error::{Error, Result};
use crate::options::Settings;
use crate::progress::Progress;
use crate::report::{FallbackKind, Run};

/// Shared by the workers of one call so that they can stop each other.
pub(crate) struct Halt<'a> {
    stopped: AtomicBool,
    progress: &'a Progress,
}

impl<'a> Halt<'a> {
    fn new(progress: &'a Progress) -> Halt<'a> {
        Halt {
            stopped: AtomicBool::new(false),
            progress,
        }
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Whether to continue; an error once the caller cancels.
    pub(crate) fn check_running(&self) -> Result<bool> {
        self.progress.check()?;
        Ok(!self.stopped.load(Ordering::Relaxed))
    }
}

/// Runs `work` on one thread per worker and collects the results. The first error wins and stops
/// the others. If the system refuses more threads, those that started do all the work.
pub(crate) fn run_workers<T: Send>(
    workers: usize,
    progress: &Progress,
    work: impl Fn(&Halt<'_>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let halt = Halt::new(progress);
    let guarded = || {
        // A panic stops the others too, since nobody waits for their results.
        let stop_on_failure = StopOnDrop(&halt);
        let result = work(&halt);
        if result.is_ok() {
            std::mem::forget(stop_on_failure);
        }
        result
    };
    let results: Vec<Result<T>> = thread::scope(|scope| {
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, guarded);
        let mut handles = Vec::with_capacity(workers);
        for worker in 0..workers {
            match spawn(worker) {
                Ok(handle) => handles.push(handle),
                Err(_) if !handles.is_empty() => break,
                Err(source) => {
                    let operation = "start a thread";
                    return vec![Err(penstock_io::Error::Engine { operation, source }.into())];
                }
            }
        }
        let join = |handle: thread::ScopedJoinHandle<'_, _>| {
            handle
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        handles.into_iter().map(join).collect()
    });
    results.into_iter().collect()
}

/// Stops all workers when dropped.
struct StopOnDrop<'a>(&'a Halt<'a>);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Opens a worker's engine for `depth` operations in flight, wrapped so that short transfers are
/// completed.
fn open_engine(settings: &Settings, depth: usize, run: &mut Run) -> Result<WholeTransfers> {
    let _span = trace::span("open engine");
    let opened = (settings.engine_factory)(depth)?;
    let capabilities = opened.engine.capabilities();
    run.engine = capabilities.name.to_owned();
    run.setup = capabilities.setup.to_owned();
    if let Some(reason) = opened.fallback {
        run.note(FallbackKind::Engine, reason);
    }
    Ok(WholeTransfers::new(opened.engine))
}

/// Adds the operation and the file to a completion's error.
fn failed(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    Error::storage(operation, PathBuf::from(path))
}

/// Submits an operation to an engine whose queue has room.
fn submit(engine: &mut dyn Engine, op: Op) {
    let kind = match &op.kind {
        OpKind::Read { .. } => "read",
        OpKind::Write { .. } => "write",
        OpKind::SyncData => "sync",
    };
    let rejected = engine.submit(op).is_err();
    assert!(!rejected, "the queue had room for a {kind}");
}
