//! The measured loop for device memory: bytes pass through pinned memory, copied by the device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use penstock_io::buffer::{Cut, DeviceBlock, DeviceStreams, IoBuf, Moving, Pool};
use penstock_io::engine::{Completion, Engine, Op, OpKind};
use penstock_store::Result;

use crate::content::Tag;
use crate::plan::Request;
use crate::worker::{TURN, Worker};

/// Device memory for a worker's requests in flight.
pub(crate) struct Staged {
    block: DeviceBlock,
    slot_bytes: usize,
}

/// A request whose bytes are being copied by the device, before a write or after a read.
struct Copying {
    slot: usize,
    request: Request,
    begun: Instant,
    moved: usize,
    moving: Moving,
}

impl Staged {
    /// Allocates memory on both sides for a worker's requests, and fills it.
    pub(crate) fn open(
        device_streams: &Arc<DeviceStreams>,
        worker: &mut Worker<'_>,
    ) -> Result<Staged> {
        let (slot_bytes, depth) = (worker.slot_bytes(), worker.depth());
        let pool = Pool::pinned(slot_bytes, slot_bytes * depth, device_streams.device());
        let block = DeviceBlock::allocate(device_streams, slot_bytes * depth)?;
        let tag = Tag::new(worker.shared.job.seed, u32::MAX, 0);
        for slot in 0..depth {
            let mut buf = pool.take()?;
            tag.fill(buf.as_mut_slice(), (slot * slot_bytes) as u64);
            let filled = block.fill(slot * slot_bytes, buf, whole(slot_bytes))?;
            worker.free.push(filled.wait()?);
        }
        let unpinned = pool.unpinned();
        worker.tally.fallback = unpinned.map(|reason| format!("unpinned: {reason}"));
        Ok(Staged { block, slot_bytes })
    }

    fn to_device(&self, slot: usize, buf: IoBuf) -> Result<Moving> {
        let bytes = self.slot_bytes;
        Ok(self.block.fill(slot * bytes, buf, whole(bytes))?)
    }

    fn to_host(&self, slot: usize, buf: IoBuf) -> Result<Moving> {
        let bytes = self.slot_bytes;
        Ok(self.block.read(slot * bytes, buf, whole(bytes))?)
    }

    /// Fills the device memory that a request writes, if its content is verified.
    fn fill(
        &self,
        worker: &Worker<'_>,
        request: &Request,
        slot: usize,
        mut buf: IoBuf,
    ) -> Result<IoBuf> {
        worker.fill(request, &mut buf);
        if !(worker.is_write() && worker.shared.job.verifies) {
            return Ok(buf);
        }
        let mut buf = self.to_device(slot, buf)?.wait()?;
        buf.as_mut_slice().fill(0);
        Ok(buf)
    }

    /// Verifies the device memory of a request that was read, if the job asks for it.
    fn check(
        &self,
        worker: &mut Worker<'_>,
        request: &Request,
        moved: usize,
        slot: usize,
        mut buf: IoBuf,
    ) -> Result<IoBuf> {
        if worker.is_write() || !worker.shared.job.verifies {
            return Ok(buf);
        }
        buf.as_mut_slice().fill(0);
        let buf = self.to_host(slot, buf)?.wait()?;
        worker.check(request, moved, buf.as_slice());
        Ok(buf)
    }

    /// Makes one request at a time, with its copy.
    pub(crate) fn run_blocking(&self, worker: &mut Worker<'_>) -> Result<()> {
        let mut buf = worker.free.pop().expect("one for each request in flight");
        while let Some(request) = worker.next() {
            buf = self.fill(worker, &request, 0, buf)?;
            let begun = Instant::now();
            let moved;
            if worker.is_write() {
                buf = self.to_host(0, buf)?.wait()?;
                moved = worker.transfer(&request, &mut buf)?;
            } else {
                moved = worker.transfer(&request, &mut buf)?;
                buf = self.to_device(0, buf)?.wait()?;
            }
            worker.count(moved, begun);
            buf = self.check(worker, &request, moved, 0, buf)?;
        }
        Ok(())
    }

    /// Makes one request at a time by cuFile, which needs no host memory from here.
    pub(crate) fn run_cufile(&self, worker: &mut Worker<'_>) -> Result<()> {
        let mut buf = worker.free.pop().expect("one for each request in flight");
        while let Some(request) = worker.next() {
            buf = self.fill(worker, &request, 0, buf)?;
            let handle = &worker.shared.handles[request.file as usize];
            let memory = self.block.memory();
            let bytes = request.bytes as usize;
            let begun = Instant::now();
            let mut moved = 0;
            while moved < bytes {
                let (left, offset) = (bytes - moved, request.offset + moved as u64);
                let more = match worker.is_write() {
                    true => handle.write(memory, moved, left, offset),
                    false => handle.read(memory, moved, left, offset),
                };
                match more.map_err(penstock_io::Error::from)? {
                    0 => break,
                    more => moved += more,
                }
                worker.tally.short += u64::from(moved < bytes);
            }
            worker.count(moved, begun);
            buf = self.check(worker, &request, moved, 0, buf)?;
        }
        Ok(())
    }

