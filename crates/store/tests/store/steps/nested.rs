//! Removal of a directory with nested checkpoints: all of them are removed, or nothing is.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::save::{Attempt, commit, write_rank};
use penstock_store::steps::store::Store;
use penstock_store::steps::whole::{Removal, remove_checkpoint};
use penstock_store::{Error, MANIFEST, Progress};

use crate::common::unlocked::Unlocked;
use crate::common::{Sample, names, publication};

const FORCED: Removal = Removal {
    is_forced: true,
    is_foreign: false,
};
const FOREIGN: Removal = Removal {
    is_forced: false,
    is_foreign: true,
};

fn sample() -> Sample {
    Sample::of_sizes(&[1000, 40])
}

/// A checkpoint, and a store with two steps in it.
struct Outer {
    root: tempfile::TempDir,
    path: PathBuf,
    inner: Store,
}

impl Outer {
    fn new() -> Outer {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("outer");
        sample().save_step(&path, None, false).unwrap();
        let inner = Store::new(path.join("hook/store"));
        for step in [1, 2] {
            let at = inner.step_path(step);
            sample().save_step(&at, Some(step), false).unwrap();
        }
        Outer { root, path, inner }
    }

    /// A store whose locks are invisible to other hosts.
    fn unlocked(&self) -> Store {
        Store::new(self.root.path()).with_file_system(Unlocked::host())
    }

    fn assert_whole(&self) {
        for path in [
            &self.path,
            &self.inner.step_path(1),
            &self.inner.step_path(2),
        ] {
            sample().assert_at(path);
        }
    }
}

fn path_of(error: &Error) -> &Path {
    match error {
        Error::Protected { path } | Error::Storage { path, .. } | Error::Undecided { path, .. } => {
            path
        }
        error => panic!("{error:?}"),
    }
}

fn kind_of(error: &Error) -> ErrorKind {
    match error {
        Error::Storage { source, .. } => source.kind(),
        error => panic!("{error:?}"),
    }
}

#[test]
fn a_step_below_that_is_protected_keeps_all_of_it() {
    let outer = Outer::new();
    outer.inner.protect(2).unwrap();
    let stores = [Store::new(outer.root.path()), outer.unlocked()];
    for store in &stores {
        let kept = store.remove_directory(&outer.path, Removal::default());
        let error = kept.unwrap_err();
        assert!(matches!(error, Error::Protected { .. }), "{error:?}");
        assert_eq!(path_of(&error), outer.inner.step_path(2));
        outer.assert_whole();
    }
    stores[0].remove_directory(&outer.path, FORCED).unwrap();
    assert!(names(outer.root.path()).is_empty());
}

#[test]
fn a_step_below_that_is_read_keeps_all_of_it() {
    let outer = Outer::new();
    let reading = Checkpoint::open(&outer.inner.step_path(1)).unwrap();
    for allowed in [Removal::default(), FORCED, FOREIGN] {
        let error = remove_checkpoint(&outer.path, allowed).unwrap_err();
        assert_eq!(kind_of(&error), ErrorKind::ResourceBusy, "{error:?}");
        assert_eq!(path_of(&error), outer.inner.step_path(1));
        outer.assert_whole();
    }
    drop(reading);
    assert!(remove_checkpoint(&outer.path, Removal::default()).unwrap() > 3000);
    assert!(names(outer.root.path()).is_empty());
}

#[test]
fn a_save_below_that_has_written_nothing_yet_keeps_all_of_it() {
    let outer = Outer::new();
    let options = Options::default();
    let at = publication(&outer.path.join("hook/next"));
    let (file_system, progress) = (&options.file_system, Progress::default());
    let mut attempt = Attempt::begin(&at.path, false, file_system, &progress).unwrap();
    let error = remove_checkpoint(&outer.path, Removal::default()).unwrap_err();
    assert_eq!(kind_of(&error), ErrorKind::ResourceBusy, "{error:?}");
    let part = write_rank(&mut attempt, 0, sample().state(), &options, &progress).unwrap();
    commit(attempt, &at, vec![part.part]).unwrap();
    outer.assert_whole();
    sample().assert_at(&at.path);
}

#[test]
fn where_nobody_sees_locks_what_may_be_live_below_keeps_all_of_it() {
    let outer = Outer::new();
    let manifest = outer.inner.step_path(1).join(MANIFEST);
    let text = fs::read(&manifest).unwrap();
    fs::remove_file(&manifest).unwrap();
    let kept = outer.unlocked().remove_directory(&outer.path, FORCED);
    let error = kept.unwrap_err();
    assert!(matches!(error, Error::Undecided { .. }), "{error:?}");
    assert_eq!(path_of(&error), outer.inner.step_path(1));
    fs::write(&manifest, text).unwrap();
    outer.assert_whole();
    let removed = outer.unlocked();
    removed
        .remove_directory(&outer.path, Removal::default())
        .unwrap();
    assert!(names(outer.root.path()).is_empty());
}

#[test]
fn where_nobody_sees_locks_no_step_below_looks_whole_on_the_way() {
    for dies in 1.. {
        let outer = Outer::new();
        let host = Unlocked::host();
        let dying = Store::new(outer.root.path()).with_file_system(host.clone());
        host.die(dies);
        let result = dying.remove_directory(&outer.path, Removal::default());
        for path in [outer.path.clone(), outer.inner.step_path(1)] {
            if path.join(MANIFEST).exists() {
                sample().assert_at(&path);
            }
        }
        if !host.is_done() {
            assert!(result.unwrap() > 3000);
            assert!(dies > 10);
            return;
        }
    }
}

#[test]
fn a_directory_that_is_no_checkpoint_and_holds_some_is_refused() {
    let outer = Outer::new();
    for directory in [outer.inner.root(), outer.root.path()] {
        let error = remove_checkpoint(directory, Removal::default()).unwrap_err();
        assert_eq!(kind_of(&error), ErrorKind::InvalidInput, "{error:?}");
        assert!(error.full_message().contains("it is no checkpoint"));
        assert!(error.remedy().contains("one checkpoint"));
        outer.assert_whole();
    }
    // With this option, directories of other libraries are removed too.
    remove_checkpoint(outer.inner.root(), FOREIGN).unwrap();
    sample().assert_at(&outer.path);
    assert!(!outer.inner.root().exists());
}

#[test]
fn a_path_that_ends_in_no_name_of_its_own_is_refused() {
    let outer = Outer::new();
    for end in ["hook/..", "hook/../", "hook/.", ".", "./", "./.", "..//"] {
        let error = remove_checkpoint(&outer.path.join(end), FOREIGN).unwrap_err();
        assert_eq!(kind_of(&error), ErrorKind::InvalidInput, "{end}");
        outer.assert_whole();
    }
    let error = remove_checkpoint(Path::new("/"), FOREIGN).unwrap_err();
    assert_eq!(kind_of(&error), ErrorKind::InvalidInput);
}

#[test]
fn a_link_is_refused_however_many_separators_follow() {
    let outer = Outer::new();
    let link = outer.root.path().join("link");
    std::os::unix::fs::symlink(&outer.path, &link).unwrap();
    for end in ["", "/", "//"] {
        let path = PathBuf::from(format!("{}{end}", link.display()));
        let error = remove_checkpoint(&path, FOREIGN).unwrap_err();
        assert_eq!(kind_of(&error), ErrorKind::NotADirectory, "{end:?}");
        outer.assert_whole();
    }
    let path = format!("{}//", outer.path.display());
    remove_checkpoint(Path::new(&path), Removal::default()).unwrap();
    assert!(!outer.path.exists());
}
