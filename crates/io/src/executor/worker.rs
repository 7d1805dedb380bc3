//! One thread of an executor: keeps the queue of its engine full, and waits in the kernel.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use slab::Slab;

use super::pieces::{RequestPart, Way};
use super::request::{Arrived, Landing, ParallelWork, Visitor};
use super::schedule::Next;
use super::shared::{ExecutorShared, Otherwise, Room, WorkFound};
use super::transfer::{Cause, Failure, Moved, TransferState};
use crate::buffer::IoBuf;
use crate::engine::{Completion, Engine, Op, OpKind};
use crate::file::File;
use crate::trace::{self, Role};
use crate::{Error, Result};

/// The most pieces that a worker takes from the schedule at once.
const TAKEN_MAX: usize = 64;

/// The state of one worker thread.
pub(super) struct Worker {
    shared: Arc<ExecutorShared>,
    index: usize,
    /// `None` after the engine has failed.
    engine: Option<Box<dyn Engine>>,
    queue_depth: usize,
    in_flight_bytes_max: u64,
    /// Bytes of the pieces in flight.
    in_flight_bytes: u64,
    flying: Slab<Flying>,
    /// Taken from the schedule, and not begun.
    taken: VecDeque<Next>,
    /// Kept to reuse its memory.
    completed: Vec<Completion>,
    /// Pieces that the device is done with, to be delivered: copied, checked, reported.
    arrived: VecDeque<(Flying, Completion)>,
    /// The failure of everything that this worker leaves undone.
    failure: Failure,
}

/// A piece in flight.
struct Flying {
    state: Arc<TransferState>,
    file: Arc<File>,
    operation: &'static str,
    offset: u64,
    bytes: u64,
    is_staged: bool,
    /// Destination of the staged bytes, and how many other bytes precede them in staging.
    landing: Option<(Landing, u64)>,
    /// Receives bytes that moved without staging.
    visitor: Option<Box<dyn Visitor>>,
}

impl Flying {
    fn failure(&self, offset: u64, cause: Cause) -> Failure {
        Failure {
            operation: self.operation,
            path: self.file.shared_path(),
            offset,
            cause,
        }
    }

    /// Takes the completion into account.
    fn end(
        mut self,
        completion: Completion,
    ) -> (Arc<TransferState>, std::result::Result<Moved, Failure>) {
        let result = match completion.result {
            Err(error) => Err(self.failure(self.offset, Cause::of(&error))),
            Ok(moved) => self.land(moved as u64, completion.buf),
        };
        (self.state, result)
    }

    fn land(&mut self, moved: u64, buf: Option<IoBuf>) -> std::result::Result<Moved, Failure> {
        let before = self.landing.as_ref().map_or(0, |(_, before)| *before);
        let arrived = moved.saturating_sub(before).min(self.bytes);
        if arrived < self.bytes {
            return Err(self.failure(self.offset + arrived, Cause::End));
        }
        match (self.landing.take(), self.visitor.take(), buf) {
            (Some((landing, before)), _, Some(buf)) => {
                let before = before as usize;
                landing.fill(&buf.as_slice()[before..before + self.bytes as usize]);
            }
            (None, Some(visitor), Some(buf)) => visitor.arrived(Arrived::Own(buf)),
            _ => {}
        }
        Ok(Moved {
            bytes: self.bytes,
            staged_bytes: if self.is_staged { self.bytes } else { 0 },
            cached_bytes: if self.file.is_direct() { 0 } else { self.bytes },
        })
    }
}

impl Worker {
    pub(super) fn new(
        shared: Arc<ExecutorShared>,
        index: usize,
        in_flight_bytes_max: u64,
        engine: Box<dyn Engine>,
    ) -> Worker {
        let queue_depth = engine.capabilities().queue_depth_max;
        Worker {
            shared,
            index,
            engine: Some(engine),
            queue_depth,
            in_flight_bytes_max,
            in_flight_bytes: 0,
            flying: Slab::with_capacity(queue_depth),
            taken: VecDeque::with_capacity(TAKEN_MAX),
            completed: Vec::with_capacity(queue_depth),
            arrived: VecDeque::with_capacity(queue_depth),
            failure: Failure::of_worker("a thread of it has panicked"),
        }
    }

