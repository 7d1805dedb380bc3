//! A save is all or nothing: any failure in it is reported and leaves nothing behind, and data
//! stored before is unchanged.

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::thread;

use crate::common::hook::hooked;
use crate::common::{self, Sample, engines, errno, faulty, load, names, skip};
use penstock_io::engine::EngineChoice;
use penstock_io::faulty::{Failure, Faults, OpClass, Repeat};
use penstock_store::care::verify::verify;
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::save::{Publication, save};
use penstock_store::steps::store::Store;
use penstock_store::{Error, Progress, Result};

const EINTR: i32 = 4;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;

/// Replaces the checkpoint at `path`.
fn overwrite(sample: &Sample, path: &Path, options: &Options) -> Result<()> {
    let publication = Publication {
        overwrite: true,
        ..common::publication(path)
    };
    save(sample.state(), &publication, options, &Progress::default()).map(drop)
}

#[test]
fn a_complete_checkpoint_is_not_replaced_unasked() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let old = Sample::seeded(1);
    old.save(&path, &Options::default()).unwrap();
    let before = names(&path);
    let refused = Sample::seeded(2).save(&path, &Options::default());
    assert!(matches!(refused, Err(Error::Exists { .. })), "{refused:?}");
    assert_eq!(names(&path), before);
    old.assert_at(&path);
}

#[test]
fn the_old_one_loads_until_the_new_one_is_committed() {
    for &engine in engines() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let (old, new) = (Arc::new(Sample::seeded(1)), Sample::seeded(2));
        old.save(&path, &Options::default()).unwrap();
        let options = {
            let (old, path) = (Arc::clone(&old), path.clone());
            hooked(engine, move |_| old.assert_at(&path))
        };
        overwrite(&new, &path, &options).unwrap();
        new.assert_at(&path);
        assert_eq!(names(&path).len(), 3, "the old one's files are gone");
    }
}

/// Number of operations of an undisturbed save of the sample.
fn operations(engine: EngineChoice, sample: &Sample) -> u64 {
    let root = tempfile::tempdir().unwrap();
    let faults = Arc::new(Faults::new(0));
    let options = faulty(engine, Arc::clone(&faults));
    sample.save(&root.path().join("ckpt"), &options).unwrap();
    faults.operations()
}

fn failing(nth: u64, repeat: Repeat, errno: i32) -> Arc<Faults> {
    let failure = Failure {
        class: None,
        nth,
        repeat,
        errno,
    };
    Arc::new(Faults::new(nth).fail(failure))
}

#[test]
fn each_failing_write_ends_the_save_and_harms_nothing() {
    let (old, new) = (Sample::seeded(1), Sample::seeded(2));
    for &engine in engines() {
        let writes = operations(engine, &new);
        assert!(writes >= 3, "a save of several operations: {writes}");
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        old.save(&path, &Options::default()).unwrap();
        let before = names(&path);
        for nth in 1..=writes {
            for repeat in [Repeat::Once, Repeat::Forever] {
                for number in [EIO, ENOSPC] {
                    let what = format!("{engine:?} write {nth} {repeat:?} errno {number}");
                    let options = faulty(engine, failing(nth, repeat, number));
                    let error = overwrite(&new, &path, &options).expect_err(&what);
                    assert_eq!(errno(&error), Some(number), "{what}: {error}");
                    assert_eq!(names(&path), before, "{what}");
                    let fresh = root.path().join("fresh");
                    let options = faulty(engine, failing(nth, repeat, number));
                    new.save(&fresh, &options).expect_err(&what);
                    assert!(!fresh.exists(), "{what}: {:?}", names(&fresh));
                }
            }
            old.assert_at(&path);
        }
        overwrite(&new, &path, &Options::default()).unwrap();
        new.assert_at(&path);
    }
}

