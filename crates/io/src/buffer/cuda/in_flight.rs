//! A buffer while devices copy to it.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use penstock_cuda::{Direction, Event, PitchedCopy};

use super::{DeviceRegion, DeviceStreams};
use crate::Result;
use crate::buffer::IoBuf;

/// A region, the first byte of its content to copy, and the destination range in a buffer.
pub(super) type Copy<'a> = (&'a DeviceRegion, u64, Range<usize>);

/// A buffer that nothing reaches before all copies to it are done; its drop waits for them.
#[derive(Debug)]
pub(super) struct InFlightCopy {
    /// `None` while dropping.
    buf: Option<IoBuf>,
    /// Recorded behind the last copy of each device.
    events: Vec<Arc<Event>>,
}

impl InFlightCopy {
    /// Begins the copies, of which there may be none.
    pub(super) fn begin(buf: IoBuf, copies: &[Copy<'_>]) -> Result<InFlightCopy> {
        let mut all_in_flight = InFlightCopy::begin_all(vec![(buf, copies)])?;
        Ok(all_in_flight.pop().expect("one for each buffer"))
    }

    /// Begins copies to several buffers: one call and one event for each device.
    pub(super) fn begin_all(parts: Vec<(IoBuf, &[Copy<'_>])>) -> Result<Vec<InFlightCopy>> {
        let in_flight = |buf| InFlightCopy {
            buf: Some(buf),
            events: Vec::new(),
        };
        let (mut all_in_flight, copies): (Vec<InFlightCopy>, Vec<&[Copy<'_>]>) = parts
            .into_iter()
            .map(|(buf, copies)| (in_flight(buf), copies))
            .unzip();
        let mut all_streams: Vec<&Arc<DeviceStreams>> = Vec::new();
        for (region, ..) in copies.iter().copied().flatten() {
            if !all_streams
                .iter()
                .any(|device_streams| Arc::ptr_eq(device_streams, region.device_streams()))
            {
                all_streams.push(region.device_streams());
            }
        }
        for device_streams in all_streams {
            // On an error, dropping `all_in_flight` waits for the copies that have begun.
            copy_by(device_streams, &mut all_in_flight, &copies)?;
        }
        Ok(all_in_flight)
    }

    pub(super) fn is_done(&self) -> Result<bool> {
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
fn copy_by(
    device_streams: &Arc<DeviceStreams>,
    all_in_flight: &mut [InFlightCopy],
    copies: &[&[Copy<'_>]],
) -> Result<()> {
    let is_its = |(region, ..): &&Copy<'_>| Arc::ptr_eq(region.device_streams(), device_streams);
    let mut pieces: Vec<PitchedCopy> = Vec::new();
    for (in_flight, copies) in all_in_flight.iter().zip(copies) {
        let buf = in_flight
            .buf
            .as_ref()
            .expect("it is there until it is given");
        for (region, start, into) in copies.iter().filter(is_its) {
            let is_inside = into.start <= into.end && into.end <= buf.len();
            assert!(is_inside, "beyond the buffer");
            region.pieces(*start, buf.address() + into.start, into.len(), &mut pieces);
        }
    }
    // Without the lock, a thread could note an earlier event over a later one, and a region be
    // released early.
    let turn = device_streams.turn();
    // SAFETY: nothing else reaches the buffers until they were waited for, which the drop of a
    // [`InFlightCopy`] does too; a region's memory stays in place until its last copy is done, which the
    // drop of the region waits for; the lender promised that nobody writes to it meanwhile.
    let queued = unsafe { device_streams.out().copy(Direction::ToHost, &pieces) };
    let event = queued.and_then(|()| device_streams.out().record());
    let event = event.inspect_err(|_| {
        // Some copies may have been queued.
        device_streams.out().drain();
    })?;
    let event = Arc::new(event);
    for (in_flight, copies) in all_in_flight.iter_mut().zip(copies) {
        let mut has_some = false;
        for (region, ..) in copies.iter().filter(is_its) {
            region.is_copied_at(&event);
            has_some = true;
        }
        if has_some {
            in_flight.events.push(Arc::clone(&event));
        }
    }
    drop(turn);
    Ok(())
}

impl Drop for InFlightCopy {
    fn drop(&mut self) {
        self.events.drain(..).for_each(|event| event.drain());
    }
}
