//! One rank's write, split into copying out of the caller's memory and writing.
//!
//! [`Job::stage`], on the caller's thread, copies the state at the speed of memory; the caller may
//! change the state once it returns. [`Job::write`], on another thread, writes the staged extents.
//! A lazy job needs no staging: its workers copy as they write, and a caller who needs the memory
//! earlier stages the rest. The sync save is a lazy job that is never staged.
//!
//! A caller that continues during a lazy job may change the state too early. Such a job is
//! *watched*: it fails if anybody wrote to memory that was not copied yet ([`Watch`]). Where
//! changes cannot be detected, the job is eager.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use penstock_cuda::Foreign;
use penstock_io::buffer::{Region, Unwatchable, Watch};
use penstock_io::trace::{self, Role};
use serde_json::value::RawValue;

use super::arena::Arena;
use super::eager_copy::{bytes_of, device, hold, replace_by_copies, replace_by_snapshots, small};
use super::linked::Links;
use super::planned::{PlannedWrite, WrittenShard};
use super::state::SaveState;
use super::written::{Stopwatch, Written};
use crate::commit::Attempt;
use crate::error::{Error, Result};
use crate::format::part::Missing;
use crate::options::{Options, STAGING_BYTES};
use crate::pipeline;
use crate::pipeline::staging_queue::StagingQueue;
use crate::progress::Progress;
use crate::report::{FallbackKind, Run};
use crate::seal::{Block, draw_salt};

/// Limit on staging threads: more do not speed up memory, and the caller has other work for them.
const STAGE_THREADS_MAX: usize = 4;

/// Limit on further eager copies of a lazy job, outside of the staging memory.
const AT_ONCE_BYTES_MAX: u64 = 64 << 20;
const UNCOUNTED: &str = "nobody tells of changes to some tensors that a device has";
const TOO_MUCH_AT_ONCE: &str = "it has more than 64 MiB that has to be copied at the call";

/// Where and when a job copies the state.
#[derive(Clone, Debug, Default)]
pub struct Staging {
    /// Memory to stage in; without one the job allocates its own, within `Options::staging_bytes`.
    pub arena: Option<Arena>,
    /// Whether the workers copy extents that are not staged. Otherwise they wait for
    /// [`Job::stage`].
    pub is_lazy: bool,
    /// Whether a lazy job fails if a tensor is changed before it is copied.
    pub is_watched: bool,
    /// Indices of further tensors that a lazy job copies eagerly, whatever their size. With more
    /// than 64 MiB of them the job is eager, and also if one of them is on a device.
    pub eager: Vec<usize>,
    /// Streams that work on device tensors, and wait for their eager copies.
    pub streams: Vec<Foreign>,
}

/// A rank's write in two halves. Every method may be called from any thread.
pub struct Job {
    planned: Arc<PlannedWrite>,
    staging_queue: StagingQueue,
    plan_seconds: f64,
    is_lazy: bool,
    /// Why a job that was to be lazy is eager.
    eager_because: Option<String>,
    /// Device tensors copied eagerly.
    snapshots: Vec<usize>,
    /// Whether device copies are queued before their extents are due to be written.
    copies_ahead: bool,
    /// Time spent in [`Job::stage`]; `None` before the first call.
    stage_seconds: Mutex<Option<f64>>,
    is_begun: AtomicBool,
}

