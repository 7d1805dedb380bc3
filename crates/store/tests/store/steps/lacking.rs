//! File systems without hard links, without a rename that does not replace, and with directories
//! that cannot be renamed, as in a lower layer of overlayfs.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem, Files, Native};
use penstock_io::{Error as IoError, Result as IoResult};
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::save::save;
use penstock_store::steps::store::{StepState, Store};
use penstock_store::steps::whole::Removal;
use penstock_store::{Error, MANIFEST, Progress};

use crate::common::{Sample, names, publication};

const EPERM: i32 = 1;
const EIO: i32 = 5;
const EXDEV: i32 = 18;
const EINVAL: i32 = 22;
const ENOSYS: i32 = 38;
const EOPNOTSUPP: i32 = 95;

/// More changes than any of these calls makes.
const CHANGES_MAX: usize = 100;

/// The native file system, without some of its abilities.
#[derive(Debug)]
struct Lacking {
    link: Option<i32>,
    rename_new: Option<i32>,
    /// The error of a rename of a step's directory.
    rename_step: Option<i32>,
    seen: AtomicUsize,
    /// The number of the change at which the process dies.
    dies: usize,
}

impl Lacking {
    fn nothing() -> Lacking {
        Lacking {
            link: None,
            rename_new: None,
            rename_step: None,
            seen: AtomicUsize::new(0),
            dies: usize::MAX,
        }
    }

    fn count(&self, operation: &'static str, path: &Path) -> IoResult<()> {
        match self.seen.fetch_add(1, Ordering::Relaxed) + 1 >= self.dies {
            true => Err(refused(operation, path, EIO)),
            false => Ok(()),
        }
    }

    fn has_died(&self) -> bool {
        self.seen.load(Ordering::Relaxed) >= self.dies
    }

    fn answer(&self, change: Change<'_>) -> Option<i32> {
        match change {
            Change::Link { .. } => self.link,
            Change::RenameNew { .. } => self.rename_new,
            Change::Rename { from, .. } if is_step(from) => self.rename_step,
            _ => None,
        }
    }
}

fn is_step(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with("step-"))
}

fn refused(operation: &'static str, path: &Path, errno: i32) -> IoError {
    IoError::Storage {
        operation,
        path: path.to_owned(),
        source: io::Error::from_raw_os_error(errno),
    }
}

impl FileSystem for Lacking {
    fn files(&self) -> &dyn Files {
        &Native
    }

    fn create(&self, path: &Path, direct: Direct) -> IoResult<File> {
        self.count("create", path)?;
        Native.create(path, direct)
    }

    fn change(&self, change: Change<'_>) -> IoResult<()> {
        self.count(change.operation(), change.path())?;
        match self.answer(change) {
            Some(errno) => Err(refused(change.operation(), change.path(), errno)),
            None => Native.change(change),
        }
    }
}

fn save_on(file_system: Lacking, path: &Path, overwrite: bool) -> Result<(), Error> {
    let options = Options {
        file_system: Arc::new(file_system),
        ..Options::default()
    };
    let mut to = publication(path);
    to.overwrite = overwrite;
    let state = Sample::of_sizes(&[1000]).state();
    save(state, &to, &options, &Progress::default()).map(drop)
}

#[test]
fn without_hard_links_a_checkpoint_appears_by_a_rename_that_replaces_nothing() {
    for errno in [EPERM, EINVAL, ENOSYS, EOPNOTSUPP] {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let linkless = || Lacking {
            link: Some(errno),
            ..Lacking::nothing()
        };
        save_on(linkless(), &path, false).unwrap();
        Sample::of_sizes(&[1000]).assert_at(&path);
        let again = save_on(linkless(), &path, false);
        assert!(matches!(again, Err(Error::Exists { .. })), "{again:?}");
    }
}

#[test]
fn where_no_name_can_be_taken_the_error_says_so_and_how_to_save_all_the_same() {
    for errno in [EINVAL, ENOSYS, EOPNOTSUPP] {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let lacking = || Lacking {
            link: Some(EPERM),
            rename_new: Some(errno),
            ..Lacking::nothing()
        };
        let error = save_on(lacking(), &path, false).unwrap_err();
        assert!(matches!(error, Error::NoFreeNames { .. }), "{error:?}");
        assert!(error.to_string().contains("no hard links"), "{error}");
        assert!(error.remedy().contains("overwrite=True"), "{error}");
        assert!(!path.exists(), "{:?}", names(&path));
        save_on(lacking(), &path, true).unwrap();
        Sample::of_sizes(&[1000]).assert_at(&path);
        let again = save_on(lacking(), &path, false);
        assert!(matches!(again, Err(Error::Exists { .. })), "{again:?}");
    }
}

/// A store whose step 2 is damaged, protected or not, with a foreign file and directory.
fn damaged(root: &Path, is_protected: bool) -> Store {
    let store = Store::new(root);
    for step in [1, 2] {
        let sample = Sample::of_sizes(&[1000]);
        sample
            .save_step(&store.step_path(step), Some(step), false)
            .unwrap();
    }
    let path = store.step_path(2);
    fs::create_dir(path.join("logs")).unwrap();
    fs::write(path.join("logs/events"), "{}").unwrap();
    fs::write(path.join("notes"), "{}").unwrap();
    if is_protected {
        store.protect(2).unwrap();
    }
    let part = names(&path)
        .into_iter()
        .find(|name| name.starts_with("part"));
    fs::write(path.join(part.unwrap()), "{").unwrap();
    store
}

