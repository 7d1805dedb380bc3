//! An engine under test, files with a known pattern, and operations on them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::{IoBuf, Memory};
use crate::engine::{Completion, Engine, Op, OpKind, Rejected};
use crate::file::{Direct, File};

/// The engine under test, and the directory for its files.
pub struct Subject {
    /// Opens an engine of the given queue depth.
    pub open: fn(queue_depth: usize) -> Box<dyn Engine>,
    /// An empty directory for the files of one case, on the file system to test with.
    pub directory: PathBuf,
    /// How files are opened; [`Direct::On`] needs a file system that can.
    pub direct: Direct,
}

/// Far more than any case takes: an engine that needs it hangs.
pub(super) const HANG: Duration = Duration::from_secs(60);

impl Subject {
    pub(super) fn create(&self, name: &str) -> Arc<File> {
        Arc::new(File::create(&self.directory.join(name), self.direct).unwrap())
    }

    pub(super) fn reopen(&self, name: &str) -> Arc<File> {
        Arc::new(File::open(&self.directory.join(name), self.direct).unwrap())
    }

    /// A file of `len` bytes of the pattern.
    pub(super) fn file_with_pattern(&self, name: &str, len: usize) -> Arc<File> {
        let mut bytes = vec![0; len];
        fill(&mut bytes, 0);
        std::fs::write(self.directory.join(name), bytes).unwrap();
        self.reopen(name)
    }
}

/// The byte that every test file has at `offset`: differs between neighbours, blocks and pages.
pub(super) fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 ^ (offset >> 12) as u8
}

pub(super) fn fill(bytes: &mut [u8], offset: u64) {
    for (byte, at) in bytes.iter_mut().zip(offset..) {
        *byte = byte_at(at);
    }
}

#[track_caller]
pub(super) fn assert_pattern(bytes: &[u8], offset: u64) {
    for (&byte, at) in bytes.iter().zip(offset..) {
        assert_eq!(byte, byte_at(at), "at offset {at}");
    }
}

pub(super) fn buffer(len: usize) -> IoBuf {
    Memory::allocate(len).unwrap().share().1
}

pub(super) fn pattern_buffer(len: usize, offset: u64) -> IoBuf {
    let mut buf = buffer(len);
    fill(buf.as_mut_slice(), offset);
    buf
}

pub(super) fn read(token: u64, file: &Arc<File>, offset: u64, len: usize) -> Op {
    let kind = OpKind::Read {
        offset,
        buf: buffer(len),
    };
    Op {
        token,
        file: Arc::clone(file),
        kind,
    }
}

pub(super) fn write(token: u64, file: &Arc<File>, offset: u64, len: usize) -> Op {
    let kind = OpKind::Write {
        offset,
        buf: pattern_buffer(len, offset),
    };
    Op {
        token,
        file: Arc::clone(file),
        kind,
    }
}

pub(super) fn sync(token: u64, file: &Arc<File>) -> Op {
    Op {
        token,
        file: Arc::clone(file),
        kind: OpKind::SyncData,
    }
}

/// Waits for at least `min` completions.
pub(super) fn wait(engine: &mut dyn Engine, min: usize) -> Vec<Completion> {
    let mut completed = Vec::new();
    engine.poll(min, Some(HANG), &mut completed).unwrap();
    assert!(
        completed.len() >= min,
        "{} of {min} completions after a minute",
        completed.len()
    );
    completed
}

/// Runs all operations, as many at a time as the engine takes; returns completions in order of
/// token.
pub(super) fn run(engine: &mut dyn Engine, ops: impl IntoIterator<Item = Op>) -> Vec<Completion> {
    let mut completed = Vec::new();
    for mut op in ops {
        while let Err(Rejected { op: back }) = engine.submit(op) {
            completed.extend(wait(engine, 1));
            op = back;
        }
    }
    let left = engine.in_flight();
    completed.extend(wait(engine, left));
    assert_eq!(engine.in_flight(), 0);
    completed.sort_by_key(|completion| completion.token);
    completed
}

pub(super) fn run_one(engine: &mut dyn Engine, op: Op) -> Completion {
    run(engine, [op])
        .pop()
        .expect("one completion for one operation")
}

/// Cuts `[0, total)` into pieces of changing length, all but the last multiples of `unit`, in an
/// order that is neither forwards nor backwards.
pub(super) fn pieces(total: usize, unit: usize, lengths: &[usize]) -> Vec<(u64, usize)> {
    let mut pieces = Vec::new();
    let mut offset = 0;
    for &length in lengths.iter().cycle() {
        let len = length.next_multiple_of(unit).min(total - offset);
        if len == 0 {
            break;
        }
        pieces.push((offset as u64, len));
        offset += len;
    }
    let (even, odd): (Vec<_>, Vec<_>) = pieces
        .iter()
        .rev()
        .enumerate()
        .partition(|(i, _)| i % 2 == 0);
    even.into_iter()
        .chain(odd)
        .map(|(_, &piece)| piece)
        .collect()
}
