//! Several savers and readers at one path: one saver wins, the others are told, and a reader sees
//! one checkpoint or another, never a mix.

mod common;

use std::collections::HashMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::{Sample, load, names};
use penstock_store::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::{Error, Progress, Result};

/// The variables that tell a child where to save what.
const PATH: &str = "PENSTOCK_TEST_SAVE_PATH";
const SEED: &str = "PENSTOCK_TEST_SAVE_SEED";
/// How a child ends that found somebody else's checkpoint.
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
    for round in 0..25 {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/ckpt");
        let samples = [1, 2, 3].map(Sample::seeded);
        let start = Barrier::new(samples.len());
        let attempt = |sample: &Sample| {
            start.wait();
            sample.save(&path, &Options::default()).map(drop)
        };
        let results: Vec<Result<()>> = thread::scope(|scope| {
            let savers: Vec<_> = samples
                .iter()
                .map(|sample| scope.spawn(|| attempt(sample)))
                .collect();
            savers
                .into_iter()
                .map(|saver| saver.join().unwrap())
                .collect()
        });
        let winners: Vec<_> = (0..3).filter(|&index| results[index].is_ok()).collect();
        assert_eq!(winners.len(), 1, "round {round}: {results:?}");
        for result in &results {
            assert!(
                matches!(result, Ok(()) | Err(Error::Exists { .. })),
                "round {round}: {result:?}"
            );
        }
        samples[winners[0]].assert_at(&path);
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
                .args(["child", "--exact", "--ignored", "--nocapture"])
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

/// Each replaces the other's checkpoint; none may take the files of the one that is current.
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
                // The files went away after it was opened, which is told from damage.
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

/// What was opened is gone, which is no damage and says so.
#[test]
fn a_checkpoint_replaced_after_it_was_opened_says_so() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    Sample::seeded(1).save(&path, &Options::default()).unwrap();
    let opened = Checkpoint::open(&path).unwrap();
    Sample::seeded(2).save_step(&path, None, true).unwrap();
    let options = Options::default();
    let error = opened
        .load(None, HashMap::new(), &options, &Progress::default())
        .unwrap_err();
    assert!(matches!(error, Error::Replaced { .. }), "{error}");
    Sample::seeded(2).assert_at(&path);
}
