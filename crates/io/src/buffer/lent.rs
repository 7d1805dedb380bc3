//! Memory of the host or a device that a caller lends for reading.

use super::{DeviceRegion, HostRegion, Snapshot};

/// Borrowed memory to copy from.
#[derive(Debug)]
pub enum Region {
    /// Host memory.
    Host(HostRegion),
    /// Device memory.
    Device(DeviceRegion),
    /// Device memory as it was at one moment.
    Snapshot(Snapshot),
}

impl Region {
    /// Bytes of the content: the number of items times their size.
    pub fn len(&self) -> u64 {
        match self {
            Region::Host(region) => region.len(),
            Region::Device(region) => region.len(),
            Region::Snapshot(snapshot) => snapshot.len(),
        }
    }

    /// Whether there is no content.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The region, if it is host memory.
    pub fn host(&self) -> Option<&HostRegion> {
        match self {
            Region::Host(region) => Some(region),
            _ => None,
        }
    }

    /// The region, if it is device memory.
    pub fn device(&self) -> Option<&DeviceRegion> {
        match self {
            Region::Device(region) => Some(region),
            _ => None,
        }
    }
}

impl From<HostRegion> for Region {
    fn from(region: HostRegion) -> Region {
        Region::Host(region)
    }
}

impl From<DeviceRegion> for Region {
    fn from(region: DeviceRegion) -> Region {
        Region::Device(region)
    }
}

impl From<Snapshot> for Region {
    fn from(snapshot: Snapshot) -> Region {
        Region::Snapshot(snapshot)
    }
}