impl Job {
    /// Plans the write of a state to the device behind `path`. A lazy job eagerly copies small
    /// tensors, up to 64 KiB each and 64 MiB in all, the smallest first.
    ///
    /// A watched job fails with [`Error::SourceModified`] if anybody writes to the other tensors before they
    /// are copied. If changes cannot be detected, [`Job::is_lazy`] is false.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a tensor that the format does not support.
    pub fn new(state: SaveState, path: &Path, options: &Options, staging: &Staging) -> Result<Job> {
        let begun = Instant::now();
        let mut options = options.clone();
        if let Some(budget_bytes) = staging.arena.as_ref().and_then(Arena::budget_bytes) {
            // Extents and workers are chosen to fit the arena.
            let staging_bytes = options.staging_bytes.unwrap_or(STAGING_BYTES);
            options.staging_bytes = Some(staging_bytes.min(budget_bytes));
        }
        let (mut planned, mut sources) = PlannedWrite::new(state, Vec::new(), path, &options)?;
        let names = |index: usize| planned.name(index).to_owned();
        let mut is_lazy = staging.is_lazy;
        let mut eager_because = None;
        let mut copied = Vec::new();
        let mut snapshots = Vec::new();
        if is_lazy {
            copied = small(&sources, |source| source.host().is_some());
            let mut asked = staging.eager.clone();
            asked.retain(|&index| {
                sources[index].host().is_some() && copied.binary_search(&index).is_err()
            });
            if bytes_of(&sources, &asked) <= AT_ONCE_BYTES_MAX {
                copied.extend(asked);
                copied.sort_unstable();
            } else {
                is_lazy = false;
                eager_because = Some(TOO_MUCH_AT_ONCE.to_owned());
            }
            replace_by_copies(&mut sources, &copied)?;
            snapshots = replace_by_snapshots(&mut sources, &staging.streams)?;
            let is_device = |&index: &usize| sources[index].device().is_some();
            if staging.eager.iter().any(is_device) {
                is_lazy = false;
                eager_because = Some(UNCOUNTED.to_owned());
            }
        }
        let sources = Arc::new(sources);
        let mut watch = None;
        let of_host = sources.iter().filter(|source| source.host().is_some());
        let is_on_host = copied.len() < of_host.count();
        if is_lazy && staging.is_watched && is_on_host {
            let _span = trace::span("watch");
            match Watch::begin(Arc::clone(&sources), &copied) {
                Ok(begun) => watch = Some(begun),
                Err(reason) => {
                    is_lazy = false;
                    eager_because = Some(because(&reason, names));
                }
            }
        }
        if let Some(arena) = &staging.arena {
            let settings = &mut planned.settings;
            let extent_bytes = settings.extent_bytes;
            let extents = usize::try_from(planned.plan.extents()).unwrap_or(usize::MAX);
            let wanted_bytes = extents.saturating_mul(extent_bytes);
            // One extent in flight and one being filled.
            settings.pool = arena.pool(
                extent_bytes,
                wanted_bytes,
                2 * extent_bytes,
                device(&sources),
            );
        }
        Ok(Job {
            eager_because,
            snapshots,
            // Shortens the wait of a caller that changes the sources. Copies by the host would not:
            // they compete with the caller's own work.
            copies_ahead: is_lazy && !is_on_host,
            ..Job::of(planned, sources, watch, is_lazy, begun)
        })
    }

    /// The job of a sync save of a state, with the list of its missing tensors.
    pub(crate) fn sync(
        state: SaveState,
        missing: Vec<Missing>,
        path: &Path,
        options: &Options,
    ) -> Result<Job> {
        let _span = trace::span("plan");
        let begun = Instant::now();
        let (mut planned, sources) = PlannedWrite::new(state, missing, path, options)?;
        if let Some(device) = device(&sources) {
            let extents = usize::try_from(planned.plan.extents()).unwrap_or(usize::MAX);
            planned.settings.pin(device, extents);
        }
        Ok(Job::of(planned, Arc::new(sources), None, true, begun))
    }

    fn of(
        planned: PlannedWrite,
        sources: Arc<Vec<Region>>,
        watch: Option<Watch>,
        is_lazy: bool,
        begun: Instant,
    ) -> Job {
        let plan = Arc::clone(&planned.plan);
        let pool = planned.settings.pool.clone();
        let staging_queue = StagingQueue::new(plan, sources, watch, pool, is_lazy);
        Job {
            planned: Arc::new(planned),
            staging_queue,
            plan_seconds: begun.elapsed().as_secs_f64(),
            is_lazy,
            eager_because: None,
            snapshots: Vec::new(),
            copies_ahead: false,
            stage_seconds: Mutex::default(),
            is_begun: AtomicBool::new(false),
        }
    }