    /// Works until the executor closes and nothing is left to do, or the engine fails. Pieces that
    /// are not done then fail when the worker is dropped.
    pub(super) fn run(mut self) {
        let _row = trace::enter(Role::Executor);
        if let Err(error) = self.work() {
            self.failure = Failure::of_worker(&error.to_string());
            self.deliver();
        }
    }

    /// Requests come first: the next ones are on their way before bytes that have arrived are
    /// delivered, so the device has work meanwhile.
    fn work(&mut self) -> Result<()> {
        loop {
            let is_flying = self.fill()?;
            if !self.arrived.is_empty() {
                // An engine may hold small requests back until it is polled.
                self.poll(0, Some(Duration::ZERO))?;
                self.deliver();
            } else if is_flying {
                self.wait()?;
            } else {
                return Ok(());
            }
        }
    }

    fn engine(&mut self) -> &mut dyn Engine {
        let engine = self.engine.as_mut();
        engine.expect("it is there until the worker goes").as_mut()
    }

    fn in_flight(&self) -> usize {
        self.flying.len()
    }

    /// Starts the pieces that there is room for; waits for some if there is nothing else to do.
    ///
    /// # Returns
    /// `false` once the executor is closing and nothing is left to do.
    fn fill(&mut self) -> Result<bool> {
        loop {
            let in_flight = self.in_flight();
            let room = Room {
                pieces: (self.queue_depth - in_flight).min(TAKEN_MAX),
                bytes: self
                    .in_flight_bytes_max
                    .saturating_sub(self.in_flight_bytes),
            };
            if in_flight > 0 && (room.pieces == 0 || room.bytes == 0) {
                return Ok(true);
            }
            let otherwise = match (self.arrived.is_empty(), in_flight) {
                (false, _) => Otherwise::Deliver,
                (true, 0) => Otherwise::Sleep,
                (true, _) => Otherwise::Wait,
            };
            let found = self
                .shared
                .take(self.index, room, otherwise, &mut self.taken);
            while let Some(next) = self.taken.pop_front() {
                match next {
                    Next::Over(state) => self.shared.end(&state, Err(None)),
                    Next::RequestPart(piece, state) => self.start(piece, state)?,
                }
            }
            match found {
                WorkFound::Some => {}
                WorkFound::Offer(offer) => self.run_part(&*offer)?,
                WorkFound::None => return Ok(true),
                WorkFound::End => return Ok(false),
            }
        }
    }

    /// Helps with a caller's computation until there is a request to begin.
    fn run_part(&mut self, offer: &dyn ParallelWork) -> Result<()> {
        self.deliver();
        while offer.run_part() && self.shared.is_empty() {
            if self.in_flight() > 0 {
                self.poll(0, Some(Duration::ZERO))?;
                self.deliver();
            }
        }
        Ok(())
    }

    /// Waits for a completion, or a wake, and takes all completions.
    fn wait(&mut self) -> Result<()> {
        let min = self.in_flight().min(1);
        let polled = self.poll(min, None);
        self.shared.wakers.is_up(self.index);
        polled
    }

    /// Takes the completions that have arrived.
    fn poll(&mut self, min: usize, timeout: Option<Duration>) -> Result<()> {
        let mut completed = std::mem::take(&mut self.completed);
        let polled = self.engine().poll(min, timeout, &mut completed);
        for completion in completed.drain(..) {
            let key = usize::try_from(completion.token).expect("a token of this worker");
            let flying = self.flying.remove(key);
            self.in_flight_bytes -= flying.bytes;
            self.arrived.push_back((flying, completion));
        }
        self.completed = completed;
        polled
    }

