//! A buffer while devices copy to it.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use penstock_cuda::{Direction, Event, Piece};

use super::{DeviceRegion, Lane};
use crate::Result;
use crate::buffer::IoBuf;

/// A region, from which byte of its content on, and where that belongs in a buffer.
pub(super) type Copy<'a> = (&'a DeviceRegion, u64, Range<usize>);

/// A buffer that nobody reaches before all copies to it are done; dropped, it waits for them.
#[derive(Debug)]
pub(super) struct Flight {
    /// None while dropping.
    buf: Option<IoBuf>,
    /// When all is there.
    events: Vec<Arc<Event>>,
}

impl Flight {
    /// Begins copies, which may be none.
    pub(super) fn begin(buf: IoBuf, copies: &[Copy<'_>]) -> Result<Flight> {
        let mut flight = Flight {
            buf: Some(buf),
            events: Vec::new(),
        };
        let mut rest = copies;
        while let Some((first, ..)) = rest.first() {
            let lane = first.lane();
            let is_other = |(region, ..): &Copy<'_>| !Arc::ptr_eq(region.lane(), lane);
            let count = rest.iter().position(is_other).unwrap_or(rest.len());
            let (copies, others) = rest.split_at(count);
            // What has begun before is waited for where this fails: by the drop.
            flight.add(lane, copies)?;
            rest = others;
        }
        Ok(flight)
    }

    pub(super) fn is_here(&self) -> Result<bool> {
        for event in &self.events {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(super) fn wait(&self) -> Result<()> {
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
    fn add(&mut self, lane: &Lane, copies: &[Copy<'_>]) -> Result<()> {
        let buf = self.buf.as_ref().expect("it is there until it is given");
        let mut pieces: Vec<Piece> = Vec::with_capacity(copies.len());
        for (region, start, into) in copies {
            let is_inside = into.start <= into.end && into.end <= buf.len();
            assert!(is_inside, "beyond the buffer");
            region.pieces(*start, buf.address() + into.start, into.len(), &mut pieces);
        }
        // Without it a thread could note an earlier moment over a later one, and a region be let go of early.
        let turn = lane.turn();
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
        drop(turn);
        self.events.push(event);
        Ok(())
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.events.drain(..).for_each(|event| event.settle());
    }
}
