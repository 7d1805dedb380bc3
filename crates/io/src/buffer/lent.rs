//! Memory of the host or a device that a caller lends for reading.

#![allow(unsafe_code)]

use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::{DeviceRegion, HostRegion, IoBuf, Snapshot};

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

    /// A window on a range of the content of one of the regions, from which a file is written
    /// without a copy. It keeps all of them.
    ///
    /// Other threads may be writing to the memory: a digest of the window and the bytes that the
    /// system writes are the same only if a [`Watch`](super::Watch) finds that nobody has.
    ///
    /// # Panics
    /// If the region is not contiguous host memory, or the range reaches beyond it.
    pub fn window(regions: &Arc<Vec<Region>>, index: usize, range: &Range<u64>) -> IoBuf {
        let region = regions[index].host().expect("host memory");
        let content = region.addresses(range);
        let address = NonNull::new(ptr::with_exposed_provenance_mut(content.start));
        let address = address.unwrap_or(NonNull::dangling());
        // SAFETY: the range was just found to be in the content, which stays readable while the
        // region lives; the window keeps it.
        unsafe { IoBuf::lent(address, content.len(), Arc::clone(regions) as _) }
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
