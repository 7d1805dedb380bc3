//! Saving: extents are filled from the tensors, digested in the staging buffer, and written.
//!
//! The copy into the buffer is the only one (see `super::staging_queue`). The worker that writes the buffer
//! digests it there. While the queue is full, the worker fills some more extents, so that a device
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

/// Minimum number of extents that a device copies for a worker at once: with only one, the worker
/// would wait.
const FROM_DEVICE_MIN: usize = 8;

/// The extents that one worker digested, by number, with the digests of their chunks.
type Digested = Vec<(u64, Vec<Digest>)>;

/// Writes every extent of the plan and returns the chunk digests of each shard.
///
/// Direct files are written up to a multiple of a page; the caller truncates them.
pub(crate) fn write(
    plan: &WritePlan,
    staging_queue: &StagingQueue,
    files: &[Arc<File>],
    settings: &Settings,
    progress: &Progress,
    run: &mut Run,
) -> Result<Vec<Vec<Digest>>> {
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
    let mut chunks: Vec<Vec<Digest>> = plan
        .shards
        .iter()
        .map(|shard| vec![Digest::EMPTY; shard.bytes.div_ceil(CHUNK_BYTES) as usize])
        .collect();
    let mut written = 0;
    for (worker_run, digested) in run_workers(workers, progress, work)? {
        run.merge(worker_run);
        written += digested.len() as u64;
        for (number, digests) in digested {
            let extent = plan.extent(number);
            let first = (extent.range.start / CHUNK_BYTES) as usize;
            chunks[extent.shard][first..first + digests.len()].copy_from_slice(&digests);
        }
    }
    assert_eq!(written, plan.extents(), "every extent is written once");
    Ok(chunks)
}

struct Worker<'a> {
    plan: &'a WritePlan,
    staging_queue: &'a StagingQueue,
    files: &'a [Arc<File>],
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
                match self.staging_queue.next(has_none, self.halt)? {
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
        if let Some(Filled { number, buf }) = self.device_to_host.pop_front() {
            self.digest(number, buf.wait()?);
        }
        Ok(())
    }

    fn digest(&mut self, number: u64, buf: IoBuf) {
        let _span = trace::span("digest");
        let extent = self.plan.extent(number);
        let bytes = extent.bytes();
        let digests = digest_chunks(&buf.as_slice()[..bytes]);
        let file = &self.files[extent.shard];
        file.expect(extent.range.start, || {
            Digest::of_chunks(&digests, bytes as u64).0
        });
        self.digested.push((number, digests));
        self.filled.push_back((number, buf));
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

fn digest_chunks(bytes: &[u8]) -> Vec<Digest> {
    bytes.chunks(CHUNK_BYTES as usize).map(Digest::of).collect()
}
