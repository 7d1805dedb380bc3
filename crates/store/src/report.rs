//! What a call did, told so that nobody has to guess which path ran.

use std::path::PathBuf;

use crate::options::Settings;

/// A way that was not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FallbackKind {
    /// Another engine than the first choice moves the bytes.
    Engine,
    /// They go through the page cache, though they need not by what the caller asked for.
    Buffered,
    /// A lazy save copies the state at its call.
    Eager,
    /// Memory that devices copy to is not pinned: they copy to it more slowly.
    Unpinned,
    /// Space is not reserved before it is written.
    Unreserved,
    /// A file that was to be linked to has no second name: its blocks are shared, or it is copied.
    Unlinked,
    /// Files of a checkpoint that was replaced could not be removed yet.
    Leftover,
    /// There is no index of a group that readers of models could load it by.
    Unindexed,
    /// Damaged chunks were read from another copy of the checkpoint.
    Copy,
}

impl FallbackKind {
    /// Its name in reports and metrics.
    pub fn name(self) -> &'static str {
        match self {
            FallbackKind::Engine => "engine",
            FallbackKind::Buffered => "buffered",
            FallbackKind::Eager => "eager",
            FallbackKind::Unpinned => "unpinned",
            FallbackKind::Unreserved => "unreserved",
            FallbackKind::Unlinked => "unlinked",
            FallbackKind::Leftover => "leftover",
            FallbackKind::Unindexed => "unindexed",
            FallbackKind::Copy => "copy",
        }
    }
}

/// What was hoped for and not had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// Which way was not open.
    pub kind: FallbackKind,
    /// Why, in words.
    pub reason: String,
}

/// How a call ran, for its report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// The backend that moved the bytes; empty if none was needed.
    pub engine: String,
    /// How the backend runs: the ring's flags, or the calls that the threads make.
    pub setup: String,
    /// What was asked for or hoped for and not had, with the reason; no reason twice.
    pub fallbacks: Vec<Fallback>,
    /// Whether every file bypassed the page cache.
    pub is_direct: bool,
}

impl Run {
    /// Adds a fallback unless it is already there.
    pub(crate) fn note(&mut self, kind: FallbackKind, reason: String) {
        let fallback = Fallback { kind, reason };
        if !self.fallbacks.contains(&fallback) {
            self.fallbacks.push(fallback);
        }
    }

    pub(crate) fn merge(&mut self, other: Run) {
        self.engine = other.engine;
        self.setup = other.setup;
        other
            .fallbacks
            .into_iter()
            .for_each(|fallback| self.note(fallback.kind, fallback.reason));
    }
}

/// How the bytes were moved; part of every report.
#[derive(Clone, Debug)]
pub struct Transport {
    /// The backend: `uring` or `threads`; empty if there was nothing to move.
    pub engine: String,
    /// How the backend runs: the ring's flags, or the calls that the threads make.
    pub engine_setup: String,
    /// Whether every file bypassed the page cache.
    pub direct_io: bool,
    /// What was not to be had, with the reason.
    pub fallbacks: Vec<Fallback>,
    /// Extent size, workers and depth where they were left to Penstock or staging has no room for
    /// what was asked, each with the reason.
    pub choices: Vec<String>,
    /// The block device behind the directory, with its driver, where they are known.
    pub device: Option<String>,
    /// Workers, each with an engine of its own.
    pub io_threads: usize,
    /// Operations in flight per worker.
    pub queue_depth: usize,
    /// Bytes of one request.
    pub extent_bytes: usize,
    /// Most staging memory that was in use at once.
    pub staging_peak_bytes: usize,
}

impl Transport {
    pub(crate) fn new(settings: &Settings, run: Run, direct_io: bool) -> Transport {
        Transport {
            engine: run.engine,
            engine_setup: run.setup,
            direct_io,
            fallbacks: run.fallbacks,
            choices: settings.choices.clone(),
            device: settings.device.as_ref().map(ToString::to_string),
            io_threads: settings.io_threads,
            queue_depth: settings.queue_depth,
            extent_bytes: settings.extent_bytes,
            staging_peak_bytes: settings.pool.peak_bytes(),
        }
    }
}

/// What a save did.
#[derive(Clone, Debug)]
pub struct SaveReport {
    /// The checkpoint directory.
    pub path: PathBuf,
    /// The step, where one was given.
    pub step: Option<u64>,
    /// Identity of the checkpoint.
    pub id: String,
    /// Bytes of all files that were written.
    pub bytes: u64,
    /// Bytes of tensor data in them.
    pub tensor_bytes: u64,
    /// Bytes of the files that were linked to instead, or whose blocks are shared.
    pub linked_bytes: u64,
    /// Bytes of tensor data that devices copied out of their memory.
    pub device_bytes: u64,
    /// Tensors stored.
    pub tensors: usize,
    /// Files of the checkpoint, the manifest included.
    pub files: usize,
    /// Time from the call to the acknowledgement.
    pub seconds: f64,
    /// The same by phase, in order: plan, write, sync, commit.
    pub phases: Vec<(&'static str, f64)>,
    /// How the bytes were moved.
    pub transport: Transport,
}

/// What a load did.
#[derive(Clone, Debug)]
pub struct LoadReport {
    /// Bytes of tensor data handed out.
    pub bytes: u64,
    /// Bytes read from the shards.
    pub bytes_read: u64,
    /// Bytes that the host copied on their way to their place.
    pub bounced_bytes: u64,
    /// Bytes that devices copied to their memory.
    pub device_bytes: u64,
    /// Tensors handed out.
    pub tensors: usize,
    /// Shards read from.
    pub files: usize,
    /// Time from the call to the last verified byte.
    pub seconds: f64,
    /// Whether digests were checked.
    pub verified: bool,
    /// How the bytes were moved.
    pub transport: Transport,
}

/// Everything that verification found.
#[derive(Clone, Debug, Default)]
pub struct VerifyReport {
    /// Damage, in the order of the files.
    pub problems: Vec<Problem>,
    /// Bytes whose digest was checked.
    pub bytes_checked: u64,
    /// Files looked at.
    pub files: usize,
    /// Tensors in the parts that could be read.
    pub tensors: usize,
    /// Whether it holds only what was salvaged from another checkpoint.
    pub is_partial: bool,
    /// Time it took.
    pub seconds: f64,
}

/// One piece of damage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Name of the file inside the checkpoint.
    pub file: String,
    /// Start of the damaged chunk, where the damage has a place.
    pub offset: Option<u64>,
    /// A tensor that the damage touches.
    pub tensor: Option<String>,
    /// What was found.
    pub detail: String,
    /// Whether the stored bytes themselves are wrong: they are missing, or do not match their digest
    /// when read twice. Else they are what was written, and make no sense; or the device does not
    /// give them, which may be the fault of this host.
    pub is_proven: bool,
}
