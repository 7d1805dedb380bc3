//! Saving: extents are filled from the tensors, digested in the staging buffer, and written.
//!
//! The copy into the buffer is the only one (see `super::staging_queue`). The worker that writes the buffer
//! digests it there; in a sealed save it first seals the chunks that were not sealed on the way
//! there, in place. A save that is signed hashes the stored bytes there too. While the queue is full,
//! the worker fills some more extents, so that a device
//! that completes many requests at once receives the next ones immediately. Few of them, since
//! recently used staging memory is still in a cache. Device copies run in the background, so more
//! of those are requested ahead.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use penstock_io::buffer::IoBuf;
use penstock_io::engine::{Completion, Engine, Op, OpKind};
use penstock_io::file::File;
use penstock_io::priority;
use penstock_io::trace::{self, Role};

use super::crew::{Crew, Member};
use super::staging_queue::lending::{Lending, LentExtent, Loan};
use super::staging_queue::supply::Next;
use super::staging_queue::{Filled, StagingQueue};
use super::{Halt, failed, open_engine, run_workers, submit};
use crate::error::{Error, Result};
use crate::format::digest::{CHUNK_BYTES, ChunkDigester, Digest};
use crate::options::Settings;
use crate::plan::write::WritePlan;
use crate::progress::Progress;
use crate::report::Run;
use crate::seal::{ShardSealer, Tag};
use crate::sign::{ChunkHash, FileHasher};

/// Minimum number of extents that a device copies for a worker at once: with only one, the worker
/// would wait.
const FROM_DEVICE_MIN: usize = 8;

/// How long a worker waits at once for memory that others return.
const MEMORY_PAUSE: Duration = Duration::from_millis(20);

/// The extents that one worker digested, by number, with the digests, the tags and the hashes of
/// their chunks.
type Digested = Vec<(u64, Vec<Digest>, Vec<Tag>, Vec<ChunkHash>)>;

/// The digest of each chunk of a shard, the tag of each if it is sealed, and the hash of each if the
/// save is signed.
#[derive(Clone, Debug)]
pub(crate) struct WrittenChunks {
    pub(crate) digests: Vec<Digest>,
    pub(crate) tags: Vec<Tag>,
    pub(crate) hashes: Vec<ChunkHash>,
}

impl WrittenChunks {
    /// Room for the chunks of a shard.
    fn none(shard_bytes: u64, is_sealed: bool, is_hashed: bool) -> WrittenChunks {
        let chunks = shard_bytes.div_ceil(CHUNK_BYTES) as usize;
        WrittenChunks {
            digests: vec![Digest::EMPTY; chunks],
            tags: vec![[0; 16]; if is_sealed { chunks } else { 0 }],
            hashes: vec![[0; 32]; if is_hashed { chunks } else { 0 }],
        }
    }
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
    let lending = begin_lending(staging_queue, files, sealers, settings, run);
    // Writes into the page cache are copies, for which more workers always pay.
    let in_turn = settings.in_turn
        && !staging_queue.is_on_device()
        && files.iter().all(|file| file.is_direct());
    let crew = Crew::new(workers, settings.queue_depth, in_turn);
    let work = |halt: &Halt<'_>| {
        let Some(member) = crew.join() else {
            return Ok(None);
        };
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
            lending: lending.as_ref(),
            engine: open_engine(settings, member.depth(), &mut run)?,
            member,
            completed: Vec::new(),
            device_to_host: VecDeque::new(),
            filled: VecDeque::new(),
            digested: Vec::new(),
            zero_copy_bytes: 0,
            rewritten_extents: 0,
            changed: VecDeque::new(),
            lent: HashMap::new(),
        };
        let ran = worker.run();
        // The claims of a worker that fails end the save, for which the others are not to blame.
        let is_blameless = matches!(ran, Err(Error::Interrupted)) && !halt.check_running()?;
        if !is_blameless {
            ran.inspect_err(|_| halt.stop())?;
        }
        run.zero_copy_bytes = worker.zero_copy_bytes;
        run.rewritten_extents = worker.rewritten_extents;
        Ok(Some((run, worker.digested)))
    };
    let shards = plan.shards.iter();
    let mut chunks: Vec<_> = shards
        .map(|shard| WrittenChunks::none(shard.bytes, !sealers.is_empty(), settings.is_hashed))
        .collect();
    let mut written = 0;
    for (worker_run, digested) in run_workers(workers, progress, work)?.into_iter().flatten() {
        run.merge(worker_run);
        written += digested.len() as u64;
        for (number, digests, tags, hashes) in digested {
            let extent = plan.extent(number);
            let first = (extent.range.start / CHUNK_BYTES) as usize;
            let chunks = &mut chunks[extent.shard];
            chunks.digests[first..first + digests.len()].copy_from_slice(&digests);
            if !tags.is_empty() {
                chunks.tags[first..first + tags.len()].copy_from_slice(&tags);
            }
            if !hashes.is_empty() {
                chunks.hashes[first..first + hashes.len()].copy_from_slice(&hashes);
            }
        }
    }
    run.explain_rewritten();
    run.workers = crew.begun().filter(|_| in_turn);
    assert_eq!(written, plan.extents(), "every extent is written once");
    Ok(chunks)
}

