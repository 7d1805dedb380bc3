//! States to save, and helpers to save them.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file uses its own part of this module"
)]

pub mod answering;
pub mod disk;
pub mod draw;
pub mod expect;
pub mod flaky;
pub mod forge;
pub mod held;
pub mod hook;
pub mod ledger;
pub mod machine;
pub mod saver;
pub mod sealed;
#[cfg(feature = "objects")]
pub mod served;
pub mod unlocked;

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use penstock_io::buffer::{HostRegion, Memory};
use penstock_io::engine::{EngineChoice, EngineConfig, Opened, open};
use penstock_io::faulty::{Faults, Faulty, FaultyFileSystem};
use penstock_io::file::Direct;
use penstock_io::file_system::{FileSystem, Native};
use penstock_store::care::verify::verify;
use penstock_store::format::part::Alias;
use penstock_store::load::checkpoint::{Checkpoint, Loaded};
use penstock_store::options::Options;
use penstock_store::plan::read::Placement;
use penstock_store::plan::write::{Grouped, TensorSpec};
use penstock_store::report::{Problem, SaveReport};
use penstock_store::save::{Linked, Publication, SaveState, Sidecars, save};
use penstock_store::{Error, Progress, Result};
use serde_json::Value;
use serde_json::value::RawValue;

