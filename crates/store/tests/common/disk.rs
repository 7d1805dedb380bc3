//! A file system that can lose power: ext4 or XFS in a file, mounted over a loop device.
//!
//! It is shut down by `EXT4_IOC_SHUTDOWN` or `XFS_IOC_GOINGDOWN` without a flush of the log:
//! everything that was not synced is lost, as in a power cut. It needs root, and cannot simulate a
//! drive that lies about its cache.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::skip;

/// The standard library has no wrapper for the call, and Python is available wherever Penstock is
/// built. Both file systems use the same number, `_IOR('X', 125, __u32)`, and the same argument: 2
/// is `NOLOGFLUSH`. The process waits for its input, so that the cut comes at once.
const SHUTDOWN: &str = "import fcntl, os, struct, sys
for line in sys.stdin:
    directory = os.open(line.rstrip('\\n'), os.O_RDONLY)
    fcntl.ioctl(directory, 0x8004587D, struct.pack('I', 2))
    os.close(directory)
    print(flush=True)";

/// How long a closed ring may hold on to its files: the kernel tears it down later.
const UNMOUNT_TRIES_MAX: usize = 500;
const UNMOUNT_PAUSE: Duration = Duration::from_millis(10);

/// The file system of a disk.
#[derive(Clone, Copy, Debug)]
pub struct FileSystem {
    pub name: &'static str,
    /// The image is sparse: it takes only the space written to it. XFS needs at least 300 MiB.
    image_bytes: u64,
}

pub const FILE_SYSTEMS: [FileSystem; 2] = [
    FileSystem {
        name: "ext4",
        image_bytes: 96 << 20,
    },
    FileSystem {
        name: "xfs",
        image_bytes: 320 << 20,
    },
];

pub struct Disk {
    pub file_system: FileSystem,
    directory: tempfile::TempDir,
    switch: Switch,
}

impl Disk {
    /// Creates a disk, and proves that its power can be cut; otherwise returns the reason.
    pub fn new(file_system: FileSystem) -> Result<Disk, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::create_dir(&path).unwrap();
        let disk = Disk {
            file_system,
            directory,
            switch: Switch::new(path)?,
        };
        let image = std::fs::File::create(disk.image()).unwrap();
        image.set_len(file_system.image_bytes).unwrap();
        let format = format!("mkfs.{}", file_system.name);
        run(Command::new(format).arg("-q").arg(disk.image()))?;
        disk.mount()?;
        std::fs::write(disk.path().join("unsynced"), "lost").unwrap();
        disk.switch.cut()?;
        disk.restore();
        let is_lost = !disk.path().join("unsynced").exists();
        is_lost
            .then_some(disk)
            .ok_or("a cut loses nothing here".to_owned())
    }

    pub fn path(&self) -> &Path {
        &self.switch.path
    }

    pub fn switch(&self) -> Switch {
        self.switch.clone()
    }

    fn image(&self) -> PathBuf {
        self.directory.path().join("image")
    }

    fn mount(&self) -> Result<(), String> {
        run(Command::new("mount")
            .args(["-o", "loop"])
            .arg(self.image())
            .arg(self.path()))
    }

    fn unmount(&self) -> Result<(), String> {
        let unmount = || run(Command::new("umount").arg(self.path()));
        for _ in 1..UNMOUNT_TRIES_MAX {
            if unmount().is_ok() {
                return Ok(());
            }
            thread::sleep(UNMOUNT_PAUSE);
        }
        unmount()
    }

    /// Remounts the disk in the state that a cut has left.
    pub fn restore(&self) {
        self.unmount().unwrap();
        self.mount().unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let path = self.path();
        // A disk that was cut off and not restored may return errors.
        let is_unmounted = device(path).is_ok_and(|found| found == device_above(path));
        if !is_unmounted && let Err(reason) = self.unmount() {
            eprintln!("{} stays mounted: {reason}", path.display());
        }
    }
}

/// Runs a test on a disk with each file system, or reports why it cannot.
pub fn on_each_disk(test: &str, run: impl Fn(&Disk)) {
    for file_system in FILE_SYSTEMS {
        match Disk::new(file_system) {
            Ok(disk) => run(&disk),
            Err(reason) => skip(&format!("{test} on {}", file_system.name), &reason),
        }
    }
}

/// Cuts the power of one disk, from any thread.
#[derive(Clone)]
pub struct Switch {
    path: PathBuf,
    helper: Arc<Mutex<Helper>>,
}

impl Switch {
    fn new(path: PathBuf) -> Result<Switch, String> {
        let helper = Arc::new(Mutex::new(Helper::new()?));
        Ok(Switch { path, helper })
    }

    pub fn cut(&self) -> Result<(), String> {
        // No other file system must ever be shut down.
        assert_ne!(device(&self.path).unwrap(), device_above(&self.path));
        self.helper.lock().unwrap().shut_down(&self.path)
    }
}

fn device(path: &Path) -> io::Result<u64> {
    Ok(path.metadata()?.dev())
}

/// The device that contains the mount point itself.
fn device_above(path: &Path) -> u64 {
    device(path.parent().unwrap()).unwrap()
}

struct Helper {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Helper {
    fn new() -> Result<Helper, String> {
        let mut child = Command::new("python3")
            .args(["-c", SHUTDOWN])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("python3: {error}"))?;
        Ok(Helper {
            orders: child.stdin.take(),
            answers: BufReader::new(child.stdout.take().unwrap()),
            child,
        })
    }

    fn shut_down(&mut self, path: &Path) -> Result<(), String> {
        let mut orders = self.orders.as_ref().unwrap();
        let mut answer = String::new();
        let answered = writeln!(orders, "{}", path.display())
            .and_then(|()| self.answers.read_line(&mut answer));
        match answered {
            Ok(bytes) if bytes > 0 => Ok(()),
            _ => Err("python3 cannot shut a file system down, see above".to_owned()),
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // The process ends when its input is closed.
        drop(self.orders.take());
        let _ = self.child.wait();
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
