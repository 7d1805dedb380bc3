//! Streams that execute nothing until a test allows it.
//!
//! Streams are identified by the caller's handles, so 0 is the legacy stream of every context.

use std::collections::{HashMap, HashSet};

#[derive(Default)]
pub(crate) struct Holds {
    all: bool,
    streams: HashSet<u64>,
    /// How many operations of a held stream may still execute.
    allowed: HashMap<u64, u64>,
}

impl Holds {
    pub(crate) fn hold_all(&mut self) {
        self.all = true;
    }

    pub(crate) fn hold(&mut self, stream: u64) {
        self.streams.insert(stream);
    }

    /// Releases all streams.
    pub(crate) fn release_all(&mut self) {
        *self = Holds::default();
    }

    /// Releases one stream, unless all are held.
    pub(crate) fn release(&mut self, stream: u64) {
        self.streams.remove(&stream);
        self.allowed.remove(&stream);
    }

    pub(crate) fn allow(&mut self, stream: u64, operations: u64) {
        *self.allowed.entry(stream).or_default() += operations;
    }

    /// Whether an operation of a stream may begin now.
    pub(crate) fn lets(&self, stream: u64) -> bool {
        !self.holds(stream) || self.allowed.get(&stream).is_some_and(|left| *left > 0)
    }

    /// Counts an operation of a stream that begins.
    pub(crate) fn began(&mut self, stream: u64) {
        if self.holds(stream)
            && let Some(left) = self.allowed.get_mut(&stream)
        {
            *left -= 1;
        }
    }

    /// Whether any stream may be held.
    pub(crate) fn is_any(&self) -> bool {
        self.all || !self.streams.is_empty()
    }

    fn holds(&self, stream: u64) -> bool {
        self.all || self.streams.contains(&stream)
    }
}
