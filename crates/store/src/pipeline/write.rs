//! Saving: extents are filled from the tensors, digested in the staging buffer, and written.
//!
//! The copy into the buffer is the only one (see `super::staging_queue`). The worker that writes the buffer
//! digests it there; in a sealed save it first seals the chunks that were not sealed on the way
//! there, in place. While the queue is full, the worker fills some more extents, so that a device
//! that completes many requests at once receives the next ones immediately. Few of them, since
//! recently used staging memory is still in a cache. Device copies run in the background, so more
//! of those are requested ahead.

use std::collections::VecDeque;
use std::sync::Arc;

use penstock_io::buffer::IoBuf;
use penstock_io::engine::{Completion, Engine, Op, OpKind};
use penstock_io::file::File;
use penstock_io::priority;
use penstock_io::trace::{self, Role};

use super::staging_queue::{Filled, Next, StagingQueue};
use super::{Halt, failed, open_engine, run_workers, submit};
use crate::error::Result;
use crate::format::digest::{CHUNK_BYTES, Digest};
use crate::options::Settings;
use crate::plan::write::WritePlan;
use crate::progress::Progress;
use crate::report::Run;
use crate::seal::{ShardSealer, Tag};

/// Minimum number of extents that a device copies for a worker at once: with only one, the worker
/// would wait.
const FROM_DEVICE_MIN: usize = 8;

/// The extents that one worker digested, by number, with the digests and the tags of their chunks.
type Digested = Vec<(u64, Vec<Digest>, Vec<Tag>)>;

/// The digest of each chunk of a shard, and the tag of each if it is sealed.
#[derive(Clone, Debug)]
pub(crate) struct WrittenChunks {
    pub(crate) digests: Vec<Digest>,
    pub(crate) tags: Vec<Tag>,
}

/// Writes every extent of the plan, sealed if there are sealers, one for each shard.
///
/// Direct files are written up to a multiple of a page; the caller truncates them.
pub(crate) fn write(
    plan: &WritePlan,
    staging_queue: &StagingQueue,
    files: &[Arc<File>],
    sealers: &[ShardSealer],
    settings: &Settings,
    progress: &Progress,
    run: &mut Run,
) -> Result<Vec<WrittenChunks>> {
    let workers = (settings.io_threads as u64).min(plan.extents()) as usize;
    let work = |halt: &Halt<'_>| {
        let _row = trace::enter(Role::Writer);
        let _span = trace::span("work");
        // Threads started by the engine inherit the priority.
        settings.nice.into_iter().for_each(priority::step_back);
        let mut run = Run::default();
        let mut worker = Worker {
            plan,
            staging_queue,
            files,
            sealers,
            settings,
            halt,
            engine: open_engine(settings, &mut run)?,
            completed: Vec::new(),
            device_to_host: VecDeque::new(),
            filled: VecDeque::new(),
            digested: Vec::new(),
        };
        worker.run()?;
        Ok((run, worker.digested))
    };
    let empty = |bytes: u64| {
        let chunks = bytes.div_ceil(CHUNK_BYTES) as usize;
        WrittenChunks {
            digests: vec![Digest::EMPTY; chunks],
            tags: vec![[0; 16]; if sealers.is_empty() { 0 } else { chunks }],
        }
    };
    let shards = plan.shards.iter();
    let mut chunks: Vec<_> = shards.map(|shard| empty(shard.bytes)).collect();
    let mut written = 0;
    for (worker_run, digested) in run_workers(workers, progress, work)? {
        run.merge(worker_run);
        written += digested.len() as u64;
        for (number, digests, tags) in digested {
            let extent = plan.extent(number);
            let first = (extent.range.start / CHUNK_BYTES) as usize;
            let chunks = &mut chunks[extent.shard];
            chunks.digests[first..first + digests.len()].copy_from_slice(&digests);
            if !tags.is_empty() {
                chunks.tags[first..first + tags.len()].copy_from_slice(&tags);
            }
        }
    }
    assert_eq!(written, plan.extents(), "every extent is written once");
    Ok(chunks)
}

struct Worker<'a> {
    plan: &'a WritePlan,
    staging_queue: &'a StagingQueue,
    files: &'a [Arc<File>],
    /// One for each shard of a sealed save; empty in a clear one.
    sealers: &'a [ShardSealer],
    settings: &'a Settings,
    halt: &'a Halt<'a>,
    engine: penstock_io::transfer::WholeTransfers,
    completed: Vec<Completion>,
    /// Extents that may still be arriving from a device.
    device_to_host: VecDeque<Filled>,
    /// Extents waiting for room in the queue.
    filled: VecDeque<(u64, IoBuf)>,
    digested: Digested,
}

