//! Loading and verifying: items are read into their final memory, and digested there before anybody
//! uses them.
//!
//! Submitting requests comes first: a worker refills the queue, and only while the device is busy
//! does it populate the memory of later items (a page fault would delay submission) and verify
//! completed reads.
//!
//! An item that does not match its digest is read once more, bypassing the page cache, since a
//! transfer can fail although the stored bytes are right. A second mismatch is damage. Bytes that
//! go through staging reach the caller's memory only after verification.
//!
//! Bytes for devices go through staging. The device copies them itself, many extents per call: a
//! worker continues, and takes buffers back when it needs some or has nothing else to do.
//!
//! A chunk of a sealed file is opened in new memory where it was read, or on the way from staging to
//! its place. Chunks of a signed file are hashed where they were read, and compared with the hashes
//! that the signature covers, before anything else is done with them. Tags and hashes are checked
//! instead of digests. An item that fails is read once more and compared with its digests: one that
//! does not match them is damaged, one that does was tampered with.
//!
//! Some storage completes reads during submission (tmpfs, the page cache). A worker that detects
//! this keeps few operations in flight, so that the bytes are still in the processor's caches when
//! they are digested and copied.

mod finish;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use penstock_io::buffer::{IoBuf, Memory, MemoryHandle};
use penstock_io::engine::{Completion, Engine, Op};
use penstock_io::file::File;
use penstock_io::trace::{self, Role};
use penstock_io::transfer::WholeTransfers;

use super::damage::Damage;
use super::device_copies::DeviceCopies;
use super::pages::Pages;
use super::placed::{PlacedItem, untoken};
use super::replica;
use super::target::{Region, Rest, Target};
use super::{Halt, failed, open_engine, run_workers, submit};
use crate::error::Result;
use crate::format::digest::{CHUNK_BYTES, Digest};
use crate::format::plain::is_lost;
use crate::format::shard::PAGE_BYTES;
use crate::options::Settings;
use crate::plan::read::{FileFacts, ReadPlan, Segment};
use crate::progress::Progress;
use crate::report::Run;
use crate::seal::ShardOpener;
use crate::sign::ChunkHash;

/// How long a worker waits for a buffer of others before it looks after copies to devices again.
const TURN: Duration = Duration::from_millis(5);

/// Approximate amount that a worker takes from the shared queue at a time.
const TAKEN_BYTES: usize = 4 << 20;

/// A file to read and the digests of its chunks; `None` if its digests are lost.
pub(crate) struct Source<'a> {
    pub(crate) file: Arc<File>,
    pub(crate) bytes: u64,
    pub(crate) chunks: Option<&'a [Digest]>,
    /// Opens the file's chunks, if it is sealed and is to be opened.
    pub(crate) opener: Option<&'a ShardOpener>,
    /// The use of the hashes of the file's chunks.
    pub(crate) hashing: Hashing<'a>,
}

/// The use of the hash of each chunk, made of the bytes as they are stored.
#[derive(Clone, Copy)]
pub(crate) enum Hashing<'a> {
    /// None is made.
    Off,
    /// They are those of a signed file: a chunk with another one was exchanged.
    Compare(&'a [ChunkHash]),
    /// They are kept, by the chunk's index.
    Collect(&'a Mutex<Vec<ChunkHash>>),
}

impl Source<'_> {
    /// Whether each chunk has to match a tag or a signed hash, which tell more than its digest.
    fn is_authenticated(&self) -> bool {
        self.opener.is_some() || matches!(self.hashing, Hashing::Compare(_))
    }

    /// The properties of the file that a plan needs.
    pub(crate) fn facts(&self) -> FileFacts {
        let alignment = self.file.alignment();
        FileFacts {
            bytes: self.bytes,
            // Requests are aligned to pages, a multiple of every block size used with direct I/O.
            offset_alignment: if self.file.is_direct() { PAGE_BYTES } else { 1 },
            memory_alignment: alignment.memory,
            is_elsewhere: self.file.is_elsewhere(),
            // Nothing gets to the caller's memory before it is opened, or compared with a signature.
            is_sealed: self.is_authenticated(),
        }
    }
}

