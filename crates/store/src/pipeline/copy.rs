//! Copying files with digests: each chunk is verified between its read and its write.
//!
//! One staging buffer holds an extent from its read to the end of its write, so memory is bounded
//! by the queue depth. A chunk that does not match its digest is read once more, bypassing the page
//! cache, since a transfer can fail although the stored bytes are right. A second mismatch is
//! damage, and the copy is discarded.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use penstock_io::buffer::{IoBuf, Pool};
use penstock_io::engine::{Completion, Engine, Op, OpKind};
use penstock_io::file::File;
use penstock_io::priority;
use penstock_io::trace::{self, Role};
use penstock_io::transfer::WholeTransfers;

use super::damage::Damage;
use super::{Halt, failed, open_engine, run_workers, submit};
use crate::error::Result;
use crate::format::digest::{CHUNK_BYTES, Digest};
use crate::format::shard::PAGE_BYTES;
use crate::options::Settings;
use crate::progress::Progress;
use crate::report::Run;

/// A file, and the file to copy it to.
pub(crate) struct Copy {
    pub(crate) from: Arc<File>,
    pub(crate) to: Arc<File>,
    pub(crate) bytes: u64,
    /// Digests of its chunks.
    pub(crate) chunks: Vec<Digest>,
}

/// Copies files; returns damage found in one of them, by the index of that file.
///
/// Direct files are written up to a multiple of a page; the caller truncates them.
pub(crate) fn copy(
    copies: &[Copy],
    settings: &Settings,
    progress: &Progress,
    run: &mut Run,
) -> Result<Option<Damage>> {
    let extent_bytes = (settings.extent_bytes as u64).next_multiple_of(CHUNK_BYTES);
    let mut firsts = vec![0];
    for copy in copies {
        firsts.push(firsts[firsts.len() - 1] + copy.bytes.div_ceil(extent_bytes));
    }
    let extents = Extents {
        copies,
        bytes: extent_bytes,
        firsts,
        next: AtomicU64::new(0),
    };
    let workers = (settings.io_threads as u64).min(extents.count()) as usize;
    let work = |halt: &Halt<'_>| {
        let _row = trace::enter(Role::Writer);
        let _span = trace::span("copy files");
        settings.nice.into_iter().for_each(priority::step_back);
        let mut run = Run::default();
        let buffer_bytes = extent_bytes as usize;
        let mut worker = Worker {
            extents: &extents,
            halt,
            engine: open_engine(settings, settings.queue_depth, &mut run)?,
            pool: Pool::new(buffer_bytes, settings.queue_depth * buffer_bytes),
            depth: settings.queue_depth,
            damage: None,
        };
        worker.run()?;
        Ok((run, worker.damage))
    };
    let mut damage = None;
    for (worker_run, found) in run_workers(workers, progress, work)? {
        run.merge(worker_run);
        damage = damage.or(found);
    }
    Ok(damage)
}

/// All files, cut into extents of whole chunks.
struct Extents<'a> {
    copies: &'a [Copy],
    bytes: u64,
    /// Number of the first extent of each file, and the total number at the end.
    firsts: Vec<u64>,
    /// The next extent that is not taken.
    next: AtomicU64,
}

impl Extents<'_> {
    fn count(&self) -> u64 {
        self.firsts[self.firsts.len() - 1]
    }

    fn take(&self) -> Option<u64> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        (number < self.count()).then_some(number)
    }

    /// The file of an extent, its offset in that file, and its size.
    fn place(&self, number: u64) -> (usize, u64, usize) {
        let file = self.firsts.partition_point(|&first| first <= number) - 1;
        let start = (number - self.firsts[file]) * self.bytes;
        let bytes = self.bytes.min(self.copies[file].bytes - start);
        (file, start, bytes as usize)
    }
}

/// The stage of an extent's operation, encoded in the token with the extent's number.
const READ: u64 = 0;
const REREAD: u64 = 1;
const WRITE: u64 = 2;
const STAGES: u64 = 3;