    /// Delivers the pieces that have arrived; returns whether there were any.
    fn deliver(&mut self) -> bool {
        let has_some = !self.arrived.is_empty();
        while let Some((flying, completion)) = self.arrived.pop_front() {
            let (state, result) = flying.end(completion);
            self.shared.end(&state, result.map_err(Some));
        }
        has_some
    }

    fn start(&mut self, piece: RequestPart, state: Arc<TransferState>) -> Result<()> {
        let staged_bytes = piece.staged_bytes();
        let staging = match self.staging(staged_bytes) {
            Ok(staging) => staging,
            Err(error) => {
                let failure = without_memory(&piece, &error);
                // The piece is dropped first: after `end`, the caller may use the memory again.
                drop(piece);
                self.shared.end(&state, Err(Some(failure)));
                return match error {
                    Error::OutOfMemory { .. } => Ok(()),
                    error => Err(error),
                };
            }
        };
        let operation = piece.operation();
        let RequestPart {
            file,
            offset,
            bytes,
            way,
        } = piece;
        let (mut landing, mut visitor) = (None, None);
        let kind = match (way, staging) {
            (
                Way::ReadStaged {
                    landing: to,
                    before,
                },
                Some(buf),
            ) => {
                landing = Some((to, before));
                let offset = offset - before;
                OpKind::Read { offset, buf }
            }
            (Way::WriteStaged(copied), Some(mut buf)) => {
                copied.copy_to(buf.as_mut_slice());
                OpKind::Write { offset, buf }
            }
            (Way::Read(buf, visited_by), _) => {
                visitor = visited_by;
                OpKind::Read { offset, buf }
            }
            (Way::Write(buf), _) => OpKind::Write { offset, buf },
            (Way::Sync, _) => OpKind::SyncData,
            (Way::ReadStaged { .. } | Way::WriteStaged(_), None) => {
                unreachable!("there is staging for what is staged")
            }
        };
        let key = self.note(Flying {
            state,
            file: Arc::clone(&file),
            operation,
            offset,
            bytes,
            is_staged: staged_bytes > 0,
            landing,
            visitor,
        });
        let op = Op {
            token: key as u64,
            file,
            kind,
        };
        self.engine()
            .submit(op)
            .expect("no more is taken than there is room for");
        Ok(())
    }

    /// Registers a piece in flight; returns its key.
    fn note(&mut self, flying: Flying) -> usize {
        self.in_flight_bytes += flying.bytes;
        self.flying.insert(flying)
    }

    /// Takes a buffer of `bytes` bytes, waiting for one; `None` for zero bytes.
    fn staging(&mut self, bytes: usize) -> Result<Option<IoBuf>> {
        if bytes == 0 {
            return Ok(None);
        }
        let pool = self.shared.staging.of(bytes).clone();
        let mut buf = loop {
            if let Some(buf) = pool.try_take()? {
                break buf;
            }
            if self.deliver() {
                continue;
            }
            if self.in_flight() == 0 {
                // Other workers hold all buffers, and return them as they finish.
                break pool.take()?;
            }
            self.wait()?;
        };
        buf.set_len(bytes);
        Ok(Some(buf))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The engine first: after that nothing touches the callers' memory.
        self.engine = None;
        let flying = std::mem::take(&mut self.flying).into_iter();
        let mut left: Vec<Arc<TransferState>> = flying.map(|(_, flying)| flying.state).collect();
        left.extend(self.arrived.drain(..).map(|(flying, _)| flying.state));
        for next in self.taken.drain(..) {
            let (Next::RequestPart(_, state) | Next::Over(state)) = next;
            left.push(state);
        }
        for state in left {
            self.shared.end(&state, Err(Some(self.failure.clone())));
        }
        self.shared.leave(&self.failure);
    }
}

/// The failure of a piece that no memory could be allocated for; other pieces are unaffected.
fn without_memory(piece: &RequestPart, error: &Error) -> Failure {
    Failure {
        operation: piece.operation(),
        path: piece.file.shared_path(),
        offset: piece.offset,
        cause: Cause::Other(std::io::ErrorKind::OutOfMemory, error.to_string()),
    }
}
