//! One thread of a job: the measured loop.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use penstock_cuda::CuFileHandle;
use penstock_io::buffer::{DeviceStreams, IoBuf, Memory};
use penstock_io::engine::{
    self, Capabilities, Completion, Engine, EngineChoice, EngineConfig, Op, OpKind,
};
use penstock_io::file::File;
use penstock_io::transfer::WholeTransfers;
use penstock_store::{Error, Result};
use rustix::io::Errno;

use crate::content::Tag;
use crate::job::{ALIGNMENT, Job, Method, Pattern};
use crate::outcome::Tally;
use crate::plan::{Plan, Request};

/// How often a thread checks whether to stop.
pub(crate) const TURN: Duration = Duration::from_millis(100);

/// The state that all threads of a process share.
pub(crate) struct WorkerShared<'a> {
    pub(crate) job: &'a Job,
    pub(crate) plan: &'a Plan,
    pub(crate) files: &'a [Arc<File>],
    pub(crate) tags: &'a [Tag],
    /// Memory that stands for the tensors, shorter than these and used repeatedly.
    pub(crate) source: Option<&'a Memory>,
    /// The streams of the device whose memory is used.
    pub(crate) device_streams: Option<&'a Arc<DeviceStreams>>,
    /// cuFile's handles of the files, if it moves the bytes.
    pub(crate) handles: &'a [CuFileHandle],
    pub(crate) stop: &'a AtomicBool,
}

/// A thread that is ready to begin.
pub(crate) struct Worker<'a> {
    pub(crate) shared: &'a WorkerShared<'a>,
    requests: &'a [Request],
    next: usize,
    pub(crate) free: Vec<IoBuf>,
    pub(crate) tally: Tally,
    begun: Instant,
    deadline: Option<Instant>,
}

impl<'a> Worker<'a> {
    /// Allocates buffers for its requests, unless the method has memory of its own.
    pub(crate) fn new(shared: &'a WorkerShared<'a>, requests: &'a [Request]) -> Result<Worker<'a>> {
        let mut worker = Worker {
            shared,
            requests,
            next: 0,
            free: Vec::new(),
            tally: Tally::new(),
            begun: Instant::now(),
            deadline: None,
        };
        if shared.job.method != Method::Executor && shared.device_streams.is_none() {
            worker.free = buffers(worker.slot_bytes(), worker.depth(), shared.job.seed)?;
        }
        Ok(worker)
    }

    /// Bytes of a request's buffer.
    pub(crate) fn slot_bytes(&self) -> usize {
        (self.shared.job.block_bytes as usize).next_multiple_of(ALIGNMENT as usize)
    }

    /// Requests in flight: at most as many as the thread has.
    pub(crate) fn depth(&self) -> usize {
        let depth = self.shared.job.depth;
        match self.shared.job.seconds {
            Some(_) => depth,
            None => depth.min(self.requests.len().max(1)),
        }
    }

    pub(crate) fn is_write(&self) -> bool {
        self.shared.job.pattern == Pattern::Write
    }

    pub(crate) fn start(&mut self, go: impl FnOnce() -> Instant) {
        self.begun = go();
        let seconds = self.shared.job.seconds;
        self.deadline = seconds.map(|seconds| self.begun + Duration::from_secs_f64(seconds));
    }

    pub(crate) fn open_engine(&mut self) -> Result<Box<dyn Engine>> {
        let job = self.shared.job;
        let choice = match job.method {
            Method::Uring | Method::UringRegistered => EngineChoice::Uring,
            Method::Posix | Method::Threads | Method::Cufile | Method::Executor => {
                EngineChoice::Threads
            }
        };
        let opened = engine::open(&EngineConfig {
            choice,
            queue_depth: job.depth,
        })?;
        let mut engine = Box::new(WholeTransfers::new(opened.engine));
        let Capabilities { name, setup, .. } = engine.capabilities();
        let mut setup = format!("{name}, {setup}");
        if job.method == Method::UringRegistered {
            let buffers: Vec<&IoBuf> = self.free.iter().collect();
            match engine.register(&buffers, self.shared.files) {
                Ok(()) => setup += ", registered buffers and files",
                Err(error) => self.tally.fallback = Some(format!("not registered: {error}")),
            }
        }
        self.tally.setup = setup;
        Ok(engine)
    }

    /// The next request; `None` after the last, or once the time is over.
    pub(crate) fn next(&mut self) -> Option<Request> {
        if self.shared.stop.load(Ordering::Relaxed) {
            return None;
        }
        if let Some(deadline) = self.deadline {
            if Instant::now() >= deadline {
                return None;
            }
            if self.next == self.requests.len() {
                self.next = 0;
            }
        }
        let request = *self.requests.get(self.next)?;
        self.next += 1;
        Some(request)
    }

    /// Sets the bytes that a request writes.
    pub(crate) fn fill(&self, request: &Request, buf: &mut IoBuf) {
        buf.set_len(request.bytes as usize);
        if !self.is_write() {
            return;
        }
        if self.shared.job.verifies {
            let tag = self.shared.tags[request.file as usize];
            tag.fill(buf.as_mut_slice(), request.offset);
        } else if let Some(source) = self.shared.source {
            self.copy(request, source.as_slice(), buf.as_mut_slice());
        }
    }

    /// Copies tensor by tensor, as a checkpoint library has to.
    fn copy(&self, request: &Request, source: &[u8], mut to: &mut [u8]) {
        let ends = &self.shared.plan.ends;
        let mut at = request.start;
        let mut tensor = ends.partition_point(|&end| end <= at);
        while tensor < ends.len() && !to.is_empty() {
            let from = at as usize % source.len();
            let bytes = ((ends[tensor] - at) as usize)
                .min(to.len())
                .min(source.len() - from);
            let (now, later) = to.split_at_mut(bytes);
            now.copy_from_slice(&source[from..from + bytes]);
            to = later;
            at += bytes as u64;
            if at == ends[tensor] {
                tensor += 1;
            }
        }
    }

    /// Counts a completed request.
    pub(crate) fn count(&mut self, moved: usize, begun: Instant) {
        let now = Instant::now();
        let nanoseconds = u64::try_from((now - begun).as_nanos()).unwrap_or(u64::MAX);
        let elapsed = (now - self.begun).as_secs_f64();
        self.tally.count(moved as u64, nanoseconds, elapsed);
    }

    /// Verifies the bytes that were read, if the job asks for it.
    pub(crate) fn check(&mut self, request: &Request, moved: usize, buf: &[u8]) {
        let job = self.shared.job;
        if job.verifies && job.pattern != Pattern::Write {
            self.tally.checked += 1;
            let file = request.file as usize;
            let bytes = &buf[..moved];
            let found = match moved < request.bytes as usize {
                true => Some(request.offset + moved as u64),
                false => self.shared.tags[file].check(bytes, request.offset),
            };
            if let (Some(offset), None) = (found, &self.tally.damaged) {
                let path = self.shared.files[file].path().display().to_string();
                self.tally.damaged = Some((path, offset));
            }
        }
    }

    pub(crate) fn run_blocking(&mut self) -> Result<()> {
        let mut buf = self.free.pop().expect("one for each request in flight");
        while let Some(request) = self.next() {
            self.fill(&request, &mut buf);
            let begun = Instant::now();
            let moved = self.transfer(&request, &mut buf)?;
            self.count(moved, begun);
            self.check(&request, moved, buf.as_slice());
        }
        Ok(())
    }

    /// Makes one request by `pread` or `pwrite`, continuing short transfers.
    pub(crate) fn transfer(&mut self, request: &Request, buf: &mut IoBuf) -> Result<usize> {
        let file = &self.shared.files[request.file as usize];
        let is_write = self.is_write();
        let bytes = buf.as_mut_slice();
        let mut done = 0;
        while done < bytes.len() {
            let at = request.offset + done as u64;
            let moved = match is_write {
                true => rustix::io::pwrite(file.as_fd(), &bytes[done..], at),
                false => rustix::io::pread(file.as_fd(), &mut bytes[done..], at),
            };
            match moved {
                Ok(0) => break,
                Ok(moved) => done += moved,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.failed(request, errno.into())),
            }
            if done < bytes.len() {
                self.tally.short += 1;
            }
        }
        Ok(done)
    }

