//! A store orders steps by number, keeps the steps that retention promises to keep, and removes
//! only its own dead files.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use crate::common::hook::hooked;
use crate::common::{self, Sample, engines, forge, load, names};
use penstock_store::options::Options;
use penstock_store::save::{Publication, save};
use penstock_store::steps::retention::Kept;
use penstock_store::steps::store::{StepState, Store};
use penstock_store::{Error, MANIFEST, Progress};

/// Saves the steps, in this order.
fn store_with(root: &Path, steps: &[u64]) -> Store {
    let store = Store::new(root);
    for &step in steps {
        save_step(&store, step);
    }
    store
}

fn save_step(store: &Store, step: u64) -> String {
    let path = store.step_path(step);
    let report = Sample::of_sizes(&[1000]).save_step(&path, Some(step), false);
    report.unwrap().id
}

fn damage(store: &Store, step: u64) {
    let shard = forge::shard_path(&store.step_path(step));
    fs::write(shard, "cut").unwrap();
}

fn is_complete(store: &Store, step: u64) -> bool {
    matches!(store.state(step), Ok(StepState::Complete(_)))
}

#[test]
fn steps_are_ordered_by_number() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[100, 9, 10_000_000_000, 20, 0]);
    assert_eq!(store.steps().unwrap(), [0, 9, 20, 100, 10_000_000_000]);
}

#[test]
fn a_store_need_not_exist() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path().join("a/b"));
    assert!(store.steps().unwrap().is_empty());
    assert!(store.sweep().unwrap().is_empty());
    assert!(store.retain(Some(1), None, None).unwrap().is_empty());
    assert!(matches!(store.state(1), Err(Error::NotFound { .. })));
    assert!(matches!(store.delete(1), Err(Error::NotFound { .. })));
    assert!(!store.root().exists(), "asking creates nothing");
    save_step(&store, 1);
    assert_eq!(store.steps().unwrap(), [1]);
}

#[test]
fn what_only_looks_like_a_step_is_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[5]);
    let strangers = [
        "step-1",
        "step-00000000005",
        "step-+000000001",
        "step-0000000006.bak",
        "backup",
    ];
    for stranger in strangers {
        fs::create_dir(root.path().join(stranger)).unwrap();
    }
    fs::write(root.path().join("step-0000000007"), "a file").unwrap();
    assert_eq!(store.steps().unwrap(), [5]);
    store.sweep().unwrap();
    store.retain(Some(1), None, None).unwrap();
    for stranger in strangers {
        assert!(root.path().join(stranger).is_dir(), "{stranger}");
    }
    assert!(root.path().join("step-0000000007").is_file());
}

#[test]
fn the_state_of_each_step_is_reported() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[1, 2, 3, 4]);
    fs::remove_file(store.step_path(2).join(MANIFEST)).unwrap();
    damage(&store, 3);
    fs::write(store.step_path(4).join(MANIFEST), "{}").unwrap();
    fs::create_dir(store.step_path(5)).unwrap();
    // A checkpoint under another step's name would be loaded as the wrong step.
    fs::rename(store.step_path(1), store.step_path(6)).unwrap();
    save_step(&store, 1);
    assert!(is_complete(&store, 1));
    assert!(matches!(store.state(2), Ok(StepState::Incomplete)));
    assert!(matches!(store.state(3), Ok(StepState::Damaged(_))));
    assert!(matches!(store.state(4), Ok(StepState::Damaged(_))));
    assert!(matches!(store.state(5), Ok(StepState::Incomplete)));
    assert!(matches!(store.state(6), Ok(StepState::Damaged(_))));
}

#[test]
fn retention_keeps_the_newest_and_the_multiples() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[10, 20, 30, 40, 50, 60]);
    assert!(store.retain(None, Some(20), None).unwrap().is_empty());
    assert!(store.retain(Some(6), None, None).unwrap().is_empty());
    assert_eq!(store.retain(Some(2), Some(20), None).unwrap(), [10, 30]);
    assert_eq!(store.steps().unwrap(), [20, 40, 50, 60]);
    assert_eq!(store.retain(Some(1), None, None).unwrap(), [20, 40, 50]);
    assert_eq!(
        store.retain(Some(0), None, None).unwrap(),
        [] as [u64; 0],
        "never the last"
    );
    assert!(is_complete(&store, 60));
}