#[test]
fn each_failing_read_ends_the_load() {
    type Call = fn(&Path, &Options) -> Result<()>;
    let calls: [(&str, Call); 2] = [
        ("load", |path, options| load(path, options).map(drop)),
        ("verify", |path, options| {
            verify(path, options, &Progress::default()).map(drop)
        }),
    ];
    let sample = Sample::seeded(1);
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    sample.save(&path, &Options::default()).unwrap();
    for &engine in engines() {
        for (name, call) in calls {
            let faults = Arc::new(Faults::new(0));
            call(&path, &faulty(engine, Arc::clone(&faults))).unwrap();
            let reads = faults.operations();
            assert!(reads >= 3, "{name} takes several reads: {reads}");
            for nth in 1..=reads {
                for repeat in [Repeat::Once, Repeat::Forever] {
                    let what = format!("{engine:?} {name} read {nth} {repeat:?}");
                    let options = faulty(engine, failing(nth, repeat, EIO));
                    let error = call(&path, &options).expect_err(&what);
                    assert_eq!(errno(&error), Some(EIO), "{what}: {error}");
                }
            }
        }
    }
    sample.assert_at(&path);
}

#[test]
fn short_and_interrupted_transfers_change_nothing() {
    let sample = Sample::mixed();
    for &engine in engines() {
        for seed in 0..6 {
            let root = tempfile::tempdir().unwrap();
            let path = root.path().join("ckpt");
            let short = || {
                let interrupted = |nth, errno| Failure {
                    class: None,
                    nth,
                    repeat: Repeat::Once,
                    errno,
                };
                let faults = Faults::new(seed).short_transfers(if seed == 0 { 100 } else { 60 });
                let faults = faults.fail(interrupted(1 + seed, EINTR));
                Arc::new(faults.fail(interrupted(3 + seed, EAGAIN)))
            };
            sample.save(&path, &faulty(engine, short())).unwrap();
            sample.assert_at(&path);
            let loaded = load(&path, &faulty(engine, short())).unwrap();
            assert!(sample.is(&loaded), "{engine:?} seed {seed}");
            let report = verify(&path, &faulty(engine, short()), &Progress::default()).unwrap();
            assert!(report.problems.is_empty(), "{:?}", report.problems);
        }
    }
}

#[test]
fn an_interruption_without_end_is_an_error() {
    let sample = Sample::seeded(1);
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    for errno_number in [EINTR, EAGAIN] {
        let failure = Failure {
            class: Some(OpClass::Write),
            nth: 2,
            repeat: Repeat::Forever,
            errno: errno_number,
        };
        let options = faulty(engines()[0], Arc::new(Faults::new(1).fail(failure)));
        let error = sample.save(&path, &options).unwrap_err();
        assert_eq!(errno(&error), Some(errno_number), "{error}");
        assert!(!path.exists());
    }
}

/// Cancels from another thread when the call reaches an operation; the call waits there for the
/// cancellation, so that it is always in progress.
fn cancelling(
    engine: EngineChoice,
    nth: u64,
    progress: &Arc<Progress>,
) -> (Options, thread::JoinHandle<()>) {
    let (reached, at_operation) = mpsc::channel();
    let (cancelled, is_cancelled) = mpsc::channel();
    let is_cancelled = std::sync::Mutex::new(is_cancelled);
    let options = hooked(engine, move |operation| {
        if operation == nth {
            reached.send(()).unwrap();
            is_cancelled.lock().unwrap().recv().unwrap();
        }
    });
    let progress = Arc::clone(progress);
    let canceller = thread::spawn(move || {
        at_operation.recv().unwrap();
        progress.cancel();
        cancelled.send(()).unwrap();
    });
    (options, canceller)
}

#[test]
fn a_cancelled_save_leaves_nothing() {
    let (old, new) = (Sample::seeded(1), Sample::seeded(2));
    for &engine in engines() {
        for nth in 1..=operations(engine, &new) {
            let root = tempfile::tempdir().unwrap();
            let path = root.path().join("ckpt");
            old.save(&path, &Options::default()).unwrap();
            let before = names(&path);
            for path in [path.clone(), root.path().join("fresh")] {
                let progress = Arc::new(Progress::default());
                let (options, canceller) = cancelling(engine, nth, &progress);
                let publication = Publication {
                    overwrite: true,
                    ..common::publication(&path)
                };
                let stopped = save(new.state(), &publication, &options, &progress);
                assert!(matches!(stopped, Err(Error::Interrupted)), "{stopped:?}");
                canceller.join().unwrap();
            }
            assert_eq!(names(&path), before);
            assert!(!root.path().join("fresh").exists());
            old.assert_at(&path);
        }
    }
}

