//! A buffer while devices copy to it.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use penstock_cuda::{Direction, Event, Piece};

use super::{DeviceRegion, Lane};
use crate::Result;
use crate::buffer::IoBuf;

/// A region, the first byte of its content to copy, and the destination range in a buffer.
pub(super) type Copy<'a> = (&'a DeviceRegion, u64, Range<usize>);

/// A buffer that nothing reaches before all copies to it are done; its drop waits for them.
#[derive(Debug)]
pub(super) struct Flight {
    /// `None` while dropping.
    buf: Option<IoBuf>,
    /// Recorded behind the last copy of each device.
    events: Vec<Arc<Event>>,
}

impl Flight {
    /// Begins the copies, of which there may be none.
    pub(super) fn begin(buf: IoBuf, copies: &[Copy<'_>]) -> Result<Flight> {
        let mut flights = Flight::begin_all(vec![(buf, copies)])?;
        Ok(flights.pop().expect("one for each buffer"))
    }

    /// Begins copies to several buffers: one call and one event for each device.
    pub(super) fn begin_all(parts: Vec<(IoBuf, &[Copy<'_>])>) -> Result<Vec<Flight>> {
        let flight = |buf| Flight {
            buf: Some(buf),
            events: Vec::new(),
        };
        let (mut flights, copies): (Vec<Flight>, Vec<&[Copy<'_>]>) = parts
            .into_iter()
            .map(|(buf, copies)| (flight(buf), copies))
            .unzip();
        let mut lanes: Vec<&Arc<Lane>> = Vec::new();
        for (region, ..) in copies.iter().copied().flatten() {
            if !lanes.iter().any(|lane| Arc::ptr_eq(lane, region.lane())) {
                lanes.push(region.lane());
            }
        }
        for lane in lanes {
            // On an error, dropping `flights` waits for the copies that have begun.
            copy_by(lane, &mut flights, &copies)?;
        }
        Ok(flights)
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

    /// Returns the buffer; the caller knows that all bytes have arrived.
    pub(super) fn take(mut self) -> IoBuf {
        self.events.clear();
        self.buf.take().expect("it is there until it is given")
    }
}

/// Begins the copies of one device.
fn copy_by(lane: &Arc<Lane>, flights: &mut [Flight], copies: &[&[Copy<'_>]]) -> Result<()> {
    let is_its = |(region, ..): &&Copy<'_>| Arc::ptr_eq(region.lane(), lane);
    let mut pieces: Vec<Piece> = Vec::new();
    for (flight, copies) in flights.iter().zip(copies) {
        let buf = flight.buf.as_ref().expect("it is there until it is given");
        for (region, start, into) in copies.iter().filter(is_its) {
            let is_inside = into.start <= into.end && into.end <= buf.len();
            assert!(is_inside, "beyond the buffer");
            region.pieces(*start, buf.address() + into.start, into.len(), &mut pieces);
        }
    }
    // Without the lock, a thread could note an earlier event over a later one, and a region be
    // released early.
    let turn = lane.turn();
    // SAFETY: nothing else reaches the buffers until they were waited for, which the drop of a
    // [`Flight`] does too; a region's memory stays in place until its last copy is done, which the
    // drop of the region waits for; the lender promised that nobody writes to it meanwhile.
    let queued = unsafe { lane.out().copy(Direction::ToHost, &pieces) };
    let event = queued.and_then(|()| lane.out().record());
    let event = event.inspect_err(|_| {
        // Some copies may have been queued.
        lane.out().settle();
    })?;
    let event = Arc::new(event);
    for (flight, copies) in flights.iter_mut().zip(copies) {
        let mut has_some = false;
        for (region, ..) in copies.iter().filter(is_its) {
            region.is_copied_at(&event);
            has_some = true;
        }
        if has_some {
            flight.events.push(Arc::clone(&event));
        }
    }
    drop(turn);
    Ok(())
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.events.drain(..).for_each(|event| event.settle());
    }
}