#[test]
fn the_newest_verified_checkpoint_is_never_deleted() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[1, 2]);
    let id = save_step(&store, 3);
    store.mark_verified(3, &id).unwrap();
    for step in 4..8 {
        save_step(&store, step);
    }
    assert_eq!(store.retain(Some(2), None, None).unwrap(), [1, 2, 4, 5]);
    assert_eq!(store.steps().unwrap(), [3, 6, 7]);
    // An older mark does not replace a newer one; a newer one replaces it.
    store.mark_verified(1, &id).unwrap();
    assert!(store.retain(Some(2), None, None).unwrap().is_empty());
    let id = save_step(&store, 8);
    store.mark_verified(8, &id).unwrap();
    assert_eq!(store.retain(Some(1), None, None).unwrap(), [3, 6, 7]);
}

/// A mark of a replaced checkpoint applies to no other one.
#[test]
fn a_replaced_checkpoint_is_no_longer_the_verified_one() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    let id_1 = save_step(&store, 1);
    let id_9 = save_step(&store, 9);
    store.mark_verified(9, &id_9).unwrap();
    let replacement = Sample::of_sizes(&[2000]);
    replacement
        .save_step(&store.step_path(9), Some(9), true)
        .unwrap();
    store.mark_verified(1, &id_1).unwrap();
    for step in [10, 11] {
        save_step(&store, step);
    }
    store.retain(Some(1), None, None).unwrap();
    assert!(is_complete(&store, 1), "the newest that was read back");
}

/// An unreadable file of marks may have protected the only good checkpoint. Only a scrub repairs
/// it: a new file with one mark would pass for complete.
#[test]
fn while_marks_cannot_be_read_nothing_is_deleted() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[1, 2]);
    let id = save_step(&store, 3);
    let marks = root.path().join("verified.json");
    for text in ["", "{}", "[1]", "{\"step\":-1,\"id\":\"\"}"] {
        fs::write(&marks, text).unwrap();
        let error = store.retain(Some(1), None, None).unwrap_err();
        assert!(error.to_string().contains("verified.json"), "{error}");
        assert_eq!(store.steps().unwrap(), [1, 2, 3], "{text}");
    }
    store.mark_verified(3, &id).unwrap();
    store.retain(Some(1), None, None).unwrap_err();
    let scrub = penstock_store::steps::scrub::Scrub {
        bytes_per_second: None,
        max_age: None,
    };
    store
        .scrub(&scrub, &Options::default(), &Progress::default())
        .unwrap();
    assert_eq!(store.retain(Some(1), None, None).unwrap(), [1, 2]);
    // Nor if the file exists but cannot be read.
    fs::remove_file(&marks).unwrap();
    std::os::unix::fs::symlink(&marks, &marks).unwrap();
    save_step(&store, 4);
    store.retain(Some(1), None, None).unwrap_err();
    assert_eq!(store.steps().unwrap(), [3, 4]);
}

/// The newest verified checkpoint is sought among those that count: not one that lost a file since,
/// nor one on an abandoned branch.
#[test]
fn the_newest_good_one_of_those_that_count_is_kept() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    for step in [3, 5, 9] {
        let id = save_step(&store, step);
        if step < 9 {
            store.mark_verified(step, &id).unwrap();
        }
    }
    let shards = names(&store.step_path(5));
    let shard = shards.iter().find(|name| name.starts_with("shard"));
    fs::remove_file(store.step_path(5).join(shard.unwrap())).unwrap();
    assert_eq!(
        store.retain(Some(1), None, Some(9)).unwrap(),
        Vec::<u64>::new()
    );

    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    for step in [1, 9] {
        let id = save_step(&store, step);
        store.mark_verified(step, &id).unwrap();
    }
    save_step(&store, 2);
    assert_eq!(
        store.retain(Some(1), None, Some(2)).unwrap(),
        Vec::<u64>::new()
    );
}

