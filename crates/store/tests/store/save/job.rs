//! A job stores the state as it was when its caller learned that it is staged, whatever happens to
//! the caller's memory afterwards; and nobody ever waits for a job that has ended.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use crate::common::{
    self, Rng, Sample, engines, errno, faulty, load, names, publication, within_a_minute,
};
use penstock_io::engine::EngineChoice;
use penstock_io::faulty::{Failure, Faults, Lent, OpClass, Repeat};
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::plan::write::TensorSpec;
use penstock_store::save::{Arena, Attempt, Job, Linked, SaveState, Staging, Written, commit};
use penstock_store::{Error, Progress, Result};
use serde_json::value::RawValue;

const EIO: i32 = 5;
const MIB: usize = 1 << 20;
/// Number of 8-byte words in a mebibyte.
const MIB_WORDS: usize = MIB / 8;

/// Tensors that their owner changes.
struct Tensors(Vec<Lent>, Vec<usize>);

impl Tensors {
    fn new(seed: u64, words: &[usize]) -> Tensors {
        let lent = words.iter().map(|&words| Lent::new(seed, words)).collect();
        Tensors(lent, words.to_vec())
    }

    fn state(&self) -> SaveState {
        let spec = |(index, &words): (usize, &usize)| TensorSpec {
            name: format!("t{index}"),
            dtype: "int64".to_owned(),
            shape: vec![words as u64],
            item_bytes: 8,
            region: None,
            group: None,
        };
        SaveState {
            tensors: self.1.iter().enumerate().map(spec).collect(),
            sources: self.0.iter().map(|lent| lent.region().into()).collect(),
            linked: Linked::default(),
            aliases: Vec::new(),
            tree: RawValue::from_string("{\"a\":1}".into()).unwrap(),
        }
    }

    fn change(&self, seed: u64) {
        self.0.iter().for_each(|lent| lent.change(seed));
    }

    fn are_returned(&self) -> bool {
        self.0.iter().all(Lent::is_returned)
    }

    #[track_caller]
    fn assert_at(&self, path: &Path, seed: u64) {
        let loaded = load(path, &Options::default()).unwrap();
        for (place, &words) in self.1.iter().enumerate() {
            let content = Lent::content(seed, words);
            let found = common::bytes_of(&loaded, place, content.len());
            assert!(found == &content[..], "tensor {place} is torn");
        }
    }
}

/// More than one worker, extents of one chunk, and little in flight.
fn options(engine: EngineChoice) -> Options {
    Options {
        engine,
        extent_bytes: Some(MIB),
        io_threads: Some(2),
        queue_depth: Some(2),
        ..Options::default()
    }
}

fn staging(arena: Option<&Arena>, is_lazy: bool) -> Staging {
    let arena = arena.cloned();
    Staging {
        arena,
        is_lazy,
        ..Staging::default()
    }
}

fn begin(path: &Path) -> Attempt {
    let options = Options::default();
    Attempt::begin(path, true, &options.file_system, &Progress::default()).unwrap()
}

fn write(job: &Job, path: &Path) -> Result<Written> {
    let mut attempt = begin(path);
    let written = job.write(&mut attempt, 0, &Progress::default())?;
    let publication = penstock_store::save::Publication {
        overwrite: true,
        ..publication(path)
    };
    commit(attempt, &publication, vec![written.part.clone()])?;
    Ok(written)
}

/// Runs a test once for each engine, each in a separate directory.
fn each_engine(what: &str, test: fn(EngineChoice, &Path)) {
    for &engine in engines() {
        within_a_minute(&format!("{what} on {engine}"), move || {
            let root = tempfile::tempdir().unwrap();
            test(engine, &root.path().join("ckpt"));
        });
    }
}

const SIZES: [usize; 5] = [3 * MIB_WORDS + 7, 1, 2 * MIB_WORDS, 500, 5 * MIB_WORDS - 3];

#[test]
fn what_is_staged_is_what_was_there() {
    each_engine("staging", |engine, path| {
        for arena in [None, Some(Arena::new(None))] {
            let tensors = Tensors::new(1, &SIZES);
            let staging = staging(arena.as_ref(), false);
            let job = Job::new(tensors.state(), path, &options(engine), &staging).unwrap();
            assert!(!job.is_staged());
            assert!(!job.wait_staged(Some(Duration::from_millis(1))));
            job.stage(Some(2)).unwrap();
            assert!(job.is_staged() && tensors.are_returned());
            tensors.change(2);
            let written = write(&job, path).unwrap();
            let phases: Vec<_> = written.phases.iter().map(|(phase, _)| *phase).collect();
            assert_eq!(phases, ["plan", "stage", "write", "sync"]);
            tensors.assert_at(path, 1);
        }
    });
}