/// The reaction to damage.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnDamage {
    /// Stop: the result of this load is not used. Only this kind of read may skip digests, by
    /// option; the others end in a verdict.
    Stop,
    /// Continue and list all damage.
    List,
    /// List all damage, unreadable sectors included. The data is returned anyway: the caller checks
    /// which of it the damage touches.
    Survey,
}

/// The result of a read.
pub(crate) struct Outcome {
    /// The memory of each segment of the plan; empty if there is damage, except in a survey.
    pub(crate) segments: Vec<Memory>,
    /// All damage found, by file and offset; possibly incomplete if the read stops at damage.
    pub(crate) damage: Vec<Damage>,
    /// Bytes that the host copied from staging to their places.
    pub(crate) bounced_bytes: u64,
    /// Bytes that devices copied to their memory.
    pub(crate) device_bytes: u64,
    /// Bytes requested from storage.
    pub(crate) bytes_read: u64,
    /// Bytes of sealed chunks that were opened.
    pub(crate) opened_bytes: u64,
}

/// Carries out a read plan. `targets` holds the caller's memory per request.
pub(crate) fn read(
    plan: ReadPlan,
    targets: Vec<Target>,
    sources: &[Source<'_>],
    settings: &Settings,
    on_damage: OnDamage,
    progress: &Progress,
    run: &mut Run,
) -> Result<Outcome> {
    let (handles, queue) = prepare(plan, targets, sources)?;
    let workers = settings.io_threads.min(queue.len());
    let queue = Mutex::new(queue);
    let pages = Pages::of(&handles);
    let device_copies = DeviceCopies::new(settings.pool.budget_bytes());
    let work = |halt: &Halt<'_>| {
        let _row = trace::enter(Role::Reader);
        let _span = trace::span("work");
        let mut run = Run::default();
        let engine = open_engine(settings, settings.queue_depth, &mut run)?;
        let shared = (&pages, &device_copies);
        let mut worker = Worker::new(sources, settings, on_damage, halt, shared, engine);
        worker.run(&queue)?;
        Ok((run, worker.tally))
    };
    let mut tally = Tally::default();
    for (worker_run, worker_tally) in run_workers(workers, progress, work)? {
        run.merge(worker_run);
        tally.damage.extend(worker_tally.damage);
        tally.bounced_bytes += worker_tally.bounced_bytes;
        tally.bytes_read += worker_tally.bytes_read;
        tally.opened_bytes += worker_tally.opened_bytes;
        tally.mended.extend(worker_tally.mended);
    }
    if let Some(path) = &settings.replica {
        let mut mended: BTreeMap<&Path, Vec<u64>> = BTreeMap::new();
        for &(file, offset) in &tally.mended {
            let file = sources[file].file.path();
            mended.entry(file).or_default().push(offset);
        }
        replica::report(path, &mended, run);
    }
    tally
        .damage
        .sort_by_key(|damage| (damage.file, damage.range.start));
    let device_bytes = device_copies.bytes();
    drop((queue, device_copies));
    let reclaim = |handle: MemoryHandle| {
        handle
            .reclaim()
            .unwrap_or_else(|_| unreachable!("every window over a segment was dropped"))
    };
    // Damage may have stopped some reads, and the memory is not returned anyway.
    let segments = match tally.damage.is_empty() || on_damage == OnDamage::Survey {
        true => handles.into_iter().map(reclaim).collect(),
        false => Vec::new(),
    };
    Ok(Outcome {
        segments,
        damage: tally.damage,
        bounced_bytes: tally.bounced_bytes,
        device_bytes,
        bytes_read: tally.bytes_read,
        opened_bytes: tally.opened_bytes,
    })
}