/// Between the plan and its execution, the step that was to stay may turn out to be damaged.
#[test]
fn what_became_the_only_good_one_since_it_was_doomed_stays() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    let ids: Vec<String> = (1..=3).map(|step| save_step(&store, step)).collect();
    store.mark_verified(1, &ids[0]).unwrap();
    store.mark_verified(3, &ids[2]).unwrap();
    let doomed = vec![(1, ids[0].clone()), (2, ids[1].clone())];
    store.mark_damaged(3, &ids[2]).unwrap();
    assert_eq!(
        store.retire(&doomed).unwrap(),
        Vec::<u64>::new(),
        "no other good one stays"
    );
    store.mark_verified(3, &ids[2]).unwrap();
    assert_eq!(store.retire(&doomed).unwrap(), [1, 2]);
}

/// Only its protection distinguishes it from a dead save: its remaining files are kept.
#[test]
fn a_protected_step_that_lost_its_manifest_is_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[1, 2]);
    store.protect(1).unwrap();
    let path = store.step_path(1);
    fs::remove_file(path.join(MANIFEST)).unwrap();
    let before = names(&path);
    assert!(matches!(store.state(1), Ok(StepState::Damaged(_))));
    assert!(store.sweep().unwrap().is_empty());
    let again = Sample::seeded(3).save_step(&path, Some(1), false);
    assert!(matches!(again, Err(Error::Protected { .. })), "{again:?}");
    assert!(store.delete(1).is_err());
    assert_eq!(names(&path), before);
    store.delete_protected(1).unwrap();
    assert!(!path.exists());
}

/// A directory that was renamed holds another step's checkpoint.
#[test]
fn a_checkpoint_at_another_step_is_not_that_step() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[1]);
    assert!(store.identity(1).unwrap().is_some());
    fs::rename(store.step_path(1), store.step_path(9)).unwrap();
    let error = store.identity(9).unwrap_err();
    assert!(error.to_string().contains("belongs to step 1"), "{error}");
}

#[test]
fn a_step_that_is_a_link_does_not_stop_retention() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[2, 3, 4]);
    let elsewhere = tempfile::tempdir().unwrap();
    let other = Store::new(elsewhere.path());
    save_step(&other, 1);
    std::os::unix::fs::symlink(other.step_path(1), store.step_path(1)).unwrap();
    assert_eq!(store.retain(Some(1), None, None).unwrap(), [2, 3]);
    assert!(is_complete(&other, 1));
}

/// Readers refuse larger metadata, so it is refused before the old checkpoint is replaced.
#[test]
fn metadata_beyond_what_readers_take_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let sample = common::Sample::seeded(1);
    sample.save_step(&path, None, false).unwrap();
    let text = format!("{{\"note\":\"{}\"}}", "x".repeat(65 << 20));
    let publication = penstock_store::save::Publication {
        metadata: serde_json::value::RawValue::from_string(text).unwrap(),
        overwrite: true,
        ..common::publication(&path)
    };
    let (options, progress) = (Options::default(), penstock_store::Progress::default());
    let state = common::Sample::seeded(2).state();
    let error = penstock_store::save::save(state, &publication, &options, &progress).unwrap_err();
    assert!(
        matches!(&error, Error::Unsupported { key, .. } if key == "metadata"),
        "{error}"
    );
    sample.assert_at(&path);
}

/// A damaged checkpoint may yet be repaired, and does not count among those to keep.
#[test]
fn damaged_checkpoints_are_neither_counted_nor_deleted() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[1, 2, 3, 4, 5]);
    damage(&store, 1);
    damage(&store, 5);
    fs::remove_file(store.step_path(4).join(MANIFEST)).unwrap();
    assert_eq!(store.retain(Some(1), None, None).unwrap(), [2]);
    store.sweep().unwrap();
    assert_eq!(store.steps().unwrap(), [1, 3, 5]);
    assert!(is_complete(&store, 3));
    assert!(names(&store.step_path(1)).len() == 3, "nothing was touched");
}

/// A directory that cannot be opened must not stop the care of all others.
#[test]
fn one_odd_step_does_not_stop_the_others() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[1, 2, 3]);
    fs::create_dir_all(store.step_path(9).join(MANIFEST)).unwrap();
    fs::remove_file(store.step_path(1).join(MANIFEST)).unwrap();
    assert_eq!(store.retain(Some(1), None, None).unwrap(), [2]);
    assert_eq!(store.sweep().unwrap().len(), 1, "the remains of step 1");
    assert_eq!(store.steps().unwrap(), [3, 9]);
}

