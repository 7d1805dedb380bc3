//! Several savers and readers at one path: one saver wins, the others return that the checkpoint
//! exists, and a reader sees one checkpoint or another, never a mix.

use std::collections::HashMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::common::{Sample, load, names, only_winner, race};
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::steps::store::Store;
use penstock_store::{Error, Progress};

/// Environment variables that tell a child what to save and where.
const PATH: &str = "PENSTOCK_TEST_SAVE_PATH";
const SEED: &str = "PENSTOCK_TEST_SAVE_SEED";
/// Exit status of a child that found another saver's checkpoint.
const EXISTS_STATUS: i32 = 3;

#[test]
#[ignore = "not a test: a saver in a process of its own"]
fn child() {
    let Some(path) = std::env::var_os(PATH) else {
        return;
    };
    let seed = std::env::var(SEED).unwrap().parse().unwrap();
    match Sample::seeded(seed).save(Path::new(&path), &Options::default()) {
        Ok(_) => {}
        Err(Error::Exists { .. }) => std::process::exit(EXISTS_STATUS),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn one_of_several_threads_wins() {
    for _ in 0..25 {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/ckpt");
        let samples = [1, 2, 3].map(Sample::seeded);
        let results = race(&samples, |sample| sample.save(&path, &Options::default()));
        samples[only_winner(&results)].assert_at(&path);
        assert_eq!(names(&path).len(), 3, "the losers left nothing");
    }
}

#[test]
fn one_of_several_processes_wins() {
    for round in 0..5 {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let spawn = |seed: u64| {
            Command::new(std::env::current_exe().unwrap())
                .args(["concurrency::child", "--exact", "--ignored", "--nocapture"])
                .env(PATH, &path)
                .env(SEED, seed.to_string())
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        };
        let children: Vec<_> = (1..=3).map(|seed| (seed, spawn(seed))).collect();
        let mut winners = Vec::new();
        for (seed, mut child) in children {
            match child.wait().unwrap().code() {
                Some(0) => winners.push(seed),
                Some(EXISTS_STATUS) => {}
                other => panic!("round {round} seed {seed}: {other:?}"),
            }
        }
        assert_eq!(winners.len(), 1, "round {round}");
        Sample::seeded(winners[0]).assert_at(&path);
        assert_eq!(names(&path).len(), 3);
    }
}

/// Each replaces the other's checkpoint; none may remove the files of the current one.
#[test]
fn savers_that_replace_each_other_leave_a_whole_checkpoint() {
    for round in 0..25 {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let samples = [1, 2, 3].map(Sample::seeded);
        let start = Barrier::new(samples.len());
        thread::scope(|scope| {
            for sample in &samples {
                scope.spawn(|| {
                    start.wait();
                    sample.save_step(&path, None, true).unwrap();
                });
            }
        });
        let loaded = load(&path, &Options::default());
        let loaded = loaded.unwrap_or_else(|error| panic!("round {round}: {error}"));
        let found = samples.iter().filter(|sample| sample.is(&loaded)).count();
        assert_eq!(found, 1, "round {round}: one of them, whole");
    }
}

#[test]
fn a_reader_sees_the_old_or_the_new_and_never_a_mix() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let samples = [1, 2].map(Sample::seeded);
    samples[0].save(&path, &Options::default()).unwrap();
    let done = AtomicBool::new(false);
    let read = || {
        let (mut whole, mut errors) = (0, 0);
        while !done.load(Ordering::Relaxed) {
            match load(&path, &Options::default()) {
                Ok(loaded) => {
                    assert!(samples.iter().any(|sample| sample.is(&loaded)), "a mix");
                    whole += 1;
                }
                // The files were removed after it was opened, which is not reported as damage.
                Err(Error::Replaced { .. }) => errors += 1,
                Err(error) => panic!("{error}"),
            }
        }
        (whole, errors)
    };
    thread::scope(|scope| {
        let readers: Vec<_> = (0..2).map(|_| scope.spawn(read)).collect();
        for turn in 1..=60 {
            samples[turn % 2].save_step(&path, None, true).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        for reader in readers {
            let (whole, errors) = reader.join().unwrap();
            eprintln!("{whole} whole loads, {errors} clean errors");
            assert!(whole > 0);
        }
    });
    samples[0].assert_at(&path);
}

/// Nothing removes the files of an open checkpoint: not an overwrite, not a sweep, not a deletion,
/// not retention.
#[test]
fn what_a_reader_has_opened_stays_until_it_is_closed() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    for step in [1, 2, 3] {
        Sample::seeded(step)
            .save_step(&store.step_path(step), Some(step), false)
            .unwrap();
    }
    let path = store.step_path(1);
    let opened = Checkpoint::open(&path).unwrap();
    assert_eq!(store.retain(Some(1), None, Some(3)).unwrap(), [2]);
    let refused = store.delete(1).unwrap_err();
    assert!(refused.full_message().contains("busy"), "{refused}");
    assert!(refused.remedy().contains("load"), "{}", refused.remedy());
    Sample::seeded(9).save_step(&path, Some(1), true).unwrap();
    assert_eq!(store.sweep().unwrap(), []);
    let load_all = |checkpoint: &Checkpoint| {
        let options = Options::default();
        checkpoint.load(None, HashMap::new(), &options, &Progress::default())
    };
    assert!(Sample::seeded(1).is(&load_all(&opened).unwrap()));
    Sample::seeded(9).assert_at(&path);

    drop(opened);
    let swept = store.sweep().unwrap();
    assert_eq!(swept.len(), 1, "{swept:?}");
    assert_eq!(names(&path).len(), 3);
    Sample::seeded(9).assert_at(&path);
    store.delete(1).unwrap();
}

/// A reader that has released its lease blocks nobody, and learns that its files were replaced.
#[test]
fn a_checkpoint_replaced_after_it_was_released_says_so() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    Sample::seeded(1).save(&path, &Options::default()).unwrap();
    let opened = Checkpoint::open(&path).unwrap();
    opened.release();
    Sample::seeded(2).save_step(&path, None, true).unwrap();
    let options = Options::default();
    let error = opened
        .load(None, HashMap::new(), &options, &Progress::default())
        .unwrap_err();
    assert!(matches!(error, Error::Replaced { .. }), "{error}");
    Sample::seeded(2).assert_at(&path);
}

