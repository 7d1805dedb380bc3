//! The block device behind a path, as `/sys` describes it.
//!
//! For request sizes and reports; nothing depends on the device being known.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The most levels of stacked devices that are followed.
const LEVELS_MAX: u32 = 8;

/// The type of tmpfs in `statfs`, from the kernel's `magic.h`.
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// SCSI vendor names that hypervisors use: QEMU, Hyper-V, VMware, VirtualBox, Google.
const VIRTUAL_VENDORS: [&str; 5] = ["QEMU", "Msft", "VMware", "VBOX", "Google"];

/// For a device without moving heads: enough requests to keep it busy while a worker does something
/// else, with little memory. Measured in docs/performance.md.
const FAST: Requests = Requests {
    bytes: 1 << 20,
    queue_depth: 16,
    workers_max: 4,
};
/// For a rotating disk: long runs, and few requests that move the head elsewhere.
const ROTATIONAL: Requests = Requests {
    bytes: 4 << 20,
    queue_depth: 4,
    workers_max: 1,
};
/// For reads from files in memory: more than one request at a time keeps nothing busier, and each
/// worker copies as fast as its core does. Measured in docs/performance.md.
const MEMORY: Requests = Requests {
    bytes: 1 << 20,
    queue_depth: 4,
    workers_max: 16,
};
/// Requests grow to a whole stripe of an array, up to this.
const STRIPE_BYTES_MAX: usize = 16 << 20;

/// Request sizes and counts that suit a kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requests {
    /// Bytes of one request.
    pub bytes: usize,
    /// Requests in flight of each worker.
    pub queue_depth: usize,
    /// The most workers. One copies and digests several gigabytes a second; this many saturate the
    /// share of most drives that one process gets.
    pub workers_max: usize,
}

impl Requests {
    /// The values that suit a device, or an unknown one.
    pub fn suited(device: Option<&Device>) -> Requests {
        if device.is_some_and(|device| device.is_rotational) {
            ROTATIONAL
        } else {
            FAST
        }
    }

    /// The values that suit reads of files in memory.
    pub fn suited_to_memory() -> Requests {
        MEMORY
    }

    /// A request size in whole units that is also a multiple of an array's stripe, where there is
    /// such a size within bounds.
    pub fn whole_stripes(&self, device: Option<&Device>, unit_bytes: usize) -> Option<usize> {
        let stripe_bytes = device.map_or(0, |device| device.optimal_io_bytes);
        if !(1..=STRIPE_BYTES_MAX).contains(&stripe_bytes) {
            return None;
        }
        let mut common = stripe_bytes;
        while !common.is_multiple_of(unit_bytes) && common <= STRIPE_BYTES_MAX {
            common += stripe_bytes;
        }
        let bytes = self.bytes.next_multiple_of(common);
        (bytes <= STRIPE_BYTES_MAX).then_some(bytes)
    }
}

/// Whether files at `path`, existing or to be made, are only in memory: tmpfs.
pub(crate) fn is_memory(path: &Path) -> bool {
    let mut existing = path.ancestors().chain([Path::new(".")]);
    let found = existing.find_map(|path| rustix::fs::statfs(path).ok());
    found.is_some_and(|found| found.f_type == TMPFS_MAGIC)
}

/// A block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The kernel's name for the disk, also where a partition of it is used.
    pub name: String,
    /// The kernel's driver, where a driver runs the disk itself: not on RAID or LVM.
    pub driver: Option<String>,
    /// Whether it has moving heads, or is stacked on a disk that has.
    pub is_rotational: bool,
    /// The device's preferred request size: on RAID a whole stripe. 0 where it reports none.
    pub optimal_io_bytes: usize,
}

impl Device {
    /// The device that holds `path`, existing or to be made; `None` where no single block device is
    /// known (network file systems, tmpfs, Btrfs) or `/sys` is missing.
    pub fn behind(path: &Path) -> Option<Device> {
        let mut existing = path.ancestors().chain([Path::new(".")]);
        let stat = existing.find_map(|path| rustix::fs::stat(path).ok())?;
        Device::numbered(stat.st_dev)
    }

    /// The device that holds an open file; `None` as for [`Device::behind`].
    pub fn of(file: impl AsFd) -> Option<Device> {
        Device::numbered(rustix::fs::fstat(file).ok()?.st_dev)
    }

    fn numbered(number: u64) -> Option<Device> {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        Device::at(Path::new(&format!("/sys/dev/block/{major}:{minor}")))
    }

    /// The device of a directory of `/sys`, which may be a partition's.
    fn at(directory: &Path) -> Option<Device> {
        let directory = disk(directory)?;
        Some(Device {
            name: word(directory.file_name()?),
            driver: driver(&directory),
            is_rotational: rotates(&directory, LEVELS_MAX),
            optimal_io_bytes: number(&directory.join("queue/optimal_io_size")).unwrap_or(0),
        })
    }
}

/// The directory of a disk, given that of the disk or of a partition.
fn disk(directory: &Path) -> Option<PathBuf> {
    let mut directory = fs::canonicalize(directory).ok()?;
    if directory.join("partition").exists() {
        directory.pop();
    }
    Some(directory)
}

fn driver(disk: &Path) -> Option<String> {
    let links = ["device/driver", "device/device/driver"];
    let target = links
        .into_iter()
        .find_map(|link| fs::read_link(disk.join(link)).ok())?;
    target.file_name().map(word)
}

