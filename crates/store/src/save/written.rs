//! The result of a rank's write, and the time it took.

use penstock_io::trace;

use crate::format::manifest::PartEntry;
use crate::report::Transport;

/// The data that a rank stored, and how.
#[derive(Debug)]
pub struct Written {
    /// The rank's vote: its part, as the manifest will list it.
    pub part: PartEntry,
    /// Size of the rank's written files, including its part.
    pub bytes: u64,
    /// Tensor data in them, in bytes.
    pub tensor_bytes: u64,
    /// Size of the files that were hard-linked instead, or whose blocks are shared.
    pub linked_bytes: u64,
    /// Tensor data that devices copied from their memory, in bytes.
    pub device_bytes: u64,
    /// Tensor data written from the caller's memory without a copy, in bytes.
    pub zero_copy_bytes: u64,
    /// Bytes that were sealed: all of the shards but their headers, or none.
    pub sealed_bytes: u64,
    /// Number of tensors stored.
    pub tensors: usize,
    /// Number of the rank's files, including the part.
    pub files: usize,
    /// How the bytes were moved.
    pub transport: Transport,
    /// Seconds per phase, in order: plan, stage if the state was staged, write, sync.
    pub phases: Vec<(&'static str, f64)>,
}

/// Measures the phases of a call, for its report and its trace.
pub(super) struct Stopwatch {
    last_ns: u64,
    pub(super) phases: Vec<(&'static str, f64)>,
}

impl Stopwatch {
    pub(super) fn since(begun_ns: u64) -> Stopwatch {
        Stopwatch {
            last_ns: begun_ns,
            phases: Vec::new(),
        }
    }

    pub(super) fn lap(&mut self, phase: &'static str) {
        trace::span_since(phase, self.last_ns, None);
        let now_ns = trace::now_ns();
        let seconds = (now_ns - self.last_ns) as f64 / 1e9;
        self.phases.push((phase, seconds));
        self.last_ns = now_ns;
    }

    /// Inserts a phase that was measured elsewhere, if it was, before all others.
    pub(super) fn insert(&mut self, phase: &'static str, seconds: Option<f64>) {
        if let Some(seconds) = seconds {
            self.phases.insert(0, (phase, seconds));
        }
    }
}
