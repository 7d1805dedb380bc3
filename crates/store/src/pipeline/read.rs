//! Loading and verifying: items are read into their final places, and digested there before
//! anybody sees them.
//!
//! An item whose digest does not match is read once more, since a transfer can go wrong where the
//! stored bytes are right; then it is damage. Bytes that go through staging reach the caller's
//! memory only after they were found right.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use penstock_io::buffer::{HostRegionMut, IoBuf, Memory, MemoryHandle};
use penstock_io::engine::{Completion, Engine, Op, OpKind};
use penstock_io::file::File;
use penstock_io::transfer::WholeTransfers;

use super::{Halt, Run, failed, open_engine, reap, run_workers, submit};
use crate::digest::{CHUNK_BYTES, Digest};
use crate::error::Result;
use crate::options::Settings;
use crate::plan::read::{Destination, FileFacts, Item, Owner, ReadPlan, floor};
use crate::progress::Progress;
use crate::shard::PAGE_BYTES;

/// A file to read and the digests of its chunks.
pub(crate) struct Source<'a> {
    pub(crate) file: Arc<File>,
    pub(crate) bytes: u64,
    pub(crate) chunks: &'a [Digest],
}

impl Source<'_> {
    /// What a plan needs to know of the file.
    pub(crate) fn facts(&self) -> FileFacts {
        let alignment = self.file.alignment();
        FileFacts {
            bytes: self.bytes,
            // Requests are cut on pages, which every block size that direct I/O is used with
            // divides.
            offset_alignment: if self.file.is_direct() { PAGE_BYTES } else { 1 },
            memory_alignment: alignment.memory,
        }
    }
}

/// A chunk whose bytes are not those that were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Damage {
    /// Index of the file.
    pub(crate) file: usize,
    /// The chunk's bytes.
    pub(crate) range: Range<u64>,
}

impl Damage {
    /// What is wrong with it.
    pub(crate) const DETAIL: &'static str = "the bytes do not match their digest";
}

/// What to do about damage.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnDamage {
    /// Stop: nothing of this load will be used.
    Stop,
    /// Go on and list all of it.
    List,
}

/// What a read brought.
pub(crate) struct Outcome {
    /// The memory of each segment of the plan; none if there is damage.
    pub(crate) segments: Vec<Memory>,
    /// Damage found, by file and offset; if it was to stop at it, perhaps not all.
    pub(crate) damage: Vec<Damage>,
    /// Bytes that went through staging on their way to their place.
    pub(crate) bounced_bytes: u64,
    /// Bytes requested from the device.
    pub(crate) bytes_read: u64,
}

/// Carries out a read plan. `targets` holds the caller's memory by request.
pub(crate) fn read(
    plan: ReadPlan,
    mut targets: Vec<Option<HostRegionMut>>,
    sources: &[Source<'_>],
    settings: &Settings,
    on_damage: OnDamage,
    progress: &Progress,
    run: &mut Run,
) -> Result<Outcome> {
    let mut handles = Vec::with_capacity(plan.segments.len());
    let mut segments = Vec::with_capacity(plan.segments.len());
    for segment in &plan.segments {
        let bytes = (segment.mirror.end - segment.mirror.start) as usize;
        let (handle, buf) = Memory::allocate(bytes)?.share();
        handles.push(handle);
        segments.push(Region {
            start: Some(segment.mirror.start),
            rest: Some(buf),
        });
    }
    let mut targets: Vec<Option<Region>> = targets
        .drain(..)
        .map(|target| {
            target.map(|memory| Region {
                start: None,
                rest: Some(memory.into_buf()),
            })
        })
        .collect();
    let mut queue = VecDeque::with_capacity(plan.items.len());
    for item in plan.items {
        let alignment = sources[item.file].facts().offset_alignment;
        queue.push_back(Prepared::new(item, alignment, &mut segments, &mut targets));
    }
    drop((segments, targets));

    let workers = settings.io_threads.min(queue.len());
    let queue = Mutex::new(queue);
    let work = |halt: &Halt<'_>| {
        let mut run = Run::default();
        let engine = open_engine(settings, &mut run)?;
        let mut worker = Worker::new(sources, settings, on_damage, halt, engine);
        worker.run(&queue)?;
        Ok((run, worker.tally))
    };
    let mut tally = Tally::default();
    for (worker_run, worker_tally) in run_workers(workers, progress, work)? {
        run.merge(worker_run);
        tally.damage.extend(worker_tally.damage);
        tally.bounced_bytes += worker_tally.bounced_bytes;
        tally.bytes_read += worker_tally.bytes_read;
    }
    tally
        .damage
        .sort_by_key(|damage| (damage.file, damage.range.start));
    drop(queue);
    let reclaim = |handle: MemoryHandle| {
        handle
            .reclaim()
            .unwrap_or_else(|_| unreachable!("every window over a segment was dropped"))
    };
    // After damage some reads may have been left behind, and nothing of it is handed out anyway.
    let segments = match tally.damage.is_empty() {
        true => handles.into_iter().map(reclaim).collect(),
        false => Vec::new(),
    };
    Ok(Outcome {
        segments,
        damage: tally.damage,
        bounced_bytes: tally.bounced_bytes,
        bytes_read: tally.bytes_read,
    })
}