/// Allocates the segments, and gives every item its windows in segments and targets.
fn prepare(
    plan: ReadPlan,
    targets: Vec<Target>,
    sources: &[Source<'_>],
) -> Result<(Vec<MemoryHandle>, VecDeque<PlacedItem>)> {
    let _span = trace::span("prepare");
    let mut handles = Vec::with_capacity(plan.segments.len());
    let mut segments = Vec::with_capacity(plan.segments.len());
    let mirror_bytes = |segment: &Segment| (segment.mirror.end - segment.mirror.start) as usize;
    let memory = Memory::allocate_all(plan.segments.iter().map(mirror_bytes))?;
    for (segment, memory) in plan.segments.iter().zip(memory) {
        let (handle, buf) = memory.share();
        handles.push(handle);
        segments.push(Region::new(Some(segment.mirror.start), buf));
    }
    let mut targets: Vec<Rest> = targets.into_iter().map(Rest::of).collect();
    let mut queue = VecDeque::with_capacity(plan.items.len());
    for item in plan.items {
        let alignment = sources[item.file].facts().offset_alignment;
        queue.push_back(PlacedItem::new(
            item,
            alignment,
            &mut segments,
            &mut targets,
        ));
    }
    Ok((handles, queue))
}

#[derive(Default)]
struct Tally {
    damage: Vec<Damage>,
    bounced_bytes: u64,
    bytes_read: u64,
    opened_bytes: u64,
    /// File and offset of chunks read from the replica.
    mended: Vec<(usize, u64)>,
}

struct Worker<'a> {
    sources: &'a [Source<'a>],
    settings: &'a Settings,
    on_damage: OnDamage,
    halt: &'a Halt<'a>,
    pages: &'a Pages<'a>,
    engine: WholeTransfers,
    completed: Vec<Completion>,
    /// Items claimed by this worker, not started yet.
    taken: VecDeque<PlacedItem>,
    /// Items in progress, by slot.
    slots: Vec<Option<PlacedItem>>,
    /// Items that were read and are not verified yet.
    arrived: VecDeque<PlacedItem>,
    /// Copies from staging buffers to devices, of all workers.
    device_copies: &'a DeviceCopies,
    /// Number of requests that keep the storage busy, up to the queue depth.
    depth: usize,
    /// Operations waiting for room in the queue.
    waiting: VecDeque<Op>,
    /// The last read error of the device.
    lost: Option<io::Error>,
    tally: Tally,
}