/// A FIFO without a writer: opening it blocks forever.
pub fn make_fifo(file: &Path) {
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mknodat(rustix::fs::CWD, file, rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

const PAGE_BYTES: usize = 4096;

/// A state whose bytes are known.
pub struct Sample {
    pub specs: Vec<TensorSpec>,
    pub bytes: Vec<Vec<u8>>,
    pub aliases: Vec<Alias>,
}

impl Sample {
    /// One `uint8` tensor of each size.
    pub fn of_sizes(sizes: &[usize]) -> Sample {
        let specs = sizes
            .iter()
            .enumerate()
            .map(|(index, &bytes)| TensorSpec {
                name: format!("t{index}"),
                dtype: "uint8".into(),
                shape: vec![bytes as u64],
                item_bytes: 1,
                region: None,
                group: None,
            })
            .collect();
        let bytes = (0u64..)
            .zip(sizes)
            .map(|(seed, &bytes)| noise(seed, bytes))
            .collect();
        Sample {
            specs,
            bytes,
            aliases: Vec::new(),
        }
    }

    /// A few mebibytes that differ with `seed`: a step of a training run in these tests.
    pub fn seeded(seed: u64) -> Sample {
        Sample::seeded_sizes(seed, &[1_234_567, 4096, 1 << 20, 300, 77_777])
    }

    /// Tensors of these sizes, with bytes that differ with `seed`.
    pub fn seeded_sizes(seed: u64, sizes: &[usize]) -> Sample {
        let mut sample = Sample::of_sizes(sizes);
        for (index, bytes) in (0u64..).zip(&mut sample.bytes) {
            *bytes = noise(seed * 1000 + index, bytes.len());
        }
        sample
    }

    /// A sample in which names differ with `seed` too: ranks of one checkpoint have no name in
    /// common.
    pub fn seeded_rank(seed: u64, sizes: &[usize]) -> Sample {
        let mut sample = Sample::seeded_sizes(seed, sizes);
        for spec in &mut sample.specs {
            spec.name = format!("s{seed}.{}", spec.name);
        }
        sample
    }

    /// The sample as a model: in separate shards, under other names.
    pub fn grouped(mut self) -> Sample {
        for spec in &mut self.specs {
            let (group, name) = (String::new(), format!("w.{}", spec.name));
            spec.group = Some(Grouped { group, name });
        }
        self
    }

    /// Sizes around all boundaries: pages, chunks, extents.
    pub fn mixed() -> Sample {
        let mib = 1 << 20;
        Sample::of_sizes(&[
            0,
            1,
            17,
            4095,
            4096,
            4097,
            65_535,
            mib - 4096,
            mib,
            mib + 1,
            5 * mib,
            9 * mib + 12_345,
            64,
            640,
            0,
        ])
    }

    pub fn state(&self) -> SaveState {
        // At the starts of pages, where a save needs no copy.
        let lengths = self
            .bytes
            .iter()
            .map(|bytes| bytes.len().next_multiple_of(PAGE_BYTES));
        let mut memory = Memory::allocate(lengths.sum::<usize>().max(1)).unwrap();
        let mut ranges = Vec::with_capacity(self.bytes.len());
        let mut start = 0;
        for bytes in &self.bytes {
            let range = start..start + bytes.len();
            memory.as_mut_slice()[range.clone()].copy_from_slice(bytes);
            start += bytes.len().next_multiple_of(PAGE_BYTES);
            ranges.push(range);
        }
        let memory = Arc::new(memory);
        let region = |range| HostRegion::within(&memory, range).into();
        let sources = ranges.into_iter().map(region).collect();
        SaveState {
            tensors: self.specs.clone(),
            sources,
            linked: Linked::default(),
            aliases: self.aliases.clone(),
            tree: RawValue::from_string("{\"a\":1}".into()).unwrap(),
        }
    }

    pub fn save(&self, path: &Path, options: &Options) -> Result<SaveReport> {
        save(
            self.state(),
            &publication(path),
            options,
            &Progress::default(),
        )
    }

    /// Saves as a step, replacing an existing one if `overwrite` is set.
    pub fn save_step(&self, path: &Path, step: Option<u64>, overwrite: bool) -> Result<SaveReport> {
        let publication = Publication {
            step,
            overwrite,
            ..publication(path)
        };
        let options = Options::default();
        save(self.state(), &publication, &options, &Progress::default())
    }

    /// Whether a complete load returned this state, bit for bit.
    pub fn is(&self, loaded: &Loaded) -> bool {
        loaded.placements.len() == self.bytes.len()
            && (0..)
                .zip(&self.bytes)
                .all(|(place, bytes)| bytes_of(loaded, place, bytes.len()) == &bytes[..])
    }

    /// Panics unless the checkpoint is complete and holds this state, bit for bit.
    #[track_caller]
    pub fn assert_at(&self, path: &Path) {
        let loaded = load(path, &Options::default());
        let loaded = loaded.unwrap_or_else(|error| panic!("{} loads: {error}", path.display()));
        assert!(self.is(&loaded), "{} is another state", path.display());
        let report = verify(path, &Options::default(), &Progress::default()).unwrap();
        assert!(report.problems.is_empty(), "{:?}", report.problems);
    }
}

/// The results of several saves that begin at the same time.
pub fn race(
    samples: &[Sample],
    save: impl Fn(&Sample) -> Result<SaveReport> + Sync,
) -> Vec<Result<SaveReport>> {
    let start = Barrier::new(samples.len());
    let attempt = |sample| {
        start.wait();
        save(sample)
    };
    thread::scope(|scope| {
        let savers: Vec<_> = samples
            .iter()
            .map(|sample| scope.spawn(|| attempt(sample)))
            .collect();
        savers
            .into_iter()
            .map(|saver| saver.join().unwrap())
            .collect()
    })
}

/// The index of the save that won; panics unless exactly one did and the others returned that the
/// checkpoint exists.
#[track_caller]
pub fn only_winner(results: &[Result<SaveReport>]) -> usize {
    let winners: Vec<_> = (0..results.len())
        .filter(|&index| results[index].is_ok())
        .collect();
    assert_eq!(winners.len(), 1, "{results:?}");
    let is_reported = |result: &Result<_>| matches!(result, Ok(_) | Err(Error::Exists { .. }));
    assert!(results.iter().all(is_reported), "{results:?}");
    winners[0]
}

pub fn publication(path: &Path) -> Publication {
    Publication {
        path: path.to_owned(),
        step: None,
        metadata: RawValue::from_string("{}".into()).unwrap(),
        overwrite: false,
        sidecars: Sidecars::default(),
    }
}

/// The sidecars of a state that is a model.
pub fn sidecars(seed: u64) -> Sidecars {
    Sidecars {
        files: vec![("config.json".to_owned(), format!("{{{seed}}}").into_bytes())],
        group: Some(String::new()),
    }
}

/// Checks the copies of sidecars: an index whose files exist, and a configuration of the same save.
pub fn check_sidecars(path: &Path, checkpoint: &Checkpoint) -> std::result::Result<(), String> {
    let sidecars = &checkpoint.manifest().sidecars;
    if sidecars.is_empty() {
        return Ok(());
    }
    let read = |name: &str| fs::read(path.join(name)).map_err(|error| format!("{name}: {error}"));
    read("config.json")?;
    let index: Value = serde_json::from_slice(&read("model.safetensors.index.json")?)
        .map_err(|error| format!("the index is cut: {error}"))?;
    let files = index["weight_map"]
        .as_object()
        .ok_or("the index has no files")?;
    for file in files.values() {
        read(file.as_str().unwrap_or_default())?;
    }
    for entry in sidecars {
        read(&entry.file)?;
    }
    Ok(())
}

/// Opens a checkpoint and loads all of it.
pub fn load(path: &Path, options: &Options) -> Result<Loaded> {
    let checkpoint = sealed::open(path, &options.clone().at(path)?.file_system)?;
    checkpoint.load(None, HashMap::new(), options, &Progress::default())
}

/// Names in a directory, sorted; none if it does not exist.
pub fn names(path: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(path) else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// The system's error number, if there is one.
pub fn errno(error: &Error) -> Option<i32> {
    match error {
        Error::Storage { source, .. }
        | Error::Full { source, .. }
        | Error::CommitUndecided { source, .. }
        | Error::Unsynced { source, .. } => source.raw_os_error(),
        _ => None,
    }
}

/// The problem that a load reported when it refused damage.
pub fn problem_of(error: Error) -> Problem {
    let (file, offset, tensor, detail, is_proven) = match error {
        Error::Corrupt {
            file,
            offset,
            tensor,
            detail,
            ..
        } => (file, offset, tensor, detail, true),
        Error::Malformed {
            file,
            tensor,
            detail,
            ..
        } => (file, None, tensor, detail, false),
        error => panic!("damage is named as such, not as: {error}"),
    };
    let file = file.unwrap_or_default();
    Problem {
        file,
        offset,
        tensor,
        detail,
        is_proven,
    }
}

/// Runs `work` and panics if it has not returned after a generous time: a hang must fail.
pub fn within_a_minute<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (sender, receiver) = mpsc::channel();
    let worker = thread::spawn(move || drop(sender.send(work())));
    match receiver.recv_timeout(Duration::from_secs(60)) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what} hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(worker.join().unwrap_err())
        }
    }
}

