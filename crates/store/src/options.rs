//! A caller's options, and the settings derived from them for one call.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::thread;

use penstock_io::buffer::Pool;
use penstock_io::device::{Device, Requests};
use penstock_io::engine::{self, EngineChoice, EngineConfig, Opened};
use penstock_io::file::Direct;
use penstock_io::file_system::{FileSystem, Native};
#[cfg(feature = "objects")]
use penstock_object::Objects;
use serde::de::{Deserialize, Deserializer, Error as _};

use crate::format::digest::CHUNK_BYTES;
use crate::format::shard::PAGE_BYTES;
use crate::tier;

/// Default number of workers that copy and digest received bytes.
#[cfg(feature = "objects")]
const OBJECT_THREADS: usize = 2;

/// Minimum amount of data per worker: less is moved before a second one has started.
const WORKER_BYTES_MIN: u64 = 16 << 20;
/// Default staging limit of a call, whatever the size of the checkpoint.
pub(crate) const STAGING_BYTES: usize = 256 << 20;
/// Data per shard. One file per rank is best for the device; the limit keeps files at a size that
/// other tools copy and upload easily.
const SHARD_BYTES: u64 = 16 << 30;
/// Target number of shards of a save in a bucket, and their minimum size: some stores copy the data
/// when an upload ends, and for all but the last shard this overlaps with further uploads.
const OBJECT_SHARDS: u64 = 8;
const OBJECT_SHARD_BYTES_MIN: u64 = 64 << 20;
/// Additional space in a staging buffer: pieces of an extent that land there separately each start
/// on a 4 KiB page of their own (see `plan::read`). A multiple of any page size of mapped memory,
/// so that adjacent buffers stay aligned.
const STAGING_SLACK_BYTES: usize = 64 << 10;

/// Larger values are reduced to these. The ranges that users may choose from, and the errors for
/// others, are in `penstock.Options`.
const QUEUE_DEPTH_MAX: usize = 4096;
const EXTENT_BYTES_MAX: usize = 1 << 30;
const IO_THREADS_MAX: usize = 1024;
const STAGING_BYTES_MAX: usize = 1 << 50;
const SHARD_BYTES_MAX: u64 = 1 << 50;

/// Creates the engine of one worker, given its queue depth.
pub type EngineFactory = Arc<dyn Fn(usize) -> penstock_io::Result<Opened> + Send + Sync>;

/// A caller's options; `None` leaves a number to Penstock.
///
/// Deserialized from the form that Python passes, with any numbers: they are bounded before they
/// are added or multiplied.
#[derive(Clone, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// The backend that moves the bytes.
    #[serde(deserialize_with = "word")]
    pub engine: EngineChoice,
    /// Whether the page cache is bypassed.
    #[serde(deserialize_with = "word")]
    pub direct: Direct,
    /// Operations in flight per worker.
    pub queue_depth: Option<usize>,
    /// Bytes of one request; a multiple of [`CHUNK_BYTES`].
    pub extent_bytes: Option<usize>,
    /// Workers, each with an engine of its own.
    pub io_threads: Option<usize>,
    /// Limit on the staging memory of a call.
    pub staging_bytes: Option<usize>,
    /// Limit on the data in one shard.
    pub shard_bytes: Option<u64>,
    /// Whether a load checks digests. Calls that end in a verdict (verify, scrub, survey, salvage)
    /// always check them.
    pub verify: bool,
    /// Whether a save writes from the tensors' own memory where that is aligned.
    pub zero_copy: bool,
    /// A replica of the loaded checkpoint: damaged chunks are read there.
    pub replica: Option<PathBuf>,
    /// Whether a save is planned for an attempt with a key, see
    /// [`Attempt::seal`](crate::save::Attempt::seal).
    #[serde(skip)]
    pub is_sealed: bool,
    /// Whether a save hashes each chunk that it writes, for a signature.
    #[serde(skip)]
    pub is_hashed: bool,
    /// Whether a save without copies also takes little memory, short pieces and small pages: for
    /// tests, as none of that pays.
    #[serde(skip)]
    pub lends_all: bool,
    /// The nice value of the writing threads, if they are to yield to others.
    #[serde(skip)]
    pub nice: Option<u8>,
    /// Replaces the engine, for tests that inject faults.
    #[serde(skip)]
    pub engine_factory: Option<EngineFactory>,
    /// The file system on which files are created, named, synced and removed.
    #[serde(skip)]
    pub file_system: Arc<dyn FileSystem>,
}

