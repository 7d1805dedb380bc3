//! Stream capture: the participating streams, the calls that they may not make meanwhile, and
//! whether all of them are joined again before the end.
//!
//! Captured work is counted and dropped. Graphs cannot be launched.

use std::collections::{BTreeMap, HashMap};

use crate::status::{Answer, Status};
use crate::thread::{self, MODE_GLOBAL, MODE_RELAXED};

/// For each stream, the number of its nodes that come before.
type Clock = HashMap<u64, u64>;

/// The record of an event in a capture.
#[derive(Clone)]
pub(crate) struct Mark {
    capture: u64,
    seen: Clock,
}

struct Capture {
    mode: i32,
    /// The stream in which it began.
    origin: u64,
    thread: u64,
    is_invalid: bool,
    /// For each stream, the nodes that precede its next one.
    members: HashMap<u64, Clock>,
}

/// `CUstreamCaptureStatus`.
#[derive(Clone, Copy)]
#[repr(i32)]
pub(crate) enum CaptureStatus {
    None = 0,
    Active = 1,
    Invalidated = 2,
}

/// All captures in progress.
#[derive(Default)]
pub(crate) struct Captures {
    captures: BTreeMap<u64, Capture>,
}

impl Captures {
    pub(crate) fn begin(&mut self, id: u64, stream: u64, mode: i32) -> Answer {
        if self.of(stream).is_some() {
            return Err(Status::ILLEGAL_STATE);
        }
        let members = HashMap::from([(stream, Clock::new())]);
        let thread = thread::id();
        let capture = Capture {
            mode,
            origin: stream,
            thread,
            is_invalid: false,
            members,
        };
        self.captures.insert(id, capture);
        Ok(())
    }

    /// Ends the capture that began in a stream.
    pub(crate) fn end(&mut self, stream: u64) -> Answer {
        let id = self.of(stream).ok_or(Status::ILLEGAL_STATE)?;
        let capture = &self.captures[&id];
        if capture.origin != stream {
            self.invalidate(id);
            return Err(Status::CAPTURE_UNMATCHED);
        }
        if capture.mode != MODE_RELAXED && capture.thread != thread::id() {
            return Err(Status::CAPTURE_WRONG_THREAD);
        }
        let is_joined = capture.is_joined();
        let is_invalid = capture.is_invalid;
        self.captures.remove(&id);
        match (is_invalid, is_joined) {
            (true, _) => Err(Status::CAPTURE_INVALIDATED),
            (false, false) => Err(Status::CAPTURE_UNJOINED),
            (false, true) => Ok(()),
        }
    }

    pub(crate) fn status(&self, stream: u64) -> CaptureStatus {
        match self.of(stream).map(|id| self.captures[&id].is_invalid) {
            None => CaptureStatus::None,
            Some(false) => CaptureStatus::Active,
            Some(true) => CaptureStatus::Invalidated,
        }
    }

    /// Captures work of a stream; returns whether the stream is capturing.
    pub(crate) fn take(&mut self, stream: u64) -> Answer<bool> {
        let Some(capture) = self.valid(stream)? else {
            return Ok(false);
        };
        if let Some(seen) = capture.members.get_mut(&stream) {
            *seen.entry(stream).or_default() += 1;
        }
        Ok(true)
    }

    /// The mark for an event recorded in this stream; `None` if the stream is not capturing.
    pub(crate) fn mark(&mut self, stream: u64) -> Answer<Option<Mark>> {
        let capture = self.of(stream).unwrap_or_default();
        let valid = self.valid(stream)?;
        let seen = valid
            .and_then(|capture| capture.members.get(&stream))
            .cloned();
        Ok(seen.map(|seen| Mark { capture, seen }))
    }

    /// Makes a stream come after a mark. A stream that is not capturing joins the capture.
    pub(crate) fn join(&mut self, stream: u64, mark: &Mark) -> Answer {
        if let Some(id) = self.of(stream)
            && id != mark.capture
        {
            self.invalidate(id);
            self.invalidate(mark.capture);
            return Err(Status::CAPTURE_MERGE);
        }
        let capture = self
            .captures
            .get_mut(&mark.capture)
            .ok_or(Status::CAPTURED_EVENT)?;
        if capture.is_invalid {
            return Err(Status::CAPTURE_INVALIDATED);
        }
        let seen = capture.members.entry(stream).or_default();
        for (other, count) in &mark.seen {
            let own = seen.entry(*other).or_default();
            *own = (*own).max(*count);
        }
        Ok(())
    }

    /// Refuses a call that cannot be captured, where a capture forbids it, and invalidates that
    /// capture.
    pub(crate) fn refuse_unsafe_call(&mut self) -> Answer {
        let (thread, thread_mode) = (thread::id(), thread::capture_mode());
        let in_the_way = |capture: &Capture| match (thread_mode, capture.mode) {
            (MODE_RELAXED, _) | (_, MODE_RELAXED) => false,
            (MODE_GLOBAL, MODE_GLOBAL) => true,
            _ => capture.thread == thread,
        };
        let mut outcome = Ok(());
        for capture in self
            .captures
            .values_mut()
            .filter(|capture| in_the_way(capture))
        {
            capture.is_invalid = true;
            outcome = Err(Status::CAPTURE_UNSUPPORTED);
        }
        outcome
    }

    /// Invalidates the capture that a stream takes part in.
    pub(crate) fn spoil(&mut self, stream: u64) {
        if let Some(id) = self.of(stream) {
            self.invalidate(id);
        }
    }

    /// Invalidates the capture of a mark.
    pub(crate) fn spoil_marked(&mut self, mark: &Mark) {
        self.invalidate(mark.capture);
    }

    pub(crate) fn includes(&self, stream: u64) -> bool {
        self.of(stream).is_some()
    }

    /// Invalidates and removes the captures of a stream that is being destroyed.
    pub(crate) fn leave(&mut self, stream: u64) {
        if let Some(id) = self.of(stream) {
            self.invalidate(id);
            if self.captures[&id].origin == stream {
                self.captures.remove(&id);
            }
        }
    }

    fn of(&self, stream: u64) -> Option<u64> {
        let mut captures = self.captures.iter();
        captures
            .find(|(_, capture)| capture.members.contains_key(&stream))
            .map(|(id, _)| *id)
    }

    /// The capture that a stream takes part in, unless it is invalid.
    fn valid(&mut self, stream: u64) -> Answer<Option<&mut Capture>> {
        let Some(id) = self.of(stream) else {
            return Ok(None);
        };
        let capture = self.captures.get_mut(&id);
        match capture {
            Some(capture) if capture.is_invalid => Err(Status::CAPTURE_INVALIDATED),
            capture => Ok(capture),
        }
    }

    fn invalidate(&mut self, id: u64) {
        if let Some(capture) = self.captures.get_mut(&id) {
            capture.is_invalid = true;
        }
    }
}

impl Capture {
    /// Whether the stream in which it began comes after all nodes of the others.
    fn is_joined(&self) -> bool {
        let joined = &self.members[&self.origin];
        self.members.iter().all(|(stream, seen)| {
            let last = seen.get(stream).copied().unwrap_or_default();
            *stream == self.origin || joined.get(stream).copied().unwrap_or_default() >= last
        })
    }
}
