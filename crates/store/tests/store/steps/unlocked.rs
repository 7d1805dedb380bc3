//! Deletion where locks are not visible to everybody: only provably dead files are removed,
//! whatever other hosts do meanwhile, and wherever the deletion dies.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::common::unlocked::Unlocked;
use crate::common::{Sample, forge, names, publication};
use penstock_store::options::Options;
use penstock_store::save::{Attempt, Publication, commit, save, write_rank};
use penstock_store::steps::store::{StepState, Store};
use penstock_store::{Error, MANIFEST, Progress, Result};

/// More changes than any deletion here makes.
const CHANGES_MAX: usize = 30;

/// A step of another host, and this host's view of it.
struct SharedStore {
    root: tempfile::TempDir,
    here: Arc<Unlocked>,
    store: Store,
}

impl SharedStore {
    fn new() -> SharedStore {
        let root = tempfile::tempdir().unwrap();
        let here = Unlocked::host();
        let store = Store::new(root.path()).with_file_system(here.clone());
        save_elsewhere(root.path(), 1, 1, false).unwrap();
        SharedStore { root, here, store }
    }

    fn id(&self) -> String {
        self.store.identity(1).unwrap().unwrap()
    }

    fn assert_holds(&self, seed: u64) {
        sample(seed).assert_at(&self.store.step_path(1));
    }

    fn elsewhere(&self) -> Store {
        Store::new(self.root.path()).with_file_system(Unlocked::host())
    }
}

fn sample(seed: u64) -> Sample {
    Sample::seeded_sizes(seed, &[700, 40])
}

fn step_publication(root: &Path, step: u64, overwrite: bool) -> Publication {
    Publication {
        step: Some(step),
        overwrite,
        ..publication(&Store::new(root).step_path(step))
    }
}

fn options_elsewhere() -> Options {
    Options {
        file_system: Unlocked::host(),
        io_threads: Some(1),
        ..Options::default()
    }
}

fn save_elsewhere(root: &Path, step: u64, seed: u64, overwrite: bool) -> Result<()> {
    let (state, publication) = (
        sample(seed).state(),
        step_publication(root, step, overwrite),
    );
    save(
        state,
        &publication,
        &options_elsewhere(),
        &Progress::default(),
    )
    .map(drop)
}

/// An attempt of another host that has written everything, and has not published.
fn written(root: &Path, overwrite: bool) -> impl FnOnce() -> Result<()> {
    let (publication, options) = (step_publication(root, 1, overwrite), options_elsewhere());
    let (file_system, progress) = (Arc::clone(&options.file_system), Progress::default());
    let begun = Attempt::begin(&publication.path, overwrite, &file_system, &progress);
    let mut attempt = begun.unwrap();
    let state = sample(2).state();
    let part = write_rank(&mut attempt, 0, state, &options, &progress).unwrap();
    move || commit(attempt, &publication, vec![part.part]).map(drop)
}

fn assert_busy<T: std::fmt::Debug>(result: Result<T>) {
    let Err(error) = result else {
        panic!("what may be live was removed: {result:?}")
    };
    let Error::Undecided { .. } = error else {
        panic!("{error:?}")
    };
    assert!(error.remedy().contains("remove the directory"), "{error}");
}

#[test]
fn files_of_attempts_that_may_be_live_stay() {
    let root = tempfile::tempdir().unwrap();
    let commit = written(root.path(), false);
    let store = Store::new(root.path()).with_file_system(Unlocked::host());
    let before = names(&store.step_path(1));
    assert_busy(store.delete(1));
    assert_busy(store.delete_protected(1));
    assert_eq!(names(&store.step_path(1)), before);
    commit().unwrap();
    sample(2).assert_at(&store.step_path(1));
}

#[test]
fn what_a_manifest_does_not_tell_stays() {
    let harms: [fn(&Path); 2] = [
        |manifest| fs::write(manifest, "{}").unwrap(),
        |manifest| {
            let text = fs::read_to_string(manifest).unwrap();
            fs::write(manifest, text.replace("\"version\":1", "\"version\":9")).unwrap();
        },
    ];
    for harm in harms {
        let shared = SharedStore::new();
        let commit = written(shared.root.path(), true);
        harm(&shared.store.step_path(1).join(MANIFEST));
        let before = names(&shared.store.step_path(1));
        assert_busy(shared.store.delete(1));
        assert_eq!(names(&shared.store.step_path(1)), before);
        commit().unwrap();
        shared.assert_holds(2);
    }
}