fn word<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err = penstock_io::Error>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(D::Error::custom)
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
            zero_copy: true,
            replica: None,
            is_sealed: false,
            is_hashed: false,
            lends_all: false,
            nice: None,
            engine_factory: None,
            file_system: Arc::new(Native),
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
            .field("zero_copy", &self.zero_copy)
            .field("replica", &self.replica)
            .field("is_sealed", &self.is_sealed)
            .field("is_hashed", &self.is_hashed)
            .field("lends_all", &self.lends_all)
            .field("nice", &self.nice)
            .finish_non_exhaustive()
    }
}

/// The settings of one call, every choice made.
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
    /// Whether the workers of a save begin one after the other, as the device needs them.
    pub in_turn: bool,
    /// Limit on the data in one shard.
    pub shard_bytes: u64,
    /// Whether a load checks digests.
    pub verify: bool,
    /// Whether a save writes from the tensors' own memory where that is aligned.
    pub zero_copy: bool,
    /// Whether it also takes what does not pay.
    pub lends_all: bool,
    /// Whether a save hashes each chunk that it writes.
    pub is_hashed: bool,
    /// A replica of the checkpoint.
    pub replica: Option<PathBuf>,
    /// The nice value of the writing threads.
    pub nice: Option<u8>,
    /// Staging memory of this call.
    pub pool: Pool,
    /// Creates a worker's engine.
    pub engine_factory: EngineFactory,
    /// The device that the bytes are written to or read from, if known.
    pub device: Option<Device>,
    /// Numbers chosen by Penstock or different from those requested, each with the reason.
    pub choices: Vec<String>,
}

impl Options {
    /// These options for a checkpoint at `path`, on the path's file system and with its engine.
    pub fn at(self, path: &Path) -> crate::Result<Options> {
        #[cfg(feature = "objects")]
        if let Some(objects) = tier::objects(path)? {
            return Ok(self.on(&objects));
        }
        let file_system = tier::file_system(path)?;
        Ok(Options {
            file_system,
            ..self
        })
    }

    /// These options for checkpoints in a bucket, with its engine.
    #[cfg(feature = "objects")]
    #[must_use]
    pub fn on(self, objects: &Arc<Objects>) -> Options {
        let io_threads = self.io_threads.unwrap_or(OBJECT_THREADS);
        let each = (objects.connections() / io_threads.max(1)).max(1);
        let mover = Arc::clone(objects);
        Options {
            // A request is a part of an upload, and all parts have one size.
            extent_bytes: Some(objects.part_bytes()),
            io_threads: Some(io_threads),
            queue_depth: Some(self.queue_depth.unwrap_or(each)),
            direct: Direct::Off,
            engine_factory: Some(Arc::new(move |queue_depth| mover.engine(queue_depth))),
            file_system: Arc::clone(objects) as Arc<dyn FileSystem>,
            ..self
        }
    }

    /// Chooses the numbers that the caller left open, for moving `bytes` to or from the device
    /// behind `path`.
    pub fn choose(&self, path: &Path, bytes: u64) -> Settings {
        let device = self.file_system.files().device(path);
        let suited = Requests::suited(device.as_ref());
        let is_rotational = device.as_ref().is_some_and(|device| device.is_rotational);
        let kind = match (&device, is_rotational) {
            (None, _) => "the device is not known".to_owned(),
            (Some(device), true) => format!("{device} rotates"),
            (Some(device), false) => format!("{device} does not rotate"),
        };
        self.suit(suited, device, &kind, bytes)
    }