#[test]
fn the_memory_is_the_caller_s_the_moment_staging_returns() {
    each_engine("200 jobs", |engine, path| {
        let (arena, options) = (Arena::new(Some(6 * MIB)), options(engine));
        for seed in 0..200 {
            let tensors = Tensors::new(seed, &[MIB_WORDS, 9, 3 * MIB_WORDS + 1]);
            let staging = staging(Some(&arena), seed % 2 == 0);
            let job = Job::new(tensors.state(), path, &options, &staging).unwrap();
            thread::scope(|scope| {
                let writing = scope.spawn(|| write(&job, path).unwrap());
                job.stage(Some(1 + seed as usize % 3)).unwrap();
                tensors.change(seed + 1000);
                writing.join().unwrap();
            });
            tensors.assert_at(path, seed);
        }
    });
}

#[test]
fn a_state_larger_than_the_arena_is_staged_as_it_is_written() {
    each_engine("a small arena", |engine, path| {
        let arena = Arena::new(Some(3 * MIB + 1));
        let tensors = Tensors::new(1, &[40 * MIB_WORDS]);
        let staging = staging(Some(&arena), false);
        let job = Job::new(tensors.state(), path, &options(engine), &staging).unwrap();
        thread::scope(|scope| {
            let writing = scope.spawn(|| write(&job, path).unwrap());
            job.stage(None).unwrap();
            tensors.change(2);
            let written = writing.join().unwrap();
            assert!(written.transport.staging_peak_bytes <= 3 * MIB);
        });
        assert!(arena.held_bytes() <= 3 * MIB);
        assert_eq!(arena.peak_bytes(), 3 * MIB);
        tensors.assert_at(path, 1);
    });
}

#[test]
fn a_lazy_job_needs_no_staging() {
    each_engine("a lazy job", |engine, path| {
        for arena in [None, Some(Arena::new(Some(4 * MIB)))] {
            let tensors = Tensors::new(1, &SIZES);
            let staging = staging(arena.as_ref(), true);
            let job = Job::new(tensors.state(), path, &options(engine), &staging).unwrap();
            write(&job, path).unwrap();
            assert!(job.is_staged() && tensors.are_returned());
            tensors.assert_at(path, 1);
        }
    });
}

#[test]
fn a_lazy_job_may_be_staged_at_any_moment() {
    each_engine("a lazy job", |engine, path| {
        let (arena, mut rng) = (Arena::new(Some(8 * MIB)), Rng::new(7));
        for seed in 0..60 {
            let tensors = Tensors::new(seed, &[5 * MIB_WORDS, 7 * MIB_WORDS + 5]);
            let staging = staging(Some(&arena), true);
            let job = Job::new(tensors.state(), path, &options(engine), &staging).unwrap();
            let pause = Duration::from_micros(rng.below(6000));
            thread::scope(|scope| {
                let writing = scope.spawn(|| write(&job, path).unwrap());
                thread::sleep(pause);
                job.stage(None).unwrap();
                tensors.change(seed + 1000);
                writing.join().unwrap();
            });
            tensors.assert_at(path, seed);
        }
    });
}

/// Callers change counters after each step without thinking of them as tensors.
#[test]
fn a_lazy_job_copies_what_is_small_at_once() {
    each_engine("a lazy job", |engine, path| {
        let tensors = Tensors::new(1, &[8192, 1, 8193, 0]);
        let staging = staging(None, true);
        let job = Job::new(tensors.state(), path, &options(engine), &staging).unwrap();
        let returned: Vec<bool> = tensors.0.iter().map(Lent::is_returned).collect();
        assert_eq!(returned, [true, true, false, false]);
        tensors.0[..2].iter().for_each(|lent| lent.change(2));
        write(&job, path).unwrap();
        tensors.assert_at(path, 1);
    });
}

/// Writes that a job has submitted, before and after the state was staged.
#[derive(Default)]
struct Submitted {
    job: OnceLock<Arc<Job>>,
    before: AtomicUsize,
    after: AtomicUsize,
}

