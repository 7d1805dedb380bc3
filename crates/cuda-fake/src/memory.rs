//! What memory the devices know: their own, and the host's as far as it is pinned.
//!
//! An operation that runs reads the address space as it was when it began, without the driver's lock. That
//! what it finds there stays mapped is up to those who free: they wait for the device first. Memory that was
//! registered is the caller's, who has to wait; an operation that begins after that finds it gone.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use rustix::mm::{MsyncFlags, msync};

use crate::backing::{Backing, device_address};
use crate::status::{Answer, Status};

/// `CU_MEMHOSTREGISTER_PORTABLE`, and the same of `cuMemHostAlloc`.
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`, and the same of `cuMemHostAlloc`.
const DEVICEMAP: u32 = 2;

/// Whose memory a range is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    Device(i32),
    /// The caller's, pinned by `cuMemHostRegister`.
    Registered {
        flags: u32,
    },
    /// From `cuMemHostAlloc`.
    Pinned {
        flags: u32,
    },
}

/// A range that devices know.
#[derive(Clone)]
pub(crate) struct Range {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) home: Home,
    /// The context that made it, with which it dies.
    pub(crate) context: u64,
    /// Where its bytes are in this process.
    address: usize,
}

impl Range {
    pub(crate) fn is_device(&self) -> bool {
        matches!(self.home, Home::Device(_))
    }

    /// Whether a device of this context sees it as pinned.
    fn is_pinned_in(&self, context: u64) -> bool {
        match self.home {
            Home::Device(_) => false,
            Home::Registered { flags } => self.context == context || flags & PORTABLE != 0,
            // With one address space for all, what the driver allocates is portable by itself.
            Home::Pinned { .. } => true,
        }
    }

    /// Whether kernels, and copies that call it device memory, reach it.
    pub(crate) fn is_mapped(&self) -> bool {
        match self.home {
            Home::Registered { flags } => flags & DEVICEMAP != 0,
            Home::Device(_) | Home::Pinned { .. } => true,
        }
    }

    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes
    }
}

/// Ranges by their beginning; none overlaps another.
#[derive(Clone, Default)]
pub(crate) struct AddressSpace {
    ranges: BTreeMap<u64, Range>,
}

impl AddressSpace {
    /// The range that an address lies in.
    pub(crate) fn find(&self, address: u64) -> Option<&Range> {
        let (_, range) = self.ranges.range(..=address).next_back()?;
        (address < range.end()).then_some(range)
    }

    /// The range that all of these bytes lie in.
    fn find_all(&self, address: u64, bytes: u64) -> Option<&Range> {
        let range = self.find(address)?;
        (bytes <= range.end() - address).then_some(range)
    }

    fn overlaps(&self, start: u64, end: u64) -> bool {
        let before = self.ranges.range(..end).next_back();
        before.is_some_and(|(_, range)| range.end() > start)
    }

    /// Where the bytes of an address of a device are, if a device reaches them all.
    pub(crate) fn reach(&self, address: u64, bytes: u64) -> Option<*mut u8> {
        let range = self.find_all(address, bytes)?;
        let offset = (address - range.start) as usize;
        range
            .is_mapped()
            .then_some((range.address + offset) as *mut u8)
    }

    /// Whether host memory is pinned for a context. What is pinned in part, or by two calls that happen to lie
    /// side by side, the driver refuses to copy.
    pub(crate) fn is_pinned(&self, address: u64, bytes: u64, context: u64) -> Answer<bool> {
        if let Some(range) = self.find_all(address, bytes) {
            if range.is_device() {
                return Err(Status::INVALID_VALUE);
            }
            return Ok(range.is_pinned_in(context));
        }
        match self.overlaps(address, address.saturating_add(bytes)) {
            true => Err(Status::INVALID_VALUE),
            false => Ok(false),
        }
    }

    pub(crate) fn ranges(&self) -> impl Iterator<Item = &Range> {
        self.ranges.values()
    }
}

/// The address space, and the pages behind what is not the caller's.
#[derive(Default)]
pub(crate) struct Memory {
    space: Arc<AddressSpace>,
    backings: HashMap<u64, Backing>,
}

impl Memory {
    /// The address space as it is now.
    pub(crate) fn space(&self) -> &Arc<AddressSpace> {
        &self.space
    }

    /// Memory of a device, at most `available_bytes` of it.
    pub(crate) fn allocate(
        &mut self,
        device: i32,
        context: u64,
        bytes: u64,
        available_bytes: u64,
    ) -> Answer<u64> {
        if bytes > available_bytes {
            return Err(Status::OUT_OF_MEMORY);
        }
        let start = device_address(bytes)?;
        let backing = Backing::device(bytes as usize)?;
        let address = backing.address();
        let home = Home::Device(device);
        self.backings.insert(start, backing);
        self.insert(Range {
            start,
            bytes,
            home,
            context,
            address,
        });
        Ok(start)
    }

    /// Pinned memory of the host.
    pub(crate) fn allocate_host(&mut self, context: u64, bytes: u64, flags: u32) -> Answer<u64> {
        let backing = Backing::host(bytes as usize)?;
        let address = backing.address();
        let home = Home::Pinned { flags };
        self.backings.insert(address as u64, backing);
        self.insert(Range {
            start: address as u64,
            bytes,
            home,
            context,
            address,
        });
        Ok(address as u64)
    }

    /// Pins memory of the caller. Pages are pinned as a whole, so no two ranges may share one.
    pub(crate) fn register(&mut self, context: u64, start: u64, bytes: u64, flags: u32) -> Answer {
        let page = rustix::param::page_size() as u64;
        let first = start - start % page;
        let end = start.checked_add(bytes).ok_or(Status::INVALID_VALUE)?;
        let end = end
            .checked_next_multiple_of(page)
            .ok_or(Status::INVALID_VALUE)?;
        if self.space.overlaps(first, end) {
            return Err(Status::ALREADY_REGISTERED);
        }
        // SAFETY: to write back asynchronously does nothing on Linux, but to say whether all of it is mapped.
        let mapped = unsafe { msync(first as *mut _, (end - first) as usize, MsyncFlags::ASYNC) };
        mapped.map_err(|_| Status::INVALID_VALUE)?;
        let home = Home::Registered { flags };
        self.insert(Range {
            start,
            bytes,
            home,
            context,
            address: start as usize,
        });
        Ok(())
    }

    fn insert(&mut self, range: Range) {
        Arc::make_mut(&mut self.space)
            .ranges
            .insert(range.start, range);
    }

    /// Forgets a range, and gives back the pages behind it.
    pub(crate) fn remove(&mut self, start: u64) {
        Arc::make_mut(&mut self.space).ranges.remove(&start);
        self.backings.remove(&start);
    }

    /// Forgets all that a context made.
    pub(crate) fn remove_context(&mut self, context: u64) {
        let theirs = self.space.ranges().filter(|range| range.context == context);
        for start in theirs.map(|range| range.start).collect::<Vec<_>>() {
            self.remove(start);
        }
    }

    /// How much of a device is taken.
    pub(crate) fn device_bytes(&self, device: i32) -> u64 {
        let theirs = self
            .space
            .ranges()
            .filter(|range| range.home == Home::Device(device));
        theirs.map(|range| range.bytes).sum()
    }

    /// How much host memory is pinned.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        let host = self.space.ranges().filter(|range| !range.is_device());
        host.map(|range| range.bytes).sum()
    }

    /// Where a test finds the bytes at an address, whoever may reach them.
    pub(crate) fn inspect(&self, address: u64, bytes: u64) -> Option<*mut u8> {
        let range = self.space.find_all(address, bytes)?;
        Some((range.address + (address - range.start) as usize) as *mut u8)
    }
}