/// Final memory that is handed out to pieces from front to back.
struct Region {
    /// The file offset that the first byte of `rest` stands for. A target's first piece starts
    /// where the target does, and sets it.
    start: Option<u64>,
    rest: Option<IoBuf>,
}

impl Region {
    /// The window for bytes `range` of the file; windows are asked for in order.
    fn window(&mut self, range: &Range<u64>) -> IoBuf {
        let mut window = self
            .rest
            .take()
            .expect("a region is handed out from front to back");
        let skip = (range.start - self.start.unwrap_or(range.start)) as usize;
        if skip > 0 {
            window = window.split_off(skip);
        }
        let bytes = (range.end - range.start) as usize;
        if bytes < window.len() {
            self.rest = Some(window.split_off(bytes));
            self.start = Some(range.end);
        }
        window
    }
}

/// A piece with its memory.
struct Landing {
    range: Range<u64>,
    place: Place,
}

enum Place {
    /// Read here; the window mirrors `read`, which surrounds the piece.
    Direct {
        window: Option<IoBuf>,
        read: Range<u64>,
    },
    /// In the item's staging run with this number, then copied to the window if there is one.
    Staged { run: usize, window: Option<IoBuf> },
}

/// Neighbouring pieces that go through staging, read with one request.
struct StagingRun {
    read: Range<u64>,
    buf: Option<IoBuf>,
}

/// An item with the memory its pieces land in.
struct Prepared {
    file: usize,
    range: Range<u64>,
    landings: Vec<Landing>,
    runs: Vec<StagingRun>,
    retried: bool,
    operations_left: usize,
}

impl Prepared {
    fn new(
        item: Item,
        alignment: u64,
        segments: &mut [Region],
        targets: &mut [Option<Region>],
    ) -> Prepared {
        let aligned = |range: &Range<u64>| {
            floor(range.start, alignment)..range.end.next_multiple_of(alignment)
        };
        let mut window = |owner: Owner, range: &Range<u64>| match owner {
            Owner::Segment(index) => segments[index].window(range),
            Owner::Target(index) => targets[index]
                .as_mut()
                .expect("the plan saw this target")
                .window(range),
        };
        let mut landings: Vec<Landing> = Vec::with_capacity(item.pieces.len());
        let mut runs: Vec<StagingRun> = Vec::new();
        let mut run_is_open = false;
        for piece in item.pieces {
            let staged = match piece.to {
                Destination::Direct(owner) => {
                    let read = aligned(&piece.range);
                    let window = Some(window(owner, &read));
                    run_is_open = false;
                    landings.push(Landing {
                        range: piece.range,
                        place: Place::Direct { window, read },
                    });
                    continue;
                }
                Destination::Copy(owner) => Some(window(owner, &piece.range)),
                Destination::Discard => None,
            };
            let read = aligned(&piece.range);
            match runs.last_mut() {
                Some(run) if run_is_open => run.read.end = read.end,
                _ => runs.push(StagingRun { read, buf: None }),
            }
            run_is_open = true;
            let place = Place::Staged {
                run: runs.len() - 1,
                window: staged,
            };
            landings.push(Landing {
                range: piece.range,
                place,
            });
        }
        let range = item.range;
        let file = item.file;
        Prepared {
            file,
            range,
            landings,
            runs,
            retried: false,
            operations_left: 0,
        }
    }

    /// Cuts the staging runs out of one buffer.
    fn stage(&mut self, mut buf: IoBuf) {
        for run in &mut self.runs {
            let rest = buf.split_off((run.read.end - run.read.start) as usize);
            run.buf = Some(std::mem::replace(&mut buf, rest));
        }
    }