/// The caller waits for the copy alone: writers would take memory bandwidth and cores from it.
#[test]
fn writers_hold_back_until_all_is_staged_or_they_are_needed() {
    each_engine("holding back", |engine, path| {
        for (budget_bytes, is_room_for_all) in [(None, true), (Some(4 * MIB), false)] {
            let submitted = Arc::new(Submitted::default());
            let faults = {
                let submitted = Arc::clone(&submitted);
                Faults::new(0).call(move |_, operation, _| {
                    let job = submitted.job.get();
                    match operation {
                        "write" if job.unwrap().is_staged() => &submitted.after,
                        "write" => &submitted.before,
                        _ => return,
                    }
                    .fetch_add(1, Ordering::Relaxed);
                })
            };
            let tensors = Tensors::new(1, &[30 * MIB_WORDS]);
            let staging = staging(Some(&Arena::new(budget_bytes)), false);
            let options = faulty(engine, Arc::new(faults));
            let job = Arc::new(Job::new(tensors.state(), path, &options, &staging).unwrap());
            assert!(submitted.job.set(Arc::clone(&job)).is_ok());
            thread::scope(|scope| {
                let writing = scope.spawn(|| write(&job, path).unwrap());
                job.stage(Some(1)).unwrap();
                writing.join().unwrap();
            });
            let before = submitted.before.load(Ordering::Relaxed);
            let after = submitted.after.load(Ordering::Relaxed);
            assert_eq!(before == 0, is_room_for_all, "{before} writes came before");
            assert!(before + after >= 31, "{before} and {after}");
            tensors.assert_at(path, 1);
        }
    });
}

/// The caller's memory is freed long before the write ends.
#[test]
fn the_sources_go_before_the_write_ends() {
    each_engine("a write", |engine, path| {
        let is_returned = Arc::new(AtomicBool::new(false));
        let faults = {
            let is_returned = Arc::clone(&is_returned);
            Faults::new(0).call(move |_, operation, _| {
                while operation == "write" && !is_returned.load(Ordering::Relaxed) {
                    thread::sleep(Duration::from_millis(1));
                }
            })
        };
        let tensors = Tensors::new(1, &[20 * MIB_WORDS]);
        let staging = staging(Some(&Arena::new(None)), true);
        let options = faulty(engine, Arc::new(faults));
        let job = Job::new(tensors.state(), path, &options, &staging).unwrap();
        thread::scope(|scope| {
            let writing = scope.spawn(|| write(&job, path).unwrap());
            job.stage(None).unwrap();
            assert!(tensors.are_returned() && !writing.is_finished());
            is_returned.store(true, Ordering::Relaxed);
        });
        tensors.assert_at(path, 1);
    });
}

#[test]
fn a_failed_write_lets_everybody_go() {
    each_engine("a failed write", |engine, path| {
        for is_lazy in [false, true] {
            let failure = Failure {
                class: Some(OpClass::Write),
                nth: 3,
                repeat: Repeat::Forever,
                errno: EIO,
            };
            let options = faulty(engine, Arc::new(Faults::new(0).fail(failure)));
            let tensors = Tensors::new(1, &[30 * MIB_WORDS]);
            let staging = staging(Some(&Arena::new(Some(4 * MIB))), is_lazy);
            let job = Job::new(tensors.state(), path, &options, &staging).unwrap();
            thread::scope(|scope| {
                let staging = scope.spawn(|| job.stage(Some(2)));
                let waiting = scope.spawn(|| job.wait_staged(None));
                let error = write(&job, path).unwrap_err();
                assert_eq!(errno(&error), Some(EIO), "{error}");
                staging.join().unwrap().unwrap();
                assert!(waiting.join().unwrap());
            });
            assert!(tensors.are_returned());
            assert_eq!(names(path), [""; 0]);
        }
    });
}

#[test]
fn a_cancelled_job_lets_everybody_go() {
    each_engine("a cancelled job", |engine, path| {
        let arena = Arena::new(Some(4 * MIB));
        let staging = staging(Some(&arena), false);
        // Without a writer, a stager waits for a buffer.
        let tensors = Tensors::new(1, &[30 * MIB_WORDS]);
        let job = Job::new(tensors.state(), path, &options(engine), &staging).unwrap();
        thread::scope(|scope| {
            let staged = scope.spawn(|| job.stage(None));
            while arena.peak_bytes() < 4 * MIB {
                thread::sleep(Duration::from_millis(1));
            }
            job.cancel();
            staged.join().unwrap().unwrap();
        });
        assert!(tensors.are_returned() && job.is_staged());
        let error = write(&job, path).unwrap_err();
        assert!(matches!(error, Error::Interrupted), "{error}");

        // Without a stager, the workers wait.
        for by_progress in [false, true] {
            let job = Job::new(tensors.state(), path, &options(engine), &staging).unwrap();
            let progress = Progress::default();
            thread::scope(|scope| {
                let writing = scope.spawn(|| job.write(&mut begin(path), 0, &progress));
                thread::sleep(Duration::from_millis(10));
                match by_progress {
                    true => progress.cancel(),
                    false => job.cancel(),
                }
                let error = writing.join().unwrap().unwrap_err();
                assert!(matches!(error, Error::Interrupted), "{error}");
            });
            assert!(tensors.are_returned());
        }
        arena.release();
        assert_eq!(arena.held_bytes(), 0, "no buffer is lost");
    });
}