impl<'a> Worker<'a> {
    fn new(
        sources: &'a [Source<'a>],
        settings: &'a Settings,
        on_damage: OnDamage,
        halt: &'a Halt<'a>,
        (pages, device_copies): (&'a Pages<'a>, &'a DeviceCopies),
        engine: WholeTransfers,
    ) -> Worker<'a> {
        Worker {
            sources,
            settings,
            on_damage,
            halt,
            pages,
            engine,
            completed: Vec::new(),
            taken: VecDeque::new(),
            slots: Vec::new(),
            arrived: VecDeque::new(),
            device_copies,
            depth: settings.queue_depth,
            waiting: VecDeque::new(),
            lost: None,
            tally: Tally::default(),
        }
    }

    fn run(&mut self, queue: &Mutex<VecDeque<PlacedItem>>) -> Result<()> {
        while self.halt.check_running()? {
            let is_behind = self.arrived.len() >= self.depth;
            let is_asked = !is_behind && self.fill_queue(queue)?;
            let is_answered = self.collect(0)?;
            if is_asked && self.engine.in_flight() == 0 {
                // The storage answers during submission, so fewer requests suffice.
                self.depth = (self.depth / 2).max(1);
            } else if is_answered && !is_behind {
                continue;
            }
            // The device's queue is full: time for other work. Pages come first, as the next
            // requests need them, but completed reads must not pile up either.
            if !is_behind && self.engine.in_flight() > 0 && self.pages.populate_next() {
                continue;
            }
            if let Some(item) = self.arrived.pop_front() {
                self.finish(item)?;
                continue;
            }
            if (is_asked || is_answered) && self.engine.in_flight() == 0 {
                continue;
            }
            self.device_copies.flush()?;
            if self.engine.in_flight() > 0 {
                self.depth = (2 * self.depth).min(self.settings.queue_depth);
                self.collect(1)?;
                continue;
            }
            if self.device_copies.wait_oldest()? {
                continue;
            }
            let is_left = !self.taken.is_empty() || !self.waiting.is_empty();
            assert!(
                !is_left && self.slots.iter().all(Option::is_none),
                "every item is read"
            );
            break;
        }
        Ok(())
    }

    /// Submits until the queue is full or nothing is left; returns whether it submitted anything.
    fn fill_queue(&mut self, queue: &Mutex<VecDeque<PlacedItem>>) -> Result<bool> {
        let mut is_asked = false;
        while self.engine.in_flight() < self.depth {
            if let Some(op) = self.waiting.pop_front() {
                submit(&mut self.engine, op);
                is_asked = true;
                continue;
            }
            let Some(mut item) = self.take(queue) else {
                break;
            };
            if item.needs_staging() {
                let Some(buf) = self.take_buffer()? else {
                    self.taken.push_front(item);
                    break;
                };
                item.stage(buf);
            }
            self.start(item)?;
        }
        Ok(is_asked)
    }

    /// Takes a staging buffer; `None` if all are taken and this worker has reads to collect or to
    /// digest, which come first.
    fn take_buffer(&mut self) -> Result<Option<IoBuf>> {
        let pool = &self.settings.pool;
        if let Some(buf) = pool.try_take()? {
            return Ok(Some(buf));
        }
        if self.engine.in_flight() > 0 || !self.arrived.is_empty() {
            self.device_copies.try_flush()?;
            return Ok(pool.try_take()?);
        }
        // A worker that has left may have queued copies: their buffers come back by this one.
        loop {
            self.device_copies.flush()?;
            if let Some(buf) = pool.try_take()? {
                return Ok(Some(buf));
            }
            if !self.device_copies.wait_oldest()?
                && let Some(buf) = pool.take_timeout(TURN)?
            {
                return Ok(Some(buf));
            }
        }
    }

    /// The next item. A worker claims several neighbours at a time, so that workers mostly use
    /// different huge pages.
    fn take(&mut self, queue: &Mutex<VecDeque<PlacedItem>>) -> Option<PlacedItem> {
        if self.taken.is_empty() {
            let mut queue = queue.lock().expect("no worker panics with the lock");
            let share = queue.len().div_ceil(self.settings.io_threads);
            let count = (TAKEN_BYTES / self.settings.extent_bytes).clamp(1, share.max(1));
            let count = count.min(queue.len());
            self.taken.extend(queue.drain(..count));
        }
        self.taken.pop_front()
    }

    /// Assigns a slot to an item and queues its operations.
    fn start(&mut self, mut item: PlacedItem) -> Result<()> {
        self.halt.progress.pay(item.range.end - item.range.start)?;
        let free = self.slots.iter().position(Option::is_none);
        let slot = free.unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let file = &self.sources[item.file].file;
        self.waiting.extend(item.operations(slot, file));
        self.slots[slot] = Some(item);
        Ok(())
    }

    /// Collects completions, waiting for at least `min`; returns whether there were any.
    fn collect(&mut self, min: usize) -> Result<bool> {
        self.engine.poll(min, None, &mut self.completed)?;
        let mut completed = std::mem::take(&mut self.completed);
        let found = !completed.is_empty();
        for completion in completed.drain(..) {
            self.complete(completion)?;
        }
        self.completed = completed;
        Ok(found)
    }

    fn complete(&mut self, completion: Completion) -> Result<()> {
        let (slot, number) = untoken(completion.token);
        let has_way = self.has_way();
        let item = self.slots[slot]
            .as_mut()
            .expect("an operation belongs to an item");
        let source = &self.sources[item.file];
        let path = source.file.path();
        let buf = completion.buf.expect("a read returns its buffer");
        let read = item.give_back(number, buf);
        let expected = read.end.min(source.bytes) - read.start;
        let result = match completion.result {
            // The size was right when the file was opened, so somebody is truncating it meanwhile.
            Ok(bytes) if (bytes as u64) < expected => Err(io::ErrorKind::UnexpectedEof.into()),
            result => result,
        };
        match result {
            Ok(bytes) => self.tally.bytes_read += bytes as u64,
            Err(error) if has_way && is_lost(&error) => {
                item.unreadable = Some(error.to_string());
                self.lost = Some(error);
            }
            Err(error) => return Err(failed("read", path)(error)),
        }
        if item.operations_left == 0 {
            let item = self.slots[slot].take().expect("it was there just now");
            self.arrived.push_back(item);
        }
        Ok(())
    }

    /// Whether an unreadable sector counts as damage, or may be read from the replica.
    fn has_way(&self) -> bool {
        match self.on_damage {
            OnDamage::Stop => self.settings.replica.is_some(),
            OnDamage::List => false,
            OnDamage::Survey => true,
        }
    }
}

const _: () = assert!(
    CHUNK_BYTES.is_multiple_of(PAGE_BYTES),
    "chunks start on pages"
);
