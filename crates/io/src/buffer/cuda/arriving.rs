//! Buffers that devices copy to.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use penstock_cuda::{Direction, Event, Piece};

use super::{DeviceRegion, Lane, Snapshot};
use crate::Result;
use crate::buffer::IoBuf;

/// Copies to one buffer, before they begin: so that whoever fills the rest of it on the host is done by then.
#[derive(Debug, Default)]
pub struct DeviceCopies<'a> {
    copies: Vec<(&'a DeviceRegion, u64, Range<usize>)>,
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
        let mut arriving = Arriving {
            buf: Some(buf),
            events: Vec::new(),
            late: self.late,
        };
        let mut rest = self.copies.as_slice();
        while let Some((first, ..)) = rest.first() {
            let lane = first.lane();
            let is_other = |(region, ..): &(&DeviceRegion, _, _)| !Arc::ptr_eq(region.lane(), lane);
            let count = rest.iter().position(is_other).unwrap_or(rest.len());
            let (copies, others) = rest.split_at(count);
            // What has begun before is waited for where this fails: by the drop.
            arriving.begin(lane, copies)?;
            rest = others;
        }
        Ok(arriving)
    }
}

/// A buffer that devices copy to, or have copied to.
#[derive(Debug)]
pub struct Arriving {
    /// None while dropping.
    buf: Option<IoBuf>,
    /// When all is there.
    events: Vec<Arc<Event>>,
    /// What the host copies then.
    late: Vec<Late>,
}

impl Arriving {
    /// A buffer that was filled by the host alone.
    pub fn here(buf: IoBuf) -> Arriving {
        Arriving {
            buf: Some(buf),
            events: Vec::new(),
            late: Vec::new(),
        }
    }

    /// Whether all of it is there.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): the device has failed.
    pub fn is_here(&self) -> Result<bool> {
        for event in &self.events {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        for (snapshot, ..) in &self.late {
            if !snapshot.is_here()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The buffer, once all of it is there.
    ///
    /// # Errors
    /// As [`Arriving::is_here`].
    pub fn wait(mut self) -> Result<IoBuf> {
        self.wait_here()?;
        let late = std::mem::take(&mut self.late);
        let mut buf = self.take();
        for (snapshot, start, into) in late {
            snapshot.copy_to(start, &mut buf.as_mut_slice()[into])?;
        }
        Ok(buf)
    }

    pub(super) fn wait_here(&self) -> Result<()> {
        for event in &self.events {
            event.wait()?;
        }
        Ok(())
    }

    /// The buffer, for whoever knows that all of it is there.
    pub(super) fn take(mut self) -> IoBuf {
        self.events.clear();
        self.buf.take().expect("it is there until it is given")
    }

    /// Begins copies by one device.
    fn begin(&mut self, lane: &Lane, copies: &[(&DeviceRegion, u64, Range<usize>)]) -> Result<()> {
        let buf = self.buf.as_ref().expect("it is there until it is given");
        let mut pieces: Vec<Piece> = Vec::with_capacity(copies.len());
        for (region, start, into) in copies {
            assert!(
                into.start <= into.end && into.end <= buf.len(),
                "beyond the buffer"
            );
            region.pieces(*start, buf.address() + into.start, into.len(), &mut pieces);
        }
        // SAFETY: the buffer is nobody else's until it is waited for, also where this is dropped; a
        // region's memory stays where it is until its last copy is done, which the drop of the region
        // waits for; that nobody writes to it meanwhile is the promise of whoever lent it.
        let queued = unsafe { lane.out().copy(Direction::ToHost, &pieces) };
        let event = queued.and_then(|()| lane.out().record());
        let event = event.inspect_err(|_| {
            // Some may have been queued.
            lane.out().settle();
        })?;
        let event = Arc::new(event);
        for (region, ..) in copies {
            region.is_copied_at(&event);
        }
        self.events.push(event);
        Ok(())
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.events.drain(..).for_each(|event| event.settle());
    }
}
