//! A damaged step makes way: it is quarantined whole and kept for salvage. Other steps stay in
//! place.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::common::{Sample, names};
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::steps::quarantine::QUARANTINED_MAX;
use penstock_store::steps::store::{StepState, Store};
use penstock_store::{Error, MANIFEST, Progress};

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

fn file_of(path: &Path, kind: &str) -> PathBuf {
    let name = names(path).into_iter().find(|name| name.starts_with(kind));
    path.join(name.unwrap())
}

fn make_way(store: &Store, step: u64) -> Option<PathBuf> {
    store.make_way(step, &Progress::default()).unwrap()
}

/// Damages a step so that it is detected by opening it, or only by a mark.
fn break_step(store: &Store, step: u64, how: &str) {
    let path = store.step_path(step);
    match how {
        "mark" => {
            let checkpoint = Checkpoint::open(&path).unwrap();
            store.mark_damaged(step, &checkpoint.manifest().id).unwrap();
        }
        "manifest" => fs::write(path.join(MANIFEST), "{").unwrap(),
        "protected" => {
            store.protect(step).unwrap();
            fs::remove_file(path.join(MANIFEST)).unwrap();
        }
        kind => fs::remove_file(file_of(&path, kind)).unwrap(),
    }
}

#[test]
fn what_is_damaged_gives_way_and_keeps_every_file() {
    for how in ["mark", "manifest", "protected", "part", "shard"] {
        let root = tempfile::tempdir().unwrap();
        let store = store_with(root.path(), [10, 20, 30]);
        break_step(&store, 30, how);
        let before = names(&store.step_path(30));
        let quarantined = make_way(&store, 30).expect(how);
        assert_eq!(
            quarantined,
            root.path().join("damaged-0000000030-0001"),
            "{how}"
        );
        assert_eq!(names(&quarantined), before, "{how}");
        assert_eq!(store.steps().unwrap(), [10, 20], "{how}");
        assert_eq!(make_way(&store, 30), None, "{how}: nothing is in the way");
        save_step(&store, 30);
        assert!(matches!(store.state(30), Ok(StepState::Complete(_))));
        assert_eq!(store.sweep().unwrap(), [], "{how}");
        assert_eq!(names(&quarantined), before, "{how}");
        assert!(store.quarantined().unwrap()[0].step == 30);
    }
}

#[test]
fn what_is_not_known_to_be_damaged_stays() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), 1..=6);
    let newer = store.step_path(2).join(MANIFEST);
    fs::write(
        &newer,
        "{\"format\":\"penstock-checkpoint\",\"version\":99}",
    )
    .unwrap();
    assert!(matches!(store.state(2), Ok(StepState::Newer(_))));
    fs::remove_file(store.step_path(3).join(MANIFEST)).unwrap();
    // A good checkpoint at another step, a link to a damaged one, and a marked one that was
    // replaced.
    fs::rename(store.step_path(4), store.step_path(7)).unwrap();
    break_step(&store, 5, "manifest");
    let elsewhere = root.path().join("elsewhere");
    fs::rename(store.step_path(5), &elsewhere).unwrap();
    symlink(&elsewhere, store.step_path(5)).unwrap();
    break_step(&store, 6, "mark");
    Sample::seeded(2)
        .save_step(&store.step_path(6), Some(6), true)
        .unwrap();
    for step in 1..=8 {
        assert_eq!(make_way(&store, step), None, "{step}");
    }
    assert_eq!(store.steps().unwrap(), [1, 2, 3, 5, 6, 7]);
    assert_eq!(store.quarantined().unwrap(), []);
    assert!(matches!(store.quarantine(8), Err(Error::NotFound { .. })));
}

#[test]
fn whoever_reads_it_is_waited_for() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), [1, 2]);
    break_step(&store, 2, "mark");
    let reading = Checkpoint::open(&store.step_path(2)).unwrap();
    let refused = store.quarantine(2).unwrap_err();
    assert!(refused.remedy().contains("try again"), "{refused}");
    let progress = Progress::default();
    progress.cancel();
    assert!(matches!(
        store.make_way(2, &progress),
        Err(Error::Interrupted)
    ));
    std::thread::scope(|scope| {
        let saving = scope.spawn(|| make_way(&store, 2));
        drop(reading);
        assert!(saving.join().unwrap().is_some());
    });
    // A good step is refused at once, even while it is being read.
    let _reading = Checkpoint::open(&store.step_path(1)).unwrap();
    assert_eq!(make_way(&store, 1), None);
}

#[test]
fn the_last_few_are_kept_and_protected_ones() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), [1]);
    let mut kept = Vec::new();
    for number in 0..6 {
        save_step(&store, 30);
        if number == 1 {
            store.protect(30).unwrap();
        }
        break_step(&store, 30, "shard");
        kept.push(make_way(&store, 30).unwrap());
    }
    let newer = "{\"format\":\"penstock-checkpoint\",\"version\":99}";
    fs::write(kept[2].join(MANIFEST), newer).unwrap();
    fs::create_dir(root.path().join("damaged-mine")).unwrap();
    let removed = store.retire_quarantined().unwrap();
    // The second is protected, the third cannot be read, so its state is unknown.
    assert_eq!(removed, [kept[0].clone()]);
    let there: Vec<_> = store
        .quarantined()
        .unwrap()
        .into_iter()
        .map(|a| a.path)
        .collect();
    assert_eq!(there, kept[1..]);
    assert!(there.len() == QUARANTINED_MAX + 2);
    save_step(&store, 30);
    break_step(&store, 30, "part");
    make_way(&store, 30).unwrap();
    let reading = Checkpoint::open(&kept[3]);
    assert!(reading.is_err(), "it is damaged");
    assert_eq!(store.retire_quarantined().unwrap(), [kept[3].clone()]);
    assert!(root.path().join("damaged-mine").exists());
}

#[test]
fn a_name_that_is_taken_is_passed_over() {
    let root = tempfile::tempdir().unwrap();
    let store = store_with(root.path(), [30]);
    fs::write(root.path().join("damaged-0000000030-0001"), "mine").unwrap();
    let last = root.path().join(format!("damaged-0000000001-{}", u64::MAX));
    break_step(&store, 30, "part");
    assert!(
        make_way(&store, 30)
            .unwrap()
            .ends_with("damaged-0000000030-0002")
    );
    save_step(&store, 30);
    assert_eq!(
        store.quarantined().unwrap().len(),
        1,
        "a file is none of ours"
    );
    break_step(&store, 30, "part");
    fs::create_dir(&last).unwrap();
    fs::write(last.join("notes.txt"), "mine").unwrap();
    fs::rename(
        &last,
        root.path().join(format!("damaged-0000000030-{}", u64::MAX)),
    )
    .unwrap();
    assert!(
        store.make_way(30, &Progress::default()).is_err(),
        "no name is left"
    );
    assert!(store.step_path(30).exists());
}
