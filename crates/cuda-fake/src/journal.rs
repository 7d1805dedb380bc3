//! The executed operations, in order of completion.

use std::collections::VecDeque;

use crate::operation::Kind;

/// The most entries; the oldest ones are dropped.
const ENTRIES_MAX: usize = 1 << 18;

/// An operation that was executed, or that failed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Entry {
    /// The kind of the operation.
    pub kind: Kind,
    /// 0, or the code that it failed with.
    pub status: i32,
    /// The handle of its stream; 0 for a legacy stream, 2 for a thread's.
    pub stream: u64,
    /// Bytes that it copied or filled; 0 for other operations.
    pub bytes: u64,
    /// Source address of its first copy; 0 if it was read during the call.
    pub source: u64,
    /// Destination address of its first copy.
    pub destination: u64,
}

#[derive(Default)]
pub(crate) struct Journal {
    entries: VecDeque<Entry>,
}

impl Journal {
    pub(crate) fn push(&mut self, entry: Entry) {
        if self.entries.len() == ENTRIES_MAX {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }

    pub(crate) fn len(&self) -> u64 {
        self.entries.len() as u64
    }

    pub(crate) fn get(&self, index: u64) -> Option<Entry> {
        self.entries.get(usize::try_from(index).ok()?).copied()
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }
}