/// A training run saves, keeps two steps and sweeps, while readers open the newest step, delete
/// nothing and see only whole checkpoints, and another process sweeps continuously.
#[test]
fn readers_and_sweeps_beside_a_run_with_retention() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    Sample::seeded(1)
        .save_step(&store.step_path(1), Some(1), false)
        .unwrap();
    let done = AtomicBool::new(false);
    let read = || {
        let (mut whole, mut gone) = (0, 0);
        while !done.load(Ordering::Relaxed) {
            let step = *store.steps().unwrap().last().unwrap();
            match Checkpoint::open(&store.step_path(step)) {
                Ok(opened) => {
                    let options = Options::default();
                    let loaded = opened.load(None, HashMap::new(), &options, &Progress::default());
                    let loaded = loaded.unwrap_or_else(|error| {
                        panic!("step {step} was opened: {}", error.full_message())
                    });
                    assert!(Sample::seeded(step).is(&loaded), "step {step} is another");
                    whole += 1;
                }
                // Not committed yet, or retired since.
                Err(Error::Incomplete { .. } | Error::NotFound { .. }) => gone += 1,
                Err(error) => panic!("step {step}: {}", error.full_message()),
            }
        }
        (whole, gone)
    };
    let sweep = || {
        while !done.load(Ordering::Relaxed) {
            for (path, _) in store.sweep().unwrap() {
                eprintln!("swept {}", path.display());
            }
        }
    };
    thread::scope(|scope| {
        let readers: Vec<_> = (0..2).map(|_| scope.spawn(read)).collect();
        scope.spawn(sweep);
        for step in 2..=40 {
            let path = store.step_path(step);
            let saved = Sample::seeded(step).save_step(&path, Some(step), false);
            saved.unwrap_or_else(|error| panic!("step {step}: {}", error.full_message()));
            store.retain(Some(2), None, Some(step)).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        for reader in readers {
            let (whole, gone) = reader.join().unwrap();
            eprintln!("{whole} whole loads, {gone} not there");
            assert!(whole > 0);
        }
    });
    store.retain(Some(2), None, Some(40)).unwrap();
    assert_eq!(store.steps().unwrap(), [39, 40]);
}

/// Savers of different steps of one store do not block each other.
#[test]
fn savers_of_different_steps_all_succeed() {
    for _ in 0..10 {
        let root = tempfile::tempdir().unwrap();
        let store = Store::new(root.path().join("new/store"));
        let start = Barrier::new(4);
        thread::scope(|scope| {
            for step in 1..=4 {
                let (store, start) = (&store, &start);
                scope.spawn(move || {
                    start.wait();
                    let path = store.step_path(step);
                    Sample::seeded(step)
                        .save_step(&path, Some(step), false)
                        .unwrap();
                    store.sweep().unwrap();
                });
            }
        });
        assert_eq!(store.steps().unwrap(), [1, 2, 3, 4]);
        for step in 1..=4 {
            Sample::seeded(step).assert_at(&store.step_path(step));
        }
    }
}
