//! Real file systems that behave unlike a disk: without direct I/O, in memory, full, frozen.
//!
//! Each test mounts its own file system, which requires root; without it the test prints that it is
//! skipped.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support;
use penstock_io::Error;
use penstock_io::buffer::Memory;
use penstock_io::engine::{Completion, Engine, EngineChoice, EngineConfig, Op, OpKind, open};
use penstock_io::file::{Alignment, Direct, File};
use penstock_io::transfer::WholeTransfers;

const ENOSPC: i32 = 28;

/// A mounted file system, unmounted on drop.
struct Mounted {
    directory: tempfile::TempDir,
}

impl Mounted {
    /// Mounts a file system of `kind`, or prints why that is not possible here.
    fn new(test: &str, kind: &str, options: &str, source: &Path) -> Option<Mounted> {
        let directory = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount
            .args(["-t", kind, "-o", options])
            .arg(source)
            .arg(directory.path());
        match complain(&mut mount) {
            Ok(()) => Some(Mounted { directory }),
            Err(reason) => {
                support::skip(test, &format!("cannot mount {kind}: {reason}"));
                None
            }
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazily, so that a failed test that left a file open still unmounts.
        let unmounted = complain(Command::new("umount").arg("-l").arg(self.directory.path()));
        assert_eq!(unmounted, Ok(()));
    }
}

fn complain(command: &mut Command) -> Result<(), String> {
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Every engine that this machine supports.
fn engines(queue_depth: usize) -> Vec<Box<dyn Engine>> {
    let choices = [EngineChoice::Auto, EngineChoice::Threads];
    choices
        .map(|choice| {
            open(&EngineConfig {
                choice,
                queue_depth,
            })
            .unwrap()
            .engine
        })
        .into()
}

fn write(file: &Arc<File>, offset: u64, len: usize) -> Op {
    let mut buf = Memory::allocate(len).unwrap().share().1;
    buf.as_mut_slice().fill(7);
    Op {
        token: offset,
        file: Arc::clone(file),
        kind: OpKind::Write { offset, buf },
    }
}

fn run_one(engine: &mut dyn Engine, op: Op) -> Completion {
    engine.submit(op).unwrap();
    let mut completed = Vec::new();
    engine
        .poll(1, Some(Duration::from_secs(60)), &mut completed)
        .unwrap();
    completed.pop().expect("a completion within a minute")
}

/// Checks the promises on a file system without direct I/O.
fn check_without_direct_io(mounted: &Mounted, reason: &str) {
    let path = mounted.file("file");
    let refused = File::create(&path, Direct::On).unwrap_err();
    assert!(
        matches!(refused, Error::DirectUnavailable { .. }),
        "{refused:?}"
    );
    assert!(refused.to_string().contains(reason), "{refused}");
    assert!(
        !path.exists(),
        "a file that could not be created as asked for is gone"
    );

    let file = Arc::new(File::create(&path, Direct::Auto).unwrap());
    assert!(!file.is_direct());
    assert_eq!(
        file.alignment(),
        Alignment {
            memory: 1,
            offset: 1
        }
    );
    assert!(
        file.fallback().unwrap().contains(reason),
        "{:?}",
        file.fallback()
    );
    for mut engine in engines(4) {
        let completion = run_one(engine.as_mut(), write(&file, 3, 1001));
        assert_eq!(completion.result.unwrap(), 1001);
        file.sync_data().unwrap();
        let again = Arc::new(File::open(&path, Direct::Auto).unwrap());
        assert!(again.fallback().is_some());
        let buf = Memory::allocate(5000).unwrap().share().1;
        let kind = OpKind::Read { offset: 0, buf };
        let completion = run_one(
            engine.as_mut(),
            Op {
                token: 0,
                file: again,
                kind,
            },
        );
        assert_eq!(completion.result.unwrap(), 1004);
        let buf = completion.buf.unwrap();
        assert_eq!(buf.as_slice()[..3], [0; 3]);
        assert!(buf.as_slice()[3..1004].iter().all(|&byte| byte == 7));
    }
}

#[test]
fn a_file_system_that_refuses_direct_io_is_used_buffered() {
    let Some(mounted) = Mounted::new("without direct I/O", "ramfs", "rw", Path::new("ramfs"))
    else {
        return;
    };
    check_without_direct_io(&mounted, "refuses O_DIRECT");
    let file = File::open(&mounted.file("file"), Direct::Auto).unwrap();
    drop(file);
    let file = File::create(&mounted.file("reserved"), Direct::Auto).unwrap();
    let Err(Error::Storage { source, .. }) = file.allocate(1 << 20) else {
        panic!("ramfs cannot reserve");
    };
    assert_eq!(source.kind(), std::io::ErrorKind::Unsupported);
    assert_eq!(file.len().unwrap(), 0);
}

#[test]
fn tmpfs_is_used_buffered() {
    let tmpfs = Mounted::new("tmpfs", "tmpfs", "size=1m", Path::new("tmpfs"));
    let Some(mounted) = tmpfs else { return };
    check_without_direct_io(&mounted, "page cache");
}

#[test]
fn a_full_device_is_enospc() {
    let tmpfs = Mounted::new("full device", "tmpfs", "size=64k", Path::new("tmpfs"));
    let Some(mounted) = tmpfs else { return };
    for (index, engine) in engines(4).into_iter().enumerate() {
        let file = File::create(&mounted.file(&format!("file-{index}")), Direct::Auto).unwrap();
        let refused = file.allocate(1 << 20).unwrap_err();
        let Error::Storage {
            operation: "allocate",
            source,
            ..
        } = refused
        else {
            panic!("{refused:?}");
        };
        assert_eq!(source.raw_os_error(), Some(ENOSPC));

        // The bare engine writes the bytes that fit and returns their count; the rest then fails.
        let file = Arc::new(file);
        let mut engine = WholeTransfers::new(engine);
        let completion = run_one(&mut engine, write(&file, 0, 1 << 20));
        assert_eq!(completion.result.unwrap_err().raw_os_error(), Some(ENOSPC));
        assert_eq!(completion.buf.unwrap().len(), 1 << 20);
        file.truncate(0).unwrap();
        assert_eq!(
            run_one(&mut engine, write(&file, 0, 4096)).result.unwrap(),
            4096
        );
        std::fs::remove_file(file.path()).unwrap();
    }
}

/// A small ext4 on a loop device that can be frozen: writes to it block until it thaws.
struct Freezable {
    mounted: Mounted,
    _image: tempfile::NamedTempFile,
}

impl Freezable {
    fn new(test: &str) -> Option<Freezable> {
        let image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        image.as_file().set_len(16 << 20).unwrap();
        if let Err(reason) = complain(Command::new("mkfs.ext4").arg("-q").arg(image.path())) {
            support::skip(test, &format!("cannot make an ext4: {reason}"));
            return None;
        }
        let mounted = Mounted::new(test, "ext4", "loop", image.path())?;
        Some(Freezable {
            mounted,
            _image: image,
        })
    }

    fn freeze(&self) {
        self.fsfreeze("--freeze");
    }

    fn thaw(&self) {
        self.fsfreeze("--unfreeze");
    }

    fn fsfreeze(&self, what: &str) {
        let done = complain(
            Command::new("fsfreeze")
                .arg(what)
                .arg(self.mounted.directory.path()),
        );
        assert_eq!(done, Ok(()), "fsfreeze {what}");
    }
}

/// Thaws a file system when a test ends, passed or failed.
struct Frozen<'a>(&'a Freezable);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.thaw();
    }
}

