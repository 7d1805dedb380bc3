//! Buffers that devices copy to.

use std::ops::Range;

use super::flight::{Copy, Flight};
use super::{DeviceRegion, Snapshot};
use crate::Result;
use crate::buffer::IoBuf;

/// Copies to one buffer, before they begin: so that whoever fills the rest of it on the host is done by then.
#[derive(Debug, Default)]
pub struct DeviceCopies<'a> {
    copies: Vec<Copy<'a>>,
    late: Vec<Late>,
}

/// Content of a snapshot from some byte on, and where it belongs in a buffer.
type Late = (Snapshot, u64, Range<usize>);

impl<'a> DeviceCopies<'a> {
    /// Adds one: a region's content from byte `start` on, to a range of the buffer.
    pub fn add(&mut self, region: &'a DeviceRegion, start: u64, into: Range<usize>) {
        self.copies.push((region, start, into));
    }

    /// Adds what has been copied to another buffer, or is on its way there, in the same way.
    pub fn add_snapshot(&mut self, snapshot: &Snapshot, start: u64, into: Range<usize>) {
        self.late.push((snapshot.clone(), start, into));
    }

    /// Begins them.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Nothing is copied any more then.
    ///
    /// # Panics
    /// If one reaches beyond the buffer or its region.
    pub fn begin(self, buf: IoBuf) -> Result<Arriving> {
        let mut begun = DeviceCopies::begin_all(vec![(self, buf)])?;
        Ok(begun.pop().expect("one for each buffer"))
    }

    /// Begins copies to several buffers, those of one device by one call.
    ///
    /// # Errors
    /// As [`DeviceCopies::begin`].
    ///
    /// # Panics
    /// As [`DeviceCopies::begin`].
    pub fn begin_all(all: Vec<(DeviceCopies<'_>, IoBuf)>) -> Result<Vec<Arriving>> {
        let (all, bufs): (Vec<DeviceCopies<'_>>, Vec<IoBuf>) = all.into_iter().unzip();
        let copies = all.iter().map(|one| one.copies.as_slice());
        let flights = Flight::begin_all(bufs.into_iter().zip(copies).collect())?;
        let arriving = |(flight, one): (_, DeviceCopies<'_>)| Arriving {
            flight,
            late: one.late,
        };
        Ok(flights.into_iter().zip(all).map(arriving).collect())
    }
}

/// A buffer that devices copy to, or have copied to. Dropped, it waits for them.
#[derive(Debug)]
pub struct Arriving {
    flight: Flight,
    /// What the host copies then.
    late: Vec<Late>,
}

impl Arriving {
    /// Whether all of it is there.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): the device has failed.
    pub fn is_here(&self) -> Result<bool> {
        for (snapshot, ..) in &self.late {
            if !snapshot.is_here()? {
                return Ok(false);
            }
        }
        self.flight.is_here()
    }

    /// The buffer, once all of it is there.
    ///
    /// # Errors
    /// As [`Arriving::is_here`].
    pub fn wait(self) -> Result<IoBuf> {
        self.flight.wait()?;
        let mut buf = self.flight.take();
        for (snapshot, start, into) in self.late {
            snapshot.copy_to(start, &mut buf.as_mut_slice()[into])?;
        }
        Ok(buf)
    }
}