/// Another process deleted it first: retention continues with the next step.
#[test]
fn a_doomed_checkpoint_that_is_gone_is_passed_over() {
    let shared = SharedStore::new();
    let doomed = [(1, shared.id())];
    save_elsewhere(shared.root.path(), 2, 9, false).unwrap();
    let commit = written(shared.root.path(), true);
    shared.elsewhere().delete(1).unwrap();
    assert_eq!(shared.store.retire(&doomed).unwrap(), [0; 0]);
    commit().unwrap();
    shared.assert_holds(2);
    assert_eq!(shared.store.retire(&doomed).unwrap(), [0; 0]);
    shared.assert_holds(2);
}

#[test]
fn a_deletion_removes_its_checkpoint_and_nothing_else() {
    let shared = SharedStore::new();
    let commit = written(shared.root.path(), true);
    let id = shared.id();
    let path = shared.store.step_path(1);
    assert!(shared.store.delete(1).unwrap() > 0);
    let left = names(&path);
    assert!(!left.is_empty() && left.iter().all(|name| !name.contains(&id)));
    commit().unwrap();
    shared.assert_holds(2);
    assert!(shared.store.delete(1).unwrap() > 0);
    assert!(!path.exists(), "{:?}", names(&path));
    assert!(matches!(
        shared.store.delete(1),
        Err(Error::NotFound { .. })
    ));
}

/// If another host's save is acknowledged during a deletion, its checkpoint exists.
#[test]
fn a_save_that_is_acknowledged_meanwhile_stays() {
    type Delete = fn(&SharedStore) -> Result<()>;
    let deletes: [Delete; 3] = [
        |shared| shared.store.delete(1).map(drop),
        |shared| shared.store.delete_protected(1).map(drop),
        |shared| {
            // Another checkpoint in the step's place is not deleted instead.
            save_elsewhere(shared.root.path(), 2, 9, false)?;
            let doomed = [(1, shared.id())];
            shared.store.retire(&doomed).map(drop)
        },
    ];
    for delete in deletes {
        for overwrite in [true, false] {
            let mut runs = 0;
            for nth in 1..CHANGES_MAX {
                let shared = SharedStore::new();
                let root = shared.root.path().to_owned();
                let (sender, saved) = std::sync::mpsc::channel();
                shared.here.meanwhile(nth, move || {
                    drop(sender.send(save_elsewhere(&root, 1, 2, overwrite)));
                });
                let deleted = delete(&shared);
                let Ok(saved) = saved.try_recv() else {
                    break;
                };
                runs += 1;
                let what = format!("overwrite {overwrite}, change {nth}: {deleted:?}");
                match saved {
                    Ok(()) => {
                        assert!(matches!(shared.store.state(1), Ok(StepState::Complete(_))));
                        shared.assert_holds(2);
                    }
                    Err(Error::Exists { .. }) => {}
                    // The save had no checkpoint there yet, and was not acknowledged.
                    Err(error) => panic!("{what}: {}", error.full_message()),
                }
            }
            assert!((5..CHANGES_MAX - 1).contains(&runs), "{runs}");
        }
    }
}

/// An unfinished deletion is finished by the next one on any host, and nothing else is deleted.
#[test]
fn a_deletion_that_died_is_finished_by_the_next() {
    for nth in 1..CHANGES_MAX {
        let shared = SharedStore::new();
        shared.here.die(nth);
        let result = shared.store.delete(1);
        if !shared.here.is_done() {
            result.unwrap();
            assert!(nth > 5, "{nth}");
            return;
        }
        let elsewhere = shared.elsewhere();
        match elsewhere.delete(1) {
            Ok(_) | Err(Error::NotFound { .. }) => {}
            Err(error) => panic!("after change {nth}: {}", error.full_message()),
        }
        let path = elsewhere.step_path(1);
        assert!(!path.exists(), "after change {nth}: {:?}", names(&path));
    }
    panic!("a deletion has an end")
}

/// The worst combination: a deletion took another save's manifest, and dies before it puts that
/// back.
#[test]
fn what_a_dead_deletion_took_by_mistake_is_there_all_the_same() {
    let mut mistakes = 0;
    for taken in 1..CHANGES_MAX {
        for nth in taken..CHANGES_MAX {
            let shared = SharedStore::new();
            let root = shared.root.path().to_owned();
            shared.here.meanwhile(taken, move || {
                save_elsewhere(&root, 1, 2, true).unwrap();
            });
            shared.here.die(nth);
            let _ = shared.store.delete(1);
            if !shared.here.is_done() {
                break;
            }
            let path = shared.store.step_path(1);
            mistakes += usize::from(!path.join(MANIFEST).exists());
            shared.assert_holds(2);
            let again = save_elsewhere(shared.root.path(), 1, 3, false);
            assert!(matches!(again, Err(Error::Exists { .. })), "{again:?}");
            // A host with visible locks sweeps dead files.
            Store::new(shared.root.path()).sweep().unwrap();
            shared.assert_holds(2);
            assert!(shared.elsewhere().delete(1).unwrap() > 0);
            assert!(!path.exists(), "{:?}", names(&path));
        }
    }
    assert!(mistakes > 0, "no deletion took another's manifest");
}