impl Worker<'_> {
    fn run(&mut self) -> Result<()> {
        let mut has_more = true;
        let ahead_max = match self.staging_queue.is_on_device() {
            true => self.settings.filled_ahead_max().max(FROM_DEVICE_MIN),
            false => self.settings.filled_ahead_max(),
        };
        while self.halt.check_running()? {
            self.staging_queue.check()?;
            self.take_in()?;
            self.submit_filled();
            if self.collect(0)? {
                continue;
            }
            let has_none = self.engine.in_flight() == 0 && self.device_to_host.is_empty();
            // The device's queue is full: time to fill the next extents.
            if has_more && self.device_to_host.len() + self.filled.len() < ahead_max {
                match self.staging_queue.next(has_none, self.halt, self.sealers)? {
                    Next::Filled(filled) => {
                        self.device_to_host.push_back(filled);
                        continue;
                    }
                    Next::Later => {}
                    Next::End => {
                        has_more = false;
                        continue;
                    }
                }
            }
            if has_none {
                break;
            }
            match self.engine.in_flight() {
                0 => self.digest_next()?,
                _ => _ = self.collect(1)?,
            }
        }
        Ok(())
    }

    /// Digests the extents that have arrived, in order.
    fn take_in(&mut self) -> Result<()> {
        while let Some(filled) = self.device_to_host.front()
            && filled.buf.is_done()?
        {
            self.digest_next()?;
        }
        Ok(())
    }

    /// Waits for the next extent, and digests it.
    fn digest_next(&mut self) -> Result<()> {
        if let Some(Filled { number, buf, tags }) = self.device_to_host.pop_front() {
            self.digest(number, buf.wait()?, &tags)?;
        }
        Ok(())
    }

    fn digest(&mut self, number: u64, mut buf: IoBuf, sealed: &[Option<Tag>]) -> Result<()> {
        let _span = trace::span("digest");
        let extent = self.plan.extent(number);
        let bytes = extent.bytes();
        let (digests, tags) = match self.sealers.get(extent.shard) {
            None => (digest_chunks(&buf.as_slice()[..bytes]), Vec::new()),
            Some(sealer) => {
                let first = extent.range.start / CHUNK_BYTES;
                seal_chunks(sealer, first, &mut buf.as_mut_slice()[..bytes], sealed)?
            }
        };
        let file = &self.files[extent.shard];
        file.expect(extent.range.start, || {
            Digest::of_chunks(&digests, bytes as u64).0
        });
        self.digested.push((number, digests, tags));
        self.filled.push_back((number, buf));
        Ok(())
    }

    fn submit_filled(&mut self) {
        while self.engine.in_flight() < self.settings.queue_depth {
            let Some((number, mut buf)) = self.filled.pop_front() else {
                break;
            };
            let extent = self.plan.extent(number);
            let file = &self.files[extent.shard];
            if !file.is_direct() {
                // Only direct files, which are written in whole pages, need the padding.
                buf.set_len(extent.bytes());
            }
            let op = Op {
                token: number,
                file: Arc::clone(file),
                kind: OpKind::Write {
                    offset: extent.range.start,
                    buf,
                },
            };
            submit(&mut self.engine, op);
        }
    }

    /// Collects completions, waiting for at least `min`; returns whether there were any.
    fn collect(&mut self, min: usize) -> Result<bool> {
        self.engine.poll(min, None, &mut self.completed)?;
        let found = !self.completed.is_empty();
        for completion in self.completed.drain(..) {
            let extent = self.plan.extent(completion.token);
            let file = &self.files[extent.shard];
            completion.result.map_err(failed("write", file.path()))?;
            self.halt.progress.advance(extent.bytes() as u64);
        }
        Ok(found)
    }
}

/// Seals the chunks that have no tag yet in place, from number `first` on, and digests each as it is
/// stored.
fn seal_chunks(
    sealer: &ShardSealer,
    first: u64,
    bytes: &mut [u8],
    sealed: &[Option<Tag>],
) -> Result<(Vec<Digest>, Vec<Tag>)> {
    let chunks = bytes.len().div_ceil(CHUNK_BYTES as usize);
    let (mut digests, mut tags) = (Vec::with_capacity(chunks), Vec::with_capacity(chunks));
    let sealed = sealed.iter().copied().chain(std::iter::repeat(None));
    let chunks = bytes.chunks_mut(CHUNK_BYTES as usize).zip(sealed);
    for (index, (chunk, tag)) in (first..).zip(chunks) {
        tags.push(match tag {
            Some(tag) => tag,
            None => {
                let _span = trace::span("seal");
                sealer.seal(index, chunk)?
            }
        });
        digests.push(Digest::of(chunk));
    }
    Ok((digests, tags))
}

fn digest_chunks(bytes: &[u8]) -> Vec<Digest> {
    bytes.chunks(CHUNK_BYTES as usize).map(Digest::of).collect()
}
