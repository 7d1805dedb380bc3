//! Retention is predictable: it announces its decisions and reasons, and keeps protected steps,
//! verified ones and other people's directories.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::thread;

use crate::common::{Sample, names};
use penstock_io::faulty::{Faults, FaultyFileSystem};
use penstock_io::file_system::Native;
use penstock_store::steps::retention::Kept;
use penstock_store::steps::store::{StepState, Store};
use penstock_store::{Error, MANIFEST};

fn save_step(store: &Store, step: u64) -> String {
    let path = store.step_path(step);
    let report = Sample::of_sizes(&[1000]).save_step(&path, Some(step), false);
    report.unwrap().id
}

fn store_with(root: &Path, steps: impl IntoIterator<Item = u64>) -> Store {
    let store = Store::new(root);
    for step in steps {
        save_step(&store, step);
    }
    store
}

fn is_complete(store: &Store, step: u64) -> bool {
    matches!(store.state(step), Ok(StepState::Complete(_)))
}

/// Steps with the reason to keep them.
fn reasons(store: &Store, keep_last: Option<u64>, keep_every: Option<u64>) -> Vec<Option<Kept>> {
    let verdicts = store.plan_retention(keep_last, keep_every, None).unwrap();
    let steps: Vec<u64> = verdicts.iter().map(|verdict| verdict.step).collect();
    assert_eq!(steps, store.steps().unwrap());
    verdicts.into_iter().map(|verdict| verdict.kept).collect()
}

#[test]
fn a_plan_says_what_goes_and_why_the_rest_stays() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), [10, 20, 30, 40, 50, 60, 70, 80]);
    let StepState::Complete(checkpoint) = store.state(30).unwrap() else {
        panic!("it is complete")
    };
    store
        .mark_verified(30, &checkpoint.manifest().id.clone())
        .unwrap();
    store.protect(20).unwrap();
    fs::remove_file(store.step_path(60).join(MANIFEST)).unwrap();
    fs::write(store.step_path(70).join(MANIFEST), "{}").unwrap();
    let expected = [
        None,
        Some(Kept::Protected),
        Some(Kept::Verified),
        Some(Kept::Multiple),
        Some(Kept::Newest),
        Some(Kept::Incomplete),
        Some(Kept::Damaged),
        Some(Kept::Newest),
    ];
    assert_eq!(reasons(&store, Some(2), Some(40)), expected);
    assert_eq!(store.steps().unwrap().len(), 8, "planning deletes nothing");
    assert_eq!(store.retain(Some(2), Some(40), None).unwrap(), [10]);
    assert_eq!(store.steps().unwrap(), [20, 30, 40, 50, 60, 70, 80]);

    let all = reasons(&store, None, None);
    assert!(all.iter().all(Option::is_some), "None keeps everything");
}

#[test]
fn steps_above_the_one_just_saved_are_kept() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), [1, 2, 3, 9]);
    let verdicts = store.plan_retention(Some(1), None, Some(3)).unwrap();
    let kept: Vec<_> = verdicts.iter().map(|verdict| verdict.kept).collect();
    let expected = [None, None, Some(Kept::Newest), Some(Kept::Later)];
    assert_eq!(kept, expected);
}

/// A plan may be carried out much later: a checkpoint that has been replaced by then is not
/// deleted.
#[test]
fn what_was_replaced_or_protected_since_the_plan_stays() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), 1..=4);
    let verdicts = store.plan_retention(Some(1), None, None).unwrap();
    let doomed: Vec<_> = verdicts
        .into_iter()
        .filter_map(|verdict| Some((verdict.step, verdict.doomed?.id)))
        .collect();
    let replacement = Sample::of_sizes(&[2000]);
    replacement
        .save_step(&store.step_path(1), Some(1), true)
        .unwrap();
    store.protect(2).unwrap();
    assert_eq!(store.retire(&doomed).unwrap(), [3]);
    assert_eq!(store.steps().unwrap(), [1, 2, 4]);
}