#[test]
fn a_protection_that_comes_meanwhile_holds() {
    let mut kept = 0;
    for nth in 1..CHANGES_MAX {
        let shared = SharedStore::new();
        let elsewhere = shared.elsewhere();
        let (sender, protected) = std::sync::mpsc::channel();
        shared.here.meanwhile(nth, move || {
            drop(sender.send(elsewhere.protect(1)));
        });
        let deleted = shared.store.delete(1);
        let Ok(protected) = protected.try_recv() else {
            break;
        };
        if protected.is_ok() {
            assert!(
                matches!(deleted, Err(Error::Protected { .. })),
                "{deleted:?}"
            );
            shared.assert_holds(1);
            kept += 1;
        }
    }
    assert!(kept > 0);
}

/// A deletion that dies before its second check of the protection was not acknowledged; the
/// protection was, and the next call keeps it.
#[test]
fn a_protection_that_comes_meanwhile_survives_the_death_of_the_deletion() {
    let mut taken = 0;
    for nth in 1..CHANGES_MAX {
        for dies in nth..CHANGES_MAX {
            let shared = SharedStore::new();
            let elsewhere = shared.elsewhere();
            let (sender, protected) = std::sync::mpsc::channel();
            shared.here.meanwhile(nth, move || {
                drop(sender.send(elsewhere.protect(1)));
            });
            shared.here.die(dies);
            let _ = shared.store.delete(1);
            if !shared.here.is_done() {
                break;
            }
            if protected.try_recv().unwrap().is_err() {
                continue;
            }
            taken += usize::from(!shared.store.step_path(1).join(MANIFEST).exists());
            shared.assert_holds(1);
            assert_eq!(shared.elsewhere().quarantine(1).ok().flatten(), None);
            let again = save_elsewhere(shared.root.path(), 1, 3, false);
            assert!(matches!(again, Err(Error::Exists { .. })), "{again:?}");
            let deleted = match dies % 2 {
                0 => shared.elsewhere().delete(1),
                // A host with visible locks.
                _ => Store::new(shared.root.path()).delete(1),
            };
            assert!(
                matches!(deleted, Err(Error::Protected { .. })),
                "{deleted:?}"
            );
            Store::new(shared.root.path()).sweep().unwrap();
            shared.assert_holds(1);
            assert!(shared.elsewhere().delete_protected(1).unwrap() > 0);
            assert!(!shared.store.step_path(1).exists());
        }
    }
    assert!(taken > 0, "no deletion died with the manifest taken");
}

/// A manifest that is unreadable here may be put back by another host.
#[test]
fn what_was_copied_and_not_taken_away_keeps_its_files() {
    let shared = SharedStore::new();
    let (path, id) = (shared.store.step_path(1), shared.id());
    let before = names(&path);
    // Where taking is a copy and a removal, its process died between the two.
    let taken = path.join(format!("deleted-{}.{id}.json", "ab".repeat(16)));
    fs::copy(path.join(MANIFEST), &taken).unwrap();
    Store::new(shared.root.path()).sweep().unwrap();
    assert_eq!(names(&path), before);
    shared.assert_holds(1);
    fs::copy(path.join(MANIFEST), &taken).unwrap();
    assert!(shared.store.delete(1).unwrap() > 0);
    assert!(!path.exists());
}

#[test]
fn what_was_taken_and_cannot_be_made_out_keeps_its_files() {
    let shared = SharedStore::new();
    let (path, id) = (shared.store.step_path(1), shared.id());
    let taken = path.join(format!("deleted-{}.{id}.json", "ab".repeat(16)));
    let text = fs::read(path.join(MANIFEST)).unwrap();
    fs::remove_file(path.join(MANIFEST)).unwrap();
    let local = Store::new(shared.root.path());
    // A directory in its place stands for an unreadable file: the error does not show which kind.
    fs::create_dir(&taken).unwrap();
    let before = names(&path);
    local.sweep().unwrap_err();
    assert_eq!(local.orphans().unwrap(), []);
    local.delete(1).unwrap_err();
    shared.store.delete(1).unwrap_err();
    assert_eq!(names(&path), before);
    fs::remove_dir(&taken).unwrap();
    fs::write(&taken, "{").unwrap();
    assert_eq!(local.sweep().unwrap(), []);
    assert_eq!(local.orphans().unwrap(), []);
    assert_busy(shared.store.delete(1));
    assert_eq!(names(&path), before);
    fs::write(path.join(MANIFEST), text).unwrap();
    shared.assert_holds(1);
    assert!(shared.store.delete(1).unwrap() > 0);
}