/// Begins to lend the caller's memory to the device, where that is wanted and possible.
fn begin_lending(
    staging_queue: &StagingQueue,
    files: &[Arc<File>],
    sealers: &[ShardSealer],
    settings: &Settings,
    run: &mut Run,
) -> Option<Lending> {
    let is_wanted = settings.zero_copy && sealers.is_empty();
    if !is_wanted || !staging_queue.may_lend(files, settings.lends_all) {
        return None;
    }
    match staging_queue.begin_lending(files, settings.lends_all) {
        Ok(lending) => Some(lending),
        Err(reason) => {
            run.choices.push(format!("zero_copy=off: {reason}"));
            None
        }
    }
}

/// An extent that is written from the caller's memory.
struct InFlight<'a> {
    /// Requests that have not completed.
    requests: usize,
    /// Addresses of its pieces, in their order.
    addresses: Vec<usize>,
    /// Pieces whose requests have completed. Dropped before the loan, which keeps their memory.
    written: Vec<IoBuf>,
    loan: Loan<'a>,
}

struct Worker<'a> {
    plan: &'a WritePlan,
    staging_queue: &'a StagingQueue,
    files: &'a [Arc<File>],
    /// One for each shard of a sealed save; empty in a clear one.
    sealers: &'a [ShardSealer],
    settings: &'a Settings,
    halt: &'a Halt<'a>,
    /// `None` to copy everything.
    lending: Option<&'a Lending>,
    engine: penstock_io::transfer::WholeTransfers,
    member: Member<'a>,
    completed: Vec<Completion>,
    /// Extents that may still be arriving from a device.
    device_to_host: VecDeque<Filled>,
    /// Requests waiting for room in the queue: the number of the extent, where the bytes are in
    /// it, and the bytes.
    filled: VecDeque<(u64, usize, IoBuf)>,
    digested: Digested,
    /// Bytes written from the caller's memory.
    zero_copy_bytes: u64,
    /// Extents that were written again.
    rewritten_extents: u64,
    /// Extents that were changed while they were written, to be copied and written again.
    changed: VecDeque<(u64, Loan<'a>)>,
    /// Extents with lent memory, by number. Dropped after the engine, which waits for the requests
    /// in flight: only then may the caller have its memory back.
    lent: HashMap<u64, InFlight<'a>>,
}