#[test]
fn a_protected_step_is_deleted_by_force_only() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), [1, 2]);
    store.protect(1).unwrap();
    store.protect(1).unwrap();
    assert_eq!(store.protected().unwrap(), [1]);
    let refused = store.delete(1).unwrap_err();
    assert!(matches!(refused, Error::Protected { .. }), "{refused}");
    assert!(is_complete(&store, 1));
    store.delete_protected(1).unwrap();
    assert_eq!(store.steps().unwrap(), [2], "its mark went as well");
    store.delete_protected(2).unwrap();
    assert!(store.steps().unwrap().is_empty());
}

#[test]
fn protection_is_taken_away_again() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), [1]);
    let whole = names(&store.step_path(1));
    store.protect(1).unwrap();
    store.unprotect(1).unwrap();
    store.unprotect(1).unwrap();
    assert_eq!(names(&store.step_path(1)), whole);
    assert!(store.protected().unwrap().is_empty());
    store.delete(1).unwrap();
}

#[test]
fn protection_outlives_an_overwrite_and_a_copy() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), [1]);
    store.protect(1).unwrap();
    let replacement = Sample::of_sizes(&[2000]);
    replacement
        .save_step(&store.step_path(1), Some(1), true)
        .unwrap();
    fs::rename(store.step_path(1), store.step_path(2)).unwrap();
    assert_eq!(store.protected().unwrap(), [2]);
}

#[test]
fn only_what_is_there_can_be_protected() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    assert!(matches!(store.protect(1), Err(Error::NotFound { .. })));
    assert!(matches!(store.unprotect(1), Err(Error::NotFound { .. })));
    fs::create_dir(store.step_path(2)).unwrap();
    assert!(matches!(store.protect(2), Err(Error::Incomplete { .. })));
    save_step(&store, 3);
    symlink("nowhere", store.step_path(3).join("protected")).unwrap();
    assert!(matches!(store.delete(3), Err(Error::Protected { .. })));
}

/// Deleting the only checkpoint known to be good requires a newer good one.
#[test]
fn the_only_verified_checkpoint_outlives_any_number_of_saves() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    let id = save_step(&store, 1);
    store.mark_verified(1, &id).unwrap();
    for step in 2..12 {
        save_step(&store, step);
        store.retain(Some(1), None, Some(step)).unwrap();
        assert_eq!(store.steps().unwrap(), [1, step]);
    }
}

/// Steps with damaged data do not displace those that can be loaded.
#[test]
fn what_a_scrub_found_damaged_takes_no_place_and_stays() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), [1, 2]);
    for step in [3, 4] {
        let id = save_step(&store, step);
        store.mark_verified(step, &id).unwrap();
        store.mark_damaged(step, &id).unwrap();
    }
    assert!(store.retain(Some(2), None, None).unwrap().is_empty());
    assert_eq!(store.retain(Some(1), None, None).unwrap(), [1]);
    assert_eq!(store.steps().unwrap(), [2, 3, 4]);
}

/// For most steps the manifest suffices, but not for those to delete and those that justify the
/// deletion.
#[test]
fn what_goes_and_what_it_goes_for_is_looked_at_whole() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    for step in 1..=5 {
        let id = save_step(&store, step);
        if step == 2 || step == 3 {
            store.mark_verified(step, &id).unwrap();
        }
    }
    for step in [1, 3, 5] {
        let path = store.step_path(step);
        let names = names(&path);
        let shard = names.iter().find(|name| name.starts_with("shard"));
        fs::remove_file(path.join(shard.unwrap())).unwrap();
    }
    let expected = [
        Some(Kept::Damaged),
        Some(Kept::Verified),
        Some(Kept::Damaged),
        Some(Kept::Newest),
        Some(Kept::Damaged),
    ];
    assert_eq!(reasons(&store, Some(1), None), expected);
}