    /// Makes many requests at a time, with copies and I/O in flight together.
    pub(crate) fn run_engine(
        &self,
        worker: &mut Worker<'_>,
        engine: &mut dyn Engine,
    ) -> Result<()> {
        let depth = worker.free.len();
        let mut queue = Queue {
            staged: self,
            reading_or_writing: vec![None; depth],
            slots: (0..depth).rev().collect(),
            copying: VecDeque::with_capacity(depth),
        };
        let mut completed: Vec<Completion> = Vec::with_capacity(depth);
        let mut failed = None;
        loop {
            while failed.is_none() && queue.begin(worker, engine)? {}
            if engine.in_flight() == 0 && queue.copying.is_empty() {
                return failed.map_or(Ok(()), Err);
            }
            if engine.in_flight() > 0 {
                engine.poll(
                    usize::from(queue.copying.is_empty()),
                    Some(TURN),
                    &mut completed,
                )?;
            }
            let has_none = completed.is_empty();
            for completion in completed.drain(..) {
                let ended = queue.completed(worker, completion);
                failed = failed.or(ended.err());
            }
            queue.copied(worker, engine, has_none)?;
        }
    }
}

struct Queue<'a> {
    staged: &'a Staged,
    /// Requests being read or written, by slot.
    reading_or_writing: Vec<Option<(Request, Instant)>>,
    /// Free slots.
    slots: Vec<usize>,
    /// Copies in flight, in the device's order.
    copying: VecDeque<Copying>,
}

impl Queue<'_> {
    /// Begins the next request; false if there is no free slot or no request left.
    fn begin(&mut self, worker: &mut Worker<'_>, engine: &mut dyn Engine) -> Result<bool> {
        if self.slots.is_empty() {
            return Ok(false);
        }
        let Some(request) = worker.next() else {
            return Ok(false);
        };
        let slot = self.slots.pop().expect("there is one");
        let buf = worker.free.pop().expect("one for each slot");
        let buf = self.staged.fill(worker, &request, slot, buf)?;
        let begun = Instant::now();
        if worker.is_write() {
            let moving = self.staged.to_host(slot, buf)?;
            self.copying.push_back(Copying {
                slot,
                request,
                begun,
                moved: 0,
                moving,
            });
        } else {
            self.submit(worker, engine, slot, (request, begun), buf);
        }
        Ok(true)
    }

    fn submit(
        &mut self,
        worker: &Worker<'_>,
        engine: &mut dyn Engine,
        slot: usize,
        (request, begun): (Request, Instant),
        buf: IoBuf,
    ) {
        let offset = request.offset;
        let kind = match worker.is_write() {
            true => OpKind::Write { offset, buf },
            false => OpKind::Read { offset, buf },
        };
        self.reading_or_writing[slot] = Some((request, begun));
        let file = Arc::clone(&worker.shared.files[request.file as usize]);
        let token = slot as u64;
        engine
            .submit(Op { token, file, kind })
            .expect("there is a slot for it");
    }

    /// Continues a request whose read or write has completed.
    fn completed(&mut self, worker: &mut Worker<'_>, completion: Completion) -> Result<()> {
        let slot = completion.token as usize;
        let begun = self.reading_or_writing[slot].take();
        let (request, begun) = begun.expect("it was in flight");
        let buf = completion.buf.expect("transfers have buffers");
        let ended = match completion.result {
            Ok(moved) if !worker.is_write() => {
                let moving = self.staged.to_device(slot, buf)?;
                self.copying.push_back(Copying {
                    slot,
                    request,
                    begun,
                    moved,
                    moving,
                });
                return Ok(());
            }
            Ok(moved) => {
                worker.count(moved, begun);
                Ok(())
            }
            Err(error) => Err(worker.failed(&request, error)),
        };
        worker.free.push(buf);
        self.slots.push(slot);
        ended
    }

    /// Continues requests that were copied; with `waits`, waits for the first.
    fn copied(
        &mut self,
        worker: &mut Worker<'_>,
        engine: &mut dyn Engine,
        mut waits: bool,
    ) -> Result<()> {
        while let Some(first) = self.copying.front() {
            if !waits && !first.moving.is_done()? {
                break;
            }
            waits = false;
            let copied = self.copying.pop_front().expect("there is a first");
            let (slot, request, begun) = (copied.slot, copied.request, copied.begun);
            let buf = copied.moving.wait()?;
            if worker.is_write() {
                self.submit(worker, engine, slot, (request, begun), buf);
                continue;
            }
            worker.count(copied.moved, begun);
            let buf = self
                .staged
                .check(worker, &request, copied.moved, slot, buf)?;
            worker.free.push(buf);
            self.slots.push(slot);
        }
        Ok(())
    }
}

fn whole(bytes: usize) -> Cut {
    Cut {
        piece_bytes: bytes,
        is_batched: false,
    }
}
