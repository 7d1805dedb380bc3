//! The results of a job.

use hdrhistogram::Histogram;
use penstock_cuda::CuFileCounts;
use serde::Serialize;

/// Length of a bucket of the timeline, in seconds.
pub const BUCKET_SECONDS: f64 = 0.1;

/// The results of one process.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    /// Bytes moved.
    pub bytes: u64,
    /// Requests completed.
    pub requests: u64,
    /// Short transfers, which were continued.
    pub short: u64,
    /// Time of the first request, in seconds of the monotonic clock.
    pub started_at: f64,
    /// Seconds from then to the last completion.
    pub seconds: f64,
    /// Seconds that creating, allocating and opening the files took beforehand.
    pub open_seconds: f64,
    /// Seconds that syncing them took afterwards.
    pub sync_seconds: f64,
    /// Processor seconds of all threads from the first request to the end of the syncs.
    pub cpu_seconds: f64,
    /// Latencies in nanoseconds with their counts, in ascending order.
    pub latencies: Vec<(u64, u64)>,
    /// Bytes completed in each tenth of a second.
    pub timeline: Vec<u64>,
    /// Calls about files rather than bytes.
    pub metadata: Metadata,
    /// How requests reached the kernel, in words.
    pub setup: String,
    /// Whether they bypassed the page cache.
    pub is_direct: bool,
    /// Why buffers and files are not registered, if that was requested.
    pub fallback: Option<String>,
    /// Requests whose content was verified.
    pub checked: u64,
    /// The first wrong bytes: the file and the offset.
    pub damaged: Option<(String, u64)>,
    /// The paths that cuFile used, if it moved the bytes and counts them.
    pub cufile: Option<CufileCounts>,
}

/// Requests of cuFile by path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CufileCounts {
    /// Peer to peer.
    pub by_peers: u64,
    /// By `nvidia-fs`.
    pub by_module: u64,
    /// Through host memory: compat mode.
    pub by_host: u64,
}

impl CufileCounts {
    /// The difference between two readings.
    pub(crate) fn since((now, before): (CuFileCounts, CuFileCounts)) -> CufileCounts {
        CufileCounts {
            by_peers: now.by_peers - before.by_peers,
            by_module: now.by_module - before.by_module,
            by_host: now.by_host - before.by_host,
        }
    }
}

/// Counts of calls about files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Metadata {
    /// Files created.
    pub create: u64,
    /// Files opened.
    pub open: u64,
    /// Files allocated.
    pub allocate: u64,
    /// Files truncated or extended.
    pub truncate: u64,
    /// Files synced.
    pub sync: u64,
}

/// The results of one thread.
pub(crate) struct Tally {
    pub(crate) bytes: u64,
    pub(crate) requests: u64,
    pub(crate) short: u64,
    pub(crate) checked: u64,
    pub(crate) damaged: Option<(String, u64)>,
    pub(crate) latencies: Histogram<u64>,
    pub(crate) timeline: Vec<u64>,
    pub(crate) setup: String,
    pub(crate) fallback: Option<String>,
}

impl Tally {
    pub(crate) fn new() -> Tally {
        Tally {
            bytes: 0,
            requests: 0,
            short: 0,
            checked: 0,
            damaged: None,
            latencies: histogram(),
            timeline: Vec::new(),
            setup: String::new(),
            fallback: None,
        }
    }

    /// Counts a request that took `nanoseconds` and ended `elapsed` seconds after the start.
    pub(crate) fn count(&mut self, bytes: u64, nanoseconds: u64, elapsed: f64) {
        self.bytes += bytes;
        self.requests += 1;
        self.latencies.saturating_record(nanoseconds);
        let bucket = (elapsed / BUCKET_SECONDS) as usize;
        if bucket >= self.timeline.len() {
            self.timeline.resize(bucket + 1, 0);
        }
        self.timeline[bucket] += bytes;
    }

    /// Adds the results of another thread.
    pub(crate) fn add(&mut self, other: Tally) {
        self.bytes += other.bytes;
        self.requests += other.requests;
        self.short += other.short;
        self.checked += other.checked;
        self.damaged = self.damaged.take().or(other.damaged);
        self.latencies
            .add(other.latencies)
            .expect("all have one range");
        let length = self.timeline.len().max(other.timeline.len());
        self.timeline.resize(length, 0);
        for (sum, bytes) in self.timeline.iter_mut().zip(other.timeline) {
            *sum += bytes;
        }
        self.setup = other.setup;
        self.fallback = self.fallback.take().or(other.fallback);
    }

    /// The latencies as pairs, see [`Outcome::latencies`].
    pub(crate) fn latencies(&self) -> Vec<(u64, u64)> {
        let recorded = self.latencies.iter_recorded();
        let pair = |step: hdrhistogram::iterators::IterationValue<u64>| {
            (step.value_iterated_to(), step.count_at_value())
        };
        recorded.map(pair).collect()
    }
}

/// From 100 ns to an hour with three significant digits.
fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(100, 3600 * 1_000_000_000, 3).expect("the bounds are in order")
}