    /// Chooses settings for reading: reading from memory gains from more workers than writing to
    /// it, where a file has one writer at a time.
    pub fn choose_to_read(&self, path: &Path, bytes: u64) -> Settings {
        match self.file_system.files().is_memory(path) {
            true => {
                let engine = match self.engine {
                    EngineChoice::Auto => EngineChoice::Sync,
                    chosen => chosen,
                };
                let options = Options {
                    engine,
                    ..self.clone()
                };
                options.suit(Requests::suited_to_memory(), None, "it is memory", bytes)
            }
            false => self.choose(path, bytes),
        }
    }

    /// Chooses settings by the preferences of a device, or of a `kind` of storage without one.
    fn suit(&self, suited: Requests, device: Option<Device>, kind: &str, bytes: u64) -> Settings {
        let given = self.bounded();
        let mut choices = Vec::new();

        let budget_bytes = given.staging_bytes.unwrap_or(STAGING_BYTES);
        let extent_bytes = match given.extent_bytes {
            Some(bytes) => whole_chunks(bytes),
            None => {
                let (chosen, reason) = choose_extent(&suited, device.as_ref(), budget_bytes);
                let reason = reason.unwrap_or(kind);
                choices.push(format!("extent_bytes={chosen}: {reason}"));
                chosen
            }
        };
        let buffer_bytes = extent_bytes + STAGING_SLACK_BYTES;
        // At least two buffers, so that one is filled while the other is written.
        let budget_bytes = budget_bytes.max(2 * buffer_bytes);
        let buffers = budget_bytes / buffer_bytes;

        let (wanted, reason) = match given.io_threads {
            Some(threads) => (threads, None),
            None => choose_threads(&suited, bytes),
        };
        // At least one extent in flight and one being filled for each worker.
        let io_threads = wanted.clamp(1, buffers / 2);
        let note = Note {
            name: "io_threads",
            wanted,
            chosen: io_threads,
            buffers,
        };
        choices.extend(note.text(given.io_threads.is_none(), reason.unwrap_or(kind)));

        let wanted = given.queue_depth.unwrap_or(suited.queue_depth);
        let possible = (1..=wanted)
            .rev()
            .find(|depth| io_threads * held(*depth) <= buffers);
        let queue_depth = possible.unwrap_or(1);
        let note = Note {
            name: "queue_depth",
            wanted,
            chosen: queue_depth,
            buffers,
        };
        choices.extend(note.text(given.queue_depth.is_none(), kind));

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
            in_turn: given.io_threads.is_none() && given.queue_depth.is_none(),
            shard_bytes: self.bound_of_shards(given.shard_bytes, bytes),
            verify: self.verify,
            zero_copy: self.zero_copy,
            lends_all: self.lends_all,
            is_hashed: self.is_hashed,
            replica: self.replica.clone(),
            nice: self.nice,
            pool: Pool::new(buffer_bytes, budget_bytes),
            engine_factory,
            device,
            choices,
        }
    }

    fn bound_of_shards(&self, given: Option<u64>, bytes: u64) -> u64 {
        let suited = match self.file_system.files().has_directories() {
            true => SHARD_BYTES,
            false => (bytes / OBJECT_SHARDS).clamp(OBJECT_SHARD_BYTES_MIN, SHARD_BYTES),
        };
        given.unwrap_or(suited).max(PAGE_BYTES)
    }

    /// Bounds all numbers so that their sums and products cannot overflow.
    fn bounded(&self) -> Options {
        Options {
            queue_depth: self.queue_depth.map(|depth| depth.min(QUEUE_DEPTH_MAX)),
            extent_bytes: self.extent_bytes.map(|bytes| bytes.min(EXTENT_BYTES_MAX)),
            io_threads: self.io_threads.map(|threads| threads.min(IO_THREADS_MAX)),
            staging_bytes: self.staging_bytes.map(|bytes| bytes.min(STAGING_BYTES_MAX)),
            shard_bytes: self.shard_bytes.map(|bytes| bytes.min(SHARD_BYTES_MAX)),
            ..self.clone()
        }
    }
}