/// A number or seed that a long run sets in an environment variable.
pub fn number(variable: &str, ordinary: u64) -> u64 {
    let Ok(text) = std::env::var(variable) else {
        return ordinary;
    };
    let number = text.parse();
    number.unwrap_or_else(|_| panic!("{variable}={text}: must be a number"))
}

/// Reports that a test was skipped, and why.
pub fn skip(test: &str, reason: &str) {
    eprintln!("SKIPPED {test}: {reason}");
}

/// Random numbers from a seed (SplitMix64). The seed is printed, so that a failure can be
/// reproduced.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        eprintln!("seed {seed:#x}");
        Rng(seed)
    }

    /// From a seed that was itself drawn from a printed one.
    pub fn quiet(seed: u64) -> Rng {
        Rng(seed)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// The backends that this system has.
pub fn engines() -> &'static [EngineChoice] {
    let ring = open(&EngineConfig {
        choice: EngineChoice::Uring,
        queue_depth: 1,
    });
    match ring {
        Ok(_) => &[EngineChoice::Uring, EngineChoice::Threads],
        Err(error) => {
            skip("io_uring", &error.to_string());
            &[EngineChoice::Threads]
        }
    }
}

/// The backends of loads, which read files in memory by another one.
pub fn read_engines() -> Vec<EngineChoice> {
    [engines(), &[EngineChoice::Sync]].concat()
}

/// Options whose engines fail according to `faults`. Extents are one chunk, so that even a small
/// state takes several operations.
pub fn faulty(choice: EngineChoice, faults: Arc<Faults>) -> Options {
    let factory = move |queue_depth| {
        let opened = open(&EngineConfig {
            choice,
            queue_depth,
        })?;
        Ok(Opened {
            engine: Box::new(Faulty::new(opened.engine, Arc::clone(&faults))),
            fallback: opened.fallback,
        })
    };
    Options {
        engine_factory: Some(Arc::new(factory)),
        extent_bytes: Some(1 << 20),
        ..Options::default()
    }
}

/// Options whose engines and file system fail according to `faults`, counted together; one worker
/// with one request at a time, so that the count is always the same.
pub fn faulty_storage(choice: EngineChoice, faults: Arc<Faults>) -> Options {
    let native: Arc<dyn FileSystem> = Arc::new(Native);
    Options {
        file_system: Arc::new(FaultyFileSystem::new(native, Arc::clone(&faults))),
        io_threads: Some(1),
        queue_depth: Some(1),
        ..faulty(choice, faults)
    }
}

/// Bytes without nearby repetition, by xorshift from a seed.
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut noise: Vec<u8> = (0..bytes.div_ceil(8)).flat_map(|_| next()).collect();
    noise.truncate(bytes);
    noise
}

/// The bytes of the tensor at this index of the request.
pub fn bytes_of(loaded: &Loaded, place: usize, bytes: usize) -> &[u8] {
    match loaded.placements[place] {
        Placement::Segment { segment, offset } => {
            &loaded.segments[segment].as_slice()[offset as usize..offset as usize + bytes]
        }
        Placement::Empty => &[],
        Placement::Target => panic!("no target was given"),
    }
}

/// Every engine, direct and buffered, one worker and several, small extents and large.
pub fn options_matrix() -> Vec<(String, Options)> {
    let mut matrix = Vec::new();
    for engine in read_engines() {
        for direct in [Direct::Auto, Direct::Off] {
            for (io_threads, queue_depth, extent_bytes) in [(1, 16, 4 << 20), (3, 1, 1 << 20)] {
                matrix.push((
                    format!("{engine:?} {direct:?} {io_threads} threads"),
                    Options {
                        engine,
                        direct,
                        io_threads: Some(io_threads),
                        queue_depth: Some(queue_depth),
                        extent_bytes: Some(extent_bytes),
                        ..Options::default()
                    },
                ));
            }
        }
    }
    matrix
}
