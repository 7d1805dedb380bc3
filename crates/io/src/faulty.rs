//! Decorators that fail on purpose, reproducibly, and record all operations.
//!
//! Fault model: a transfer may move fewer bytes than requested (never none, and whole alignment
//! units on a direct file, as a kernel would), completions may come late and in any order, and an
//! operation or a change may fail with any error without having run. All of it depends on the seed
//! and the operation's number alone, so a failing test fails again with the same seed. Not
//! modelled: operations that run and *then* report an error, corrupted bytes, lost writes.
//!
//! With a [`Log`], every change of storage is recorded, from which [`crash`] builds the states that
//! a power cut could leave. A [`Hook`] is called before each operation, to stop the process or the
//! disk at a known moment.
//!
//! Tracers and preloaded libraries see only `io_uring_enter`, never a request, so faults have to be
//! injected here.

pub mod crash;
mod engine;
mod file_system;
mod lent;
mod lent_device;
mod log;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::engine::{Op, OpKind};

pub use engine::Faulty;
pub use file_system::FaultyFileSystem;
pub use lent::Lent;
pub use lent_device::{LentDevice, ReadBack};
pub use log::{Log, Logged, Node, Record};

/// Called before an operation with its number, counted from 1, its verb, and its path.
pub type Hook = Arc<dyn Fn(u64, &'static str, &Path) + Send + Sync>;

/// Classes of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpClass {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Syncs through an engine.
    Sync,
    /// Changes of files and directories through a [`crate::file_system::FileSystem`].
    Change,
}

/// How often an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    /// The Nth operation of its class, and no other.
    Once,
    /// The Nth operation of its class and all later ones.
    Forever,
}

/// Selects an operation to fail, and its error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The class that is counted; `None` counts all operations.
    pub class: Option<OpClass>,
    /// The number of the operation in its class, counted from 1.
    pub nth: u64,
    /// Whether only that operation fails, or also all later ones.
    pub repeat: Repeat,
    /// The kernel's error number.
    pub errno: i32,
}

/// The faults to inject. Decorators that share one count their operations together.
pub struct Faults {
    seed: u64,
    short_percent: u64,
    late_percent: u64,
    failures: Vec<Failure>,
    hook: Option<Hook>,
    log: Option<Arc<Log>>,
    operations: AtomicU64,
    by_class: [AtomicU64; 4],
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults")
            .field("seed", &self.seed)
            .field("short_percent", &self.short_percent)
            .field("late_percent", &self.late_percent)
            .field("failures", &self.failures)
            .field("operations", &self.operations)
            .finish_non_exhaustive()
    }
}

impl Faults {
    /// Injects no faults yet.
    pub fn new(seed: u64) -> Faults {
        Faults {
            seed,
            short_percent: 0,
            late_percent: 0,
            failures: Vec::new(),
            hook: None,
            log: None,
            operations: AtomicU64::new(0),
            by_class: Default::default(),
        }
    }

    /// Shortens `percent` percent of all transfers, to lengths drawn from the seed.
    #[must_use]
    pub fn short_transfers(self, percent: u64) -> Faults {
        Faults {
            short_percent: percent,
            ..self
        }
    }

    /// Shuffles completions, and returns `percent` percent of them late.
    #[must_use]
    pub fn late_completions(self, percent: u64) -> Faults {
        Faults {
            late_percent: percent,
            ..self
        }
    }

    /// Calls `hook` before each operation and each change.
    #[must_use]
    pub fn call(self, hook: impl Fn(u64, &'static str, &Path) + Send + Sync + 'static) -> Faults {
        Faults {
            hook: Some(Arc::new(hook)),
            ..self
        }
    }

    /// Records every change of storage.
    #[must_use]
    pub fn record(self, log: Arc<Log>) -> Faults {
        Faults {
            log: Some(log),
            ..self
        }
    }

    /// Adds a failure. If several apply to an operation, the one added first wins.
    #[must_use]
    pub fn fail(mut self, failure: Failure) -> Faults {
        self.failures.push(failure);
        self
    }

    /// Operations so far, failed ones included, so that a test can fail each one in turn.
    pub fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// Counts an operation; returns its number, and its error if it is to fail.
    fn count(&self, class: OpClass, operation: &'static str, path: &Path) -> (u64, Option<i32>) {
        let number = self.operations.fetch_add(1, Ordering::Relaxed) + 1;
        let of_class = self.by_class[class as usize].fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(hook) = &self.hook {
            hook(number, operation, path);
        }
        let failure = self.failures.iter().find(|failure| {
            let count = match failure.class {
                None => number,
                Some(counted) if counted == class => of_class,
                Some(_) => return false,
            };
            count == failure.nth || (failure.repeat == Repeat::Forever && count > failure.nth)
        });
        (number, failure.map(|failure| failure.errno))
    }

    /// Counts an engine's operation and decides its outcome.
    fn next(&self, op: &Op) -> Verdict {
        let (class, operation) = match op.kind {
            OpKind::Read { .. } => (OpClass::Read, "read"),
            OpKind::Write { .. } => (OpClass::Write, "write"),
            OpKind::SyncData => (OpClass::Sync, "fdatasync"),
        };
        let (number, errno) = self.count(class, operation, op.file.path());
        if let Some(errno) = errno {
            return Verdict::Fail(errno);
        }
        match &op.kind {
            OpKind::Read { buf, .. } | OpKind::Write { buf, .. } => {
                let alignment = op.file.alignment();
                let step = alignment.memory.max(alignment.offset);
                self.shorten(number, buf.len(), step)
            }
            OpKind::SyncData => Verdict::Pass,
        }
    }

    fn shorten(&self, number: u64, len: usize, step: usize) -> Verdict {
        let mut random = self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let steps = (len / step) as u64;
        if steps < 2 || mix(&mut random) % 100 >= self.short_percent {
            return Verdict::Pass;
        }
        let kept = 1 + mix(&mut random) % (steps - 1);
        Verdict::Shorten(kept as usize * step)
    }
}

enum Verdict {
    Pass,
    Shorten(usize),
    Fail(i32),
}

/// SplitMix64.
pub(crate) fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
