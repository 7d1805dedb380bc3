//! Saves from the caller's own memory, without a copy: the stored bytes are those that were
//! digested, whoever changes the memory meanwhile, and the caller has its memory back only when no
//! request reads it any more, however the save ends.

use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::Duration;

use crate::alone;
use crate::common::{
    self, Rng, bytes_of, engines, faulty, load, names, publication, within_a_minute,
};
use penstock_io::buffer::{Region, Watch};
use penstock_io::engine::{
    Capabilities, Completion, Engine, EngineChoice, EngineConfig, Op, OpKind, Opened, Rejected,
    open,
};
use penstock_io::faulty::{Failure, Faults, Lent, OpClass, Repeat};
use penstock_io::file::{Direct, File};
use penstock_store::options::Options;
use penstock_store::plan::write::TensorSpec;
use penstock_store::report::SaveReport;
use penstock_store::save::{Attempt, Job, Linked, SaveState, Staging, commit, save};
use penstock_store::{Error, Progress, Result};
use serde_json::value::RawValue;

const EINTR: i32 = 4;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;
const MIB: usize = 1 << 20;
/// Number of 8-byte words in a mebibyte.
const MIB_WORDS: usize = MIB / 8;

/// Several extents, pages, and what is neither: edges to copy on all sides.
const SIZES: [usize; 6] = [
    3 * MIB_WORDS + 7,
    512,
    2 * MIB_WORDS,
    500,
    5 * MIB_WORDS - 3,
    MIB_WORDS / 2,
];

/// Whether this system can save without copies; says why, if not.
fn can_lend(directory: &Path) -> bool {
    if let Err(error) = Watch::probe() {
        eprintln!("SKIPPED saves without copies: {error}");
        return false;
    }
    let probe = File::create(&directory.join("probe"), Direct::On);
    if let Err(error) = &probe {
        eprintln!("SKIPPED saves without copies: {error}");
    }
    probe.is_ok()
}

fn lent(seed: u64) -> Arc<Vec<Lent>> {
    let lent = SIZES.iter().map(|&words| Lent::aligned(seed, words));
    Arc::new(lent.collect())
}

/// Where memory begins in a page: at its start, or where only a device takes it.
fn starts(directory: &Path) -> Vec<usize> {
    let file = File::create(&directory.join("starts"), Direct::On).unwrap();
    let alignment = file.alignment().memory;
    [0, 512, 64, 4096 - 8]
        .into_iter()
        .filter(|start| start % alignment == 0)
        .collect()
}

fn change(lent: &[Lent], seed: u64) {
    lent.iter().for_each(|lent| lent.change(seed));
}

fn state(lent: &[Lent]) -> SaveState {
    let spec = |(index, &words): (usize, &usize)| TensorSpec {
        name: format!("t{index}"),
        dtype: "int64".to_owned(),
        shape: vec![words as u64],
        item_bytes: 8,
        region: None,
        group: None,
    };
    SaveState {
        tensors: SIZES.iter().enumerate().map(spec).collect(),
        sources: lent
            .iter()
            .map(|lent| Region::from(lent.region()))
            .collect(),
        linked: Linked::default(),
        aliases: Vec::new(),
        tree: RawValue::from_string("{\"a\":1}".into()).unwrap(),
    }
}

/// More than one worker, and more than one request in flight.
fn lending(options: Options) -> Options {
    Options {
        extent_bytes: Some(MIB),
        io_threads: Some(2),
        queue_depth: Some(3),
        lends_all: true,
        ..options
    }
}

fn save_to(path: &Path, lent: &[Lent], options: &Options) -> Result<SaveReport> {
    save(
        state(lent),
        &publication(path),
        options,
        &Progress::default(),
    )
}

#[track_caller]
fn assert_at(path: &Path, seed: u64) {
    let loaded = load(path, &Options::default()).unwrap();
    for (place, &words) in SIZES.iter().enumerate() {
        let content = Lent::content(seed, words);
        let found = bytes_of(&loaded, place, content.len());
        assert!(found == &content[..], "tensor {place} is torn");
    }
}