impl Settings {
    /// Pins staging memory for this many extents, so that devices copy from and to it directly;
    /// pinned memory is kept.
    pub(crate) fn pin(&mut self, device: &Arc<penstock_cuda::Device>, extents: usize) {
        let buffer_bytes = self.pool.buffer_bytes();
        // One more buffer, which is filled while the others are in use.
        let wanted_bytes = extents.saturating_add(1).saturating_mul(buffer_bytes);
        let budget_bytes = self
            .pool
            .budget_bytes()
            .min(wanted_bytes.max(2 * buffer_bytes));
        self.pool = Pool::pinned_and_kept(buffer_bytes, budget_bytes, device);
    }

    /// How many extents a saving worker fills while its queue is full.
    pub(crate) fn filled_ahead_max(&self) -> usize {
        filled_ahead(self.queue_depth)
    }
}

fn filled_ahead(queue_depth: usize) -> usize {
    queue_depth.div_ceil(4)
}

/// How many staging buffers a worker with this queue depth uses.
fn held(queue_depth: usize) -> usize {
    queue_depth + filled_ahead(queue_depth)
}

/// A chosen number and the requested one.
struct Note {
    name: &'static str,
    wanted: usize,
    chosen: usize,
    buffers: usize,
}

impl Note {
    /// The text for the report; none if the caller's number is used.
    fn text(&self, is_open: bool, reason: &str) -> Option<String> {
        let Note {
            name,
            wanted,
            chosen,
            buffers,
        } = self;
        if chosen != wanted {
            return Some(format!(
                "{name}={chosen}: staging_bytes holds {buffers} extents, too few for {wanted}"
            ));
        }
        is_open.then(|| format!("{name}={chosen}: {reason}"))
    }
}

fn whole_chunks(bytes: usize) -> usize {
    let chunk_bytes = CHUNK_BYTES as usize;
    bytes.next_multiple_of(chunk_bytes).max(chunk_bytes)
}

/// The extent size, and the reason if it does not follow from the kind of device.
fn choose_extent(
    suited: &Requests,
    device: Option<&Device>,
    budget_bytes: usize,
) -> (usize, Option<&'static str>) {
    let chunk_bytes = CHUNK_BYTES as usize;
    let (wanted, reason) = match suited.whole_stripes(device, chunk_bytes) {
        Some(stripes) if stripes != suited.bytes => {
            (stripes, Some("whole requests as the device prefers them"))
        }
        _ => (suited.bytes, None),
    };
    let room_bytes = (budget_bytes / 2).saturating_sub(STAGING_SLACK_BYTES);
    if wanted <= room_bytes {
        return (wanted, reason);
    }
    let chosen = (room_bytes - room_bytes % chunk_bytes).max(chunk_bytes);
    (chosen, Some("staging_bytes has to hold two extents"))
}

