//! Files that become shards unchanged: by a hard link, by shared blocks, or by a copy.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::held::{self, Holds};
use crate::common::{Sample, engines, errno, names, publication};
use penstock_io::engine::EngineChoice;
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem, Files, Native};
use penstock_store::care::salvage::salvage;
use penstock_store::care::verify::verify;
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::report::{Fallback, FallbackKind, SaveReport};
use penstock_store::save::{Attempt, Job, Publication, SaveState, Staging, commit, save};
use penstock_store::steps::scrub::{Outcome, Scrub};
use penstock_store::steps::store::Store;
use penstock_store::{Error, Progress, Result};

const EXDEV: i32 = 18;
const EMLINK: i32 = 31;
const EPERM: i32 = 1;
const EIO: i32 = 5;

/// A file system on which hard links fail with a given error.
#[derive(Debug)]
struct Unlinkable {
    errno: i32,
    /// Whether files can share blocks there.
    clones: bool,
}

impl FileSystem for Unlinkable {
    fn files(&self) -> &dyn Files {
        &Native
    }

    fn create(&self, path: &Path, direct: Direct) -> penstock_io::Result<File> {
        Native.create(path, direct)
    }

    fn change(&self, change: Change<'_>) -> penstock_io::Result<()> {
        match change {
            Change::Link { to, .. } if !is_manifest(to) => Err(penstock_io::Error::Storage {
                operation: change.operation(),
                path: to.to_owned(),
                source: std::io::Error::from_raw_os_error(self.errno),
            }),
            Change::Clone { from, to } if self.clones => {
                fs::write(to.path(), fs::read(from.path()).unwrap()).unwrap();
                Ok(())
            }
            change => Native.change(change),
        }
    }
}

fn is_manifest(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == "manifest.json")
}

fn unlinkable(errno: i32, clones: bool) -> Options {
    Options {
        file_system: Arc::new(Unlinkable { errno, clones }),
        ..Options::default()
    }
}

/// Some tensors in memory, and three in a file of several chunks.
fn sample() -> Sample {
    Sample::of_sizes(&[5000, 77, 1_500_000, 0, 900_000])
}

const IN_FILE: usize = 3;

struct World {
    root: tempfile::TempDir,
    sample: Sample,
}

impl World {
    fn new() -> World {
        World {
            root: tempfile::tempdir().unwrap(),
            sample: sample(),
        }
    }

    fn held(&self) -> PathBuf {
        self.root.path().join("held")
    }

    fn path(&self) -> PathBuf {
        self.root.path().join("ckpt")
    }

    fn state(&self) -> SaveState {
        held::write(&self.sample, IN_FILE, &self.held())
    }

    fn save(&self, options: &Options) -> Result<SaveReport> {
        save(
            self.state(),
            &publication(&self.path()),
            options,
            &Progress::default(),
        )
    }

    /// The shard that the file has become.
    fn shard(&self) -> PathBuf {
        let checkpoint = Checkpoint::open(&self.path()).unwrap();
        let file = checkpoint.part().files.last().unwrap();
        self.path().join(&file.name)
    }
}