    /// The requests that bring the item in. Tokens count the direct landings first, then the runs.
    fn operations(&mut self, slot: usize, file: &Arc<File>) -> Vec<Op> {
        let landings = self
            .landings
            .iter_mut()
            .filter_map(|landing| match &mut landing.place {
                Place::Direct { window, read } => Some((read.start, window.take())),
                Place::Staged { .. } => None,
            });
        let runs = self
            .runs
            .iter_mut()
            .map(|run| (run.read.start, run.buf.take()));
        let reads: Vec<_> = landings.chain(runs).collect();
        self.operations_left = reads.len();
        let op = |(number, (offset, buf)): (usize, (u64, Option<IoBuf>))| Op {
            token: token(slot, number),
            file: Arc::clone(file),
            kind: OpKind::Read {
                offset,
                buf: buf.expect("a buffer is back once its read is"),
            },
        };
        reads.into_iter().enumerate().map(op).collect()
    }

    /// Puts the buffer of a finished read back and tells which bytes it was to bring.
    fn give_back(&mut self, number: usize, buf: IoBuf) -> Range<u64> {
        self.operations_left -= 1;
        let direct = self
            .landings
            .iter_mut()
            .filter_map(|landing| match &mut landing.place {
                Place::Direct { window, read } => Some((window, read)),
                Place::Staged { .. } => None,
            });
        let runs = self
            .runs
            .iter_mut()
            .map(|run| (&mut run.buf, &mut run.read));
        let (place, read) = direct
            .chain(runs)
            .nth(number)
            .expect("the token names a read");
        *place = Some(buf);
        read.clone()
    }

    /// The bytes of a landing, wherever they were read to.
    fn bytes<'a>(&'a self, landing: &'a Landing) -> &'a [u8] {
        let (buf, read) = match &landing.place {
            Place::Direct { window, read } => (window, read),
            Place::Staged { run, .. } => (&self.runs[*run].buf, &self.runs[*run].read),
        };
        let buf = buf
            .as_ref()
            .expect("all reads of the item are back")
            .as_slice();
        let first = (landing.range.start - read.start) as usize;
        &buf[first..first + (landing.range.end - landing.range.start) as usize]
    }

    /// Chunks whose digest is not the recorded one.
    fn damaged_chunks(&self, chunks: &[Digest]) -> Vec<Range<u64>> {
        let mut damaged = Vec::new();
        let mut running = Digest::EMPTY;
        for landing in &self.landings {
            let mut bytes = self.bytes(landing);
            let mut at = landing.range.start;
            while !bytes.is_empty() {
                let chunk_start = floor(at, CHUNK_BYTES);
                let chunk_end = (chunk_start + CHUNK_BYTES).min(self.range.end);
                let length = bytes.len().min((chunk_end - at) as usize);
                let (now, later) = bytes.split_at(length);
                let digest = Digest::of(now);
                let begins_chunk = at == chunk_start;
                running = if begins_chunk {
                    digest
                } else {
                    running.then(digest, length as u64)
                };
                at += length as u64;
                bytes = later;
                let index = (chunk_start / CHUNK_BYTES) as usize;
                if at == chunk_end && running != chunks[index] {
                    damaged.push(chunk_start..chunk_end);
                }
            }
        }
        damaged
    }

    /// Copies what was staged to its place; returns how many bytes that was.
    fn unstage(&mut self) -> u64 {
        let mut copied = 0;
        for landing in &mut self.landings {
            if let Place::Staged {
                run,
                window: Some(window),
            } = &mut landing.place
            {
                let run = &self.runs[*run];
                let first = (landing.range.start - run.read.start) as usize;
                let staged = run
                    .buf
                    .as_ref()
                    .expect("all reads of the item are back")
                    .as_slice();
                let target = window.as_mut_slice();
                target.copy_from_slice(&staged[first..first + target.len()]);
                copied += target.len() as u64;
            }
        }
        copied
    }
}

/// Operations of an item are numbered within its worker's slot.
fn token(slot: usize, number: usize) -> u64 {
    (slot as u64) << 32 | number as u64
}

fn untoken(token: u64) -> (usize, usize) {
    ((token >> 32) as usize, (token & 0xffff_ffff) as usize)
}

#[derive(Default)]
struct Tally {
    damage: Vec<Damage>,
    bounced_bytes: u64,
    bytes_read: u64,
}

struct Worker<'a> {
    sources: &'a [Source<'a>],
    settings: &'a Settings,
    on_damage: OnDamage,
    halt: &'a Halt<'a>,
    engine: WholeTransfers,
    completed: Vec<Completion>,
    /// Items under way, by slot.
    slots: Vec<Option<Prepared>>,
    /// Operations that wait for room in the queue.
    waiting: VecDeque<Op>,
    tally: Tally,
}

