//! Copies of rows of bytes. A source is read in one go, and later its destination is written in one
//! go.

use crate::memory::AddressSpace;
use crate::status::{Answer, Status};

/// The content of a copy's destination from the call until the copy is done.
const POISON: u8 = 0xA5;

/// The location of bytes.
pub(crate) enum Place {
    /// A device address.
    Device(u64),
    /// A host address; pinned or not at the time of the call.
    Host { address: u64, pinned: bool },
    /// Bytes read at the time of the call, row after row.
    Staged(Vec<u8>),
}

/// The source or the destination of a copy.
pub(crate) struct Side {
    pub(crate) place: Place,
    /// The distance between rows.
    pub(crate) pitch: u64,
}

impl Side {
    /// The address of the first byte, if all rows are accessible.
    fn reach(&self, space: &AddressSpace, extent: u64, context: u64) -> Answer<*mut u8> {
        match self.place {
            Place::Device(address) => space.reach(address, extent).ok_or(Status::ILLEGAL_ADDRESS),
            Place::Host { address, pinned } => {
                let still = !pinned || space.is_pinned(address, extent, context) == Ok(true);
                still
                    .then_some(address as *mut u8)
                    .ok_or(Status::ILLEGAL_ADDRESS)
            }
            Place::Staged(_) => Err(Status::ILLEGAL_ADDRESS),
        }
    }

    pub(crate) fn is_pageable(&self) -> bool {
        matches!(self.place, Place::Host { pinned: false, .. })
    }

    pub(crate) fn address(&self) -> u64 {
        match self.place {
            Place::Device(address) | Place::Host { address, .. } => address,
            Place::Staged(_) => 0,
        }
    }
}

/// A copy of rows.
pub(crate) struct RowsCopy {
    pub(crate) source: Side,
    pub(crate) destination: Side,
    pub(crate) width: u64,
    pub(crate) rows: u64,
}

impl RowsCopy {
    pub(crate) fn bytes(&self) -> u64 {
        self.width * self.rows
    }

    /// The bytes that a side spans, from the first to the last.
    fn extent(&self, side: &Side) -> u64 {
        (self.rows - 1) * side.pitch + self.width
    }

    /// Reads the source's bytes, row after row.
    pub(crate) fn read(&self, space: &AddressSpace, context: u64) -> Answer<Vec<u8>> {
        if let Place::Staged(bytes) = &self.source.place {
            return Ok(bytes.clone());
        }
        let from = self
            .source
            .reach(space, self.extent(&self.source), context)?;
        let mut bytes = vec![0; self.bytes() as usize];
        for row in 0..self.rows {
            let taken = (row * self.width) as usize;
            let skipped = (row * self.source.pitch) as usize;
            let into = bytes[taken..].as_mut_ptr();
            let from = from.wrapping_add(skipped);
            // SAFETY: the source spans all rows, and `bytes` has room for all. The driver requires
            // its callers to keep their memory until the copy is done.
            unsafe { into.copy_from_nonoverlapping(from, self.width as usize) };
        }
        Ok(bytes)
    }

    /// Writes the bytes read before to the destination.
    pub(crate) fn write(&self, bytes: &[u8], space: &AddressSpace, context: u64) -> Answer {
        let to = self
            .destination
            .reach(space, self.extent(&self.destination), context)?;
        for row in 0..self.rows {
            let from = &bytes[(row * self.width) as usize..][..self.width as usize];
            let to = to.wrapping_add((row * self.destination.pitch) as usize);
            // SAFETY: the destination spans all rows, and is memory outside of this library, unlike
            // `from`.
            unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        }
        Ok(())
    }

    /// Reads the source now, as it is unpinned, or the caller may change it after the call.
    pub(crate) fn stage(&mut self, space: &AddressSpace, context: u64) -> Answer {
        let bytes = self.read(space, context)?;
        self.source = Side {
            place: Place::Staged(bytes),
            pitch: self.width,
        };
        Ok(())
    }

    /// Reads and writes in one go, row by row.
    pub(crate) fn copy(&self, space: &AddressSpace, context: u64) -> Answer {
        if let Place::Staged(bytes) = &self.source.place {
            return self.write(bytes, space, context);
        }
        let from = self
            .source
            .reach(space, self.extent(&self.source), context)?;
        let to = self
            .destination
            .reach(space, self.extent(&self.destination), context)?;
        for row in 0..self.rows {
            let from = from.wrapping_add((row * self.source.pitch) as usize);
            let to = to.wrapping_add((row * self.destination.pitch) as usize);
            // SAFETY: both sides span all rows, and may overlap. The driver requires its callers to
            // keep their memory until the copy is done.
            unsafe { to.copy_from(from, self.width as usize) };
        }
        Ok(())
    }

    /// Overwrites the destination on the host with garbage, until the copy is done.
    pub(crate) fn poison(&self) {
        let Place::Host { address, .. } = self.destination.place else {
            return;
        };
        for row in 0..self.rows {
            let to = (address + row * self.destination.pitch) as *mut u8;
            // SAFETY: the driver's caller allows the copy to write here from now on.
            unsafe { to.write_bytes(POISON, self.width as usize) };
        }
    }

    /// Changes the first byte that was written to pinned memory.
    pub(crate) fn garble(&self) {
        let Place::Host {
            address,
            pinned: true,
        } = self.destination.place
        else {
            return;
        };
        let to = address as *mut u8;
        // SAFETY: the copy has just written there, and its caller does not see it as done yet.
        let byte = unsafe { to.read() };
        // SAFETY: as above.
        unsafe { to.write(!byte) };
    }

    /// The host memory that the copy uses while it is queued, as first address and end.
    pub(crate) fn host_ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        [&self.source, &self.destination]
            .into_iter()
            .filter_map(|side| match side.place {
                Place::Host { address, .. } => Some((address, address + self.extent(side))),
                Place::Device(_) | Place::Staged(_) => None,
            })
    }

    /// The host destination of the copy, as first address and end.
    pub(crate) fn host_destination(&self) -> Option<(u64, u64)> {
        match self.destination.place {
            Place::Host { address, .. } => {
                Some((address, address + self.extent(&self.destination)))
            }
            Place::Device(_) | Place::Staged(_) => None,
        }
    }
}