fn inode(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

#[test]
fn a_file_is_linked_and_not_written() {
    for &engine in engines() {
        let world = World::new();
        let options = Options {
            engine,
            ..Options::default()
        };
        let report = world.save(&options).unwrap();
        world.sample.assert_at(&world.path());
        assert_eq!(inode(&world.shard()), inode(&world.held()));
        let file_bytes = fs::metadata(world.held()).unwrap().len();
        assert_eq!(report.linked_bytes, file_bytes);
        let all: u64 = names(&world.path())
            .iter()
            .map(|name| fs::metadata(world.path().join(name)).unwrap().len())
            .sum();
        assert_eq!(report.bytes + report.linked_bytes, all);
        assert_eq!((report.tensors, report.files), (5, 4));
        assert_eq!(report.tensor_bytes, 5077);
        assert!(!report.transport.fallbacks.iter().any(is_unlinked));
        // The other name of the file no longer matters.
        fs::remove_file(world.held()).unwrap();
        world.sample.assert_at(&world.path());
    }
}

fn is_unlinked(fallback: &Fallback) -> bool {
    fallback.kind == FallbackKind::Unlinked
}

#[test]
fn a_state_may_lie_in_files_alone() {
    let world = World::new();
    let count = world.sample.specs.len();
    let state = held::write(&world.sample, count, &world.held());
    let options = Options::default();
    let saved = save(
        state,
        &publication(&world.path()),
        &options,
        &Progress::default(),
    );
    let report = saved.unwrap();
    world.sample.assert_at(&world.path());
    assert!(!report.transport.direct_io, "nothing was written");
    assert_eq!(report.tensor_bytes, 0);
}

#[test]
fn names_of_its_own_and_tensors_of_nobody_are_no_damage() {
    let world = World::new();
    world.save(&Options::default()).unwrap();
    let checkpoint = Checkpoint::open(&world.path()).unwrap();
    let stored = checkpoint.part().tensors.last().unwrap();
    assert_eq!(stored.name, "t4");
    assert_eq!(stored.stored_name.as_deref(), Some("moment.4"));
    assert_eq!(checkpoint.part().tensors.len(), 5);
}

#[test]
fn what_a_header_does_not_have_is_reported() {
    let world = World::new();
    let mut state = world.state();
    state.linked.tensors[0].stored_name = "elsewhere".to_owned();
    let saved = save(
        state,
        &publication(&world.path()),
        &Options::default(),
        &Progress::default(),
    );
    saved.unwrap();
    let report = verify(&world.path(), &Options::default(), &Progress::default()).unwrap();
    let [problem] = &report.problems[..] else {
        panic!("{:?}", report.problems)
    };
    assert!(
        problem.detail.contains("\"elsewhere\""),
        "{}",
        problem.detail
    );
    assert!(!problem.is_proven);
}

#[test]
fn a_job_lets_go_of_files_once_they_are_linked() {
    let world = World::new();
    let holds = Holds::default();
    let options = Options::default();
    let job = || {
        let mut state = world.state();
        holds.hold(&mut state);
        let staging = Staging {
            is_lazy: true,
            is_watched: true,
            ..Staging::default()
        };
        Job::new(state, &world.path(), &options, &staging).unwrap()
    };
    let (written, given_up, cancelled) = (job(), job(), job());
    assert_eq!(holds.count(), 3);
    let progress = Progress::default();
    let begin = || Attempt::begin(&world.path(), true, &options.file_system, &progress);
    let mut attempt = begin().unwrap();
    let part = written.write(&mut attempt, 0, &progress).unwrap().part;
    assert_eq!(holds.count(), 2);
    commit(attempt, &publication(&world.path()), vec![part]).unwrap();
    world.sample.assert_at(&world.path());
    drop(given_up);
    assert_eq!(holds.count(), 1);
    cancelled.cancel();
    assert_eq!(holds.count(), 0);
    // Nothing is linked any more, since no guard keeps the file.
    let refused = cancelled.write(&mut begin().unwrap(), 0, &progress);
    assert!(matches!(refused, Err(Error::Interrupted)), "{refused:?}");
    world.sample.assert_at(&world.path());
}

#[test]
fn what_cannot_be_linked_shares_its_blocks() {
    for number in [EXDEV, EMLINK, EPERM] {
        let world = World::new();
        let report = world.save(&unlinkable(number, true)).unwrap();
        world.sample.assert_at(&world.path());
        assert_ne!(inode(&world.shard()), inode(&world.held()));
        assert_eq!(
            report.linked_bytes,
            fs::metadata(world.held()).unwrap().len()
        );
        let found: Vec<_> = report
            .transport
            .fallbacks
            .iter()
            .filter(|f| is_unlinked(f))
            .collect();
        let [fallback] = &found[..] else {
            panic!("{found:?}")
        };
        let why = std::io::Error::from_raw_os_error(number).to_string();
        assert!(
            fallback.reason.contains("shares the blocks"),
            "{fallback:?}"
        );
        assert!(fallback.reason.contains(&why), "{fallback:?}");
    }
}

fn copying(engine: EngineChoice, direct: Direct, io_threads: usize) -> Options {
    Options {
        engine,
        direct,
        io_threads: Some(io_threads),
        extent_bytes: Some(1 << 20),
        queue_depth: Some(2),
        ..unlinkable(EXDEV, false)
    }
}

#[test]
fn what_cannot_be_linked_is_copied() {
    for &engine in engines() {
        for (direct, io_threads) in [(Direct::Auto, 1), (Direct::Off, 3)] {
            let world = World::new();
            let report = world.save(&copying(engine, direct, io_threads)).unwrap();
            world.sample.assert_at(&world.path());
            assert_ne!(inode(&world.shard()), inode(&world.held()));
            let copied = fs::read(world.shard()).unwrap();
            assert_eq!(copied, fs::read(world.held()).unwrap());
            assert_eq!(report.linked_bytes, 0);
            assert!(report.bytes > copied.len() as u64);
            let mut fallbacks = report.transport.fallbacks.iter();
            let fallback = fallbacks.find(|fallback| is_unlinked(fallback)).unwrap();
            assert!(fallback.reason.contains("is copied"), "{fallback:?}");
        }
    }
}

/// Bytes that do not match their digest are not copied into a checkpoint.
#[test]
fn a_damaged_file_is_not_copied() {
    for &engine in engines() {
        let world = World::new();
        let state = world.state();
        let mut bytes = fs::read(world.held()).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(world.held(), bytes).unwrap();
        let options = copying(engine, Direct::Auto, 2);
        let error = save(
            state,
            &publication(&world.path()),
            &options,
            &Progress::default(),
        )
        .expect_err("it is damaged");
        let Error::Corrupt {
            path,
            file,
            offset,
            tensor,
            ..
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!(
            (path.as_path(), file.as_deref()),
            (world.root.path(), Some("held"))
        );
        assert_eq!(*offset, Some(2 << 20));
        assert_eq!(tensor.as_deref(), Some("t4"));
        assert!(!world.path().exists(), "{:?}", names(&world.path()));
    }
}

#[test]
fn what_is_no_file_of_its_size_is_reported() {
    let world = World::new();
    for clones in [None, Some(true), Some(false)] {
        let options = clones.map_or_else(Options::default, |clones| unlinkable(EXDEV, clones));
        let refuse = |state: SaveState| {
            save(
                state,
                &publication(&world.path()),
                &options,
                &Progress::default(),
            )
            .expect_err("it is not what it should be")
        };
        let mut state = world.state();
        state.linked.files[0].bytes += 1;
        let error = refuse(state);
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        assert!(error.to_string().contains("held: it has"), "{error}");

        let state = world.state();
        let link = world.root.path().join("link");
        std::os::unix::fs::symlink(world.held(), &link).unwrap();
        let mut linked = world.state();
        linked.linked.files[0].path = link.clone();
        let error = refuse(linked).to_string();
        assert!(error.contains("symbolic link"), "{error}");
        fs::remove_file(link).unwrap();

        fs::remove_file(world.held()).unwrap();
        let error = refuse(state);
        assert!(matches!(error, Error::Storage { .. }), "{error}");
        assert!(!world.path().exists());
    }
}

#[test]
fn numbers_that_cannot_be_are_refused_before_anything_is_written() {
    let world = World::new();
    let spoil: [fn(&mut SaveState); 3] = [
        |state| state.linked.files[0].chunks.truncate(1),
        |state| state.linked.tensors[2].start += 1,
        |state| state.linked.tensors[0].spec.name = "t0".to_owned(),
    ];
    for spoil in spoil {
        let mut state = world.state();
        spoil(&mut state);
        let saved = save(
            state,
            &publication(&world.path()),
            &Options::default(),
            &Progress::default(),
        );
        assert!(matches!(saved, Err(Error::Unsupported { .. })), "{saved:?}");
        assert!(!world.path().exists());
    }
}

/// Fails the link, and all alternatives.
#[derive(Debug)]
struct Broken;

impl FileSystem for Broken {
    fn files(&self) -> &dyn Files {
        &Native
    }

    fn create(&self, path: &Path, direct: Direct) -> penstock_io::Result<File> {
        Native.create(path, direct)
    }

    fn change(&self, change: Change<'_>) -> penstock_io::Result<()> {
        match change {
            Change::Link { to, .. } => Err(penstock_io::Error::Storage {
                operation: change.operation(),
                path: to.to_owned(),
                source: std::io::Error::from_raw_os_error(EIO),
            }),
            change => Native.change(change),
        }
    }
}

#[test]
fn a_link_that_fails_leaves_nothing() {
    let world = World::new();
    let options = Options {
        file_system: Arc::new(Broken),
        ..Options::default()
    };
    let error = world.save(&options).expect_err("the link failed");
    assert_eq!(errno(&error), Some(EIO));
    assert!(!world.path().exists());
    assert_eq!(
        fs::read(world.held()).unwrap(),
        held::file_of(&world.sample, IN_FILE).0
    );
}

fn step(store: &Store, step: u64, overwrite: bool) -> Publication {
    Publication {
        step: Some(step),
        overwrite,
        ..publication(&store.step_path(step))
    }
}

/// Removing a checkpoint removes a name of the file, and does not change its bytes.
#[test]
fn the_other_name_keeps_its_bytes_whatever_becomes_of_the_checkpoint() {
    let world = World::new();
    let store = Store::new(world.root.path().join("store"));
    let (options, progress) = (Options::default(), Progress::default());
    let held = held::file_of(&world.sample, IN_FILE).0;
    let save = |number, overwrite| {
        let state = held::state(&world.sample, IN_FILE, &world.held());
        save(state, &step(&store, number, overwrite), &options, &progress).unwrap();
        world.sample.assert_at(&store.step_path(number));
    };
    world.state();
    save(1, false);
    save(1, true);
    save(2, false);
    save(3, false);
    // Several checkpoints, one file.
    store.delete(1).unwrap();
    store.retain(Some(1), None, Some(3)).unwrap();
    world.sample.assert_at(&store.step_path(3));
    let report = store.scrub(&Scrub::default(), &options, &progress).unwrap();
    assert_eq!(report.steps[0].outcome, Outcome::Verified);
    // A save that dies leaves its name of the file to a sweep.
    let mut attempt =
        Attempt::begin(&store.step_path(4), false, &options.file_system, &progress).unwrap();
    let state = held::state(&world.sample, IN_FILE, &world.held());
    let job = Job::new(
        state,
        attempt.path(),
        &options,
        &Staging {
            is_lazy: true,
            ..Staging::default()
        },
    );
    job.unwrap()
        .write_shards(&mut attempt, 0, &progress)
        .map(drop)
        .unwrap();
    std::mem::forget(attempt);
    fs::remove_file(world.held()).unwrap();
    world.sample.assert_at(&store.step_path(3));
    let linked = Checkpoint::open(&store.step_path(3))
        .unwrap()
        .part()
        .files
        .last()
        .unwrap()
        .name
        .clone();
    assert_eq!(fs::read(store.step_path(3).join(linked)).unwrap(), held);
}

/// A salvage copies linked files into files of its own.
#[test]
fn salvage_copies_what_was_linked() {
    let world = World::new();
    world.save(&Options::default()).unwrap();
    let (options, progress) = (Options::default(), Progress::default());
    let written = names(&world.path())
        .into_iter()
        .find(|name| name.starts_with("shard-00000-00"));
    fs::remove_file(world.path().join(written.unwrap())).unwrap();
    let out = world.root.path().join("out");
    let report = salvage(&world.path(), &out, false, &options, &options, &progress).unwrap();
    assert_eq!((report.tensors, report.missing.len()), (IN_FILE, 2));
    let taken = Checkpoint::open(&out).unwrap();
    assert!(
        taken
            .part()
            .tensors
            .iter()
            .all(|tensor| tensor.stored_name.is_none())
    );
    for file in taken.files() {
        let path = out.join(file.0);
        assert_ne!(inode(&path), inode(&world.held()));
    }
    let verified = verify(&out, &options, &progress).unwrap();
    assert!(verified.problems.is_empty(), "{:?}", verified.problems);
}
