//! The work of one process of a benchmark.

use std::path::PathBuf;

use serde::Deserialize;

/// Largest alignment that a direct request may need.
pub const ALIGNMENT: u64 = 4096;

/// How requests reach the kernel.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// `pread` and `pwrite`, one at a time on each thread.
    Posix,
    /// `pread` and `pwrite` by a pool of threads, with many requests in flight but no ring.
    Threads,
    /// A ring on each thread.
    Uring,
    /// A ring on each thread, with registered buffers and files.
    UringRegistered,
    /// Requests by cuFile, one at a time on each thread; only with a device.
    Cufile,
    /// Batches of requests that one thread submits to an executor with as many threads.
    Executor,
}

impl Method {
    /// How many of a job's threads make requests.
    pub(crate) fn callers(self, threads: usize) -> usize {
        match self {
            Method::Executor => 1,
            _ => threads,
        }
    }
}

/// Division of the bytes into files.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// One file for each tensor.
    FilePerTensor,
    /// One file for each process.
    FilePerProcess,
    /// One file for all processes, each of which has a part of it.
    SharedFile,
}

/// Access pattern.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Writes everything, in order.
    Write,
    /// Reads everything, in order.
    Read,
    /// Reads blocks at random offsets.
    RandomRead,
}

/// The work of one process.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Directory of the files.
    pub directory: PathBuf,
    /// Number of this process, from 0.
    pub process: u32,
    /// Number of processes.
    pub processes: u32,
    /// How requests reach the kernel.
    pub method: Method,
    /// Whether requests bypass the page cache.
    pub direct: bool,
    /// Division of the bytes into files.
    pub layout: Layout,
    /// Whether tensors are packed into blocks. Otherwise a request never spans two tensors, and a
    /// direct one is padded.
    pub aggregated: bool,
    /// Access pattern.
    pub pattern: Pattern,
    /// Bytes of each tensor of this process.
    pub tensors: Vec<u64>,
    /// Whether tensors are copied from memory of their own into the write buffers.
    pub copies: bool,
    /// The largest request, in bytes.
    pub block_bytes: u32,
    /// Requests in flight on each thread.
    pub depth: usize,
    /// Number of threads.
    pub threads: usize,
    /// Whether files are allocated before they are written.
    pub allocates: bool,
    /// Whether files are synced after they were written.
    pub syncs: bool,
    /// Whether written content identifies its position, and is verified when read.
    pub verifies: bool,
    /// Seconds after which to stop; the files are read or written repeatedly until then. `None`
    /// for a single pass.
    pub seconds: Option<f64>,
    /// The device whose memory the bytes are read into or written from, through pinned memory;
    /// `None` for host memory.
    #[serde(default)]
    pub device: Option<u32>,
    /// Seed of the random offsets and of the content.
    pub seed: u64,
}

impl Job {
    /// Checks that the job can run.
    ///
    /// # Errors
    /// A sentence about the first setting that is out of bounds.
    pub fn check(&self) -> Result<(), String> {
        let block_bytes = u64::from(self.block_bytes);
        let word = if self.direct { ALIGNMENT } else { WORD_BYTES };
        let bytes = self.tensors.iter().try_fold(0, |sum: u64, &bytes| {
            sum.checked_add(bytes.checked_next_multiple_of(ALIGNMENT)?)
        });
        let checks = [
            (
                self.block_bytes > 0 && block_bytes.is_multiple_of(word),
                format!("block_bytes must be a multiple of {word}"),
            ),
            (
                (1..=4096).contains(&self.depth),
                "depth must be between 1 and 4096".to_owned(),
            ),
            (
                self.depth == 1 || !matches!(self.method, Method::Posix | Method::Cufile),
                "posix and cufile have one request in flight on each thread: depth must be 1"
                    .to_owned(),
            ),
            (
                self.device.is_some() || self.method != Method::Cufile,
                "cufile moves bytes of a device".to_owned(),
            ),
            (
                self.device.is_none()
                    || !matches!(self.method, Method::Executor | Method::UringRegistered),
                "posix, threads, uring and cufile move bytes of a device".to_owned(),
            ),
            (
                (1..=1024).contains(&self.threads),
                "threads must be between 1 and 1024".to_owned(),
            ),
            (
                self.process < self.processes,
                "process must be below processes".to_owned(),
            ),
            (
                bytes.is_some_and(|bytes| bytes > 0 && bytes < 1 << 60),
                "tensors must hold bytes, and less than 2^60".to_owned(),
            ),
            (
                self.seconds.is_none_or(|seconds| seconds > 0.0),
                "seconds must be positive".to_owned(),
            ),
        ];
        match checks.into_iter().find(|(holds, _)| !holds) {
            Some((_, problem)) => Err(problem),
            None => Ok(()),
        }
    }
}

/// Content is generated and verified in words of this many bytes.
pub(crate) const WORD_BYTES: u64 = 8;
