//! The memory that devices can use: their own, and pinned host memory.
//!
//! A running operation uses the address space as it was when it began, without the driver's lock.
//! Its memory stays mapped, as frees wait for the device first. Registered memory is the caller's,
//! who has to wait; an operation that begins after the memory was unregistered does not find it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use rustix::mm::{MsyncFlags, msync};

use crate::backing::{Backing, device_address};
use crate::status::{Answer, Status};

/// `CU_MEMHOSTREGISTER_PORTABLE`, and the same of `cuMemHostAlloc`.
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`, and the same of `cuMemHostAlloc`.
const DEVICEMAP: u32 = 2;

/// The owner of a range.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    Device(i32),
    /// The caller's memory, pinned by `cuMemHostRegister`.
    Registered {
        flags: u32,
    },
    /// Memory of `cuMemHostAlloc`.
    Pinned {
        flags: u32,
    },
}

/// A range of memory that devices can use.
#[derive(Clone)]
pub(crate) struct Range {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) home: Home,
    /// The context that made it, and with which it is freed.
    pub(crate) context: u64,
    /// Address of its bytes in this process.
    address: usize,
}

impl Range {
    pub(crate) fn is_device(&self) -> bool {
        matches!(self.home, Home::Device(_))
    }

    /// Whether devices of this context treat it as pinned.
    fn is_pinned_in(&self, context: u64) -> bool {
        match self.home {
            Home::Device(_) => false,
            Home::Registered { flags } => self.context == context || flags & PORTABLE != 0,
            // With unified addressing, memory that the driver allocates is always portable.
            Home::Pinned { .. } => true,
        }
    }

    /// Whether kernels, and copies that call it device memory, can access it.
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

/// Ranges by their start; no two overlap.
#[derive(Clone, Default)]
pub(crate) struct AddressSpace {
    ranges: BTreeMap<u64, Range>,
}

impl AddressSpace {
    /// The range that contains an address.
    pub(crate) fn find(&self, address: u64) -> Option<&Range> {
        let (_, range) = self.ranges.range(..=address).next_back()?;
        (address < range.end()).then_some(range)
    }

    /// The range that contains all of these bytes.
    fn find_all(&self, address: u64, bytes: u64) -> Option<&Range> {
        let range = self.find(address)?;
        (bytes <= range.end() - address).then_some(range)
    }

    fn overlaps(&self, start: u64, end: u64) -> bool {
        let before = self.ranges.range(..end).next_back();
        before.is_some_and(|(_, range)| range.end() > start)
    }

    /// The address in this process of bytes at a device address, if a device can access them all.
    pub(crate) fn reach(&self, address: u64, bytes: u64) -> Option<*mut u8> {
        let range = self.find_all(address, bytes)?;
        let offset = (address - range.start) as usize;
        range
            .is_mapped()
            .then_some((range.address + offset) as *mut u8)
    }

    /// Whether host memory is pinned for a context. Memory that is pinned in part, or by two
    /// adjacent registrations, is an error, as the driver refuses to copy it.
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

/// The address space, and the pages that this library owns.
#[derive(Default)]
pub(crate) struct Memory {
    space: Arc<AddressSpace>,
    backings: HashMap<u64, Backing>,
}

impl Memory {
    /// The present address space.
    pub(crate) fn space(&self) -> &Arc<AddressSpace> {
        &self.space
    }

    /// Allocates memory of a device that has at most `available_bytes` left.
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

    /// Allocates pinned host memory.
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

    /// Pins memory of the caller. Whole pages are pinned, so no two ranges may share one.
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
        // SAFETY: on Linux, an asynchronous write-back only checks that the whole range is mapped.
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

    /// Removes a range, and frees its pages.
    pub(crate) fn remove(&mut self, start: u64) {
        Arc::make_mut(&mut self.space).ranges.remove(&start);
        self.backings.remove(&start);
    }

    /// Removes all ranges that a context made.
    pub(crate) fn remove_context(&mut self, context: u64) {
        let theirs = self.space.ranges().filter(|range| range.context == context);
        for start in theirs.map(|range| range.start).collect::<Vec<_>>() {
            self.remove(start);
        }
    }

    /// Bytes of a device that are allocated.
    pub(crate) fn device_bytes(&self, device: i32) -> u64 {
        let theirs = self
            .space
            .ranges()
            .filter(|range| range.home == Home::Device(device));
        theirs.map(|range| range.bytes).sum()
    }

    /// Bytes of host memory that are pinned.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        let host = self.space.ranges().filter(|range| !range.is_device());
        host.map(|range| range.bytes).sum()
    }

    /// The address in this process of bytes for a test, whether or not devices may access them.
    pub(crate) fn inspect(&self, address: u64, bytes: u64) -> Option<*mut u8> {
        let range = self.space.find_all(address, bytes)?;
        Some((range.address + (address - range.start) as usize) as *mut u8)
    }
}