fn write(job: &Job, path: &Path) -> Result<u64> {
    let (options, progress) = (Options::default(), Progress::default());
    let mut attempt = Attempt::begin(path, false, &options.file_system, &progress)?;
    let written = job.write(&mut attempt, 0, &progress)?;
    commit(attempt, &publication(path), vec![written.part])?;
    Ok(written.zero_copy_bytes)
}

/// Runs a test alone, in a directory for each engine, where the system can save without copies.
fn each_engine(what: &str, test: impl Fn(EngineChoice, &Path) + Clone + Send + 'static) {
    let _alone = alone();
    for &engine in engines() {
        let test = test.clone();
        within_a_minute(&format!("{what} on {engine}"), move || {
            let root = tempfile::tempdir().unwrap();
            if can_lend(root.path()) {
                test(engine, &root.path().join("ckpt"));
            }
        });
    }
}

/// The bytes of the shards of a checkpoint.
fn shards(path: &Path) -> Vec<Vec<u8>> {
    let shards = names(path)
        .into_iter()
        .filter(|name| name.ends_with(".safetensors"));
    shards
        .map(|name| std::fs::read(path.join(name)).unwrap())
        .collect()
}

#[test]
fn the_files_are_those_of_a_save_that_copies() {
    each_engine("lending", |engine, path| {
        let memory = lent(1);
        for shard_bytes in [None, Some(2 * MIB as u64)] {
            let saved = |name: &str, zero_copy| {
                let options = lending(Options {
                    engine,
                    zero_copy,
                    shard_bytes,
                    ..Options::default()
                });
                let path = path.with_file_name(format!("{name}{}", shard_bytes.is_some()));
                let report = save_to(&path, &memory, &options).unwrap();
                assert_at(&path, 1);
                (report.zero_copy_bytes, shards(&path))
            };
            let (lent_bytes, files) = saved("lent", true);
            let total_bytes = 8 * SIZES.iter().sum::<usize>() as u64;
            assert!(
                lent_bytes > total_bytes / 2,
                "{lent_bytes} of {total_bytes}"
            );
            assert!(lent_bytes < total_bytes, "the edges are copied");
            let (lent_bytes, copied) = saved("copied", false);
            assert!(lent_bytes == 0 && files == copied && !files.is_empty());
        }
    });
}

/// The kernel names whole pages only: a question about other addresses has no answer.
#[test]
fn memory_that_only_a_device_takes_is_lent_and_written_once() {
    each_engine("pages", |engine, path| {
        for start in starts(path.parent().unwrap()) {
            let memory: Vec<Lent> = SIZES
                .iter()
                .map(|&words| Lent::at(start, 1, words))
                .collect();
            let path = path.with_file_name(format!("at {start}"));
            let options = lending(Options {
                engine,
                ..Options::default()
            });
            let report = save_to(&path, &memory, &options).unwrap();
            let total_bytes = 8 * SIZES.iter().sum::<usize>() as u64;
            assert!(
                report.zero_copy_bytes > total_bytes / 2,
                "at {start}: {report:?}"
            );
            let choices = &report.transport.choices;
            assert!(
                !choices.iter().any(|choice| choice.contains("zero_copy")),
                "{choices:?}"
            );
            assert_at(&path, 1);
        }
    });
}

#[test]
fn memory_that_is_not_aligned_is_copied_and_the_report_says_so() {
    each_engine("unaligned", |engine, path| {
        let memory: Vec<Lent> = SIZES.iter().map(|&words| Lent::new(1, words)).collect();
        let options = lending(Options {
            engine,
            ..Options::default()
        });
        let probe = File::create(&path.with_file_name("aligned"), Direct::On).unwrap();
        let report = save_to(path, &memory, &options).unwrap();
        if probe.alignment().memory > 16 {
            assert_eq!(report.zero_copy_bytes, 0);
            let choices = &report.transport.choices;
            let found = choices
                .iter()
                .find(|choice| choice.starts_with("zero_copy=off: "));
            assert!(
                found.is_some_and(|choice| choice.contains("multiples of")),
                "{choices:?}"
            );
        }
        assert_at(path, 1);
    });
}

