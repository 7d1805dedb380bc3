//! Memory that a caller lends, of the host or of a device.

use super::{DeviceRegion, HostRegion, Snapshot};

/// Borrowed memory to copy from, wherever it is.
#[derive(Debug)]
pub enum Region {
    /// The host's.
    Host(HostRegion),
    /// A device's.
    Device(DeviceRegion),
    /// A device's, as it was at one moment.
    Snapshot(Snapshot),
}

impl Region {
    /// The length of the content: items times their size, wherever they lie.
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

    /// The region, if the host has it.
    pub fn host(&self) -> Option<&HostRegion> {
        match self {
            Region::Host(region) => Some(region),
            _ => None,
        }
    }

    /// The region, if a device has it.
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