/// Whether a rotating disk is at the bottom. A virtual disk claims to rotate unless its host sets
/// otherwise, whatever it is on, and LVM, LUKS, RAID and loop devices repeat the claim of the
/// devices below them: only a disk of the `sd` driver that no hypervisor made is believed.
fn rotates(disk_directory: &Path, levels: u32) -> bool {
    if levels == 0 || number(&disk_directory.join("queue/rotational")) != Some(1) {
        return false;
    }
    let below = fs::read_dir(disk_directory.join("slaves"))
        .into_iter()
        .flatten()
        .flatten();
    let below = below.filter_map(|entry| disk(&entry.path()));
    if below.into_iter().any(|one| rotates(&one, levels - 1)) {
        return true;
    }
    let vendor = fs::read_to_string(disk_directory.join("device/vendor")).unwrap_or_default();
    driver(disk_directory).is_some_and(|name| name == "sd")
        && !VIRTUAL_VENDORS.contains(&vendor.trim())
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        match &self.driver {
            Some(driver) => write!(f, " ({driver})"),
            None => Ok(()),
        }
    }
}

fn word(text: &OsStr) -> String {
    text.to_string_lossy().into_owned()
}

fn number<T: FromStr>(file: &Path) -> Option<T> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn write(directory: &Path, name: &str, text: &str) {
        let file = directory.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    /// A disk as `/sys` shows it.
    fn disk(sys: &Path, name: &str, driver: Option<&str>, rotational: &str) -> PathBuf {
        let disk = sys.join(name);
        write(&disk, "queue/rotational", rotational);
        write(&disk, "queue/optimal_io_size", "1048576\n");
        if let Some(driver) = driver {
            fs::create_dir(disk.join("device")).unwrap();
            symlink(
                Path::new("/bus/drivers").join(driver),
                disk.join("device/driver"),
            )
            .unwrap();
        }
        disk
    }

    #[test]
    fn a_partition_stands_for_its_disk() {
        let sys = tempfile::tempdir().unwrap();
        let disk = disk(sys.path(), "sda", Some("sd"), "1\n");
        write(&disk, "sda1/partition", "1\n");
        let device = Device::at(&disk.join("sda1")).unwrap();
        assert_eq!(device.to_string(), "sda (sd)");
        assert!(device.is_rotational);
        assert_eq!(device.optimal_io_bytes, 1 << 20);
    }

    #[test]
    fn requests_are_whole_stripes_within_bounds() {
        let bytes = |kind: Requests, stripe, unit| {
            let device = Device {
                name: "md0".to_owned(),
                driver: None,
                is_rotational: false,
                optimal_io_bytes: stripe,
            };
            kind.whole_stripes(Some(&device), unit)
        };
        assert_eq!(bytes(FAST, 0, 1 << 20), None);
        assert_eq!(bytes(FAST, 512 << 10, 1 << 20), Some(1 << 20));
        assert_eq!(bytes(FAST, 6 << 20, 1 << 20), Some(6 << 20));
        // Five data disks with chunks of 512 KiB.
        assert_eq!(bytes(FAST, 5 << 19, 1 << 20), Some(5 << 20));
        assert_eq!(bytes(FAST, 5 << 19, 4096), Some(5 << 19));
        assert_eq!(bytes(FAST, (6 << 20) + 4096, 1 << 20), None);
        assert_eq!(bytes(FAST, 32 << 20, 4096), None);
        assert_eq!(bytes(FAST, usize::MAX, 4096), None);
        assert_eq!(bytes(ROTATIONAL, 3 << 20, 1 << 20), Some(6 << 20));
        assert_eq!(FAST.whole_stripes(None, 4096), None);
    }

    #[test]
    fn what_a_virtual_disk_says_of_rotation_is_not_believed() {
        let sys = tempfile::tempdir().unwrap();
        let virtio = disk(sys.path(), "vda", Some("virtio_blk"), "1\n");
        assert!(!Device::at(&virtio).unwrap().is_rotational);
        let emulated = disk(sys.path(), "sdb", Some("sd"), "1\n");
        write(&emulated, "device/vendor", "QEMU    \n");
        assert!(!Device::at(&emulated).unwrap().is_rotational);
        let solid = disk(sys.path(), "sdc", Some("sd"), "0\n");
        assert!(!Device::at(&solid).unwrap().is_rotational);
    }

    #[test]
    fn a_stack_rotates_if_a_disk_below_it_does() {
        let sys = tempfile::tempdir().unwrap();
        for (driver, rotates) in [("virtio_blk", false), ("sd", true)] {
            let below = disk(sys.path(), &format!("below-{driver}"), Some(driver), "1\n");
            write(&below, "part/partition", "1\n");
            let volume = disk(sys.path(), &format!("dm-{driver}"), None, "1\n");
            fs::create_dir(volume.join("slaves")).unwrap();
            symlink(below.join("part"), volume.join("slaves/part")).unwrap();
            let device = Device::at(&volume).unwrap();
            assert_eq!((device.is_rotational, device.driver), (rotates, None));
        }
    }

    #[test]
    fn a_path_that_is_not_there_yet_has_the_device_of_its_parent() {
        let directory = tempfile::tempdir().unwrap();
        let deeper = directory.path().join("not/there");
        assert_eq!(Device::behind(&deeper), Device::behind(directory.path()));
        assert_eq!(Device::behind(Path::new("/proc/self")), None);
    }
}