/// Without the check of the watch the digest would be that of other bytes than the file's.
#[test]
fn what_changes_between_digest_and_write_is_written_again() {
    each_engine("changing", |engine, path| {
        let starts = starts(path.parent().unwrap());
        for nth in 1..8 {
            let start = starts[nth as usize % starts.len()];
            let memory = SIZES.iter().map(|&words| Lent::at(start, 1, words));
            let memory: Arc<Vec<Lent>> = Arc::new(memory.collect());
            let changed = Arc::clone(&memory);
            let call = move |at, _: &'static str, _: &Path| {
                if at == nth {
                    change(&changed, 2);
                }
            };
            // One worker, so that the change is before all later requests.
            let options = Options {
                io_threads: Some(1),
                ..lending(faulty(engine, Arc::new(Faults::new(0).call(call))))
            };
            let path = path.with_file_name(format!("changed at {nth}"));
            let report = save_to(&path, &memory, &options).unwrap();
            let loaded = load(&path, &Options::default());
            assert!(
                loaded.is_ok(),
                "damaged by a change before write {nth}: {loaded:?}"
            );
            assert!(nth > 1 || report.zero_copy_bytes == 0);
            let choices = &report.transport.choices;
            assert!(
                choices
                    .iter()
                    .any(|choice| choice.contains("written again")),
                "{choices:?}"
            );
        }
    });
}

#[test]
fn a_writer_beside_a_save_does_not_damage_it() {
    each_engine("racing", |engine, path| {
        let memory = lent(1);
        let is_over = Arc::new(AtomicBool::new(false));
        let writer = {
            let (memory, is_over) = (Arc::clone(&memory), Arc::clone(&is_over));
            thread::spawn(move || {
                let mut seed = 2;
                while !is_over.load(Ordering::Relaxed) {
                    memory[seed as usize % SIZES.len()].change(seed);
                    thread::sleep(Duration::from_micros(seed % 7 * 300));
                    seed += 1;
                }
            })
        };
        for round in 0..20 {
            let options = lending(Options {
                engine,
                ..Options::default()
            });
            let path = path.with_file_name(format!("round {round}"));
            save_to(&path, &memory, &options).unwrap();
            load(&path, &Options::default()).expect("no chunk is damaged");
        }
        is_over.store(true, Ordering::Relaxed);
        writer.join().unwrap();
    });
}

#[test]
fn faults_of_requests_lose_no_byte() {
    each_engine("faults", |engine, path| {
        let memory = lent(1);
        for seed in 0..16 {
            let mut random = Rng::new(seed);
            let mut failure = |errno| Failure {
                class: Some(OpClass::Write),
                nth: 1 + random.below(14),
                repeat: Repeat::Once,
                errno,
            };
            let faults = Faults::new(seed).late_completions(50);
            let faults = match seed % 4 {
                0 => faults.fail(failure(EINTR)),
                1 => faults.fail(failure(EAGAIN)),
                2 => faults.short_transfers(30),
                _ => faults.fail(failure(EIO)),
            };
            let options = lending(faulty(engine, Arc::new(faults)));
            let path = path.with_file_name(format!("faults {seed}"));
            match save_to(&path, &memory, &options) {
                Ok(_) => assert_at(&path, 1),
                Err(error) => {
                    assert_eq!(common::errno(&error), Some(EIO));
                    assert_eq!(names(&path), Vec::<String>::new());
                }
            }
        }
    });
}

/// The way in which an engine ends its requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Complete,
    /// The first one fails, the others are in flight.
    Fail,
    /// The worker dies.
    Panic,
    /// A kernel that were to read memory after it reported the completion: shows that the test
    /// notices memory that is given back early.
    CompleteEarly,
}

/// Requests in flight, shared with the test.
struct Flight {
    ending: Ending,
    in_flight: AtomicUsize,
    /// Whether requests may complete.
    is_open: AtomicBool,
    /// The job, and the addresses of its memory.
    job: OnceLock<(Weak<Job>, Vec<Range<usize>>)>,
    /// Whether the caller had its memory back while a request read it.
    is_given_back_early: AtomicBool,
}