/// On a bad sector, or owned by another user: the state of the step is unknown.
#[test]
fn a_step_that_cannot_be_read_is_reported_kept_and_in_nobodys_way() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[1, 2, 3]);
    let path = store.step_path(1);
    fs::remove_dir_all(&path).unwrap();
    // A link to itself, which not even root can look up.
    std::os::unix::fs::symlink(&path, &path).unwrap();
    let state = store.state(1).unwrap();
    assert!(
        matches!(&state, StepState::Unreadable(Error::Storage { .. })),
        "{state:?}"
    );
    assert_eq!(store.retain(Some(1), None, Some(3)).unwrap(), [2]);
    assert_eq!(store.steps().unwrap(), [1, 3]);
    let kept = store.plan_retention(Some(1), None, None).unwrap()[0].kept;
    assert_eq!(kept, Some(Kept::Unreadable));
    assert!(store.sweep().unwrap().is_empty());
    assert!(store.orphans().unwrap().is_empty());
    assert!(path.is_symlink());
}

#[test]
fn a_store_that_cannot_be_listed_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    fs::write(&file, "no directory").unwrap();
    let store = Store::new(file);
    assert!(matches!(store.steps(), Err(Error::Storage { .. })));
    assert!(matches!(store.sweep(), Err(Error::Storage { .. })));
    let planned = store.plan_retention(Some(1), None, None);
    assert!(matches!(planned, Err(Error::Storage { .. })));
}

#[test]
fn a_deletion_that_stops_leaves_no_broken_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[1]);
    let path = store.step_path(1);
    // A directory in place of a file that the deletion removes: it stops there.
    fs::create_dir(path.join(format!("part-00001.{}.json", forge::ATTEMPT))).unwrap();
    store.delete(1).expect_err("it cannot remove a directory");
    assert!(matches!(store.state(1), Ok(StepState::Incomplete)));
}

#[test]
fn deletion_frees_all_that_is_ours_and_nothing_else() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[1]);
    let report = Sample::of_sizes(&[5000, 70_000]).save_step(&store.step_path(2), Some(2), false);
    assert_eq!(store.delete(2).unwrap(), report.unwrap().bytes);
    assert_eq!(store.steps().unwrap(), [1]);
    fs::write(store.step_path(1).join("notes.txt"), "mine").unwrap();
    store.delete(1).unwrap();
    assert_eq!(names(&store.step_path(1)), ["notes.txt"]);
    store.delete(1).unwrap();
    fs::remove_file(store.step_path(1).join("notes.txt")).unwrap();
    store.delete(1).unwrap();
    assert!(store.steps().unwrap().is_empty());
}

#[test]
fn sweep_removes_orphans_and_only_them() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[1, 2, 3]);
    // Step 1 died before its manifest; step 2 is complete, with files of an earlier attempt.
    fs::remove_file(store.step_path(1).join(MANIFEST)).unwrap();
    let whole = names(&store.step_path(2));
    for name in ["shard-00000-00.X.safetensors", "manifest.X.tmp"] {
        let orphan = name.replace('X', forge::ATTEMPT);
        fs::write(store.step_path(2).join(orphan), vec![0; 50]).unwrap();
    }
    for foreign in ["notes.txt", "manifest.json.bak", "model.safetensors"] {
        fs::write(store.step_path(3).join(foreign), "mine").unwrap();
    }
    let with_foreign = names(&store.step_path(3));
    fs::create_dir(store.step_path(4)).unwrap();
    let swept = store.sweep().unwrap();
    let paths: Vec<_> = swept.iter().map(|(path, _)| path.clone()).collect();
    assert_eq!(paths, [1, 2, 4].map(|step| store.step_path(step)));
    assert_eq!(swept[1].1, 100);
    assert_eq!(store.steps().unwrap(), [2, 3]);
    assert_eq!(names(&store.step_path(2)), whole);
    assert_eq!(names(&store.step_path(3)), with_foreign);
    assert!(is_complete(&store, 2) && is_complete(&store, 3));
    assert!(
        store.sweep().unwrap().is_empty(),
        "and then nothing is left"
    );
}