impl<'a> Worker<'a> {
    fn new(
        sources: &'a [Source<'a>],
        settings: &'a Settings,
        on_damage: OnDamage,
        halt: &'a Halt<'a>,
        engine: WholeTransfers,
    ) -> Worker<'a> {
        Worker {
            sources,
            settings,
            on_damage,
            halt,
            engine,
            completed: Vec::new(),
            slots: Vec::new(),
            waiting: VecDeque::new(),
            tally: Tally::default(),
        }
    }

    fn run(&mut self, queue: &Mutex<VecDeque<Prepared>>) -> Result<()> {
        let mut has_more = true;
        while self.halt.go_on()? {
            while has_more && self.waiting.is_empty() && self.has_room() {
                match queue
                    .lock()
                    .expect("no worker panics with the lock")
                    .pop_front()
                {
                    Some(item) => self.start(item)?,
                    None => has_more = false,
                }
                self.submit_waiting();
            }
            self.submit_waiting();
            if self.engine.in_flight() == 0 && !has_more {
                break;
            }
            self.collect()?;
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.engine.in_flight() < self.settings.queue_depth
    }

    /// Gives an item a slot and, if it needs staging, a buffer; its operations join the queue.
    fn start(&mut self, mut item: Prepared) -> Result<()> {
        if !item.runs.is_empty() {
            let buf = self.take_buffer()?;
            item.stage(buf);
        }
        let free = self.slots.iter().position(Option::is_none);
        let slot = free.unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.enqueue(slot, item);
        Ok(())
    }

    fn enqueue(&mut self, slot: usize, mut item: Prepared) {
        let file = &self.sources[item.file].file;
        self.waiting.extend(item.operations(slot, file));
        self.slots[slot] = Some(item);
    }

    fn take_buffer(&mut self) -> Result<IoBuf> {
        loop {
            if let Some(buf) = self.settings.pool.try_take()? {
                return Ok(buf);
            }
            if self.engine.in_flight() == 0 {
                // The other workers hold the whole budget; they give it back.
                return Ok(self.settings.pool.take()?);
            }
            self.collect()?;
            self.submit_waiting();
        }
    }

    fn submit_waiting(&mut self) {
        while self.has_room() {
            match self.waiting.pop_front() {
                Some(op) => submit(&mut self.engine, op),
                None => break,
            }
        }
    }

    fn collect(&mut self) -> Result<()> {
        reap(&mut self.engine, &mut self.completed)?;
        for completion in std::mem::take(&mut self.completed) {
            self.arrived(completion)?;
        }
        Ok(())
    }

    fn arrived(&mut self, completion: Completion) -> Result<()> {
        let (slot, number) = untoken(completion.token);
        let item = self.slots[slot]
            .as_mut()
            .expect("an operation belongs to an item");
        let source = &self.sources[item.file];
        let path = source.file.path();
        let buf = completion.buf.expect("a read returns its buffer");
        let read = item.give_back(number, buf);
        let bytes = completion.result.map_err(failed("read", path))? as u64;
        self.tally.bytes_read += bytes;
        let expected = read.end.min(source.bytes) - read.start;
        if bytes < expected {
            // The size was right when the file was opened: somebody is cutting it under us.
            let source = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
            return Err(failed("read", path)(source));
        }
        if item.operations_left == 0 {
            let item = self.slots[slot].take().expect("it was there just now");
            self.finish(slot, item)?;
        }
        Ok(())
    }

    /// Verifies a whole item and puts its bytes in place.
    fn finish(&mut self, slot: usize, mut item: Prepared) -> Result<()> {
        let chunks = self.sources[item.file].chunks;
        let verify = self.settings.verify || self.on_damage == OnDamage::List;
        let damaged = if verify {
            item.damaged_chunks(chunks)
        } else {
            Vec::new()
        };
        if !damaged.is_empty() && !item.retried {
            item.retried = true;
            // A page cache would give the same bytes again; the device may not.
            self.sources[item.file].file.drop_cache()?;
            self.enqueue(slot, item);
            return Ok(());
        }
        if !damaged.is_empty() {
            let file = item.file;
            self.tally
                .damage
                .extend(damaged.into_iter().map(|range| Damage { file, range }));
            if self.on_damage == OnDamage::Stop {
                self.halt.stop();
                return Ok(());
            }
        } else {
            self.tally.bounced_bytes += item.unstage();
        }
        self.halt
            .progress
            .advance(item.range.end - item.range.start);
        Ok(())
    }
}

const _: () = assert!(
    CHUNK_BYTES.is_multiple_of(PAGE_BYTES),
    "chunks start on pages"
);