    /// Size of all shards.
    pub fn bytes(&self) -> u64 {
        self.planned.plan.bytes()
    }

    /// Whether workers copy extents that are not staged; false also if a job that was to be lazy is
    /// eager.
    pub fn is_lazy(&self) -> bool {
        self.is_lazy
    }

    /// Copies all extents that are not copied yet, with up to `threads` threads, including the
    /// calling one. When it returns, the caller's memory is no longer read, and the sources are
    /// dropped. If the write fails or is cancelled meanwhile, it returns early; [`Job::write`] then
    /// reports the error.
    ///
    /// A state larger than its staging memory is staged only as fast as it is written: this then
    /// waits for a [`Job::write`] on another thread.
    ///
    /// # Errors
    /// System errors for lack of memory. The job has failed then.
    pub fn stage(&self, threads: Option<usize>) -> Result<()> {
        let _span = trace::span("stage");
        let begun = Instant::now();
        let threads = threads.unwrap_or_else(|| {
            let cores = thread::available_parallelism().map_or(1, usize::from);
            cores.min(STAGE_THREADS_MAX)
        });
        // A write that ends before this returns must still report a staging phase.
        self.lock_stage_seconds().get_or_insert(0.0);
        let staged = self.staging_queue.stage(threads);
        let mut seconds = self.lock_stage_seconds();
        *seconds = Some(seconds.unwrap_or(0.0) + begun.elapsed().as_secs_f64());
        staged
    }

    /// Copies all extents that are not copied yet, and makes `streams` wait for the device copies:
    /// work queued on them from now on may change device tensors, and the caller may change host
    /// tensors. It does not wait for a device, unless staging memory is smaller than the rest of
    /// the state.
    pub fn hold(&self, streams: &[Foreign]) -> Result<()> {
        let _span = trace::span("hold");
        self.staging_queue.queue()?;
        hold(streams, self.staging_queue.all_streams().iter()).inspect_err(|_| self.cancel())
    }

    /// Indices of device tensors that a lazy job has copied eagerly: streams that work on them wait
    /// for the copies.
    pub fn snapshots(&self) -> &[usize] {
        &self.snapshots
    }

    /// Whether part of the state is on a device and may not be copied yet.
    pub fn is_on_device(&self) -> bool {
        !self.staging_queue.all_streams().is_empty()
    }

    /// Waits, without copying, until the state may be changed; returns whether that is so. It is
    /// also so once the job has failed.
    pub fn wait_staged(&self, timeout: Option<Duration>) -> bool {
        self.staging_queue.wait(timeout)
    }

    /// Whether the state may be changed.
    pub fn is_staged(&self) -> bool {
        self.staging_queue.wait(Some(Duration::ZERO))
    }

    /// Stops the job: staging ends, and a write returns [`Error::Interrupted`] soon.
    pub fn cancel(&self) {
        self.staging_queue.end();
        // A write in progress owns its holders; a later one links nothing.
        drop(self.planned.take_holders());
    }

    /// Writes shards and part, makes them durable, and casts the rank's vote, as
    /// [`write_rank`](super::write_rank) does. An eager job waits for [`Job::stage`], which runs
    /// before or on another thread, and begins when all extents are staged, or when staging needs
    /// their buffers.
    ///
    /// # Panics
    /// If the job was already written.
    pub fn write(&self, attempt: &mut Attempt, rank: u32, progress: &Progress) -> Result<Written> {
        self.write_shards(attempt, rank, progress)?
            .describe(attempt, None)
    }

