//! Reports: the results of calls, and which paths they took.

use std::path::PathBuf;

use crate::options::Settings;

/// A preferred path that could not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FallbackKind {
    /// Another engine than the first choice was used.
    Engine,
    /// Files went through the page cache although the options allow direct I/O.
    Buffered,
    /// A lazy save copied the state during its call.
    Eager,
    /// Memory for device copies is not pinned, which makes them slower.
    Unpinned,
    /// Space was not reserved before it was written.
    Unreserved,
    /// A file could not be hard-linked: its blocks are shared, or it was copied.
    Unlinked,
    /// Files of a replaced checkpoint could not be removed yet.
    Leftover,
    /// A group has no index with which model loaders could load it.
    Unindexed,
    /// Damaged chunks were read from a replica of the checkpoint.
    Copy,
}

impl FallbackKind {
    /// The kind's name in reports and metrics.
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

/// A preferred path that was not used, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// The kind of path.
    pub kind: FallbackKind,
    /// The reason, in words.
    pub reason: String,
}

/// How a call ran, for its report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// The backend that moved the bytes; empty if none was needed.
    pub engine: String,
    /// The backend's configuration: the ring's flags, or the system calls of the threads.
    pub setup: String,
    /// Preferred paths that were not used, each reason once.
    pub fallbacks: Vec<Fallback>,
    /// Whether every file bypassed the page cache.
    pub is_direct: bool,
    /// Tensor data written from the caller's memory without a copy, in bytes.
    pub zero_copy_bytes: u64,
    /// Extents that were written again, as somebody had changed them meanwhile.
    pub rewritten_extents: u64,
    /// How many workers moved bytes, and the most operations of each in flight, if they began one
    /// after the other.
    pub workers: Option<(usize, usize)>,
    /// Further choices of the call, each with the reason.
    pub choices: Vec<String>,
}

impl Run {
    /// Adds a fallback unless it is already there.
    pub(crate) fn note(&mut self, kind: FallbackKind, reason: String) {
        let fallback = Fallback { kind, reason };
        if !self.fallbacks.contains(&fallback) {
            self.fallbacks.push(fallback);
        }
    }

    /// Adds the number of extents that were written again to the choices, if there are any.
    pub(crate) fn explain_rewritten(&mut self) {
        let extents = self.rewritten_extents;
        if extents > 0 {
            self.choices.push(format!(
                "zero_copy: {extents} extents were changed while they were written, and written again"
            ));
        }
    }

    pub(crate) fn merge(&mut self, other: Run) {
        self.engine = other.engine;
        self.setup = other.setup;
        self.zero_copy_bytes += other.zero_copy_bytes;
        self.rewritten_extents += other.rewritten_extents;
        self.workers = self.workers.or(other.workers);
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
    /// The backend's configuration: the ring's flags, or the system calls of the threads.
    pub engine_setup: String,
    /// Whether every file bypassed the page cache.
    pub direct_io: bool,
    /// Preferred paths that were not used, with the reasons.
    pub fallbacks: Vec<Fallback>,
    /// Extent size, workers and depth that Penstock chose, or reduced to fit the staging memory,
    /// each with the reason.
    pub choices: Vec<String>,
    /// The block device of the directory, with its driver, if known.
    pub device: Option<String>,
    /// Workers that moved bytes, each with an engine of its own.
    pub io_threads: usize,
    /// Operations in flight per worker.
    pub queue_depth: usize,
    /// Bytes of one request.
    pub extent_bytes: usize,
    /// Peak staging memory in use.
    pub staging_peak_bytes: usize,
}

impl Transport {
    pub(crate) fn new(settings: &Settings, run: Run, direct_io: bool) -> Transport {
        let all = (settings.io_threads, settings.queue_depth);
        let (io_threads, queue_depth) = run.workers.unwrap_or(all);
        let mut choices = settings.choices.clone();
        if io_threads < settings.io_threads {
            let is_moot = |choice: &str| {
                choice.starts_with("io_threads=") || choice.starts_with("queue_depth=")
            };
            choices.retain(|choice| !is_moot(choice));
            let most = settings.io_threads;
            choices.push(format!(
                "io_threads={io_threads}: the device needs no more of {most}"
            ));
            choices.push(format!(
                "queue_depth={queue_depth}: the requests of {most} threads"
            ));
        }
        choices.extend(run.choices);
        Transport {
            engine: run.engine,
            engine_setup: run.setup,
            direct_io,
            fallbacks: run.fallbacks,
            choices,
            device: settings.device.as_ref().map(ToString::to_string),
            io_threads,
            queue_depth,
            extent_bytes: settings.extent_bytes,
            staging_peak_bytes: settings.pool.peak_bytes(),
        }
    }
}

/// The result of a save.
#[derive(Clone, Debug)]
pub struct SaveReport {
    /// The checkpoint directory.
    pub path: PathBuf,
    /// The step, if one was given.
    pub step: Option<u64>,
    /// Identity of the checkpoint.
    pub id: String,
    /// Size of all written files.
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
    /// Number of files of the checkpoint, including the manifest.
    pub files: usize,
    /// Seconds from the call to the acknowledgement.
    pub seconds: f64,
    /// Seconds per phase, in order: plan, write, sync, commit.
    pub phases: Vec<(&'static str, f64)>,
    /// How the bytes were moved.
    pub transport: Transport,
}

/// The result of a load.
#[derive(Clone, Debug)]
pub struct LoadReport {
    /// Tensor data returned, in bytes.
    pub bytes: u64,
    /// Bytes read from the shards.
    pub bytes_read: u64,
    /// Bytes that the host copied to their final memory.
    pub bounced_bytes: u64,
    /// Bytes that devices copied to their memory.
    pub device_bytes: u64,
    /// Bytes of sealed chunks that were opened.
    pub opened_bytes: u64,
    /// Number of tensors returned.
    pub tensors: usize,
    /// Number of shards read.
    pub files: usize,
    /// Seconds from the call to the last verified byte.
    pub seconds: f64,
    /// Whether digests were checked.
    pub verified: bool,
    /// How the bytes were moved.
    pub transport: Transport,
}

/// The result of a verification.
#[derive(Clone, Debug, Default)]
pub struct VerifyReport {
    /// Damage, in the order of the files.
    pub problems: Vec<Problem>,
    /// Bytes whose digest was checked.
    pub bytes_checked: u64,
    /// Number of files checked.
    pub files: usize,
    /// Number of tensors in the readable parts.
    pub tensors: usize,
    /// Whether the checkpoint holds only what was salvaged from another one.
    pub is_partial: bool,
    /// Whether the checkpoint is sealed: digests were checked, tags were not.
    pub is_sealed: bool,
    /// The key that signed it, in public, if a signature was demanded.
    pub signer: Option<String>,
    /// Duration in seconds.
    pub seconds: f64,
}

/// One piece of damage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Name of the file inside the checkpoint.
    pub file: String,
    /// Start of the damaged chunk, if the position is known.
    pub offset: Option<u64>,
    /// A tensor that the damage touches.
    pub tensor: Option<String>,
    /// Description of the damage.
    pub detail: String,
    /// Whether the stored bytes are proven wrong: they are missing, or do not match their digest in
    /// two reads. Otherwise they match but are invalid, or could not be read, which may be the
    /// fault of this host.
    pub is_proven: bool,
}
