//! A scrub reads the steps with the oldest marks first, within its rate limit, records the results,
//! and resumes after an interruption.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::hook::hooked;
use crate::common::{self, Sample, engines, faulty, forge};
use penstock_io::faulty::{Failure, Faults, OpClass, Repeat};
use penstock_store::options::Options;
use penstock_store::steps::scrub::{Outcome, Scrub, ScrubReport};
use penstock_store::steps::store::Store;
use penstock_store::{Error, MANIFEST, Progress};

const MIB: u64 = 1 << 20;

fn save_step(store: &Store, step: u64, sizes: &[usize]) -> String {
    let path = store.step_path(step);
    let report = Sample::of_sizes(sizes).save_step(&path, Some(step), false);
    report.unwrap().id
}

fn store_with(root: &Path, steps: &[u64]) -> Store {
    let store = Store::new(root);
    for &step in steps {
        save_step(&store, step, &[1000]);
    }
    store
}

fn scrub_with(store: &Store, scrub: &Scrub, options: &Options) -> ScrubReport {
    let report = store.scrub(scrub, options, &Progress::default());
    report.unwrap()
}

fn scrub(store: &Store, scrub: &Scrub) -> ScrubReport {
    scrub_with(store, scrub, &Options::default())
}

fn outcomes(report: &ScrubReport) -> Vec<(u64, Outcome)> {
    let outcome = |step: &penstock_store::steps::scrub::ScrubbedStep| (step.step, step.outcome);
    report.steps.iter().map(outcome).collect()
}

fn flip_last_byte(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(file, bytes).unwrap();
}

/// Writes marks with given times.
fn write_marks(store: &Store, marks: &[(u64, &str, u64)]) {
    let mark = |&(step, id, at_seconds): &(u64, &str, u64)| serde_json::json!({"step": step, "id": id, "at_seconds": at_seconds});
    let marks: Vec<_> = marks.iter().map(mark).collect();
    let text = serde_json::to_vec(&marks).unwrap();
    fs::write(store.root().join("verified.json"), text).unwrap();
}

/// The steps that a scrub reads, in order.
fn order_of_reading(store: &Store, plan: &Scrub) -> Vec<u64> {
    let mut order = Vec::new();
    for _ in 0..20 {
        // Stopped as soon as a step is marked, so each pass reads one more.
        let before = store.marks().unwrap();
        let progress = Arc::new(Progress::default());
        let (stopping, marked, watched) = (Arc::clone(&progress), before.clone(), store.clone());
        let options = hooked(engines()[0], move |_| {
            if watched.marks().unwrap() != marked {
                stopping.cancel();
            }
        });
        let result = store.scrub(plan, &options, &progress);
        let after = store.marks().unwrap();
        let changed = after.iter().filter(|mark| !before.contains(mark));
        order.extend(changed.map(|mark| mark.step));
        match result {
            Ok(_) => return order,
            Err(error) => assert!(matches!(error, Error::Interrupted), "{error}"),
        }
    }
    panic!("it never gets to the end: {order:?}")
}

#[test]
fn every_step_is_reported_with_what_came_of_it() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[1, 2, 3, 4, 5]);
    flip_last_byte(&forge::shard_path(&store.step_path(2)));
    fs::write(forge::shard_path(&store.step_path(3)), "cut").unwrap();
    fs::remove_file(store.step_path(4).join(MANIFEST)).unwrap();
    let expected = [
        (1, Outcome::Verified),
        (2, Outcome::Damaged),
        (3, Outcome::Damaged),
        (4, Outcome::Skipped),
        (5, Outcome::Verified),
    ];
    let report = scrub(&store, &Scrub::default());
    assert_eq!(outcomes(&report), expected);
    assert_eq!(report.steps[1].problems[0].tensor.as_deref(), Some("t0"));
    let total: u64 = fs::read_dir(store.step_path(1))
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum();
    assert_eq!(report.steps[0].bytes_checked, total);

    // The next scrub has nothing to read, and keeps its records.
    let again = scrub(&store, &Scrub::default());
    let outcome = |(step, outcome)| match outcome {
        Outcome::Verified => (step, Outcome::Skipped),
        other => (step, other),
    };
    assert_eq!(outcomes(&again), expected.map(outcome));
    assert!(again.steps.iter().all(|step| step.bytes_checked == 0));
    assert!(again.steps[0].read_at_seconds.is_some());
}

#[test]
fn what_was_never_read_comes_first_and_then_the_oldest_mark() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    let ids: Vec<String> = (0..6).map(|step| save_step(&store, step, &[10])).collect();
    write_marks(
        &store,
        &[(1, &ids[1], 2000), (3, &ids[3], 1000), (4, &ids[4], 3000)],
    );
    let plan = Scrub {
        max_age: Some(Duration::from_secs(3600)),
        ..Scrub::default()
    };
    assert_eq!(order_of_reading(&store, &plan), [5, 2, 0, 3, 1, 4]);
}