/// Of two deletions one removes the step, and the other one finds it gone.
#[test]
fn a_step_that_another_host_deletes_meanwhile_is_gone() {
    let mut runs = 0;
    for nth in 1..CHANGES_MAX {
        let shared = SharedStore::new();
        let elsewhere = shared.elsewhere();
        let (sender, deleted) = std::sync::mpsc::channel();
        shared.here.meanwhile(nth, move || {
            drop(sender.send(elsewhere.delete(1)));
        });
        let here = shared.store.delete(1);
        let Ok(there) = deleted.try_recv() else {
            break;
        };
        runs += 1;
        for deleted in [here, there] {
            assert!(
                matches!(deleted, Ok(_) | Err(Error::NotFound { .. })),
                "change {nth}: {deleted:?}"
            );
        }
        assert!(!shared.store.step_path(1).exists());
    }
    assert!((5..CHANGES_MAX - 1).contains(&runs), "{runs}");
}

/// A process that quarantines a step may rename a checkpoint that another host has just saved
/// there, and die.
#[test]
fn what_is_saved_while_a_step_is_to_be_quarantined_is_there() {
    for nth in 1..CHANGES_MAX {
        for dies in [None, Some(nth + 1)] {
            let shared = SharedStore::new();
            let root = shared.root.path().to_owned();
            shared.store.mark_damaged(1, &shared.id()).unwrap();
            shared.here.meanwhile(nth, move || {
                save_elsewhere(&root, 1, 2, true).unwrap();
            });
            if let Some(nth) = dies {
                shared.here.die(nth);
            }
            let way = shared.store.make_way(1, &Progress::default());
            if !shared.here.is_done() && nth > 1 {
                return;
            }
            if shared.store.identity(1).unwrap().is_none() {
                panic!("change {nth}, death {dies:?}: {way:?}");
            }
            shared.assert_holds(if shared.here.is_done() { 2 } else { 1 });
        }
    }
    panic!("quarantine has an end")
}

/// Nothing is lost and nothing is silent: the error names the remedy.
#[test]
fn a_damaged_step_stays_there_until_it_is_overwritten() {
    let shared = SharedStore::new();
    shared.store.mark_damaged(1, &shared.id()).unwrap();
    let refused = shared.store.quarantine(1).unwrap_err();
    assert!(refused.remedy().contains("overwrite=True"), "{refused}");
    let way = shared.store.make_way(1, &Progress::default());
    assert_eq!(way.unwrap(), None);
    let again = save_elsewhere(shared.root.path(), 1, 2, false).unwrap_err();
    assert!(again.remedy().contains("overwrite=True"), "{again}");
    save_elsewhere(shared.root.path(), 1, 2, true).unwrap();
    shared.assert_holds(2);
    assert_eq!(shared.store.quarantine(1).unwrap(), None);
}

/// An empty directory holds nobody's data; a save that created it creates it again.
#[test]
fn a_save_survives_the_removal_of_its_empty_directory() {
    let mut removed = 0;
    for nth in 1..CHANGES_MAX {
        let root = tempfile::tempdir().unwrap();
        let publication = step_publication(root.path(), 1, false);
        let here = Unlocked::host();
        let options = Options {
            file_system: here.clone(),
            ..options_elsewhere()
        };
        let elsewhere = Store::new(root.path()).with_file_system(Unlocked::host());
        let path = publication.path.clone();
        let (sender, deleted) = std::sync::mpsc::channel();
        here.meanwhile(nth, move || {
            let had_manifest = path.join(MANIFEST).exists();
            drop(sender.send((had_manifest, elsewhere.delete(1))));
        });
        let saved = save(
            sample(1).state(),
            &publication,
            &options,
            &Progress::default(),
        );
        let Ok((had_manifest, deleted)) = deleted.try_recv() else {
            break;
        };
        // A published checkpoint may be deleted.
        if !had_manifest {
            saved.unwrap();
            sample(1).assert_at(&publication.path);
            removed += usize::from(deleted.is_ok());
        }
    }
    assert!(removed > 0, "no deletion found the directory empty");
}

#[test]
fn a_sweep_removes_nothing_there() {
    let shared = SharedStore::new();
    let commit = written(shared.root.path(), true);
    let before = names(&shared.store.step_path(1));
    assert_eq!(shared.store.sweep().unwrap(), Vec::new());
    assert_eq!(names(&shared.store.step_path(1)), before);
    commit().unwrap();
    shared.assert_holds(2);
    assert!(forge::shard_path(&shared.store.step_path(1)).is_file());
}
