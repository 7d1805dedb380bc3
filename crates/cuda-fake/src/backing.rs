//! The pages behind device memory and pinned host memory, and the addresses that callers get.
//!
//! A device address is in a reserved range without access, and is not reused until the range is
//! used up: a caller that dereferences one gets a fault. The bytes are elsewhere, in a file in
//! memory, so that the system counts them as shared and not as the caller's own (`RssShmem`, not
//! `RssAnon`).

use std::ffi::c_void;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::status::{Answer, Status};

/// Bytes of addresses reserved at a time; a reservation takes no memory.
const RESERVED_BYTES: u64 = 1 << 36;
/// Distance between two allocations, so that running past one does not reach the next.
const GAP_BYTES: u64 = 1 << 16;
/// The content of fresh device memory; on a real device it is undefined.
const FRESH: u8 = 0xC5;

/// A mapping owned by this library.
pub(crate) struct Backing {
    address: usize,
    bytes: usize,
}

impl Backing {
    /// Maps pages of a file in memory, filled with `FRESH`.
    pub(crate) fn device(bytes: usize) -> Answer<Backing> {
        let file = memfd_create("cuda-fake", MemfdFlags::CLOEXEC).map_err(no_memory)?;
        ftruncate(&file, bytes as u64).map_err(no_memory)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a mapping at an address of the system's choice replaces none.
        let mapped = unsafe { mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0) };
        let pointer = mapped.map_err(no_memory)?;
        // SAFETY: these are the bytes of the mapping above, and nothing else has its address.
        unsafe { ptr::write_bytes(pointer.cast::<u8>(), FRESH, bytes) };
        Ok(Backing {
            address: pointer as usize,
            bytes,
        })
    }

    /// Maps pages that the caller uses as well.
    pub(crate) fn host(bytes: usize) -> Answer<Backing> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a mapping at an address of the system's choice replaces none.
        let mapped = unsafe { mmap_anonymous(ptr::null_mut(), bytes, access, MapFlags::PRIVATE) };
        let pointer = mapped.map_err(no_memory)?;
        Ok(Backing {
            address: pointer as usize,
            bytes,
        })
    }

    pub(crate) fn address(&self) -> usize {
        self.address
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping. Callers that drop it have waited for the operations
        // that use it.
        let unmapped = unsafe { munmap(self.address as *mut c_void, self.bytes) };
        debug_assert!(unmapped.is_ok(), "our own mapping can be taken back");
    }
}

/// The rest of the latest reserved range. A reset does not return addresses.
struct Reserved {
    next: u64,
    end: u64,
}

static RESERVED: Mutex<Reserved> = Mutex::new(Reserved { next: 0, end: 0 });

/// Reserves `bytes` bytes of page-aligned addresses without access.
pub(crate) fn device_address(bytes: u64) -> Answer<u64> {
    let whole = bytes
        .checked_add(2 * GAP_BYTES)
        .ok_or(Status::OUT_OF_MEMORY)?;
    let whole = whole / GAP_BYTES * GAP_BYTES;
    let mut reserved = RESERVED.lock().unwrap_or_else(PoisonError::into_inner);
    if reserved.end - reserved.next < whole {
        let bytes = whole.max(RESERVED_BYTES);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let none = ProtFlags::empty();
        // SAFETY: a mapping at an address of the system's choice replaces none.
        let mapped = unsafe { mmap_anonymous(ptr::null_mut(), bytes as usize, none, flags) };
        reserved.next = mapped.map_err(no_memory)? as u64;
        reserved.end = reserved.next + bytes;
    }
    let address = reserved.next;
    reserved.next += whole;
    Ok(address)
}

fn no_memory(_: rustix::io::Errno) -> Status {
    Status::OUT_OF_MEMORY
}