#[test]
fn polling_waits_for_the_timeout_and_no_longer_than_the_operation() {
    const TIMEOUT: Duration = Duration::from_millis(50);
    let Some(fs) = Freezable::new("poll timeout") else {
        return;
    };
    for (index, bare) in engines(4).into_iter().enumerate() {
        let mut engine = WholeTransfers::new(bare);
        let file = File::create(&fs.mounted.file(&format!("file-{index}")), Direct::Auto).unwrap();
        let file = Arc::new(file);
        let mut completed = Vec::new();
        {
            fs.freeze();
            let _frozen = Frozen(&fs);
            engine.submit(write(&file, 0, 65_536)).unwrap();
            let begun = Instant::now();
            engine.poll(1, Some(TIMEOUT), &mut completed).unwrap();
            assert!(begun.elapsed() >= TIMEOUT, "{:?}", begun.elapsed());
            engine
                .poll(1, Some(Duration::ZERO), &mut completed)
                .unwrap();
            engine.poll(0, None, &mut completed).unwrap();
            assert!(completed.is_empty());
            assert_eq!(engine.in_flight(), 1);
        }
        engine.poll(1, None, &mut completed).unwrap();
        assert_eq!(completed.pop().unwrap().result.unwrap(), 65_536);
        assert_eq!(engine.in_flight(), 0);
    }
}

#[test]
fn dropping_an_engine_waits_for_a_write_that_stands_still() {
    let Some(fs) = Freezable::new("engine dropped over a frozen file system") else {
        return;
    };
    for choice in [EngineChoice::Auto, EngineChoice::Threads] {
        let file = File::create(&fs.mounted.file(&format!("file-{choice}")), Direct::Auto).unwrap();
        let file = Arc::new(file);
        let thawed = Arc::new(AtomicBool::new(false));
        fs.freeze();
        let frozen = Frozen(&fs);
        let dropping = {
            let (file, thawed) = (Arc::clone(&file), Arc::clone(&thawed));
            std::thread::spawn(move || {
                let mut engine = open(&EngineConfig {
                    choice,
                    queue_depth: 4,
                })
                .unwrap()
                .engine;
                let (handle, buf) = Memory::allocate(65_536).unwrap().share();
                let kind = OpKind::Write { offset: 0, buf };
                engine
                    .submit(Op {
                        token: 0,
                        file,
                        kind,
                    })
                    .unwrap();
                drop(engine);
                assert!(
                    thawed.load(Ordering::SeqCst),
                    "the engine was gone before its write"
                );
                assert!(handle.reclaim().is_ok(), "a buffer is missing");
            })
        };
        std::thread::sleep(Duration::from_millis(50));
        assert!(!dropping.is_finished());
        thawed.store(true, Ordering::SeqCst);
        drop(frozen);
        dropping.join().unwrap();
        assert_eq!(file.len().unwrap(), 65_536);
    }
}
