//! Streams that execute nothing until a test lets them.
//!
//! Streams are told apart by what the caller knows them by, so 0 is the legacy stream of every context.

use std::collections::{HashMap, HashSet};

#[derive(Default)]
pub(crate) struct Holds {
    all: bool,
    streams: HashSet<u64>,
    /// How many operations of a stream may execute all the same.
    allowed: HashMap<u64, u64>,
}

impl Holds {
    pub(crate) fn hold_all(&mut self) {
        self.all = true;
    }

    pub(crate) fn hold(&mut self, stream: u64) {
        self.streams.insert(stream);
    }

    /// Lets everything run.
    pub(crate) fn release_all(&mut self) {
        *self = Holds::default();
    }

    /// Lets one stream run, unless all are held.
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

    /// An operation of a stream begins.
    pub(crate) fn began(&mut self, stream: u64) {
        if self.holds(stream)
            && let Some(left) = self.allowed.get_mut(&stream)
        {
            *left -= 1;
        }
    }

    /// Whether anything may be held.
    pub(crate) fn is_any(&self) -> bool {
        self.all || !self.streams.is_empty()
    }

    fn holds(&self, stream: u64) -> bool {
        self.all || self.streams.contains(&stream)
    }
}