/// The number of workers, and the reason if it does not follow from the kind of device.
fn choose_threads(suited: &Requests, bytes: u64) -> (usize, Option<&'static str>) {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let useful = usize::try_from(bytes.div_ceil(WORKER_BYTES_MIN)).unwrap_or(usize::MAX);
    let most = suited.workers_max;
    if most <= cores.min(useful) {
        (most, (most > 1).then_some("as many as pay"))
    } else if useful < cores {
        (useful.max(1), Some("the data is too little for more"))
    } else {
        (cores, Some("one for each core"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(optimal_io_bytes: usize, is_rotational: bool) -> Device {
        Device {
            name: "md0".to_owned(),
            driver: None,
            is_rotational,
            optimal_io_bytes,
        }
    }

    #[test]
    fn extents_are_whole_stripes() {
        let extent = |stripe, is_rotational| {
            let device = device(stripe, is_rotational);
            choose_extent(
                &Requests::suited(Some(&device)),
                Some(&device),
                STAGING_BYTES,
            )
            .0
        };
        assert_eq!(extent(0, false), 1 << 20);
        assert_eq!(extent(6 << 20, false), 6 << 20);
        assert_eq!(extent(32 << 20, false), 1 << 20);
        assert_eq!(extent(3 << 20, true), 6 << 20);
    }

    #[test]
    fn staging_bounds_what_is_chosen() {
        let options = Options {
            staging_bytes: Some(5 << 20),
            io_threads: Some(3),
            ..Options::default()
        };
        let settings = options.choose(Path::new("/"), 1 << 40);
        let held = settings.io_threads * held(settings.queue_depth) * settings.extent_bytes;
        assert!(held <= 5 << 20, "{held}");
        let mut names: Vec<_> = settings
            .choices
            .iter()
            .map(|choice| choice.split_once('='))
            .collect();
        assert!(
            settings
                .choices
                .iter()
                .any(|choice| choice.contains("too few for 3"))
        );
        names.dedup_by_key(|name| name.map(|(name, _)| name));
        assert_eq!(
            names.len(),
            settings.choices.len(),
            "{:?}",
            settings.choices
        );
        let rotational = Requests::suited(Some(&device(0, true)));
        let little = choose_extent(&rotational, None, 5 << 20).0;
        assert_eq!(little, 2 << 20);
    }

    #[test]
    fn any_number_is_brought_into_bounds() {
        for number in [0, 1, usize::MAX] {
            let options = Options {
                queue_depth: Some(number),
                extent_bytes: Some(number),
                io_threads: Some(number),
                staging_bytes: Some(number),
                shard_bytes: Some(number as u64),
                ..Options::default()
            };
            let settings = options.choose(Path::new("/"), u64::MAX);
            assert!((1..=QUEUE_DEPTH_MAX).contains(&settings.queue_depth));
            assert!((1..=IO_THREADS_MAX).contains(&settings.io_threads));
            assert!((1 << 20..=EXTENT_BYTES_MAX).contains(&settings.extent_bytes));
            assert!((PAGE_BYTES..=SHARD_BYTES_MAX).contains(&settings.shard_bytes));
        }
    }

    #[test]
    fn options_are_read_by_name_and_a_wrong_one_is_refused() {
        let read = |text: &str| serde_json::from_str::<Options>(text);
        let options =
            read(r#"{"engine": "threads", "queue_depth": 7, "io_threads": null}"#).unwrap();
        assert_eq!(options.engine, EngineChoice::Threads);
        assert_eq!((options.queue_depth, options.io_threads), (Some(7), None));
        assert!(options.verify);
        for (text, named) in [
            (r#"{"engine": "io_uring"}"#, "io_uring"),
            (r#"{"queue_depht": 7}"#, "queue_depht"),
            (r#"{"nice": 7}"#, "nice"),
            (r#"{"queue_depth": -1}"#, "-1"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn little_data_takes_few_workers() {
        let [fast, rotational] =
            [false, true].map(|rotates| Requests::suited(Some(&device(0, rotates))));
        assert_eq!(choose_threads(&fast, 0).0, 1);
        assert_eq!(choose_threads(&fast, 3 << 20).0, 1);
        assert!(choose_threads(&fast, u64::MAX).0 >= 1);
        assert_eq!(choose_threads(&rotational, u64::MAX).0, 1);
    }

    #[test]
    fn what_is_given_is_no_choice() {
        let options = Options {
            extent_bytes: Some(3 << 20),
            queue_depth: Some(2),
            io_threads: Some(2),
            ..Options::default()
        };
        let settings = options.choose(Path::new("/"), 1);
        assert_eq!(settings.choices, Vec::<String>::new());
        assert_eq!(settings.io_threads, 2);
    }
}
