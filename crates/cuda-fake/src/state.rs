//! The driver's whole state, behind one lock, and the path of an operation through it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar};
use std::time::Instant;

use crate::capture::Captures;
use crate::config::Config;
use crate::context::Context;
use crate::event::{Event, Record};
use crate::fault::Faults;
use crate::handle;
use crate::hold::Holds;
use crate::journal::{Entry, Journal};
use crate::memory::{AddressSpace, Memory};
use crate::module::Modules;
use crate::operation::{Operation, Position, Work};
use crate::status::{Answer, Status};
use crate::stream::{LEGACY, Order, Stream, Streams};
use crate::transfer::RowsCopy;

pub(crate) struct DriverState {
    pub(crate) config: Config,
    pub(crate) is_initialized: bool,
    pub(crate) contexts: BTreeMap<u64, Context>,
    pub(crate) memory: Memory,
    pub(crate) streams: Streams,
    streams_made: u64,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) captures: Captures,
    /// The captured graphs, and their contexts.
    pub(crate) graphs: HashMap<u64, u64>,
    pub(crate) modules: Modules,
    pub(crate) faults: Faults,
    pub(crate) holds: Holds,
    pub(crate) journal: Journal,
}

/// The next step of a stream's thread.
pub(crate) enum Next {
    Run {
        operation: Arc<Operation>,
        space: Arc<AddressSpace>,
        fault: Answer,
    },
    /// The stream has work, which may not begin yet.
    Wait,
    /// The stream has no work.
    Idle(Arc<Condvar>),
    End,
}

impl DriverState {
    pub(crate) fn new() -> DriverState {
        DriverState {
            config: Config::from_environment(),
            is_initialized: false,
            contexts: BTreeMap::new(),
            memory: Memory::default(),
            streams: Streams::default(),
            streams_made: 0,
            events: HashMap::new(),
            captures: Captures::default(),
            graphs: HashMap::new(),
            modules: Modules::default(),
            faults: Faults::default(),
            holds: Holds::default(),
            journal: Journal::default(),
        }
    }

    /// The context of a device, if it is alive.
    pub(crate) fn primary(&self, device: i32) -> Option<u64> {
        let mut contexts = self.contexts.iter();
        contexts
            .find(|(_, context)| context.device == device)
            .map(|(id, _)| *id)
    }

    pub(crate) fn new_context(&mut self, device: i32) -> u64 {
        let id = handle::next();
        let legacy = self.new_stream(Some(LEGACY), id, Order::Legacy);
        self.contexts.insert(id, Context::new(device, legacy));
        id
    }

    /// Creates a stream, known by its handle unless it is one of the two default ones.
    pub(crate) fn new_stream(&mut self, public: Option<u64>, context: u64, order: Order) -> u64 {
        let id = handle::next();
        self.streams_made += 1;
        // An odd factor makes the seeds of streams differ.
        let seed = self.streams_made.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ self.config.seed;
        self.streams
            .insert(id, Stream::new(public.unwrap_or(id), context, order, seed));
        id
    }

    /// Submits an operation to a stream. Returns whether it was queued, and not captured.
    pub(crate) fn submit(&mut self, stream: u64, mut operation: Operation) -> Answer<bool> {
        let target = self.streams.get(stream).ok_or(Status::INVALID_HANDLE)?;
        let (context, order) = (target.context, target.order);
        self.contexts
            .get(&context)
            .ok_or(Status::CONTEXT_IS_DESTROYED)?
            .is_usable()?;
        if order == Order::Legacy {
            self.refuse_implicit(context, true)?;
        }
        if self.captures.take(stream)? {
            return Ok(false);
        }
        self.poison(operation.pieces());
        operation.after.extend(self.streams.implicit(stream));
        let delay_us_max = self.config.delay_us_max;
        if let Some(stream) = self.streams.get_mut(stream) {
            stream.push(operation, delay_us_max);
        }
        Ok(true)
    }

    /// Refuses the legacy stream while a stream that waits for it is capturing.
    pub(crate) fn refuse_implicit(&mut self, context: u64, spoils: bool) -> Answer {
        let streams = self.streams.iter().filter(|(id, stream)| {
            stream.context == context
                && stream.order == Order::Blocking
                && self.captures.includes(*id)
        });
        let capturing: Vec<u64> = streams.map(|(id, _)| id).collect();
        if capturing.is_empty() {
            return Ok(());
        }
        if spoils {
            capturing.into_iter().for_each(|id| self.captures.spoil(id));
        }
        Err(Status::CAPTURE_IMPLICIT)
    }