/// Another process with a lower limit deletes a step first: that is no failure here.
#[test]
fn what_somebody_else_removes_meanwhile_is_no_error() {
    for victim in [4_u64, 1] {
        let root = tempfile::tempdir().unwrap();
        let store = store_with(root.path(), 1..=5);
        let path = store.step_path(victim);
        let gone = path.clone();
        let faults = Faults::new(0).call(move |_, operation, at| {
            if operation == "sync" && at == gone && gone.exists() {
                fs::remove_dir_all(&gone).unwrap();
            }
        });
        let seen = FaultyFileSystem::new(Arc::new(Native), Arc::new(faults));
        let store = store.with_file_system(Arc::new(seen));
        let deleted = store.retain(Some(2), None, Some(5)).unwrap();
        let expected: &[u64] = if victim == 1 { &[2, 3] } else { &[1, 2, 3] };
        assert_eq!(deleted, expected, "{victim}");
        assert!(!path.exists() && is_complete(&store, 5));
    }
}

// Marks.

#[test]
fn marks_of_many_writers_are_all_there() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    let ids: Vec<String> = (0..8).map(|step| save_step(&store, step)).collect();
    let together = Barrier::new(ids.len());
    thread::scope(|scope| {
        for (step, id) in (0..).zip(&ids) {
            let (store, together) = (store.clone(), &together);
            scope.spawn(move || {
                together.wait();
                store.mark_verified(step, id).unwrap();
            });
        }
    });
    let marked: Vec<u64> = store
        .marks()
        .unwrap()
        .iter()
        .map(|mark| mark.step)
        .collect();
    assert_eq!(marked, (0..8).collect::<Vec<_>>());
    assert_eq!(names(root.path()).len(), 9, "and nothing temporary");
}

#[test]
fn what_a_dead_writer_of_marks_left_is_swept_and_in_nobodys_way() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    let id = save_step(&store, 1);
    let left = format!("verified.{}.tmp", "a".repeat(32));
    fs::write(root.path().join(&left), "[{\"st").unwrap();
    fs::write(root.path().join("verified.mine.tmp"), "mine").unwrap();
    store.mark_verified(1, &id).unwrap();
    assert_eq!(store.marks().unwrap().len(), 1);
    let swept = store.sweep().unwrap();
    assert_eq!(swept, [(root.path().to_owned(), 5)]);
    let names = names(root.path());
    assert!(!names.contains(&left));
    assert!(names.contains(&"verified.mine.tmp".to_owned()));
}

#[test]
fn marks_of_an_earlier_version_count_with_unknown_time() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    let id = save_step(&store, 1);
    let text = format!("[{{\"step\":1,\"id\":\"{id}\"}}]");
    fs::write(root.path().join("verified.json"), text).unwrap();
    let marks = store.marks().unwrap();
    assert_eq!((marks[0].at_seconds, marks[0].is_damaged), (0, false));
    save_step(&store, 2);
    assert!(store.retain(Some(1), None, None).unwrap().is_empty());
    store.mark_verified(1, &id).unwrap();
    assert!(store.marks().unwrap()[0].at_seconds > 0);
}

#[test]
fn a_sweep_can_be_looked_at_beforehand() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), [1, 2]);
    fs::remove_file(store.step_path(1).join(MANIFEST)).unwrap();
    fs::create_dir(store.step_path(3)).unwrap();
    let before = [1, 2, 3].map(|step| names(&store.step_path(step)));
    let found = store.orphans().unwrap();
    let after = [1, 2, 3].map(|step| names(&store.step_path(step)));
    assert_eq!(before, after);
    assert_eq!(found, store.sweep().unwrap());
    let paths: Vec<_> = found.iter().map(|(path, _)| path.clone()).collect();
    assert_eq!(paths, [1, 3].map(|step| store.step_path(step)));
    assert!(store.orphans().unwrap().is_empty());
}

/// Somebody protects steps while somebody else deletes: a step whose protection was acknowledged
/// stays.
#[test]
fn a_step_that_was_protected_in_time_is_there() {
    let root = tempfile::tempdir().unwrap();
    let store = Arc::new(store_with(root.path(), 0..60));
    let deleting = {
        let store = Arc::clone(&store);
        thread::spawn(move || store.retain(Some(1), None, None).unwrap())
    };
    let protected: Vec<u64> = (0..59)
        .rev()
        .filter(|&step| store.protect(step).is_ok())
        .collect();
    deleting.join().unwrap();
    for step in protected {
        assert!(is_complete(&store, step), "{step}");
    }
}
