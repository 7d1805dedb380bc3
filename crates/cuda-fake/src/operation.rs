//! Operations of a stream: a piece of work, its duration, and the positions that it waits for.

use std::ffi::c_void;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::kernel::Launch;
use crate::memory::AddressSpace;
use crate::status::{Answer, Status};
use crate::thread::host_function;
use crate::transfer::RowsCopy;

/// Kinds of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Kind {
    /// A copy to a device.
    HostToDevice = 1,
    /// A copy from a device.
    DeviceToHost = 2,
    /// A copy within devices.
    DeviceToDevice = 3,
    /// A copy within the host.
    HostToHost = 4,
    /// Copies that were given as a batch.
    Batch = 5,
    /// A fill.
    Memset = 6,
    /// A kernel.
    Kernel = 7,
    /// A host function.
    HostFunction = 8,
    /// The record of an event.
    EventRecord = 9,
    /// A wait for an event.
    EventWait = 10,
}

/// A host function, and its argument.
pub(crate) struct HostCall {
    pub(crate) function: unsafe extern "C" fn(*mut c_void),
    /// The caller's pointer; by giving it, the caller allows another thread to use it.
    pub(crate) data: usize,
}

pub(crate) enum Work {
    Copy(Vec<RowsCopy>),
    Set { address: u64, value: u8, bytes: u64 },
    Kernel(Launch),
    HostFunction(HostCall),
    Record { event: u64 },
    Wait,
}

/// A position that a stream has to reach.
#[derive(Clone, Copy)]
pub(crate) struct Position {
    pub(crate) stream: u64,
    /// The number of its operations that are done.
    pub(crate) done: u64,
}

/// The duration of an operation, before and after it reads.
#[derive(Clone, Copy, Default)]
pub(crate) struct Delay {
    pub(crate) before: Duration,
    pub(crate) after: Duration,
}

pub(crate) struct Operation {
    pub(crate) kind: Kind,
    pub(crate) work: Work,
    /// The context whose view of pinned memory applies.
    pub(crate) context: u64,
    pub(crate) after: Vec<Position>,
    pub(crate) delay: Delay,
}

impl Operation {
    pub(crate) fn new(kind: Kind, work: Work, context: u64) -> Operation {
        let after = Vec::new();
        Operation {
            kind,
            work,
            context,
            after,
            delay: Delay::default(),
        }
    }

    /// Waits for its delay, and does its work.
    pub(crate) fn execute(&self, space: &Arc<AddressSpace>) -> Answer {
        pause(self.delay.before);
        let outcome = match &self.work {
            Work::Copy(pieces) => return self.copy(pieces, space),
            Work::Set {
                address,
                value,
                bytes,
            } => set(*address, *value, *bytes, space),
            Work::Kernel(launch) => launch.run(space),
            Work::HostFunction(call) => {
                // SAFETY: the caller gave this function to be called with this pointer, once, in a
                // thread of the driver.
                host_function(|| unsafe { (call.function)(call.data as *mut c_void) });
                Ok(())
            }
            Work::Record { .. } | Work::Wait => Ok(()),
        };
        pause(self.delay.after);
        outcome
    }

    fn copy(&self, pieces: &[RowsCopy], space: &AddressSpace) -> Answer {
        // Without time in between, reading and writing need no intermediate memory.
        if self.delay.after.is_zero() {
            return pieces
                .iter()
                .try_for_each(|piece| piece.copy(space, self.context));
        }
        let read = pieces.iter().map(|piece| piece.read(space, self.context));
        let read = read.collect::<Answer<Vec<_>>>()?;
        pause(self.delay.after);
        for (piece, bytes) in pieces.iter().zip(&read) {
            piece.write(bytes, space, self.context)?;
        }
        Ok(())
    }

    /// Corrupts the bytes that it copied to the host.
    pub(crate) fn garble(&self) {
        self.pieces().iter().for_each(RowsCopy::garble);
    }

    pub(crate) fn bytes(&self) -> u64 {
        match &self.work {
            Work::Copy(pieces) => pieces.iter().map(RowsCopy::bytes).sum(),
            Work::Set { bytes, .. } => *bytes,
            Work::Kernel(_) | Work::HostFunction(_) | Work::Record { .. } | Work::Wait => 0,
        }
    }

    /// The copies that it consists of.
    pub(crate) fn pieces(&self) -> &[RowsCopy] {
        match &self.work {
            Work::Copy(pieces) => pieces,
            _ => &[],
        }
    }

    /// Whether it writes memory and ends by itself.
    pub(crate) fn is_transfer(&self) -> bool {
        matches!(self.work, Work::Copy(_) | Work::Set { .. })
    }

    /// Whether it uses host memory between these addresses.
    pub(crate) fn uses_host(&self, start: u64, end: u64) -> bool {
        let mut used = self.pieces().iter().flat_map(RowsCopy::host_ranges);
        used.any(|(first, last)| first < end && start < last)
    }
}

fn set(address: u64, value: u8, bytes: u64, space: &AddressSpace) -> Answer {
    let to = space.reach(address, bytes).ok_or(Status::ILLEGAL_ADDRESS)?;
    // SAFETY: all bytes were found to be mapped, and stay mapped while the operation runs.
    unsafe { to.write_bytes(value, bytes as usize) };
    Ok(())
}

fn pause(delay: Duration) {
    if !delay.is_zero() {
        thread::sleep(delay);
    }
}
