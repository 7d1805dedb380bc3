//! Copies: rows of bytes from one place to another. A source is read in one go, and later its destination is
//! written in one go.

use crate::memory::AddressSpace;
use crate::status::{Answer, Status};

/// What the destination of a copy holds from the call on until the copy is done.
const POISON: u8 = 0xA5;

/// Where bytes are.
pub(crate) enum Place {
    /// At an address of a device.
    Device(u64),
    /// At an address of the host; pinned at the time of the call, or not.
    Host { address: u64, pinned: bool },
    /// Taken at the time of the call, row after row.
    Staged(Vec<u8>),
}

/// One end of a copy.
pub(crate) struct Side {
    pub(crate) place: Place,
    /// From the beginning of a row to that of the next.
    pub(crate) pitch: u64,
}

impl Side {
    /// Where the first byte is, if all rows can be reached.
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
pub(crate) struct Piece {
    pub(crate) source: Side,
    pub(crate) destination: Side,
    pub(crate) width: u64,
    pub(crate) rows: u64,
}

impl Piece {
    pub(crate) fn bytes(&self) -> u64 {
        self.width * self.rows
    }

    /// The bytes from the first to the last of a side.
    fn extent(&self, side: &Side) -> u64 {
        (self.rows - 1) * side.pitch + self.width
    }

    /// The source's bytes, row after row.
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
            // SAFETY: the source reaches over all rows, and `bytes` has room for all. That the caller's memory
            // stays until the copy is done is what the driver asks of callers.
            unsafe { into.copy_from_nonoverlapping(from, self.width as usize) };
        }
        Ok(bytes)
    }

    /// Writes what was read to the destination.
    pub(crate) fn write(&self, bytes: &[u8], space: &AddressSpace, context: u64) -> Answer {
        let to = self
            .destination
            .reach(space, self.extent(&self.destination), context)?;
        for row in 0..self.rows {
            let from = &bytes[(row * self.width) as usize..][..self.width as usize];
            let to = to.wrapping_add((row * self.destination.pitch) as usize);
            // SAFETY: the destination reaches over all rows, and is no memory of ours, as `from` is.
            unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        }
        Ok(())
    }

    /// Reads the source now, from memory that is not pinned, or that the caller wants back at once.
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
            // SAFETY: both sides reach over all rows, and may overlap. That the caller's memory stays until the
            // copy is done is what the driver asks of callers.
            unsafe { to.copy_from(from, self.width as usize) };
        }
        Ok(())
    }

    /// Spoils the destination on the host, until the copy is done.
    pub(crate) fn poison(&self) {
        let Place::Host { address, .. } = self.destination.place else {
            return;
        };
        for row in 0..self.rows {
            let to = (address + row * self.destination.pitch) as *mut u8;
            // SAFETY: the caller of the driver says that the copy may write here from now on.
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
        // SAFETY: the copy has just written there, and is not done for its caller.
        let byte = unsafe { to.read() };
        // SAFETY: as above.
        unsafe { to.write(!byte) };
    }

    /// The host memory that the copy uses while it is queued, by first address and end.
    pub(crate) fn host_ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        [&self.source, &self.destination]
            .into_iter()
            .filter_map(|side| match side.place {
                Place::Host { address, .. } => Some((address, address + self.extent(side))),
                Place::Device(_) | Place::Staged(_) => None,
            })
    }

    /// Where the copy writes on the host, by first address and end.
    pub(crate) fn host_destination(&self) -> Option<(u64, u64)> {
        match self.destination.place {
            Place::Host { address, .. } => {
                Some((address, address + self.extent(&self.destination)))
            }
            Place::Device(_) | Place::Staged(_) => None,
        }
    }
}
