//! A power cut on a real file system: what was acknowledged loads afterwards, bit for bit.
//!
//! ext4 in a file, mounted over a loop device, is shut down with `EXT4_IOC_SHUTDOWN` and
//! `NOLOGFLUSH`: everything that was not synced is lost, as when the power goes. Needs root; says
//! so where it is not to be had. It cannot show a drive that lies about its cache.

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use common::hook::hooked;
use common::{Rng, Sample, engines, skip};
use penstock_store::options::Options;
use penstock_store::store::{StepState, Store};

/// The call has no wrapper in the standard library, and Python is there wherever Penstock is
/// built. The number is `_IOR('X', 125, __u32)`; the argument 2 is `NOLOGFLUSH`.
const SHUTDOWN: &str = "import fcntl, os, struct, sys
fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, struct.pack('I', 2))";

/// A file system that can lose its power.
struct Disk {
    directory: tempfile::TempDir,
}

impl Disk {
    fn new() -> Result<Disk, String> {
        let directory = tempfile::tempdir().unwrap();
        let disk = Disk { directory };
        std::fs::create_dir(disk.path()).unwrap();
        let image = std::fs::File::create(disk.image()).unwrap();
        image.set_len(96 << 20).unwrap();
        run(Command::new("mkfs.ext4").arg("-q").arg(disk.image()))?;
        disk.mount()?;
        Ok(disk)
    }

    fn image(&self) -> PathBuf {
        self.directory.path().join("image")
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("disk")
    }

    fn mount(&self) -> Result<(), String> {
        run(Command::new("mount")
            .args(["-o", "loop"])
            .arg(self.image())
            .arg(self.path()))
    }

    /// Whether the directory is the disk: nothing else must ever be shut down.
    fn is_mounted(path: &Path) -> bool {
        let device = |path: &Path| path.metadata().unwrap().dev();
        device(path) != device(path.parent().unwrap())
    }

    fn cut_power(path: &Path) -> Result<(), String> {
        assert!(Disk::is_mounted(path));
        run(Command::new("python3").args(["-c", SHUTDOWN]).arg(path))
    }

    /// Brings the disk back as it is after the cut.
    fn restore(&self) {
        run(Command::new("umount").arg(self.path())).unwrap();
        self.mount().unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let path = self.path();
        if Disk::is_mounted(&path)
            && let Err(reason) = run(Command::new("umount").arg(&path))
        {
            eprintln!("{} stays mounted: {reason}", path.display());
        }
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command
        .output()
        .map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{command:?}: {}", said.trim()))
}

/// A disk, and the proof that its power can be cut; else the reason why there is none.
fn disk(test: &str) -> Option<Disk> {
    let usable = Disk::new().and_then(|disk| {
        std::fs::write(disk.path().join("unsynced"), "lost").unwrap();
        Disk::cut_power(&disk.path())?;
        disk.restore();
        let is_lost = !disk.path().join("unsynced").exists();
        is_lost
            .then_some(disk)
            .ok_or("a cut loses nothing here".to_owned())
    });
    usable.map_err(|reason| skip(test, &reason)).ok()
}

#[test]
fn an_acknowledged_save_survives() {
    let Some(disk) = disk("an_acknowledged_save_survives") else {
        return;
    };
    let path = disk.path().join("new/store/ckpt");
    for seed in 1..6 {
        let sample = Sample::seeded(seed);
        let options = Options {
            engine: engines()[seed as usize % engines().len()],
            ..Options::default()
        };
        let target = penstock_store::save::Target {
            overwrite: true,
            ..common::target(&path)
        };
        let progress = penstock_store::Progress::default();
        penstock_store::save::save(&sample.state(), &target, &options, &progress).unwrap();
        Disk::cut_power(&disk.path()).unwrap();
        disk.restore();
        sample.assert_at(&path);
    }
}

#[test]
fn a_cut_during_a_save_leaves_the_one_before() {
    let Some(disk) = disk("a_cut_during_a_save_leaves_the_one_before") else {
        return;
    };
    let store = Store::new(disk.path().join("store"));
    let old = Sample::seeded(1);
    old.save_step(&store.step_path(1), Some(1), false).unwrap();
    for nth in 1..=3 {
        for path in [store.step_path(1), store.step_path(2)] {
            let root = disk.path();
            let options = hooked(engines()[0], move |operation| {
                if operation == nth {
                    Disk::cut_power(&root).unwrap();
                }
            });
            let target = penstock_store::save::Target {
                overwrite: true,
                ..common::target(&path)
            };
            let progress = penstock_store::Progress::default();
            let state = Sample::seeded(2).state();
            penstock_store::save::save(&state, &target, &options, &progress)
                .expect_err("the disk is gone");
            disk.restore();
            old.assert_at(&store.step_path(1));
            store.sweep().unwrap();
            assert_eq!(store.steps().unwrap(), [1]);
            assert_eq!(common::names(&store.step_path(1)).len(), 3);
        }
    }
}

/// The saver runs until the disk is gone; wherever that finds it, in a save or in retention, every
/// step that it was told is safe is safe.
#[test]
fn cuts_at_random_moments_lose_nothing_acknowledged() {
    let Some(disk) = disk("cuts_at_random_moments_lose_nothing_acknowledged") else {
        return;
    };
    let mut rng = Rng::new(0xc07);
    let store = Store::new(disk.path().join("store"));
    let acknowledged = Arc::new(AtomicU64::new(0));
    for cut in 0..12 {
        let first = acknowledged.load(Ordering::SeqCst) + 1;
        let saver = {
            let (store, acknowledged) = (store.clone(), Arc::clone(&acknowledged));
            thread::spawn(move || {
                for step in first.. {
                    let path = store.step_path(step);
                    let saved = Sample::seeded(step).save_step(&path, Some(step), true);
                    if saved.is_err() {
                        return;
                    }
                    acknowledged.store(step, Ordering::SeqCst);
                    if store.retain(Some(2), None, Some(step)).is_err() {
                        return;
                    }
                }
            })
        };
        thread::sleep(Duration::from_millis(20 + rng.below(150)));
        Disk::cut_power(&disk.path()).unwrap();
        saver.join().unwrap();
        disk.restore();
        let mut newest = 0;
        for step in store.steps().unwrap() {
            match store.state(step).unwrap() {
                StepState::Complete(_) => {
                    Sample::seeded(step).assert_at(&store.step_path(step));
                    newest = step;
                }
                StepState::Incomplete => {}
                StepState::Damaged(error) | StepState::Newer(error) => panic!("cut {cut}: {error}"),
            }
        }
        let promised = acknowledged.load(Ordering::SeqCst);
        assert!(
            newest >= promised,
            "cut {cut}: {promised} promised, {newest} there"
        );
    }
    eprintln!("{} steps", acknowledged.load(Ordering::SeqCst));
}
