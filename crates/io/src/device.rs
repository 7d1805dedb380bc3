//! The block device behind a path, as far as `/sys` tells.
//!
//! It is for choosing request sizes and for reports; nothing depends on it being known.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The kernel's name for the disk, also where a partition of it is used.
    pub name: String,
    /// The kernel's driver, where one is in charge of the disk itself: not on RAID or LVM.
    pub driver: Option<String>,
    /// Whether it has a head to move.
    pub is_rotational: bool,
    /// The request size that it prefers, if it says: a whole stripe on RAID. 0 where it does not.
    pub optimal_io_bytes: usize,
}

impl Device {
    /// The device that holds `path`, or would if it were made; `None` where no single block device
    /// is known (network file systems, tmpfs, Btrfs) or `/sys` is not there.
    pub fn behind(path: &Path) -> Option<Device> {
        let mut existing = path.ancestors().chain([Path::new(".")]);
        let stat = existing.find_map(|path| rustix::fs::stat(path).ok())?;
        let (major, minor) = (
            rustix::fs::major(stat.st_dev),
            rustix::fs::minor(stat.st_dev),
        );
        Device::at(Path::new(&format!("/sys/dev/block/{major}:{minor}")))
    }

    /// The device that a directory of `/sys` describes, or the one that this is a partition of.
    fn at(directory: &Path) -> Option<Device> {
        let mut directory = fs::canonicalize(directory).ok()?;
        if directory.join("partition").exists() {
            directory.pop();
        }
        let driver = ["device/driver", "device/device/driver"]
            .into_iter()
            .find_map(|link| fs::read_link(directory.join(link)).ok())
            .and_then(|target| target.file_name().map(word));
        // A virtual disk says that it rotates unless its host says otherwise, whatever it stands
        // on.
        let is_virtual = driver.as_ref().is_some_and(|name| name == "virtio_blk");
        let queue = directory.join("queue");
        Some(Device {
            name: word(directory.file_name()?),
            driver,
            is_rotational: !is_virtual && number(queue.join("rotational")) == Some(1),
            optimal_io_bytes: number(queue.join("optimal_io_size")).unwrap_or(0),
        })
    }
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

fn number<T: FromStr>(file: PathBuf) -> Option<T> {
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

    #[test]
    fn a_partition_stands_for_its_disk() {
        let sys = tempfile::tempdir().unwrap();
        let disk = sys.path().join("sda");
        write(&disk, "queue/rotational", "1\n");
        write(&disk, "queue/optimal_io_size", "1048576\n");
        write(&disk, "sda1/partition", "1\n");
        fs::create_dir(disk.join("device")).unwrap();
        symlink("/sys/bus/scsi/drivers/sd", disk.join("device/driver")).unwrap();
        let device = Device::at(&disk.join("sda1")).unwrap();
        assert_eq!(device.to_string(), "sda (sd)");
        assert!(device.is_rotational);
        assert_eq!(device.optimal_io_bytes, 1 << 20);
    }

    #[test]
    fn what_a_virtual_disk_says_of_rotation_is_not_believed() {
        let sys = tempfile::tempdir().unwrap();
        let disk = sys.path().join("vda");
        write(&disk, "queue/rotational", "1\n");
        fs::create_dir(disk.join("device")).unwrap();
        symlink("/x/virtio_blk", disk.join("device/driver")).unwrap();
        assert!(!Device::at(&disk).unwrap().is_rotational);
    }

    #[test]
    fn an_array_has_no_driver_of_its_own() {
        let sys = tempfile::tempdir().unwrap();
        let array = sys.path().join("md0");
        write(&array, "queue/rotational", "0\n");
        let device = Device::at(&array).unwrap();
        assert_eq!(
            (device.to_string(), device.optimal_io_bytes),
            ("md0".into(), 0)
        );
    }

    #[test]
    fn a_path_that_is_not_there_yet_has_the_device_of_its_parent() {
        let directory = tempfile::tempdir().unwrap();
        let deeper = directory.path().join("not/there");
        assert_eq!(Device::behind(&deeper), Device::behind(directory.path()));
        assert_eq!(Device::behind(Path::new("/proc/self")), None);
    }
}
