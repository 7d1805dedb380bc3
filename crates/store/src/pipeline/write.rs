//! Saving: extents are filled from the tensors, digested in the staging buffer, and written.
//!
//! The copy into the buffer is the only one. The digest is taken there, right after the copy and
//! before anything else touches the bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use penstock_io::buffer::{HostRegion, IoBuf};
use penstock_io::engine::{Completion, Engine, Op, OpKind};
use penstock_io::file::File;

use super::{Halt, Run, failed, open_engine, reap, run_workers, submit};
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
    digested: Digested,
}

impl Worker<'_> {
    fn run(&mut self, cursor: &AtomicU64) -> Result<()> {
        while self.halt.go_on()? {
            let number = cursor.fetch_add(1, Ordering::Relaxed);
            if number >= self.plan.extents() {
                break;
            }
            let extent = self.plan.extent(number);
            let mut buf = self.take_buffer()?;
            self.fill(&extent, &mut buf);
            self.digested.push((
                number,
                digest_chunks(&buf.as_slice()[..extent_bytes(&extent)]),
            ));
            let file = Arc::clone(&self.files[extent.shard]);
            let kind = OpKind::Write {
                offset: extent.range.start,
                buf,
            };
            submit(
                &mut self.engine,
                Op {
                    token: number,
                    file,
                    kind,
                },
            );
            self.collect(0)?;
        }
        while self.engine.in_flight() > 0 {
            self.collect(1)?;
        }
        Ok(())
    }

    /// A staging buffer, and room in the queue to submit it.
    fn take_buffer(&mut self) -> Result<IoBuf> {
        loop {
            if self.engine.in_flight() < self.settings.queue_depth {
                if let Some(buf) = self.settings.pool.try_take()? {
                    return Ok(buf);
                }
                if self.engine.in_flight() == 0 {
                    // The other workers hold the whole budget; they give it back.
                    return Ok(self.settings.pool.take()?);
                }
            }
            self.collect(1)?;
        }
    }

    /// Copies the extent into the buffer and pads it to what the file wants to be written in.
    fn fill(&self, extent: &Extent, buf: &mut IoBuf) {
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

    /// Takes in completions, waiting for at least `min`.
    fn collect(&mut self, min: usize) -> Result<()> {
        if min == 0 {
            self.engine.poll(0, None, &mut self.completed)?;
        } else {
            reap(&mut self.engine, &mut self.completed)?;
        }
        for completion in self.completed.drain(..) {
            let extent = self.plan.extent(completion.token);
            let file = &self.files[extent.shard];
            completion.result.map_err(failed("write", file.path()))?;
            self.halt.progress.advance(extent_bytes(&extent) as u64);
        }
        Ok(())
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