struct Worker<'a> {
    extents: &'a Extents<'a>,
    halt: &'a Halt<'a>,
    engine: WholeTransfers,
    pool: Pool,
    depth: usize,
    damage: Option<Damage>,
}

impl Worker<'_> {
    fn run(&mut self) -> Result<()> {
        let mut completed = Vec::new();
        let mut has_more = true;
        while self.halt.check_running()? {
            while has_more && self.engine.in_flight() < self.depth {
                match self.extents.take() {
                    Some(number) => self.read(number, READ, self.pool.take()?),
                    None => has_more = false,
                }
            }
            if self.engine.in_flight() == 0 {
                break;
            }
            self.engine.poll(1, None, &mut completed)?;
            for completion in completed.drain(..) {
                self.carry_on(completion)?;
            }
        }
        Ok(())
    }

    fn read(&mut self, number: u64, stage: u64, mut buf: IoBuf) {
        let (file, offset, bytes) = self.extents.place(number);
        let from = &self.extents.copies[file].from;
        buf.set_len(length(from, bytes));
        let op = Op {
            token: number * STAGES + stage,
            file: Arc::clone(from),
            kind: OpKind::Read { offset, buf },
        };
        submit(&mut self.engine, op);
    }

    /// Verifies a completed read, and queues the write.
    fn carry_on(&mut self, completion: Completion) -> Result<()> {
        let (number, stage) = (completion.token / STAGES, completion.token % STAGES);
        let (file, offset, bytes) = self.extents.place(number);
        let copy = &self.extents.copies[file];
        if stage == WRITE {
            completion.result.map_err(failed("write", copy.to.path()))?;
            return Ok(());
        }
        let moved = completion.result;
        let moved = moved.and_then(|moved| match moved {
            // The size was right when the file was opened, so somebody is truncating it meanwhile.
            moved if moved < bytes => Err(io::ErrorKind::UnexpectedEof.into()),
            moved => Ok(moved),
        });
        moved.map_err(failed("read", copy.from.path()))?;
        let mut buf = completion.buf.expect("a read returns its buffer");
        if let Some(range) = mismatch(&copy.chunks, offset, &buf.as_slice()[..bytes]) {
            if stage == READ {
                // The page cache would return the same bytes again; the device may not.
                let _ = copy.from.drop_cache();
                self.read(number, REREAD, buf);
                return Ok(());
            }
            self.damage = Some(Damage {
                file,
                range,
                byte: None,
                unreadable: None,
                is_tampered: false,
            });
            self.halt.stop();
            return Ok(());
        }
        buf.set_len(length(&copy.to, bytes));
        buf.as_mut_slice()[bytes..].fill(0);
        let op = Op {
            token: number * STAGES + WRITE,
            file: Arc::clone(&copy.to),
            kind: OpKind::Write { offset, buf },
        };
        submit(&mut self.engine, op);
        Ok(())
    }
}

/// Size of a request: whole pages for a direct file.
pub(super) fn length(file: &File, bytes: usize) -> usize {
    match file.is_direct() {
        true => bytes.next_multiple_of(PAGE_BYTES as usize),
        false => bytes,
    }
}

/// The first chunk that does not match its digest, among bytes that begin at an offset.
pub(super) fn mismatch(chunks: &[Digest], offset: u64, bytes: &[u8]) -> Option<Range<u64>> {
    let first = (offset / CHUNK_BYTES) as usize;
    let chunks = bytes.chunks(CHUNK_BYTES as usize).zip(&chunks[first..]);
    let mut starts = (offset..).step_by(CHUNK_BYTES as usize).zip(chunks);
    let (start, (chunk, _)) = starts.find(|(_, (chunk, digest))| Digest::of(chunk) != **digest)?;
    Some(start..start + chunk.len() as u64)
}