impl<'a> Worker<'a> {
    fn run(&mut self) -> Result<()> {
        let mut has_more = true;
        let ahead_max = match self.staging_queue.is_on_device() {
            true => self.settings.filled_ahead_max().max(FROM_DEVICE_MIN),
            false => self.settings.filled_ahead_max(),
        };
        while self.halt.check_running()? {
            self.staging_queue.check()?;
            self.copy_changed()?;
            self.take_in()?;
            self.submit_filled();
            if self.collect(0)? {
                continue;
            }
            let has_none = self.engine.in_flight() == 0
                && self.device_to_host.is_empty()
                && self.changed.is_empty();
            // The device's queue is full: time to fill the next extents.
            if has_more && self.device_to_host.len() + self.filled.len() < ahead_max {
                let queue = self.staging_queue;
                match queue.next(has_none, self.halt, self.sealers, self.lending)? {
                    Next::Filled(filled) => {
                        self.device_to_host.push_back(filled);
                        continue;
                    }
                    Next::Lent(extent) => {
                        self.take_lent(extent)?;
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
            self.member.waits();
            match self.engine.in_flight() {
                0 if self.device_to_host.is_empty() => self.wait_for_memory()?,
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

    /// Waits for the next extent, and digests it, unless it was digested on its way.
    fn digest_next(&mut self) -> Result<()> {
        let Some(filled) = self.device_to_host.pop_front() else {
            return Ok(());
        };
        let bufs = vec![filled.buf.wait()?];
        self.digest(filled.number, bufs, filled.digests, &filled.tags)
    }

    /// Digests an extent with lent memory, and holds that until the extent is written.
    fn take_lent(&mut self, extent: LentExtent<'a>) -> Result<()> {
        let LentExtent {
            number,
            segments,
            loan,
        } = extent;
        let in_flight = InFlight {
            requests: segments.len(),
            addresses: segments.iter().map(IoBuf::address).collect(),
            written: Vec::with_capacity(segments.len()),
            loan,
        };
        self.lent.insert(number, in_flight);
        self.digest(number, segments, Vec::new(), &[])
    }

    /// Returns the memory of an extent that is written, unless it was changed meanwhile: then the
    /// file may hold other bytes than were digested.
    fn end_loan(&mut self, number: u64, in_flight: InFlight<'a>) {
        let is_same = self.is_as_digested(number, &in_flight);
        let InFlight { written, loan, .. } = in_flight;
        drop(written);
        let is_unchanged = |lending: &Lending| lending.is_unchanged(&loan);
        if !is_same || !self.lending.is_some_and(is_unchanged) {
            self.rewritten_extents += 1;
            self.changed.push_back((number, loan));
            return;
        }
        self.zero_copy_bytes += loan.bytes();
        loan.end();
        let bytes = self.plan.extent(number).bytes();
        self.halt.progress.advance(bytes as u64);
    }

    /// Whether the pieces of an extent that is written still have the digests of before. The watch
    /// sees no writes through pages that were pinned before it began: those of devices, and of the
    /// kernel to registered buffers.
    fn is_as_digested(&self, number: u64, in_flight: &InFlight<'_>) -> bool {
        let _span = trace::span("digest");
        let mut pieces: Vec<&IoBuf> = in_flight.written.iter().collect();
        let place = |piece: &&IoBuf| {
            let address = piece.address();
            in_flight.addresses.iter().position(|&one| one == address)
        };
        pieces.sort_by_key(place);
        let bytes = self.plan.extent(number).bytes();
        let mut digester = ChunkDigester::default();
        let chunks = chunks_of(pieces.into_iter(), bytes).into_iter().flatten();
        chunks.for_each(|piece| digester.update(piece));
        let mut digested = self.digested.iter().rev();
        let before = digested.find(|(other, ..)| *other == number);
        before.is_some_and(|(_, digests, ..)| *digests == digester.finish())
    }

    /// Copies extents that were changed while they were written, while there is staging
    /// memory for them. The copies are digested and written as other extents are.
    fn copy_changed(&mut self) -> Result<()> {
        while !self.changed.is_empty()
            && let Some(buf) = self.settings.pool.take_unless_spent()?
            && let Some((number, loan)) = self.changed.pop_front()
        {
            let stale = self
                .digested
                .iter()
                .rposition(|(other, ..)| *other == number);
            self.digested.swap_remove(stale.expect("it was digested"));
            self.device_to_host.push_back(loan.copy(buf)?);
        }
        Ok(())
    }

    /// Waits until others return memory for an extent that is to be copied.
    fn wait_for_memory(&mut self) -> Result<()> {
        let _span = trace::span("wait for memory");
        drop(self.settings.pool.take_timeout(MEMORY_PAUSE)?);
        Ok(())
    }

    /// Digests an extent, whose bytes are in one or several pieces. `digests` are those that are
    /// known.
    fn digest(
        &mut self,
        number: u64,
        mut bufs: Vec<IoBuf>,
        digests: Vec<Digest>,
        sealed: &[Option<Tag>],
    ) -> Result<()> {
        let _span = trace::span("digest");
        let extent = self.plan.extent(number);
        let bytes = extent.bytes();
        let (digests, tags) = match self.sealers.get(extent.shard) {
            None if !digests.is_empty() => (digests, Vec::new()),
            None => {
                let mut digester = ChunkDigester::default();
                let chunks = chunks_of(bufs.iter(), bytes).into_iter().flatten();
                chunks.for_each(|piece| digester.update(piece));
                (digester.finish(), Vec::new())
            }
            Some(sealer) => {
                let first = extent.range.start / CHUNK_BYTES;
                let buf = bufs[0].as_mut_slice();
                seal_chunks(sealer, first, &mut buf[..bytes], sealed)?
            }
        };
        let hashes = match self.settings.is_hashed {
            false => Vec::new(),
            true => {
                let _span = trace::span("hash");
                let hasher = FileHasher::new(self.plan.shards[extent.shard].bytes);
                (extent.range.start / CHUNK_BYTES..)
                    .zip(chunks_of(bufs.iter(), bytes))
                    .map(|(index, chunk)| hasher.chunk(index, chunk))
                    .collect()
            }
        };
        let file = &self.files[extent.shard];
        file.expect(extent.range.start, || {
            Digest::of_chunks(&digests, bytes as u64).0
        });
        self.digested.push((number, digests, tags, hashes));
        let mut at = 0;
        for buf in bufs {
            let len = buf.len();
            self.filled.push_back((number, at, buf));
            at += len;
        }
        Ok(())
    }

    fn submit_filled(&mut self) {
        while self.engine.in_flight() < self.member.depth() {
            let Some((number, at, mut buf)) = self.filled.pop_front() else {
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
                    offset: extent.range.start + at as u64,
                    buf,
                },
            };
            submit(&mut self.engine, op);
            self.member.submitted(self.engine.in_flight());
        }
    }

    /// Collects completions, waiting for at least `min`; returns whether there were any.
    fn collect(&mut self, min: usize) -> Result<bool> {
        self.engine.poll(min, None, &mut self.completed)?;
        let found = !self.completed.is_empty();
        for Completion { token, result, buf } in std::mem::take(&mut self.completed) {
            let extent = self.plan.extent(token);
            let file = &self.files[extent.shard];
            result.map_err(failed("write", file.path()))?;
            let Some(mut in_flight) = self.lent.remove(&token) else {
                self.halt.progress.advance(extent.bytes() as u64);
                continue;
            };
            in_flight.requests -= 1;
            in_flight.written.extend(buf);
            match in_flight.requests {
                0 => self.end_loan(token, in_flight),
                _ => _ = self.lent.insert(token, in_flight),
            }
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

/// The chunks of an extent of `bytes`, each as the pieces that it consists of.
fn chunks_of<'b>(bufs: impl Iterator<Item = &'b IoBuf>, bytes: usize) -> Vec<Vec<&'b [u8]>> {
    let chunk_bytes = CHUNK_BYTES as usize;
    let mut chunks = vec![Vec::new(); bytes.div_ceil(chunk_bytes)];
    let mut at = 0;
    for buf in bufs {
        let mut rest = &buf.as_slice()[..buf.len().min(bytes - at)];
        while !rest.is_empty() {
            let room = chunk_bytes - at % chunk_bytes;
            let (piece, behind) = rest.split_at(room.min(rest.len()));
            chunks[at / chunk_bytes].push(piece);
            at += piece.len();
            rest = behind;
        }
    }
    chunks
}
