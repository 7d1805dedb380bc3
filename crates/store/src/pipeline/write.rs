//! Saving: extents are filled from the tensors, digested in the staging buffer, and written.
//!
//! The copy into the buffer is the only one. The digest is taken there, right after the copy and
//! before anything else touches the bytes. While the queue is full, some extents more are filled: a
//! device that finishes many requests at once finds the next ones ready. Few of them, as staging
//! memory that was used a moment ago is still in a cache.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use penstock_io::buffer::{HostRegion, IoBuf};
use penstock_io::engine::{Completion, Engine, Op, OpKind};
use penstock_io::file::File;

use super::{Halt, Run, failed, open_engine, run_workers, submit, take_buffer};
use crate::digest::{CHUNK_BYTES, Digest};
use crate::error::Result;
use crate::options::Settings;
use crate::plan::write::{Extent, Piece, WritePlan};
use crate::progress::Progress;
use crate::shard::PAGE_BYTES;

/// What one worker digested: extents by number, with the digests of their chunks.
type Digested = Vec<(u64, Vec<Digest>)>;

/// Writes every extent of the plan and returns the chunk digests of each shard.
///
/// Direct files are written up to a multiple of a page; cutting them to size is the caller's.
pub(crate) fn write(
    plan: &WritePlan,
    sources: &[HostRegion],
    files: &[Arc<File>],
    settings: &Settings,
    progress: &Progress,
    run: &mut Run,
) -> Result<Vec<Vec<Digest>>> {
    let cursor = AtomicU64::new(0);
    let workers = (settings.io_threads as u64).min(plan.extents()) as usize;
    let work = |halt: &Halt<'_>| {
        let mut run = Run::default();
        let mut worker = Worker {
            plan,
            sources,
            files,
            settings,
            halt,
            engine: open_engine(settings, &mut run)?,
            completed: Vec::new(),
            filled: VecDeque::new(),
            digested: Vec::new(),
        };
        worker.run(&cursor)?;
        Ok((run, worker.digested))
    };
    let mut chunks: Vec<Vec<Digest>> = plan
        .shards
        .iter()
        .map(|shard| vec![Digest::EMPTY; shard.bytes.div_ceil(CHUNK_BYTES) as usize])
        .collect();
    for (worker_run, digested) in run_workers(workers, progress, work)? {
        run.merge(worker_run);
        for (number, digests) in digested {
            let extent = plan.extent(number);
            let first = (extent.range.start / CHUNK_BYTES) as usize;
            chunks[extent.shard][first..first + digests.len()].copy_from_slice(&digests);
        }
    }
    Ok(chunks)
}

struct Worker<'a> {
    plan: &'a WritePlan,
    sources: &'a [HostRegion],
    files: &'a [Arc<File>],
    settings: &'a Settings,
    halt: &'a Halt<'a>,
    engine: penstock_io::transfer::WholeTransfers,
    completed: Vec<Completion>,
    /// Extents that wait for room in the queue.
    filled: VecDeque<(u64, IoBuf)>,
    digested: Digested,
}

impl Worker<'_> {
    fn run(&mut self, cursor: &AtomicU64) -> Result<()> {
        let mut has_more = true;
        while self.halt.go_on()? {
            self.submit_filled();
            if self.collect(0)? {
                continue;
            }
            // The device has what it can take: time to fill what it gets next.
            if has_more
                && self.filled.len() < self.settings.filled_ahead_max()
                && let Some(buf) = take_buffer(&self.settings.pool, self.engine.in_flight() > 0)?
            {
                let number = cursor.fetch_add(1, Ordering::Relaxed);
                has_more = number < self.plan.extents();
                if has_more {
                    self.fill(number, buf);
                }
                continue;
            }
            if self.engine.in_flight() == 0 {
                break;
            }
            self.collect(1)?;
        }
        Ok(())
    }

    /// Fills a buffer with an extent and digests it there.
    fn fill(&mut self, number: u64, mut buf: IoBuf) {
        let extent = self.plan.extent(number);
        self.copy(&extent, &mut buf);
        let data = &buf.as_slice()[..extent_bytes(&extent)];
        self.digested.push((number, digest_chunks(data)));
        self.filled.push_back((number, buf));
    }

    fn submit_filled(&mut self) {
        while self.engine.in_flight() < self.settings.queue_depth {
            let Some((number, buf)) = self.filled.pop_front() else {
                break;
            };
            let extent = self.plan.extent(number);
            let op = Op {
                token: number,
                file: Arc::clone(&self.files[extent.shard]),
                kind: OpKind::Write {
                    offset: extent.range.start,
                    buf,
                },
            };
            submit(&mut self.engine, op);
        }
    }

    /// Copies the extent into the buffer and pads it to what the file wants to be written in.
    fn copy(&self, extent: &Extent, buf: &mut IoBuf) {
        let bytes = extent_bytes(extent);
        let file = &self.files[extent.shard];
        let padded = if file.is_direct() {
            bytes.next_multiple_of(PAGE_BYTES as usize)
        } else {
            bytes
        };
        buf.set_len(padded);
        let (data, padding) = buf.as_mut_slice().split_at_mut(bytes);
        let mut rest = data;
        self.plan.pieces(extent, |piece| match piece {
            Piece::Header(header) => take(&mut rest, header.len()).copy_from_slice(header),
            Piece::Tensor {
                tensor,
                start,
                bytes,
            } => {
                self.sources[tensor].copy_to(start, take(&mut rest, bytes as usize));
            }
        });
        padding.fill(0);
    }

    /// Takes in completions, waiting for at least `min`; tells whether there were any.
    fn collect(&mut self, min: usize) -> Result<bool> {
        self.engine.poll(min, None, &mut self.completed)?;
        let found = !self.completed.is_empty();
        for completion in self.completed.drain(..) {
            let extent = self.plan.extent(completion.token);
            let file = &self.files[extent.shard];
            completion.result.map_err(failed("write", file.path()))?;
            self.halt.progress.advance(extent_bytes(&extent) as u64);
        }
        Ok(found)
    }
}

fn extent_bytes(extent: &Extent) -> usize {
    (extent.range.end - extent.range.start) as usize
}

/// Splits the first `bytes` off `rest`.
fn take<'a>(rest: &mut &'a mut [u8], bytes: usize) -> &'a mut [u8] {
    rest.split_off_mut(..bytes)
        .expect("the pieces of an extent add up to its length")
}

fn digest_chunks(bytes: &[u8]) -> Vec<Digest> {
    bytes.chunks(CHUNK_BYTES as usize).map(Digest::of).collect()
}
