//! What one process of a benchmark does.

use std::path::PathBuf;

use serde::Deserialize;

/// Whatever a direct request has to be a multiple of, at most.
pub const ALIGNMENT: u64 = 4096;

/// How requests reach the kernel.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// `pread` and `pwrite`, one at a time on each thread.
    Posix,
    /// The same by a pool of threads, for many in flight without a ring.
    Threads,
    /// A ring on each thread.
    Uring,
    /// The same, with buffers and files registered.
    UringRegistered,
    /// Requests by cuFile, one at a time on each thread; of a device alone.
    Cufile,
    /// Batches of requests that an executor of as many threads gets from one.
    Executor,
}

impl Method {
    /// How many threads make requests, of a job that has so many.
    pub(crate) fn callers(self, threads: usize) -> usize {
        match self {
            Method::Executor => 1,
            _ => threads,
        }
    }
}

/// Which files the bytes lie in.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// One for each tensor.
    FilePerTensor,
    /// One for each process.
    FilePerProcess,
    /// One for all processes, in which each has a part of its own.
    SharedFile,
}

/// What is asked of the files.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Everything is written, in order.
    Write,
    /// Everything is read, in order.
    Read,
    /// Blocks anywhere are read.
    RandomRead,
}

/// What one process does, and which of how many it is.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Where the files are.
    pub directory: PathBuf,
    /// Which process this is.
    pub process: u32,
    /// How many there are.
    pub processes: u32,
    /// How requests reach the kernel.
    pub method: Method,
    /// Whether they go past the page cache.
    pub direct: bool,
    /// Which files the bytes lie in.
    pub layout: Layout,
    /// Whether tensors are packed into blocks. Else a request never spans two tensors, and a direct
    /// one is padded.
    pub aggregated: bool,
    /// What is asked of the files.
    pub pattern: Pattern,
    /// Bytes of each tensor of this process.
    pub tensors: Vec<u64>,
    /// Whether tensors are copied from memory of their own into the buffers that are written.
    pub copies: bool,
    /// The largest request.
    pub block_bytes: u32,
    /// Requests in flight on each thread.
    pub depth: usize,
    /// Threads.
    pub threads: usize,
    /// Whether files are allocated before they are written.
    pub allocates: bool,
    /// Whether files are synced after they were written.
    pub syncs: bool,
    /// Whether what is written says where it belongs, and what is read is checked for that.
    pub verifies: bool,
    /// After how long to stop, going over the files again and again until then; `None` to go over
    /// them once.
    pub seconds: Option<f64>,
    /// The device whose memory bytes are read into or written from, through pinned memory; none for memory
    /// of the host.
    #[serde(default)]
    pub device: Option<u32>,
    /// Decides which blocks are read at random, and what is written.
    pub seed: u64,
}

impl Job {
    /// What the job cannot be.
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

/// Content is made and checked in words of this size.
pub(crate) const WORD_BYTES: u64 = 8;