    /// Overwrites destinations with garbage, unless a queued operation has yet to read or write
    /// them.
    fn poison(&self, pieces: &[RowsCopy]) {
        for piece in pieces {
            if let Some((start, end)) = piece.host_destination()
                && !self.streams.use_host(start, end)
            {
                piece.poison();
            }
        }
    }

    /// Begins the first operation of a stream, if it may begin.
    pub(crate) fn next(&mut self, id: u64) -> Next {
        let Some(stream) = self.streams.get(id) else {
            return Next::End;
        };
        let public = stream.public;
        let Some(first) = stream.first() else {
            return if stream.is_destroyed {
                self.end_stream(id)
            } else {
                Next::Idle(Arc::clone(&stream.work))
            };
        };
        let context = self.contexts.get(&stream.context);
        let is_failing = context.is_some_and(|context| context.failing.is_some());
        if is_failing || !self.holds.lets(public) || !self.streams.have_reached(&first.after) {
            return Next::Wait;
        }
        let Some(operation) = self.streams.get_mut(id).and_then(Stream::start) else {
            return Next::Wait;
        };
        self.holds.began(public);
        let fault = self.faults.operation(operation.kind);
        Next::Run {
            operation,
            space: Arc::clone(self.memory.space()),
            fault,
        }
    }

    /// Removes a destroyed stream that has no work left. Its thread is joined with its context.
    fn end_stream(&mut self, id: u64) -> Next {
        if let Some(stream) = self.streams.remove(id)
            && let Some(context) = self.contexts.get_mut(&stream.context)
        {
            context.ended.extend(stream.thread);
        }
        Next::End
    }

    /// Notes the end of an operation of a stream.
    pub(crate) fn finish(&mut self, id: u64, operation: &Operation, outcome: Answer) {
        let Some(stream) = self.streams.get_mut(id) else {
            return;
        };
        stream.finish();
        let (public, context, done) = (stream.public, stream.context, stream.done());
        if let Work::Record { event } = operation.work {
            self.reach(event, id, done);
        }
        let first = operation.pieces().first();
        self.journal.push(Entry {
            kind: operation.kind,
            status: outcome.map_or_else(|status| status.0, |()| 0),
            stream: public,
            bytes: operation.bytes(),
            source: first.map_or(0, |piece| piece.source.address()),
            destination: first.map_or(0, |piece| piece.destination.address()),
        });
        // An operation that did nothing and reports success does not affect others.
        let failed = outcome.err().filter(|status| status.0 != 0);
        if let (Some(status), Some(context)) = (failed, self.contexts.get_mut(&context)) {
            context.failing.get_or_insert(status);
        }
        self.finish_failure(context);
    }

    /// Notes the time of an event, if this is its last record.
    fn reach(&mut self, event: u64, stream: u64, done: u64) {
        if let Some(event) = self.events.get_mut(&event)
            && let Record::In(position) = event.record
            && (position.stream, position.done) == (stream, done)
        {
            event.reached = Some(Instant::now());
        }
    }

    /// Completes the failure of a context: nothing queued in it is executed any more. The failure
    /// is reported only after all running transfers have ended, since callers then free their
    /// memory.
    fn finish_failure(&mut self, id: u64) {
        let Some(context) = self.contexts.get_mut(&id) else {
            return;
        };
        let Some(status) = context.failing else {
            return;
        };
        let theirs = |stream: &Stream| stream.context == id;
        let is_writing = |stream: &Stream| stream.running().is_some_and(Operation::is_transfer);
        if self
            .streams
            .iter()
            .any(|(_, stream)| theirs(stream) && is_writing(stream))
        {
            return;
        }
        context.failed = Some(status);
        for stream in self.streams.values_mut().filter(|stream| theirs(stream)) {
            stream.drop_queue();
        }
    }

    /// Whether streams have reached positions, or the failure of their context.
    pub(crate) fn have_reached(&self, positions: &[Position], context: u64) -> Answer<bool> {
        let context = self
            .contexts
            .get(&context)
            .ok_or(Status::CONTEXT_IS_DESTROYED)?;
        context.is_usable()?;
        Ok(context.failing.is_none() && self.streams.have_reached(positions))
    }

    /// Removes everything else of a context whose streams are gone.
    pub(crate) fn remove_context(&mut self, id: u64) {
        self.events.retain(|_, event| event.context != id);
        self.graphs.retain(|_, context| *context != id);
        self.modules.remove_context(id);
        self.memory.remove_context(id);
    }
}
