//! Submission entries for operations.

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{opcode, squeue};
use rustix::fd::{AsFd, AsRawFd};

use super::registered::Registered;
use crate::engine::{Op, OpKind, TRANSFER_BYTES_MAX};

/// The submission entry for an operation, and the bytes that it moves.
pub(super) fn prepare(op: &mut Op, registered: &Registered) -> (squeue::Entry, Option<usize>) {
    let fd = op.file.as_fd().as_raw_fd();
    let fixed = registered.file(fd);
    // Only the flag tells the kernel whether this is an index or a descriptor.
    let file = Fd(fixed.unwrap_or(fd));
    let flags = match fixed {
        Some(_) => squeue::Flags::FIXED_FILE,
        None => squeue::Flags::empty(),
    };
    let (entry, bytes) = match &mut op.kind {
        OpKind::Read { offset, buf } => {
            let len = buf.len().min(TRANSFER_BYTES_MAX);
            let at = position(*offset);
            let index = registered.buffer(buf.address(), len);
            let address = buf.as_mut_slice().as_mut_ptr();
            let entry = match index {
                Some(index) => opcode::ReadFixed::new(file, address, len as u32, index)
                    .offset(at)
                    .build(),
                None => opcode::Read::new(file, address, len as u32)
                    .offset(at)
                    .build(),
            };
            (entry, Some(len))
        }
        OpKind::Write { offset, buf } => {
            let len = buf.len().min(TRANSFER_BYTES_MAX);
            let at = position(*offset);
            let address = buf.as_slice().as_ptr();
            let entry = match registered.buffer(buf.address(), len) {
                Some(index) => opcode::WriteFixed::new(file, address, len as u32, index)
                    .offset(at)
                    .build(),
                None => opcode::Write::new(file, address, len as u32)
                    .offset(at)
                    .build(),
            };
            (entry, Some(len))
        }
        OpKind::SyncData => {
            let entry = opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC);
            (entry.build(), None)
        }
    };
    (entry.flags(flags), bytes)
}

/// The offset for the ring: all ones would mean "the file's current position", so it becomes the
/// next lower value, which the kernel refuses with `EINVAL` as it should.
fn position(offset: u64) -> u64 {
    offset.min(u64::MAX - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_offset_means_the_position_of_the_file() {
        assert_eq!(position(u64::MAX), u64::MAX - 1);
        assert_eq!(position(4096), 4096);
    }
}
