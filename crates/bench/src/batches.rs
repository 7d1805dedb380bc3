//! The measured loop of the executor method: one thread submits batches of requests, each before
//! the last one has ended.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use penstock_io::buffer::{Memory, MemoryHandle};
use penstock_io::engine::EngineChoice;
use penstock_io::executor::{
    Executor, ExecutorConfig, Kind, Landing, Request, Share, Source, Target, Transfer,
};
use penstock_store::Result;

use crate::content::Tag;
use crate::job::{ALIGNMENT, Pattern};
use crate::plan;
use crate::worker::{Worker, WorkerShared};

/// Most requests of a batch; its bytes are limited too.
const BATCH_REQUESTS_MAX: usize = 1024;
const BATCH_BYTES_MAX: usize = 64 << 20;

/// Batches in flight.
const UNDER_WAY: usize = 2;

pub(crate) struct Batches {
    share: Share,
    /// Memory of one batch each.
    free: Vec<Memory>,
    flying: VecDeque<Batch>,
    slot_bytes: usize,
    /// Declared last, so that it is dropped last: dropping it finishes the submitted requests.
    executor: Executor,
}

struct Batch {
    transfer: Transfer,
    memory: MemoryHandle,
    requests: Vec<plan::Request>,
    begun: Instant,
}

impl Batches {
    /// Starts an executor and allocates memory.
    pub(crate) fn open(shared: &WorkerShared<'_>) -> Result<Batches> {
        let job = shared.job;
        let slot_bytes = (job.block_bytes as usize).next_multiple_of(ALIGNMENT as usize);
        let executor = Executor::open(&ExecutorConfig {
            engine: EngineChoice::Uring,
            workers: job.threads,
            queue_depth: job.depth,
            in_flight_bytes: usize::MAX,
            block_bytes: slot_bytes,
            ..ExecutorConfig::default()
        })?;
        // At least enough memory to keep the queue full.
        let in_flight = job.depth * job.threads;
        let requests = (BATCH_BYTES_MAX / slot_bytes).clamp(1, BATCH_REQUESTS_MAX);
        let bytes = slot_bytes * requests.max(in_flight);
        let mut free = Vec::with_capacity(UNDER_WAY);
        for _ in 0..UNDER_WAY {
            let mut memory = Memory::allocate(bytes)?;
            Tag::new(job.seed, u32::MAX, 0).fill(memory.as_mut_slice(), 0);
            free.push(memory);
        }
        Ok(Batches {
            share: executor.share(1)?,
            free,
            flying: VecDeque::new(),
            slot_bytes,
            executor,
        })
    }

    /// Makes all requests of a worker.
    pub(crate) fn run(mut self, worker: &mut Worker<'_>) -> Result<()> {
        worker.tally.setup = format!("executor, {}", self.executor.engine());
        loop {
            while let Some(memory) = self.free.pop() {
                match self.hand_over(worker, memory)? {
                    Some(batch) => self.flying.push_back(batch),
                    None => break,
                }
            }
            let Some(batch) = self.flying.pop_front() else {
                return Ok(());
            };
            let memory = self.finish(worker, batch)?;
            self.free.push(memory);
        }
    }

    /// Submits the next batch; `None` if no requests are left.
    fn hand_over(&self, worker: &mut Worker<'_>, memory: Memory) -> Result<Option<Batch>> {
        let shared = worker.shared;
        let slots = memory.len() / self.slot_bytes;
        let begun = Instant::now();
        let (memory, mut rest) = memory.share();
        let (mut requests, mut asked) = (Vec::with_capacity(slots), Vec::with_capacity(slots));
        while requests.len() < slots {
            let Some(request) = worker.next() else { break };
            let behind = rest.split_off(self.slot_bytes);
            let mut buf = std::mem::replace(&mut rest, behind);
            worker.fill(&request, &mut buf);
            let kind = match shared.job.pattern {
                Pattern::Write => Kind::Write(Source::Window(buf)),
                Pattern::Read | Pattern::RandomRead => Kind::Read(Landing::Window(buf)),
            };
            let file = Arc::clone(&shared.files[request.file as usize]);
            asked.push(Request {
                target: Target { file, edges: None },
                offset: request.offset,
                kind,
            });
            requests.push(request);
        }
        if requests.is_empty() {
            return Ok(None);
        }
        let transfer = self.share.submit(asked)?;
        Ok(Some(Batch {
            transfer,
            memory,
            requests,
            begun,
        }))
    }

    fn finish(&self, worker: &mut Worker<'_>, batch: Batch) -> Result<Memory> {
        batch.transfer.wait(None)?;
        let memory = batch.memory.reclaim();
        let memory = memory.expect("what has ended holds on to nothing");
        let slots = memory.as_slice().chunks_exact(self.slot_bytes);
        for (request, slot) in batch.requests.iter().zip(slots) {
            let moved = request.bytes as usize;
            worker.count(moved, batch.begun);
            worker.check(request, moved, slot);
        }
        Ok(memory)
    }
}