impl Flight {
    fn new(ending: Ending) -> Arc<Flight> {
        Arc::new(Flight {
            ending,
            in_flight: AtomicUsize::new(0),
            is_open: AtomicBool::new(false),
            job: OnceLock::new(),
            is_given_back_early: AtomicBool::new(false),
        })
    }

    /// Options whose engines read memory only when they complete requests.
    fn options(self: &Arc<Flight>) -> Options {
        let flight = Arc::clone(self);
        let factory = move |queue_depth| {
            let config = EngineConfig {
                choice: EngineChoice::Sync,
                queue_depth,
            };
            let engine = Box::new(Late {
                inner: open(&config)?.engine,
                waiting: Vec::new(),
                overdue: Vec::new(),
                flight: Arc::clone(&flight),
            });
            Ok(Opened {
                engine,
                fallback: None,
            })
        };
        lending(Options {
            engine_factory: Some(Arc::new(factory)),
            ..Options::default()
        })
    }

    fn observe(&self, job: &Arc<Job>, memory: &[Lent]) {
        let regions = memory.iter().map(Lent::region);
        let addresses = regions.map(|region| region.addresses(&(0..region.len())));
        let observed = (Arc::downgrade(job), addresses.collect());
        assert!(self.job.set(observed).is_ok());
    }

    /// Whether an operation reads the caller's memory.
    fn is_lent(&self, op: &Op) -> bool {
        let (OpKind::Write { buf, .. }, Some((_, memory))) = (&op.kind, self.job.get()) else {
            return false;
        };
        memory.iter().any(|lent| lent.contains(&buf.address()))
    }

