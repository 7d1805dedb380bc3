//! Buffers that devices copy to.

use std::ops::Range;

use super::in_flight::{Copy, InFlightCopy};
use super::{DeviceRegion, Snapshot};
use crate::Result;
use crate::buffer::IoBuf;

/// Copies to one buffer that have not begun, so that the host can fill the rest of the buffer
/// first.
#[derive(Debug, Default)]
pub struct DeviceCopies<'a> {
    copies: Vec<Copy<'a>>,
    late: Vec<Late>,
}

/// Bytes of a snapshot from an offset on, and their range in the buffer.
type Late = (Snapshot, u64, Range<usize>);

impl<'a> DeviceCopies<'a> {
    /// Adds a copy of a region's content from byte `start` on, to a range of the buffer.
    pub fn add(&mut self, region: &'a DeviceRegion, start: u64, into: Range<usize>) {
        self.copies.push((region, start, into));
    }

    /// Adds bytes of a snapshot, which a device has copied or is copying to another buffer, in the
    /// same way.
    pub fn add_snapshot(&mut self, snapshot: &Snapshot, start: u64, into: Range<usize>) {
        self.late.push((snapshot.clone(), start, into));
    }

    /// Begins the copies.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). No copy is in flight then.
    ///
    /// # Panics
    /// If a copy reaches beyond the buffer or its region.
    pub fn begin(self, buf: IoBuf) -> Result<DeviceToHost> {
        let mut begun = DeviceCopies::begin_all(vec![(self, buf)])?;
        Ok(begun.pop().expect("one for each buffer"))
    }

    /// Begins copies to several buffers, those of each device by one call.
    ///
    /// # Panics
    /// As [`DeviceCopies::begin`].
    pub fn begin_all(all: Vec<(DeviceCopies<'_>, IoBuf)>) -> Result<Vec<DeviceToHost>> {
        let (all, bufs): (Vec<DeviceCopies<'_>>, Vec<IoBuf>) = all.into_iter().unzip();
        let copies = all.iter().map(|one| one.copies.as_slice());
        let all_in_flight = InFlightCopy::begin_all(bufs.into_iter().zip(copies).collect())?;
        let device_to_host = |(in_flight, one): (_, DeviceCopies<'_>)| DeviceToHost {
            in_flight,
            late: one.late,
        };
        Ok(all_in_flight
            .into_iter()
            .zip(all)
            .map(device_to_host)
            .collect())
    }
}

/// A buffer that devices copy to, or have copied to. Dropping it waits for the copies.
#[derive(Debug)]
pub struct DeviceToHost {
    in_flight: InFlightCopy,
    /// Snapshots that the host copies into the buffer after the device's copies.
    late: Vec<Late>,
}

impl DeviceToHost {
    /// Whether all bytes have arrived.
    pub fn is_done(&self) -> Result<bool> {
        for (snapshot, ..) in &self.late {
            if !snapshot.is_done()? {
                return Ok(false);
            }
        }
        self.in_flight.is_done()
    }

    /// Waits until all bytes have arrived, and returns the buffer.
    pub fn wait(self) -> Result<IoBuf> {
        self.in_flight.wait()?;
        let mut buf = self.in_flight.take();
        for (snapshot, start, into) in self.late {
            snapshot.copy_to(start, &mut buf.as_mut_slice()[into])?;
        }
        Ok(buf)
    }
}
