//! The files of a checkpoint must be regular: a symbolic link in place of one is not followed, and
//! no other kind is opened, which could block. Links on the path to a checkpoint are followed as
//! usual.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::common::{Sample, forge, load, make_fifo, problem_of, within_a_minute};
use penstock_store::care::salvage::salvage;
use penstock_store::care::survey::survey;
use penstock_store::care::verify::verify;
use penstock_store::options::Options;
use penstock_store::steps::scrub::{Outcome, Scrub};
use penstock_store::steps::store::{StepState, Store};
use penstock_store::{Error, MANIFEST, Progress};

type Find = fn(&Path) -> PathBuf;
type Make = fn(&Path);

const FILES: [Find; 3] = [
    |path| path.join(MANIFEST),
    forge::part_path,
    forge::shard_path,
];

/// Entries put in place of a file, and the words for them.
const IN_PLACE: [(&str, Make); 5] = [
    ("a symbolic link", link_to_the_same),
    ("a symbolic link", |file| symlink("nowhere", file).unwrap()),
    ("a symbolic link", |file| {
        symlink(file.file_name().unwrap(), file).unwrap();
    }),
    ("a symbolic link", |file| {
        symlink("/dev/zero", file).unwrap();
    }),
    ("not a regular file", make_fifo),
];

/// A link to the original file, moved out of the checkpoint: only the link differs.
fn link_to_the_same(file: &Path) {
    let outside = file.ancestors().nth(2).unwrap().join("outside");
    fs::rename(file.with_extension("was"), &outside).unwrap();
    symlink(&outside, file).unwrap();
}

fn replace(file: &Path, make: Make) {
    let was = file.with_extension("was");
    fs::rename(file, &was).unwrap();
    make(file);
    let _ = fs::remove_file(was);
}

fn options(verify: bool) -> Options {
    Options {
        verify,
        ..Options::default()
    }
}

/// A store with one small step.
fn store() -> (tempfile::TempDir, Store) {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path().join("store"));
    let sample = Sample::of_sizes(&[5000, 300]);
    sample
        .save_step(&store.step_path(1), Some(1), false)
        .unwrap();
    (root, store)
}

#[test]
fn what_is_no_file_is_named_by_every_reader() {
    for find in FILES {
        for (words, make) in IN_PLACE {
            let (_root, store) = store();
            let path = store.step_path(1);
            let file = find(&path);
            replace(&file, make);
            let name = file.file_name().unwrap().to_str().unwrap().to_owned();
            let what = format!("{name} as {words}");
            within_a_minute(&what.clone(), move || {
                for verifies in [true, false] {
                    let error = load(&path, &options(verifies)).expect_err(&what);
                    let problem = problem_of(error);
                    assert_eq!(problem.file, name, "{what}");
                    assert!(problem.detail.contains(words), "{what}: {}", problem.detail);
                }
                let progress = Progress::default();
                let report = verify(&path, &options(false), &progress).unwrap();
                assert_eq!(report.problems.len(), 1, "{what}: {:?}", report.problems);
                assert_eq!(report.problems[0].file, name);
                let found = survey(&path, &options(false), &progress).unwrap();
                let first = &found.problems[0];
                assert_eq!(first.file, name, "{what}");
                assert!(first.detail.contains(words), "{what}: {}", first.detail);
                assert!(matches!(store.state(1), Ok(StepState::Damaged(_))));
                let report = store.scrub(&Scrub::default(), &options(false), &progress);
                assert_eq!(report.unwrap().steps[0].outcome, Outcome::Damaged, "{what}");
            });
        }
    }
}

/// Recovered bytes come from the checkpoint, even if no digest covers them.
#[test]
fn salvage_follows_no_link_and_waits_for_nothing() {
    let lost: [fn(&Path); 3] = [
        |_| {},
        |path| fs::remove_file(path.join(MANIFEST)).unwrap(),
        |path| fs::remove_file(forge::part_path(path)).unwrap(),
    ];
    let of_file: [Find; 2] = [forge::part_path, forge::shard_path];
    for find in of_file {
        for lose in lost {
            for (_, make) in IN_PLACE {
                let (root, store) = store();
                let path = store.step_path(1);
                replace(&find(&path), make);
                lose(&path);
                let out = root.path().join("out");
                within_a_minute("salvage", move || {
                    let progress = Progress::default();
                    let salvaged = salvage(
                        &path,
                        &out,
                        true,
                        &options(false),
                        &options(false),
                        &progress,
                    );
                    let Ok(report) = salvaged else { return };
                    // Nothing is recovered through a link in place of a shard.
                    let has_shard = fs::symlink_metadata(forge::shard_path(&path)).unwrap();
                    assert!(has_shard.is_file() || report.recovered_bytes == 0);
                });
            }
        }
    }
}

#[test]
fn links_on_the_way_are_followed() {
    let (root, store) = store();
    let sample = Sample::of_sizes(&[5000, 300]);
    let way = root.path().join("way");
    symlink(store.root(), &way).unwrap();
    sample.assert_at(&way.join("step-0000000001"));
    symlink(store.step_path(1), store.step_path(2)).unwrap();
    sample.assert_at(&store.step_path(2));
    let alone = root.path().join("alone");
    symlink("store/step-0000000001", &alone).unwrap();
    sample.assert_at(&alone);
}

#[test]
fn marks_are_a_file() {
    for make in IN_PLACE.map(|(_, make)| make) {
        let (_root, store) = store();
        let report = |store: &Store| {
            let scrub = Scrub::default();
            store.scrub(&scrub, &Options::default(), &Progress::default())
        };
        report(&store).unwrap();
        replace(&store.root().join("verified.json"), make);
        within_a_minute("a look at the marks", move || {
            let error = store.retain(Some(1), None, None).unwrap_err();
            assert_eq!(problem_of(error).file, "verified.json");
            let scrubbed = report(&store).unwrap();
            assert_eq!(scrubbed.steps[0].outcome, Outcome::Verified);
            assert_eq!(store.marks().unwrap().len(), 1, "a scrub mends it");
        });
    }
}

/// As in `is_protected`: a marker that cannot be looked up protects.
#[test]
fn a_protection_that_is_a_link_to_nothing_protects_what_lost_its_manifest() {
    let (_root, store) = store();
    let path = store.step_path(1);
    symlink("nowhere", path.join("protected")).unwrap();
    fs::remove_file(path.join(MANIFEST)).unwrap();
    let saved = Sample::of_sizes(&[10]).save_step(&path, Some(1), false);
    assert!(matches!(saved, Err(Error::Protected { .. })), "{saved:?}");
    assert!(forge::shard_path(&path).is_file());
}