    fn wait_for_requests(&self) {
        while self.in_flight.load(Ordering::Acquire) < 2 {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// An engine that performs requests as late as it can.
struct Late {
    inner: Box<dyn Engine>,
    waiting: Vec<Op>,
    /// Requests that were reported as completed, and are not.
    overdue: Vec<Op>,
    flight: Arc<Flight>,
}

impl Late {
    /// Performs all requests in flight.
    fn perform(&mut self, completed: &mut Vec<Completion>) {
        if self.waiting.is_empty() {
            return;
        }
        let is_lent = self.waiting.iter().any(|op| self.flight.is_lent(op));
        let watched = self.flight.job.get().filter(|_| is_lent);
        let job = watched.and_then(|(job, _)| job.upgrade());
        if job.is_some_and(|job| job.is_staged()) {
            self.flight
                .is_given_back_early
                .store(true, Ordering::Release);
        }
        for op in self.waiting.drain(..) {
            assert!(self.inner.submit(op).is_ok());
            self.inner.poll(1, None, completed).unwrap();
        }
    }
}

impl Engine for Late {
    fn submit(&mut self, op: Op) -> std::result::Result<(), Rejected> {
        self.waiting.push(op);
        self.flight.in_flight.fetch_add(1, Ordering::Release);
        Ok(())
    }

    fn poll(
        &mut self,
        min: usize,
        _timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> penstock_io::Result<()> {
        if min == 0 && !self.flight.is_open.load(Ordering::Acquire) {
            return Ok(());
        }
        while !self.flight.is_open.load(Ordering::Acquire) {
            thread::sleep(Duration::from_millis(1));
        }
        match self.flight.ending {
            Ending::Complete => self.perform(completed),
            Ending::CompleteEarly => {
                completed.extend(self.waiting.iter().map(|op| Completion {
                    token: op.token,
                    buf: None,
                    result: Ok(0),
                }));
                self.overdue.append(&mut self.waiting);
            }
            Ending::Fail if self.waiting.is_empty() => {}
            Ending::Panic if self.waiting.is_empty() => {}
            Ending::Fail => {
                let op = self.waiting.remove(0);
                completed.push(Completion {
                    token: op.token,
                    buf: op.kind.into_buf(),
                    result: Err(io::Error::from_raw_os_error(EIO)),
                });
            }
            Ending::Panic => panic!("a worker dies"),
        }
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        let queue_depth_max = self.inner.capabilities().queue_depth_max;
        Capabilities::new("late", queue_depth_max, "for tests")
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }
}

impl Drop for Late {
    /// Waits for the requests in flight, as every engine does.
    fn drop(&mut self) {
        thread::sleep(Duration::from_millis(20));
        self.waiting.append(&mut self.overdue);
        self.perform(&mut Vec::new());
    }
}

fn lazy(memory: &[Lent], path: &Path, options: &Options, is_watched: bool) -> Arc<Job> {
    let staging = Staging {
        is_lazy: true,
        is_watched,
        ..Staging::default()
    };
    let job = Job::new(state(memory), path, options, &staging).unwrap();
    assert!(job.is_lazy());
    Arc::new(job)
}

#[test]
fn memory_is_lent_until_the_last_request_completes() {
    each_engine("holding", |_, path| {
        for is_watched in [false, true] {
            let flight = Flight::new(Ending::Complete);
            let memory = lent(1);
            let path = path.with_file_name(format!("watched {is_watched}"));
            let job = lazy(&memory, &path, &flight.options(), is_watched);
            flight.observe(&job, &memory);
            thread::scope(|scope| {
                let writing = scope.spawn(|| write(&job, &path));
                flight.wait_for_requests();
                // Copies the rest, and has to wait for the requests in flight.
                let staging = scope.spawn(|| {
                    job.stage(Some(2)).unwrap();
                    change(&memory, 2);
                });
                thread::sleep(Duration::from_millis(50));
                assert!(!job.is_staged() && !staging.is_finished());
                flight.is_open.store(true, Ordering::Release);
                staging.join().unwrap();
                assert!(writing.join().unwrap().unwrap() > 0);
            });
            assert!(!flight.is_given_back_early.load(Ordering::Acquire));
            assert_at(&path, 1);
        }
    });
}

#[test]
fn memory_is_lent_until_the_engine_of_a_failed_save_is_gone() {
    each_engine("failing", |_, path| {
        // With two workers the other one may have the memory until the engine is gone.
        for (ending, workers) in [
            (Ending::Fail, 1),
            (Ending::Fail, 2),
            (Ending::Panic, 1),
            (Ending::Panic, 2),
        ] {
            let flight = Flight::new(ending);
            flight.is_open.store(true, Ordering::Release);
            let memory = lent(1);
            let options = Options {
                io_threads: Some(workers),
                ..flight.options()
            };
            let job = lazy(&memory, path, &options, false);
            flight.observe(&job, &memory);
            let written = catch_unwind(AssertUnwindSafe(|| write(&job, path)));
            match ending {
                Ending::Fail => assert!(matches!(written, Ok(Err(Error::Storage { .. })))),
                _ => assert!(written.is_err()),
            }
            assert!(!flight.is_given_back_early.load(Ordering::Acquire));
            assert!(job.is_staged() && memory.iter().all(Lent::is_returned));
        }
    });
}

#[test]
fn a_request_that_reads_memory_after_its_completion_is_noticed() {
    each_engine("completing early", |_, path| {
        let flight = Flight::new(Ending::CompleteEarly);
        let memory = lent(1);
        let job = lazy(&memory, path, &flight.options(), false);
        flight.observe(&job, &memory);
        flight.is_open.store(true, Ordering::Release);
        let _ = write(&job, path);
        assert!(flight.is_given_back_early.load(Ordering::Acquire));
    });
}

#[test]
fn a_watched_job_fails_when_lent_memory_is_changed() {
    each_engine("watching", |_, path| {
        let flight = Flight::new(Ending::Complete);
        let memory = lent(1);
        let job = lazy(&memory, path, &flight.options(), true);
        thread::scope(|scope| {
            let writing = scope.spawn(|| write(&job, path));
            flight.wait_for_requests();
            memory[4].change(2);
            flight.is_open.store(true, Ordering::Release);
            let failed = writing.join().unwrap();
            assert!(matches!(failed, Err(Error::SourceModified { key, .. }) if key == "t4"));
        });
        assert!(memory.iter().all(Lent::is_returned));
    });
}
