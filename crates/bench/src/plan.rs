//! The layout of a job's requests; pure.

use std::path::PathBuf;

use crate::job::{ALIGNMENT, Job, Layout, Pattern, WORD_BYTES};

/// A file of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedFile {
    /// Its path.
    pub path: PathBuf,
    /// Its length once all processes have written.
    pub bytes: u64,
    /// Whether several processes write it.
    pub is_shared: bool,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Index of the file.
    pub file: u32,
    /// Bytes to move.
    pub bytes: u32,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Position of its first byte in the concatenation of all tensors.
    pub start: u64,
}

/// All requests of a process.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The files.
    pub files: Vec<PlannedFile>,
    /// The requests, in order.
    pub requests: Vec<Request>,
    /// The end of each tensor in the concatenation of all.
    pub ends: Vec<u64>,
}

impl Plan {
    /// Lays out a job.
    pub fn new(job: &Job) -> Plan {
        let alignment = if job.direct { ALIGNMENT } else { WORD_BYTES };
        let mut plan = Plan {
            files: Vec::new(),
            requests: Vec::new(),
            ends: Vec::new(),
        };
        let mut end = 0;
        for bytes in &job.tensors {
            end += bytes;
            plan.ends.push(end);
        }
        let shared = job.layout == Layout::SharedFile;
        let streams: Vec<Vec<u64>> = match job.layout {
            Layout::FilePerTensor => job.tensors.iter().map(|&bytes| vec![bytes]).collect(),
            Layout::FilePerProcess | Layout::SharedFile => vec![job.tensors.clone()],
        };
        let mut start = 0;
        for (index, stream) in streams.iter().enumerate() {
            let runs: Vec<u64> = match job.aggregated {
                true => vec![stream.iter().sum()],
                false => stream.clone(),
            };
            let part_bytes: u64 = runs
                .iter()
                .map(|bytes| bytes.next_multiple_of(alignment))
                .sum();
            let (name, parts, part) = match job.layout {
                Layout::SharedFile => ("shared.bin".to_owned(), job.processes, job.process),
                Layout::FilePerProcess => (format!("process-{:05}.bin", job.process), 1, 0),
                Layout::FilePerTensor => {
                    (format!("tensor-{:05}-{index:06}.bin", job.process), 1, 0)
                }
            };
            // The parts of one file have similar sizes; whole blocks keep them apart.
            let stride = part_bytes.next_multiple_of(u64::from(job.block_bytes).max(ALIGNMENT));
            let base = stride * u64::from(part);
            plan.files.push(PlannedFile {
                path: job.directory.join(name),
                bytes: match shared {
                    true => stride * u64::from(parts),
                    false => part_bytes,
                },
                is_shared: shared,
            });
            let file = u32::try_from(index).expect("fewer files than tensors fit memory");
            let mut at = base;
            for bytes in runs {
                plan.cut(job, file, at, start, bytes, alignment);
                at += bytes.next_multiple_of(alignment);
                start += bytes;
            }
        }
        if job.pattern == Pattern::RandomRead {
            plan.scatter(job);
        }
        plan
    }

    /// Bytes of all requests.
    pub fn bytes(&self) -> u64 {
        let bytes = |request: &Request| u64::from(request.bytes);
        self.requests.iter().map(bytes).sum()
    }

    /// Divides a range of bytes into requests.
    fn cut(&mut self, job: &Job, file: u32, base: u64, start: u64, bytes: u64, alignment: u64) {
        let block_bytes = u64::from(job.block_bytes);
        let mut done = 0;
        while done < bytes {
            let length = block_bytes.min((bytes - done).next_multiple_of(alignment));
            self.requests.push(Request {
                file,
                bytes: length as u32,
                offset: base + done,
                start: start + done,
            });
            done += length;
        }
    }

    /// Replaces the requests by as many whole blocks at random offsets.
    fn scatter(&mut self, job: &Job) {
        let block_bytes = job.block_bytes;
        let mut whole = std::mem::take(&mut self.requests);
        // The rest of a file after its last whole block is left out, unless no file has a whole
        // block.
        if whole.iter().any(|request| request.bytes == block_bytes) {
            whole.retain(|request| request.bytes == block_bytes);
        }
        let mut random = Random(mix(job.seed ^ u64::from(job.process) << 32));
        let chosen = (0..whole.len()).map(|_| whole[random.below(whole.len())]);
        self.requests = chosen.collect();
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014): fast, and random enough for offsets.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let high = (u128::from(mix(self.0)) * bound as u128) >> 64;
        high as usize
    }
}

/// The finalizer of SplitMix64.
pub(crate) fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}