/// A run resumes from step 20 after a loss spike, in the same store.
#[test]
fn what_was_just_saved_is_kept_below_later_steps() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), &[10, 20, 90, 100]);
    for step in [21, 22, 23] {
        save_step(&store, step);
        store.retain(Some(2), None, Some(step)).unwrap();
        assert!(is_complete(&store, step), "{step}");
    }
    assert_eq!(store.steps().unwrap(), [22, 23, 90, 100]);
}

#[test]
fn the_newest_verified_is_kept_when_a_newer_verified_one_is_replaced() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    for step in [10, 20] {
        let id = save_step(&store, step);
        store.mark_verified(step, &id).unwrap();
    }
    let path = store.step_path(20);
    let sample = Sample::of_sizes(&[1000]);
    sample.save_step(&path, Some(20), true).unwrap();
    save_step(&store, 30);
    assert_eq!(store.retain(Some(1), None, Some(30)).unwrap(), [20]);
    assert_eq!(store.steps().unwrap(), [10, 30]);
}

#[test]
fn a_link_among_the_steps_is_not_deleted_through() {
    let root = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let other = store_with(elsewhere.path(), &[1]);
    let store = Store::new(root.path());
    std::os::unix::fs::symlink(other.step_path(1), store.step_path(1)).unwrap();
    assert!(matches!(store.delete(1), Err(Error::Storage { .. })));
    assert!(is_complete(&other, 1));
}

/// The save stops in the middle, others try to remove its files, the save continues.
#[test]
fn a_live_attempt_is_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    let sample = Sample::seeded(1);
    let (reached, at_write) = mpsc::channel();
    let (resume, resumed) = mpsc::channel();
    let resumed = Mutex::new(resumed);
    let options = hooked(engines()[0], move |operation| {
        if operation == 2 {
            reached.send(()).unwrap();
            resumed.lock().unwrap().recv().unwrap();
        }
    });
    let path = store.step_path(1);
    thread::scope(|scope| {
        let saving = scope.spawn(|| sample.save(&path, &options));
        at_write.recv().unwrap();
        assert!(store.sweep().unwrap().is_empty());
        assert_eq!(store.retain(Some(1), None, None).unwrap(), [0; 0]);
        let error = store.delete(1).unwrap_err();
        let Error::Storage { source, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(source.kind(), io::ErrorKind::ResourceBusy);
        resume.send(()).unwrap();
        saving.join().unwrap().unwrap();
    });
    sample.assert_at(&path);
}

/// Another process sweeps at any moment: no save fails because of it, and no saved file is lost.
#[test]
fn sweeps_at_any_moment_harm_no_save() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    let done = Arc::new(AtomicBool::new(false));
    let sweeping = {
        let (store, done) = (store.clone(), Arc::clone(&done));
        thread::spawn(move || {
            while !done.load(Ordering::Relaxed) {
                store.sweep().unwrap();
            }
        })
    };
    let sample = Sample::of_sizes(&[10_000, 300]);
    let mut failures = Vec::new();
    for step in 0..150 {
        let path = store.step_path(step);
        let saved = sample.save_step(&path, Some(step), false);
        let loaded = saved.and_then(|_| load(&path, &Options::default()));
        if let Err(error) = loaded {
            failures.push(format!("step {step}: {error}"));
        }
    }
    done.store(true, Ordering::Relaxed);
    sweeping.join().unwrap();
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn a_step_without_a_recorded_number_belongs_where_it_lies() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    let sample = Sample::of_sizes(&[10]);
    let publication = Publication {
        step: None,
        ..common::publication(&store.step_path(3))
    };
    let progress = Progress::default();
    save(sample.state(), &publication, &Options::default(), &progress).unwrap();
    let StepState::Complete(checkpoint) = store.state(3).unwrap() else {
        panic!("it is complete")
    };
    let loaded = checkpoint
        .load(None, HashMap::new(), &Options::default(), &progress)
        .unwrap();
    assert!(sample.is(&loaded));
}