    /// Does the first step of [`Job::write`]: writes the shards but not the part, whose tree may
    /// come later.
    ///
    /// # Panics
    /// If the job was already written.
    pub fn write_shards(
        &self,
        attempt: &mut Attempt,
        rank: u32,
        progress: &Progress,
    ) -> Result<Shards> {
        self.write_since(trace::now_ns(), attempt, rank, progress)
    }

    /// Writes shards as [`Job::write_shards`] does, timed from an earlier moment on.
    pub(super) fn write_since(
        &self,
        begun_ns: u64,
        attempt: &mut Attempt,
        rank: u32,
        progress: &Progress,
    ) -> Result<Shards> {
        let is_begun = self.is_begun.swap(true, Ordering::Relaxed);
        assert!(!is_begun, "a job is written once");
        // A panic ends the staging queue too, so that nobody waits for this write.
        let end_on_failure = EndOnDrop(&self.staging_queue);
        progress.expect(self.bytes());
        let mut shards = Shards {
            planned: Arc::clone(&self.planned),
            id: attempt.id().to_owned(),
            rank,
            shards: Vec::new(),
            salt: None,
            links: Links::default(),
            run: Run::default(),
            free_bytes: attempt.files().free_bytes(attempt.path()),
            watch: Stopwatch::since(begun_ns),
        };
        let holders = self.planned.take_holders();
        let written = self.fill_shards(&mut shards, attempt, progress);
        drop(holders);
        written.map_err(|error| {
            let source_modified = self.source_modified(attempt.path());
            source_modified.unwrap_or_else(|| shards.with_room(error))
        })?;
        std::mem::forget(end_on_failure);
        shards.watch.insert("stage", *self.lock_stage_seconds());
        shards.watch.insert("plan", Some(self.plan_seconds));
        Ok(shards)
    }

    fn fill_shards(
        &self,
        shards: &mut Shards,
        attempt: &mut Attempt,
        progress: &Progress,
    ) -> Result<()> {
        let PlannedWrite { plan, settings, .. } = self.planned.as_ref();
        let run = &mut shards.run;
        if let Some(reason) = &self.eager_because {
            let reason = format!("copied at the call, as without lazy=True: {reason}");
            run.note(FallbackKind::Eager, reason);
        }
        self.staging_queue.check()?;
        let shard_files = self.planned.shard_files();
        let names = self.planned.linked_names(shards.rank, attempt.id());
        let linked = &self.planned.linked;
        shards.links = linked.link(&names, attempt, &shard_files, run)?;
        let files = self.planned.create_shards(attempt, shards.rank, run)?;
        if attempt.sealing().is_some() {
            shards.salt = Some(draw_salt(attempt.path())?);
        }
        let salt = shards.salt.unwrap_or(Block([0; 32]));
        let sealers = self.planned.sealers(attempt, shards.rank, &salt);
        let chunks = self.while_copying_ahead(|| {
            let queue = &self.staging_queue;
            pipeline::write::write(plan, queue, &files, &sealers, settings, progress, run)
        })?;
        shards.shards = WrittenShard::all(chunks, &sealers);
        // The thread that copied last may still be checking for changes.
        self.staging_queue.wait(None);
        if let Some(reason) = settings.pool.unpinned() {
            run.note(FallbackKind::Unpinned, reason);
        }
        self.staging_queue.check()?;
        let links = &shards.links;
        if let Some(damage) = pipeline::copy::copy(&links.copies, settings, progress, run)? {
            return Err(linked.damaged(links, &damage));
        }
        shards.watch.lap("write");
        self.planned.finish_shards(&files)?;
        for (file, bytes) in &links.made {
            shard_files.finish(file, *bytes)?;
        }
        progress.check()?;
        self.staging_queue.check()?;
        shards.watch.lap("sync");
        let made = links.made.iter().map(|(file, _)| file);
        run.is_direct = files.iter().chain(made).all(|file| file.is_direct());
        // Closed before the commit, so that no reader of a complete checkpoint finds the files
        // open.
        drop(files);
        shards.links.close();
        Ok(())
    }