#[test]
fn a_cancelled_load_hands_nothing_out() {
    let sample = Sample::seeded(1);
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    sample.save(&path, &Options::default()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    for &engine in engines() {
        let progress = Arc::new(Progress::default());
        let (options, canceller) = cancelling(engine, 1, &progress);
        let targets = std::collections::HashMap::new();
        let stopped = checkpoint.load(None, targets, &options, &progress);
        assert!(matches!(stopped, Err(Error::Interrupted)), "{engine:?}");
        canceller.join().unwrap();
    }
}

#[test]
fn progress_ends_where_it_was_said_to() {
    let sample = Sample::seeded(1);
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let progress = Progress::default();
    let publication = common::publication(&path);
    save(sample.state(), &publication, &Options::default(), &progress).unwrap();
    let (done, total) = progress.bytes();
    assert_eq!(done, total);
    assert!(total >= sample.bytes.iter().map(|bytes| bytes.len() as u64).sum());
}

/// A separate file system for this test, unmounted when dropped.
struct Mount {
    directory: tempfile::TempDir,
}

impl Mount {
    fn new(arguments: &[&str]) -> std::result::Result<Mount, String> {
        let directory = tempfile::tempdir().unwrap();
        let mount = Command::new("mount")
            .args(arguments)
            .arg(directory.path())
            .output();
        match mount {
            Ok(output) if output.status.success() => Ok(Mount { directory }),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(error) => Err(format!("mount: {error}")),
        }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn remount(&self, options: &str) {
        let mut command = Command::new("mount");
        command.args(["-o", options]).arg(self.path());
        assert!(command.status().unwrap().success(), "mount -o {options}");
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(self.path()).status();
        if !unmounted.is_ok_and(|status| status.success()) {
            eprintln!("{} stays mounted", self.path().display());
        }
    }
}

#[test]
fn a_full_disk_is_an_error_and_harms_nothing() {
    let image = tempfile::NamedTempFile::new().unwrap();
    let image_path = image.path().to_str().unwrap();
    image.as_file().set_len(32 << 20).unwrap();
    let formatted = Command::new("mkfs.ext4")
        .args(["-q", "-m", "0", image_path])
        .status();
    let mut mounts = vec![Mount::new(&["-t", "tmpfs", "-o", "size=16m", "tmpfs"])];
    mounts.push(match formatted {
        Ok(status) if status.success() => Mount::new(&["-o", "loop", image_path]),
        _ => Err("no mkfs.ext4".to_owned()),
    });
    for mount in mounts {
        let mount = match mount {
            Ok(mount) => mount,
            Err(reason) => {
                skip("a_full_disk_is_an_error_and_harms_nothing", &reason);
                continue;
            }
        };
        let old = Sample::seeded(1);
        let large = Sample::of_sizes(&[40 << 20]);
        let path = mount.path().join("ckpt");
        old.save(&path, &Options::default()).unwrap();
        let before = names(&path);
        for &engine in engines() {
            let options = Options {
                engine,
                ..Options::default()
            };
            let error = overwrite(&large, &path, &options).unwrap_err();
            assert_eq!(errno(&error), Some(ENOSPC), "{error}");
            assert_names_the_room(&error, 40 << 20, 32 << 20);
            let error = large.save(&mount.path().join("fresh"), &options);
            assert_eq!(errno(&error.unwrap_err()), Some(ENOSPC));
            assert!(!mount.path().join("fresh").exists());
        }
        assert_eq!(names(&path), before);
        old.assert_at(&path);
        let new = Sample::seeded(2);
        overwrite(&new, &path, &Options::default()).unwrap();
        new.assert_at(&path);
        check_a_disk_without_a_byte(mount.path());
    }
}

/// Checks that the error and its message name the needed and the free space.
fn assert_names_the_room(error: &Error, needed_min: u64, free_max: u64) {
    let Error::Full {
        needed_bytes,
        free_bytes,
        ..
    } = error
    else {
        panic!("{error:?}");
    };
    assert!(
        (needed_min..2 * needed_min).contains(needed_bytes),
        "{error}"
    );
    assert!(*free_bytes < free_max, "{error}");
    let message = error.to_string();
    assert!(message.contains(&needed_bytes.to_string()), "{message}");
    assert!(message.contains(&free_bytes.to_string()), "{message}");
}

/// Removal needs no space: on a full disk, retention, deletion and a sweep work and free their
/// files.
fn check_a_disk_without_a_byte(root: &Path) {
    let store = Store::new(root.join("store"));
    for step in 1..=3 {
        let path = store.step_path(step);
        let saved = Sample::seeded(step).save_step(&path, Some(step), false);
        saved.unwrap();
    }
    // The remains of a killed save.
    let attempt = "0123456789abcdef0123456789abcdef";
    let orphan = format!("shard-00000-00.{attempt}.safetensors");
    let dead = store.step_path(4);
    std::fs::create_dir(&dead).unwrap();
    std::fs::write(dead.join(&orphan), vec![1; 1 << 20]).unwrap();
    let filler = root.join("filler");
    let mut file = std::fs::File::create(&filler).unwrap();
    while std::io::Write::write_all(&mut file, &[0; 4096]).is_ok() {}
    let free = || penstock_io::file_system::free_bytes(root).unwrap();
    assert_eq!(free(), 0);

    let path = store.step_path(5);
    let error = Sample::seeded(5).save_step(&path, Some(5), false);
    let error = error.unwrap_err();
    assert_eq!(errno(&error), Some(ENOSPC), "{error}");
    assert!(!path.exists(), "{:?}", names(&path));
    Sample::seeded(3).assert_at(&store.step_path(3));

    let sweep = store.sweep().unwrap();
    assert_eq!(sweep.iter().map(|(_, bytes)| bytes).sum::<u64>(), 1 << 20);
    let after_sweep = free();
    assert!(after_sweep >= 1 << 20, "{after_sweep}");
    std::io::Write::write_all(&mut file, &vec![0; after_sweep as usize]).ok();
    store.retain(Some(2), None, Some(3)).unwrap();
    assert_eq!(store.steps().unwrap(), [2, 3]);
    let after_retention = free();
    assert!(after_retention > 2 << 20, "{after_retention}");
    let freed = store.delete(2).unwrap();
    assert!(free() >= after_retention + freed / 2);
    Sample::seeded(3).assert_at(&store.step_path(3));
    Sample::seeded(5).save_step(&path, Some(5), false).unwrap();
    drop(file);
    std::fs::remove_file(filler).unwrap();
}

/// Root ignores the mode of a directory, so only a mount can refuse its writes.
#[test]
fn a_read_only_directory_is_an_error_and_still_loads() {
    let mount = match Mount::new(&["-t", "tmpfs", "-o", "size=32m", "tmpfs"]) {
        Ok(mount) => mount,
        Err(reason) => {
            return skip("a_read_only_directory_is_an_error_and_still_loads", &reason);
        }
    };
    let old = Sample::seeded(1);
    let path = mount.path().join("ckpt");
    old.save(&path, &Options::default()).unwrap();
    mount.remount("remount,ro");
    let error = overwrite(&Sample::seeded(2), &path, &Options::default()).unwrap_err();
    assert_eq!(errno(&error), Some(EROFS), "{error}");
    let fresh = Sample::seeded(2).save(&mount.path().join("fresh"), &Options::default());
    assert_eq!(errno(&fresh.unwrap_err()), Some(EROFS));
    old.assert_at(&path);
}
