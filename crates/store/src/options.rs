//! What a caller may choose, and the numbers that follow for one call.

use std::fmt;
use std::sync::Arc;
use std::thread;

use penstock_io::buffer::Pool;
use penstock_io::engine::{self, EngineChoice, EngineConfig, Opened};
use penstock_io::file::Direct;

use crate::digest::CHUNK_BYTES;
use crate::shard::PAGE_BYTES;

/// Extent size unless the caller says otherwise: large enough that requests keep a drive busy and
/// cost nothing each, small enough that a save of a few tensors still fills the queue.
const EXTENT_BYTES: usize = 1 << 20;
/// Operations in flight per worker: 64 MiB at the default extent size.
const QUEUE_DEPTH: usize = 16;
/// Budget for staging; what a call holds at most, whatever the checkpoint's size.
const STAGING_BYTES: usize = 256 << 20;
/// Data per shard. One file a rank is best for the device; a bound keeps files that other tools
/// copy and upload at a size they like.
const SHARD_BYTES: u64 = 16 << 30;
/// Room beside an extent in a staging buffer: pieces of an extent that land there separately each
/// start on a page of their own (see `plan::read`).
const STAGING_SLACK_BYTES: usize = 16 << 10;

/// Makes the engine of one worker, given its queue depth.
pub type EngineFactory = Arc<dyn Fn(usize) -> penstock_io::Result<Opened> + Send + Sync>;

/// A caller's choices; `None` leaves a number to Penstock.
#[derive(Clone)]
pub struct Options {
    /// Which backend moves the bytes.
    pub engine: EngineChoice,
    /// Whether the page cache is bypassed.
    pub direct: Direct,
    /// Operations in flight per worker.
    pub queue_depth: Option<usize>,
    /// Bytes of one request; a multiple of [`CHUNK_BYTES`].
    pub extent_bytes: Option<usize>,
    /// Workers, each with an engine of its own.
    pub io_threads: Option<usize>,
    /// Upper bound of the memory that a call stages data in.
    pub staging_bytes: Option<usize>,
    /// Upper bound of the data in one shard.
    pub shard_bytes: Option<u64>,
    /// Whether a load checks digests.
    pub verify: bool,
    /// Replaces the engine, for tests that inject faults.
    pub engine_factory: Option<EngineFactory>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            engine: EngineChoice::Auto,
            direct: Direct::Auto,
            queue_depth: None,
            extent_bytes: None,
            io_threads: None,
            staging_bytes: None,
            shard_bytes: None,
            verify: true,
            engine_factory: None,
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("engine", &self.engine)
            .field("direct", &self.direct)
            .field("queue_depth", &self.queue_depth)
            .field("extent_bytes", &self.extent_bytes)
            .field("io_threads", &self.io_threads)
            .field("staging_bytes", &self.staging_bytes)
            .field("shard_bytes", &self.shard_bytes)
            .field("verify", &self.verify)
            .finish_non_exhaustive()
    }
}

/// The numbers of one call, every choice made.
#[derive(Clone)]
pub struct Settings {
    /// Whether the page cache is bypassed.
    pub direct: Direct,
    /// Operations in flight per worker.
    pub queue_depth: usize,
    /// Bytes of one request.
    pub extent_bytes: usize,
    /// Workers.
    pub io_threads: usize,
    /// Upper bound of the data in one shard.
    pub shard_bytes: u64,
    /// Whether a load checks digests.
    pub verify: bool,
    /// Staging memory of this call.
    pub pool: Pool,
    /// Makes a worker's engine.
    pub engine_factory: EngineFactory,
}

impl Options {
    /// Chooses what the caller left open.
    pub fn settle(&self) -> Settings {
        let chunk_bytes = CHUNK_BYTES as usize;
        let extent_bytes = self
            .extent_bytes
            .unwrap_or(EXTENT_BYTES)
            .next_multiple_of(chunk_bytes)
            .max(chunk_bytes);
        let buffer_bytes = extent_bytes + STAGING_SLACK_BYTES;
        // At least two buffers, so that one is filled while the other is written.
        let budget_bytes = self
            .staging_bytes
            .unwrap_or(STAGING_BYTES)
            .max(2 * buffer_bytes);
        let buffers = budget_bytes / buffer_bytes;
        let io_threads = self
            .io_threads
            .unwrap_or_else(default_io_threads)
            .clamp(1, buffers);
        let queue_depth = self
            .queue_depth
            .unwrap_or(QUEUE_DEPTH)
            .clamp(1, buffers / io_threads);
        let engine = self.engine;
        let engine_factory = self.engine_factory.clone().unwrap_or_else(|| {
            Arc::new(move |queue_depth| {
                engine::open(&EngineConfig {
                    choice: engine,
                    queue_depth,
                })
            })
        });
        Settings {
            direct: self.direct,
            queue_depth,
            extent_bytes,
            io_threads,
            shard_bytes: self.shard_bytes.unwrap_or(SHARD_BYTES).max(PAGE_BYTES),
            verify: self.verify,
            pool: Pool::new(buffer_bytes, budget_bytes),
            engine_factory,
        }
    }
}

/// One worker copies and digests several gigabytes a second, more than most drives take; a second
/// one pays where there are cores to spare beside the training process.
fn default_io_threads() -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    cores.clamp(1, 4)
}
