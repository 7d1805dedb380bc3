//! A long-lived set of workers that many callers share.
//!
//! A whole save or load has its own workers, which end with it. All other transfers go through an
//! [`Executor`]: any number of requests at a time, from any thread, at any offset and with any
//! memory layout. Each worker has an engine, takes pieces of requests as it has room, and waits in
//! the kernel, so that the device's queue stays full from one call to the next. A [`Share`] is one
//! caller's claim on the device: busy shares move bytes in proportion to their weights.
//!
//! Promised: a transfer that succeeds has moved every byte; its error is the first failure, with
//! operation, path and offset; its memory and files are released when the last operation on them
//! has ended, and no earlier; writes without a common byte do not disturb each other, whatever
//! their alignment. Dropping an executor finishes the submitted requests first.
//!
//! Not promised: any order among requests, and durability of writes without a sync. In a fork an
//! executor returns [`Error::Forked`], as a fork has no worker threads.

mod event_fd;
mod pieces;
mod request;
mod schedule;
mod shared;
mod transfer;
mod worker;

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::engine::{self, Engine, EngineChoice, EngineConfig};
use crate::file::File;
use crate::transfer::WholeTransfers;
use crate::{Error, Result};

pub use event_fd::EventFd;
pub use pieces::page_bytes;
pub use request::{Arrived, Kind, Landing, ParallelWork, Request, Source, Target, Visit, Visitor};
pub use transfer::{Moved, Transfer};

use pieces::Rest;
use schedule::Schedule;
use shared::{ExecutorShared, Staging};
use transfer::Failure;
use worker::Worker;

/// Number and limits of the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutorConfig {
    /// The backend of each worker; not [`EngineChoice::Sync`], which has no waker.
    pub engine: EngineChoice,
    /// Threads; at least 1.
    pub workers: usize,
    /// The most operations in flight of each worker; clamped to 1..=4096.
    pub queue_depth: usize,
    /// The most bytes that a worker's operations in flight move together; one operation is always
    /// allowed. The bound leaves room for many small operations, which a device needs to be busy, and
    /// for a few large ones.
    pub in_flight_bytes: usize,
    /// The most bytes of one operation; rounded up to whole pages.
    pub block_bytes: usize,
    /// Memory for transfers that direct I/O cannot reach.
    pub staging_bytes: usize,
    /// The most requests that may wait; further submissions block.
    pub queued_max: usize,
}

impl Default for ExecutorConfig {
    fn default() -> ExecutorConfig {
        ExecutorConfig {
            engine: EngineChoice::Auto,
            workers: 2,
            queue_depth: 128,
            in_flight_bytes: 32 << 20,
            block_bytes: 1 << 20,
            staging_bytes: 64 << 20,
            queued_max: 1 << 16,
        }
    }
}

/// Opens the engine of a worker.
pub type OpenEngine = Arc<dyn Fn() -> Result<Box<dyn Engine>> + Send + Sync>;

/// Long-lived workers that move bytes for many callers; see the module's description.
pub struct Executor {
    shared: Arc<ExecutorShared>,
    threads: Vec<JoinHandle<()>>,
    engine: &'static str,
    fallback: Option<String>,
    block_bytes: u64,
    process: u32,
}

impl Executor {
    /// Starts the workers.
    ///
    /// # Errors
    /// [`Error::EngineUnavailable`] where no worker gets an engine.
    pub fn open(config: &ExecutorConfig) -> Result<Executor> {
        let engine = EngineConfig {
            choice: config.engine,
            queue_depth: config.queue_depth,
        };
        let opened = engine::open(&engine)?;
        let (name, fallback) = (opened.engine.capabilities().name, opened.fallback);
        drop(opened.engine);
        let open: OpenEngine = Arc::new(move || Ok(engine::open(&engine)?.engine));
        let mut executor = Executor::open_with(config, &open)?;
        (executor.engine, executor.fallback) = (name, fallback);
        Ok(executor)
    }

    /// Starts workers over engines of another kind, which are wrapped for whole transfers here.
    ///
    /// # Errors
    /// The error of `open`, where no worker gets an engine.
    pub fn open_with(config: &ExecutorConfig, open: &OpenEngine) -> Result<Executor> {
        let block_bytes = config
            .block_bytes
            .clamp(1, 1 << 30)
            .next_multiple_of(pieces::page_bytes() as usize);
        let workers = config.workers.max(1);
        let shared = Arc::new(ExecutorShared::new(
            Schedule::new(block_bytes as u64),
            workers,
            Staging::new(block_bytes, config.staging_bytes),
            config.queued_max.max(1),
        ));
        let mut threads = Vec::with_capacity(workers);
        let mut refused = None;
        for index in 0..workers {
            match start(index, config.in_flight_bytes.max(1) as u64, &shared, open) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    shared.leave(&Failure::of_worker("it has no engine"));
                    refused = refused.or(Some(error));
                }
            }
        }
        if let (Some(error), true) = (refused, threads.is_empty()) {
            return Err(error);
        }
        Ok(Executor {
            shared,
            threads,
            engine: "given",
            fallback: None,
            block_bytes: block_bytes as u64,
            process: crate::process::id(),
        })
    }

    /// The backend in use, by its configuration word.
    pub fn engine(&self) -> &'static str {
        self.engine
    }

    /// Why `io_uring` is not used, where the configuration left the choice open.
    pub fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// A claim on the device in proportion to its weight, which is at least 1.
    pub fn share(&self, weight: u32) -> Result<Share> {
        check_process(self.process)?;
        Ok(Share {
            id: self.shared.add_share(weight),
            shared: Arc::clone(&self.shared),
            block_bytes: self.block_bytes,
            process: self.process,
        })
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        if self.process != crate::process::id() {
            // The threads belong to another process, and one of its locks may be held forever here.
            return std::mem::forget(threads);
        }
        self.shared.close();
        for thread in threads {
            drop(thread.join());
        }
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor")
            .field("workers", &self.threads.len())
            .field("process", &self.process)
            .finish_non_exhaustive()
    }
}