#[test]
fn a_job_that_is_never_written_gives_everything_back() {
    let (root, arena) = (tempfile::tempdir().unwrap(), Arena::new(None));
    for (is_lazy, is_staged) in [(false, false), (false, true), (true, false), (true, true)] {
        let tensors = Tensors::new(1, &SIZES);
        let staging = staging(Some(&arena), is_lazy);
        let job = Job::new(tensors.state(), root.path(), &Options::default(), &staging).unwrap();
        if is_staged {
            job.stage(None).unwrap();
        }
        drop(job);
        assert!(tensors.are_returned());
    }
    arena.release();
    assert_eq!(arena.held_bytes(), 0);
    assert_eq!(names(root.path()), [""; 0]);
}

#[test]
fn an_arena_serves_states_of_any_size() {
    each_engine("an arena", |engine, path| {
        let arena = Arena::new(None);
        let mut held_bytes = 0;
        for (seed, mebibytes) in [(1, 3), (2, 60), (3, 1), (4, 60), (5, 0)] {
            let tensors = Tensors::new(seed, &[mebibytes * MIB_WORDS]);
            let staging = staging(Some(&arena), false);
            let job = Job::new(tensors.state(), path, &options(engine), &staging).unwrap();
            job.stage(None).unwrap();
            tensors.change(99);
            write(&job, path).unwrap();
            tensors.assert_at(path, seed);
            assert!(arena.held_bytes() >= held_bytes, "pages are kept");
            held_bytes = arena.held_bytes();
        }
        assert!(held_bytes <= 80 * MIB, "pages are used again: {held_bytes}");
    });
}

#[test]
fn an_empty_state_is_staged_from_the_start() {
    each_engine("an empty state", |engine, path| {
        for is_lazy in [false, true] {
            let tensors = Tensors::new(1, &[]);
            let staging = staging(None, is_lazy);
            let job = Job::new(tensors.state(), path, &options(engine), &staging).unwrap();
            assert!(job.is_staged());
            job.stage(None).unwrap();
            write(&job, path).unwrap();
            tensors.assert_at(path, 1);
        }
    });
}

#[test]
fn shards_may_wait_for_their_tree() {
    each_engine("shards", |engine, path| {
        let sample = Sample::seeded(3);
        let staging = staging(None, true);
        let job = Job::new(sample.state(), path, &options(engine), &staging).unwrap();
        let mut attempt = begin(path);
        let shards = job.write_shards(&mut attempt, 0, &Progress::default());
        let tree = RawValue::from_string("{\"later\":2}".into()).unwrap();
        let written = shards.unwrap().describe(&mut attempt, Some(tree)).unwrap();
        commit(attempt, &publication(path), vec![written.part]).unwrap();
        sample.assert_at(path);
        assert_eq!(
            Checkpoint::open(path).unwrap().tree(0).get(),
            "{\"later\":2}"
        );
    });
}

/// A rank that has voted does not know the outcome; only one that learned it may remove its files.
#[test]
fn a_voter_leaves_its_files_unless_it_is_told_to_discard() {
    let root = tempfile::tempdir().unwrap();
    let (path, options) = (root.path().join("ckpt"), Options::default());
    for discards in [false, true] {
        let first = begin(&path);
        let progress = Progress::default();
        let mut joined = Attempt::join(&path, first.id(), &options.file_system, &progress).unwrap();
        let state = Sample::seeded_rank(1, &[4096]).state();
        let job = Job::new(state, &path, &options, &staging(None, true)).unwrap();
        job.write(&mut joined, 1, &progress).unwrap();
        let before = names(&path).len();
        match discards {
            true => joined.discard(),
            false => drop(joined),
        }
        let left = before - names(&path).len();
        assert_eq!(left, if discards { 2 } else { 0 });
        drop(first);
    }
}

#[test]
fn who_writes_may_step_back() {
    each_engine("stepping back", |engine, path| {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let (before, found) = (nice(), Arc::new(AtomicUsize::new(0)));
        let faults = {
            let found = Arc::clone(&found);
            Faults::new(0).call(move |_, _, _| found.store(nice() as usize, Ordering::Relaxed))
        };
        let options = Options {
            nice: Some(5),
            ..faulty(engine, Arc::new(faults))
        };
        let sample = Sample::seeded(1);
        let job = Job::new(sample.state(), path, &options, &staging(None, true)).unwrap();
        write(&job, path).unwrap();
        assert_eq!(found.load(Ordering::Relaxed), before.max(5) as usize);
        assert_eq!(nice(), before, "the caller does not");
    });
}