#[test]
fn a_mark_holds_until_it_is_too_old() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    let ids: Vec<String> = (0..4).map(|step| save_step(&store, step, &[10])).collect();
    let now = std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .unwrap()
        .as_secs();
    let (young, old, ahead) = (now - 100, now - 10_000, now + 10_000);
    write_marks(
        &store,
        &[
            (0, &ids[0], young),
            (1, &ids[1], old),
            (2, &ids[2], 0),
            (3, &ids[3], ahead),
        ],
    );
    let report = scrub(&store, &Scrub::default());
    let unread =
        |step: &penstock_store::steps::scrub::ScrubbedStep| step.outcome == Outcome::Skipped;
    assert!(report.steps.iter().all(unread), "once was enough");
    let plan = Scrub {
        max_age: Some(Duration::from_secs(1000)),
        ..Scrub::default()
    };
    let expected = [
        (0, Outcome::Skipped),
        (1, Outcome::Verified),
        (2, Outcome::Verified),
        // The clock was wrong, so the age of the mark is unknown.
        (3, Outcome::Verified),
    ];
    assert_eq!(outcomes(&scrub(&store, &plan)), expected);
    let everything = Scrub {
        max_age: Some(Duration::ZERO),
        ..Scrub::default()
    };
    let report = scrub(&store, &everything);
    assert!(report.steps.iter().all(|step| step.bytes_checked > 0));
}

#[test]
fn damage_takes_the_mark_away_and_repair_gives_it_back() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[1]);
    let everything = Scrub {
        max_age: Some(Duration::ZERO),
        ..Scrub::default()
    };
    scrub(&store, &everything);
    assert!(!store.marks().unwrap()[0].is_damaged);
    let shard = forge::shard_path(&store.step_path(1));
    flip_last_byte(&shard);
    scrub(&store, &everything);
    assert!(store.marks().unwrap()[0].is_damaged);
    let known = scrub(&store, &Scrub::default());
    assert_eq!(outcomes(&known), [(1, Outcome::Damaged)]);
    assert_eq!(known.steps[0].bytes_checked, 0, "it is not read again yet");
    flip_last_byte(&shard);
    scrub(&store, &everything);
    assert!(!store.marks().unwrap()[0].is_damaged);
}

/// Unreadable sectors are one kind of damage that scrubs exist to find.
#[test]
fn bytes_that_cannot_be_read_are_damage_with_a_place() {
    for &engine in engines() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::new(root.path());
        save_step(&store, 1, &[3 << 20]);
        let failure = Failure {
            class: Some(OpClass::Read),
            nth: 2,
            repeat: Repeat::Forever,
            errno: 5,
        };
        let options = Options {
            io_threads: Some(1),
            queue_depth: Some(1),
            ..faulty(engine, Arc::new(Faults::new(1).fail(failure)))
        };
        let report = scrub_with(&store, &Scrub::default(), &options);
        assert_eq!(outcomes(&report), [(1, Outcome::Damaged)]);
        let problem = &report.steps[0].problems[0];
        assert_eq!(
            (problem.offset, problem.tensor.as_deref()),
            (Some(MIB), Some("t0"))
        );
        let reason = io::Error::from_raw_os_error(5).to_string();
        assert!(problem.detail.contains(&reason), "{}", problem.detail);
        // The device may return them later, or to another host.
        assert!(store.marks().unwrap().is_empty());
    }
}

#[test]
fn a_scrub_reads_no_faster_than_told() {
    const RATE: u64 = 8 * MIB;
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    for step in [1, 2] {
        save_step(&store, step, &[6 << 20]);
    }
    let times: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let submitted = Arc::clone(&times);
    let options = hooked(engines()[0], move |_| {
        submitted.lock().unwrap().push(Instant::now());
    });
    let plan = Scrub {
        bytes_per_second: Some(RATE),
        ..Scrub::default()
    };
    let begun = Instant::now();
    let report = scrub_with(&store, &plan, &options);
    assert!(
        report
            .steps
            .iter()
            .all(|step| step.outcome == Outcome::Verified)
    );
    assert!(
        begun.elapsed() >= Duration::from_millis(1500),
        "12 MiB at 8 MiB/s"
    );
    let times = times.lock().unwrap();
    assert!(times.len() >= 12);
    for (index, &first) in times.iter().enumerate() {
        let within = times[index..]
            .iter()
            .filter(|&&time| time < first + Duration::from_secs(1));
        let requests = within.count() as u64;
        // One that ends in the second, one whose thread was late, and the empty one at the end of a
        // file.
        assert!(requests <= RATE / MIB + 3, "{requests} requests of 1 MiB");
    }
}

#[test]
fn a_slow_scrub_stops_when_told() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    save_step(&store, 1, &[3 << 20]);
    let progress = Arc::new(Progress::default());
    let watched = Arc::clone(&progress);
    let plan = Scrub {
        bytes_per_second: Some(1),
        ..Scrub::default()
    };
    let scrubbing = {
        let store = store.clone();
        std::thread::spawn(move || store.scrub(&plan, &Options::default(), &progress))
    };
    watched.cancel();
    let result = common::within_a_minute("a scrub", move || scrubbing.join().unwrap());
    assert!(matches!(result, Err(Error::Interrupted)));
}

#[test]
fn progress_counts_all_steps_together() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[1, 2, 3]);
    let progress = Progress::default();
    store
        .scrub(&Scrub::default(), &Options::default(), &progress)
        .unwrap();
    let shard_bytes = |step| {
        fs::metadata(forge::shard_path(&store.step_path(step)))
            .unwrap()
            .len()
    };
    let total: u64 = [1, 2, 3].map(shard_bytes).iter().sum();
    assert_eq!(progress.bytes(), (total, total));
}

#[test]
fn a_store_with_nothing_in_it_is_scrubbed_at_once() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path().join("none"));
    assert!(scrub(&store, &Scrub::default()).steps.is_empty());
    assert!(!store.root().exists());
}