/// One caller's claim on an executor. Submitted requests continue after it is dropped.
pub struct Share {
    id: usize,
    shared: Arc<ExecutorShared>,
    block_bytes: u64,
    process: u32,
}

impl Share {
    /// The most bytes of one operation.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Submits requests; blocks while too many are waiting.
    ///
    /// A visited request must not be longer than a block.
    ///
    /// If two of the writes overlap, and one goes past the page cache and the other through it, the
    /// content of the common pages is unspecified, and the system may report an I/O error.
    ///
    /// # Errors
    /// [`Error::Forked`]; later failures are the transfer's error.
    ///
    /// # Panics
    /// If a visited request is longer than a block.
    pub fn submit(&self, requests: Vec<Request>) -> Result<Transfer> {
        self.hand_over(requests, Vec::new())
    }

    /// As [`submit`](Share::submit), and syncs these files once everything is written, before the
    /// transfer ends.
    pub fn submit_synced(&self, requests: Vec<Request>, files: Vec<Arc<File>>) -> Result<Transfer> {
        self.hand_over(requests, files)
    }

    /// Asks up to `threads` threads of the executor to help with a computation of the caller. None
    /// may come: the caller does the remaining work, in a fork all of it.
    pub fn offer(&self, run_part: &Arc<dyn ParallelWork>, threads: usize) {
        if self.process == crate::process::id() {
            self.shared.offer(run_part, threads);
        }
    }

    fn hand_over(&self, requests: Vec<Request>, syncs: Vec<Arc<File>>) -> Result<Transfer> {
        check_process(self.process)?;
        let is_fitting = |one: &Request| match &one.kind {
            Kind::Read(Landing::Visited(visit)) => visit.bytes <= self.block_bytes,
            Kind::Read(_) | Kind::Write(_) => true,
        };
        assert!(
            requests.iter().all(is_fitting),
            "a visited request is longer than a block"
        );
        let rests: Vec<Rest> = requests
            .into_iter()
            .map(Rest::of)
            .filter(|rest| !rest.is_empty())
            .collect();
        // One more than there are, until all are submitted.
        let transfer = Transfer::new(rests.len() + 1, syncs, self.process);
        if !rests.is_empty() {
            self.shared.push(self.id, rests, &transfer.state);
        }
        self.shared.end(&transfer.state, Ok(Moved::default()));
        Ok(transfer)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.process == crate::process::id() {
            self.shared.remove_share(self.id);
        }
    }
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Share")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

fn check_process(process: u32) -> Result<()> {
    match process == crate::process::id() {
        true => Ok(()),
        false => Err(Error::Forked { process }),
    }
}

/// Starts a worker, and waits until it has its engine.
fn start(
    index: usize,
    in_flight_bytes: u64,
    shared: &Arc<ExecutorShared>,
    open: &OpenEngine,
) -> Result<JoinHandle<()>> {
    let (said, heard) = crossbeam_channel::bounded(1);
    let (shared, open) = (Arc::clone(shared), Arc::clone(open));
    let work = move || {
        let mut engine: Box<dyn Engine> = match open() {
            Ok(engine) => Box::new(WholeTransfers::new(engine)),
            Err(error) => return drop(said.send(Err(error))),
        };
        match engine.waker() {
            Ok(waker) => shared.wakers.set(index, waker),
            Err(source) => {
                let operation = "waker";
                return drop(said.send(Err(Error::Engine { operation, source })));
            }
        }
        drop(said.send(Ok(())));
        Worker::new(shared, index, in_flight_bytes, engine).run();
    };
    let thread = std::thread::Builder::new()
        .name(format!("penstock-exec-{index}"))
        .spawn(work)
        .map_err(|source| Error::Engine {
            operation: "spawn",
            source,
        })?;
    match heard.recv() {
        Ok(Ok(())) => Ok(thread),
        Ok(Err(error)) => {
            drop(thread.join());
            Err(error)
        }
        Err(_) => unreachable!("a worker says whether it has an engine"),
    }
}