    /// Runs `work` while another thread queues the device copies that it needs, as far as buffers
    /// allow.
    fn while_copying_ahead<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if !self.copies_ahead || self.staging_queue.all_streams().is_empty() {
            return work();
        }
        thread::scope(|scope| {
            // Without a thread for it, the writing threads queue the copies.
            let copying = thread::Builder::new().spawn_scoped(scope, || {
                let _row = trace::enter(Role::Stager);
                let _span = trace::span("copy ahead");
                self.staging_queue.copy_runs()
            });
            // The other thread waits for memory while somebody may return some.
            let end_on_failure = EndOnDrop(&self.staging_queue);
            let done = work();
            if done.is_ok() {
                std::mem::forget(end_on_failure);
            } else {
                drop(end_on_failure);
            }
            let copied = copying.map(|thread| {
                let joined = thread.join();
                joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            // A failed copy is the reason why nothing was written.
            match (copied, done) {
                (Ok(Err(error)), Err(Error::Interrupted)) => Err(error),
                (_, done) => done,
            }
        })
    }

    /// The error of a write whose sources changed before they were copied.
    fn source_modified(&self, path: &Path) -> Option<Error> {
        let tensor = self.staging_queue.source_modified()?;
        Some(Error::SourceModified {
            path: path.to_owned(),
            key: self.planned.name(tensor).to_owned(),
        })
    }

    fn lock_stage_seconds(&self) -> std::sync::MutexGuard<'_, Option<f64>> {
        let seconds = self.stage_seconds.lock();
        seconds.unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job")
            .field("bytes", &self.bytes())
            .field("is_staged", &self.is_staged())
            .finish_non_exhaustive()
    }
}

/// Ends a staging queue when dropped.
struct EndOnDrop<'a>(&'a StagingQueue);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The durable shards of a rank, before the part that describes them is written.
#[must_use = "shards count once they are described"]
pub struct Shards {
    planned: Arc<PlannedWrite>,
    /// The attempt that they belong to.
    id: String,
    rank: u32,
    shards: Vec<WrittenShard>,
    /// The salt of a sealed part.
    salt: Option<Block>,
    links: Links,
    run: Run,
    /// Free space on the device before they were written.
    free_bytes: Option<u64>,
    watch: Stopwatch,
}

impl Shards {
    /// Writes the part, with `tree` instead of the state's own if given, and casts the vote.
    ///
    /// # Panics
    /// If the shards belong to another attempt.
    pub fn describe(
        mut self,
        attempt: &mut Attempt,
        tree: Option<Box<RawValue>>,
    ) -> Result<Written> {
        let _span = trace::span("describe");
        assert_eq!(
            self.id,
            attempt.id(),
            "shards are described in their attempt"
        );
        let shards = std::mem::take(&mut self.shards);
        let (rank, salt) = (self.rank, self.salt);
        let part = self.planned.write_part(attempt, rank, shards, salt, tree);
        let part = part.map_err(|error| self.with_room(error))?;
        let Shards {
            planned,
            links,
            run,
            watch,
            ..
        } = self;
        Ok(planned.written(part, run, &links, watch.phases))
    }

    fn with_room(&self, error: Error) -> Error {
        let needed_bytes = self.planned.plan.bytes() + self.links.copied_bytes;
        error.with_room(needed_bytes, self.free_bytes)
    }
}

impl std::fmt::Debug for Shards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shards")
            .field("id", &self.id)
            .field("rank", &self.rank)
            .finish_non_exhaustive()
    }
}

fn because(reason: &Unwatchable, name: impl Fn(usize) -> String) -> String {
    match reason {
        Unwatchable::Shared { region } | Unwatchable::Mapped { region } => {
            format!("{} lies in {reason}", name(*region))
        }
        _ => reason.to_string(),
    }
}