    pub(crate) fn run_engine(&mut self, engine: &mut dyn Engine) -> Result<()> {
        let depth = self.free.len();
        let mut flying: Vec<Option<(Request, Instant)>> = vec![None; depth];
        let mut slots: Vec<usize> = (0..depth).rev().collect();
        let mut completed: Vec<Completion> = Vec::with_capacity(depth);
        let is_write = self.is_write();
        let mut failed = None;
        loop {
            while failed.is_none() && !slots.is_empty() {
                let Some(request) = self.next() else { break };
                let mut buf = self.free.pop().expect("one for each slot");
                self.fill(&request, &mut buf);
                let slot = slots.pop().expect("there is one");
                let offset = request.offset;
                let kind = match is_write {
                    true => OpKind::Write { offset, buf },
                    false => OpKind::Read { offset, buf },
                };
                flying[slot] = Some((request, Instant::now()));
                let file = Arc::clone(&self.shared.files[request.file as usize]);
                let op = Op {
                    token: slot as u64,
                    file,
                    kind,
                };
                engine.submit(op).expect("there is a slot for it");
            }
            if engine.in_flight() == 0 {
                return failed.map_or(Ok(()), Err);
            }
            engine.poll(1, Some(TURN), &mut completed)?;
            for completion in completed.drain(..) {
                let slot = completion.token as usize;
                let (request, begun) = flying[slot].take().expect("it was in flight");
                let buf = completion.buf.expect("transfers have buffers");
                match completion.result {
                    Ok(moved) => {
                        self.count(moved, begun);
                        self.check(&request, moved, buf.as_slice());
                    }
                    Err(error) => failed = failed.or(Some(self.failed(&request, error))),
                }
                self.free.push(buf);
                slots.push(slot);
            }
        }
    }

    pub(crate) fn failed(&self, request: &Request, source: std::io::Error) -> Error {
        let path = self.shared.files[request.file as usize].path().to_owned();
        let operation = match self.shared.job.pattern {
            Pattern::Write => "write",
            Pattern::Read | Pattern::RandomRead => "read",
        };
        penstock_io::Error::Storage {
            operation,
            path,
            source,
        }
        .into()
    }
}

/// Buffers for the requests in flight.
fn buffers(slot_bytes: usize, depth: usize, seed: u64) -> Result<Vec<IoBuf>> {
    let mut memory = Memory::allocate(slot_bytes * depth)?;
    // Allocated before the measurement, and not all zeros, which some devices do not store.
    Tag::new(seed, u32::MAX, 0).fill(memory.as_mut_slice(), 0);
    let (_, mut rest) = memory.share();
    let mut buffers = Vec::with_capacity(depth);
    for _ in 0..depth {
        let behind = rest.split_off(slot_bytes);
        buffers.push(std::mem::replace(&mut rest, behind));
    }
    Ok(buffers)
}
