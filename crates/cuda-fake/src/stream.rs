//! Streams: queues of operations, each executed in order by a thread of its own.
//!
//! A destroyed stream keeps its queue until that is empty. Operations wait for positions in other
//! streams; a stream that is gone has reached all of them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar};
use std::thread::JoinHandle;
use std::time::Duration;

use fastrand::Rng;

use crate::operation::{Delay, Operation, Position};

/// `CU_STREAM_LEGACY`, as in the journal.
pub(crate) const LEGACY: u64 = 0;
/// `CU_STREAM_PER_THREAD`.
pub(crate) const PER_THREAD: u64 = 2;

/// How a stream is ordered with the legacy stream of its context.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// It is the legacy stream.
    Legacy,
    /// Each of the two waits for the other's earlier work.
    Blocking,
    NonBlocking,
}

pub(crate) struct Stream {
    /// Its handle for callers, and in the journal.
    pub(crate) public: u64,
    pub(crate) context: u64,
    pub(crate) order: Order,
    queue: VecDeque<Operation>,
    running: Option<Arc<Operation>>,
    queued: u64,
    done: u64,
    /// Operations dropped from behind the running one; they count as done when that ends.
    dropped: u64,
    pub(crate) is_destroyed: bool,
    pub(crate) thread: Option<JoinHandle<()>>,
    /// Wakes the stream's thread while it has no work. Changes of other streams do not: tests leave
    /// hundreds of idle streams behind.
    pub(crate) work: Arc<Condvar>,
    rng: Rng,
}

impl Stream {
    pub(crate) fn new(public: u64, context: u64, order: Order, seed: u64) -> Stream {
        Stream {
            public,
            context,
            order,
            queue: VecDeque::new(),
            running: None,
            queued: 0,
            done: 0,
            dropped: 0,
            is_destroyed: false,
            thread: None,
            work: Arc::default(),
            rng: Rng::with_seed(seed),
        }
    }

    /// Appends an operation, with a delay of its own.
    pub(crate) fn push(&mut self, mut operation: Operation, delay_us_max: u64) {
        if delay_us_max > 0 {
            operation.delay = self.draw(delay_us_max);
        }
        self.queue.push_back(operation);
        self.queued += 1;
        self.work.notify_one();
    }

    /// Ends the stream once its queue is empty.
    pub(crate) fn destroy(&mut self) {
        self.is_destroyed = true;
        self.work.notify_one();
    }

    /// One in four operations has no delay, so that streams overtake each other in both directions.
    fn draw(&mut self, delay_us_max: u64) -> Delay {
        let whole_us = match self.rng.u8(..4) {
            0 => 0,
            _ => self.rng.u64(..=delay_us_max),
        };
        let before_us = self.rng.u64(..=whole_us);
        Delay {
            before: Duration::from_micros(before_us),
            after: Duration::from_micros(whole_us - before_us),
        }
    }

    pub(crate) fn first(&self) -> Option<&Operation> {
        self.queue.front()
    }

    /// Takes the first operation to run it.
    pub(crate) fn start(&mut self) -> Option<Arc<Operation>> {
        let operation = Arc::new(self.queue.pop_front()?);
        self.running = Some(Arc::clone(&operation));
        Some(operation)
    }

    /// Notes the end of the running operation.
    pub(crate) fn finish(&mut self) {
        self.running = None;
        self.done += 1 + self.dropped;
        self.dropped = 0;
    }

    /// Drops the queued operations, as if they were done.
    pub(crate) fn drop_queue(&mut self) {
        let dropped = self.queue.drain(..).count() as u64;
        match self.running {
            Some(_) => self.dropped += dropped,
            None => self.done += dropped,
        }
    }

    pub(crate) fn running(&self) -> Option<&Operation> {
        self.running.as_deref()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.done == self.queued
    }

    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    pub(crate) fn operations(&self) -> impl Iterator<Item = &Operation> {
        self.running().into_iter().chain(&self.queue)
    }
}

/// All streams, destroyed ones with remaining work included.
#[derive(Default)]
pub(crate) struct Streams {
    streams: BTreeMap<u64, Stream>,
}

impl Streams {
    pub(crate) fn insert(&mut self, id: u64, stream: Stream) {
        self.streams.insert(id, stream);
    }

    pub(crate) fn get(&self, id: u64) -> Option<&Stream> {
        self.streams.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: u64) -> Option<&mut Stream> {
        self.streams.get_mut(&id)
    }

    /// Removes a stream; its thread then ends.
    pub(crate) fn remove(&mut self, id: u64) -> Option<Stream> {
        let stream = self.streams.remove(&id)?;
        stream.work.notify_one();
        Some(stream)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &Stream)> {
        self.streams.iter().map(|(id, stream)| (*id, stream))
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut Stream> {
        self.streams.values_mut()
    }

    /// The number of streams that callers made and did not destroy.
    pub(crate) fn count(&self) -> u64 {
        let alive = self.streams.values().filter(|stream| !stream.is_destroyed);
        alive
            .filter(|stream| stream.public != LEGACY && stream.public != PER_THREAD)
            .count() as u64
    }

    /// The position of a stream after all its present work.
    pub(crate) fn end(&self, id: u64) -> Position {
        let done = self.streams.get(&id).map_or(0, |stream| stream.queued);
        Position { stream: id, done }
    }

    /// The same, and for the legacy stream also the positions of the streams that it would wait
    /// for.
    pub(crate) fn whole_end(&self, id: u64) -> Vec<Position> {
        let is_legacy = self
            .streams
            .get(&id)
            .is_some_and(|own| own.order == Order::Legacy);
        let mut positions = if is_legacy {
            self.implicit(id)
        } else {
            Vec::new()
        };
        positions.push(self.end(id));
        positions
    }

    /// The end of each stream of a context.
    pub(crate) fn ends(&self, context: u64) -> Vec<Position> {
        let theirs = self.iter().filter(|(_, stream)| stream.context == context);
        theirs.map(|(id, _)| self.end(id)).collect()
    }

    pub(crate) fn have_reached(&self, positions: &[Position]) -> bool {
        positions.iter().all(|position| {
            let stream = self.streams.get(&position.stream);
            stream.is_none_or(|stream| stream.done >= position.done)
        })
    }

    /// The positions in other streams of the context that an operation submitted now has to wait
    /// for.
    pub(crate) fn implicit(&self, id: u64) -> Vec<Position> {
        let Some(own) = self.streams.get(&id) else {
            return Vec::new();
        };
        let others = self
            .iter()
            .filter(|(_, stream)| stream.context == own.context);
        let waited_for = others.filter(|(other, stream)| match own.order {
            Order::Legacy => *other != id && stream.order == Order::Blocking,
            Order::Blocking => stream.order == Order::Legacy,
            Order::NonBlocking => false,
        });
        let ends = waited_for.filter(|(_, stream)| !stream.is_idle());
        ends.map(|(other, _)| self.end(other)).collect()
    }

    /// Whether a running operation uses host memory between these addresses.
    pub(crate) fn run_on_host(&self, start: u64, end: u64) -> bool {
        let mut running = self.streams.values().filter_map(Stream::running);
        running.any(|operation| operation.uses_host(start, end))
    }

    /// Whether an operation of any stream uses host memory between these addresses.
    pub(crate) fn use_host(&self, start: u64, end: u64) -> bool {
        let mut operations = self.streams.values().flat_map(Stream::operations);
        operations.any(|operation| operation.uses_host(start, end))
    }
}