fn contents(path: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for name in names(path) {
        let file = path.join(&name);
        match file.is_dir() {
            true => all.extend(contents(&file)),
            false => all.push((name, fs::read(file).unwrap())),
        }
    }
    all
}

fn on_layers(store: &Store, dies: usize) -> (Store, Arc<Lacking>) {
    let lacking = Arc::new(Lacking {
        rename_step: Some(EXDEV),
        dies,
        ..Lacking::nothing()
    });
    let file_system: Arc<dyn FileSystem> = Arc::clone(&lacking) as Arc<dyn FileSystem>;
    (
        Store::new(store.root()).with_file_system(file_system),
        lacking,
    )
}

#[test]
fn a_damaged_step_of_a_lower_layer_is_quarantined_whole_whenever_that_dies() {
    for is_protected in [false, true] {
        for dies in 1..=CHANGES_MAX {
            let root = tempfile::tempdir().unwrap();
            let store = damaged(root.path(), is_protected);
            let before = contents(&store.step_path(2));
            let (layered, lacking) = on_layers(&store, dies);
            let result = layered.make_way(2, &Progress::default());
            let has_ended = !lacking.has_died();
            // The whole step exists under at least one name.
            let quarantined = store.quarantined().unwrap();
            let mut places = vec![store.step_path(2)];
            places.extend(
                quarantined
                    .iter()
                    .map(|quarantined| quarantined.path.clone()),
            );
            let is_whole = |path: &std::path::PathBuf| path.exists() && contents(path) == before;
            assert!(places.iter().any(is_whole), "died at change {dies}");
            if has_ended {
                assert_eq!(result.unwrap().as_ref(), places.last());
                assert!(dies > 10 && !store.step_path(2).exists());
            }
            // The next process saves the step, and a sweep removes an incomplete directory.
            let (next, _) = on_layers(&store, usize::MAX);
            next.make_way(2, &Progress::default()).unwrap();
            let sample = Sample::of_sizes(&[1000]);
            sample
                .save_step(&store.step_path(2), Some(2), false)
                .unwrap();
            assert!(matches!(next.state(2), Ok(StepState::Complete(_))));
            next.sweep().unwrap();
            let left = names(store.root());
            assert!(!left.iter().any(|name| name.ends_with(".tmp")), "{left:?}");
            let places = store.quarantined().unwrap();
            assert!(
                places
                    .iter()
                    .any(|quarantined| contents(&quarantined.path) == before)
            );
            if has_ended {
                break;
            }
            assert!(dies < CHANGES_MAX, "quarantine has an end");
        }
    }
}

#[test]
fn a_step_that_can_be_neither_renamed_nor_linked_says_how_it_is_replaced() {
    let root = tempfile::tempdir().unwrap();
    let store = damaged(root.path(), false);
    let before = contents(&store.step_path(2));
    let file_system = Arc::new(Lacking {
        rename_step: Some(EXDEV),
        link: Some(EPERM),
        ..Lacking::nothing()
    });
    let layered = Store::new(root.path()).with_file_system(file_system);
    let error = layered.make_way(2, &Progress::default()).unwrap_err();
    assert!(error.remedy().contains("overwrite=True"), "{error}");
    assert_eq!(contents(&store.step_path(2)), before);
    assert_eq!(names(root.path()).len(), 2);
}

#[test]
fn a_directory_goes_with_all_in_it_and_never_looks_whole_on_the_way() {
    for dies in 1..=CHANGES_MAX {
        let root = tempfile::tempdir().unwrap();
        let store = damaged(root.path(), false);
        let path = store.step_path(1);
        // A framework's hook has saved another checkpoint in it.
        let nested = path.join("ema");
        let sample = Sample::of_sizes(&[700]);
        sample.save_step(&nested, None, false).unwrap();
        let nested_before = contents(&nested);
        fs::create_dir(path.join("logs")).unwrap();
        fs::write(path.join("logs/events"), "{}").unwrap();
        fs::write(path.join("trainer_state.json"), "{}").unwrap();
        let before = contents(&path);
        let (dying, lacking) = on_layers(&store, dies);
        let result = dying.remove_directory(&path, Removal::default());
        if path.exists() {
            let is_whole = path.join(MANIFEST).exists();
            assert!(!is_whole || contents(&path) == before, "change {dies}");
            let is_whole = nested.join(MANIFEST).exists();
            assert!(
                !is_whole || contents(&nested) == nested_before,
                "change {dies}"
            );
            store.remove_directory(&path, Removal::default()).unwrap();
        }
        assert!(!path.exists());
        if !lacking.has_died() {
            assert!(result.unwrap() > 1000);
            return;
        }
    }
    panic!("a removal has an end");
}

#[test]
fn a_directory_that_somebody_reads_or_protects_is_not_removed() {
    let root = tempfile::tempdir().unwrap();
    let store = damaged(root.path(), true);
    let reading = Checkpoint::open(&store.step_path(1)).unwrap();
    let busy = store.remove_directory(&store.step_path(1), Removal::default());
    let busy = busy.unwrap_err();
    assert!(busy.remedy().contains("try again"), "{busy}");
    Sample::of_sizes(&[1000]).assert_at(&store.step_path(1));
    drop(reading);
    store
        .remove_directory(&store.step_path(1), Removal::default())
        .unwrap();
    let kept = store.remove_directory(&store.step_path(2), Removal::default());
    assert!(matches!(kept, Err(Error::Protected { .. })), "{kept:?}");
    let forced = Removal {
        is_forced: true,
        ..Removal::default()
    };
    store.remove_directory(&store.step_path(2), forced).unwrap();
    assert!(names(root.path()).is_empty());
}
