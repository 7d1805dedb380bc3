//! Buffers that devices copy from.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use penstock_cuda::{Direction, Event, Piece, Stream};

use super::{DeviceScatter, Lane};
use crate::Result;
use crate::buffer::IoBuf;
use crate::buffer::slots::Lent;

/// Copies from some buffers to devices, before they begin.
#[derive(Debug, Default)]
pub struct DeviceFills {
    fills: Vec<Fill>,
    bufs: Vec<IoBuf>,
    bytes: usize,
}

/// Bytes of a buffer, and the memory that has a place for them.
#[derive(Debug)]
pub(super) struct Fill {
    to: DeviceScatter,
    /// Where the bytes begin in the run that is scattered.
    at: u64,
    /// The buffer's number, and the bytes of it.
    buf: usize,
    from: Range<usize>,
}

impl Fill {
    /// So many bytes of a run from byte `at` on, which a kernel writes: no buffer has them.
    pub(super) fn whole(to: DeviceScatter, at: u64, bytes: usize) -> Fill {
        Fill {
            to,
            at,
            buf: 0,
            from: 0..bytes,
        }
    }
}

impl DeviceFills {
    /// Adds one: what a run has from byte `at` on are the bytes `from` of the buffer with number `buf`.
    pub fn add(&mut self, to: DeviceScatter, at: u64, buf: usize, from: Range<usize>) {
        self.bytes += from.len();
        self.fills.push(Fill { to, at, buf, from });
    }

    /// Takes buffers, whose numbers follow on those that it has.
    pub fn keep(&mut self, bufs: impl IntoIterator<Item = IoBuf>) {
        self.bufs.extend(bufs);
    }

    /// How many buffers it has: the number of the next.
    pub fn bufs(&self) -> usize {
        self.bufs.len()
    }

    /// How many bytes of buffers are to be copied.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.fills.is_empty()
    }

    /// Begins them, those of one device by one call.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Nothing is copied any more then, but some may have been.
    ///
    /// # Panics
    /// If one reaches beyond its buffer or its run, or there is no such buffer.
    pub fn begin(self) -> Result<Departing> {
        let mut departing = Departing {
            events: Vec::new(),
            bytes: 0,
            bufs: self.bufs,
            fills: self.fills,
            _lent: None,
        };
        let mut next = 0;
        while let Some(first) = departing.fills.get(next) {
            let lane = Arc::clone(first.to.lane());
            let rest = &departing.fills[next..];
            let is_other = |fill: &Fill| !Arc::ptr_eq(fill.to.lane(), &lane);
            let count = rest.iter().position(is_other).unwrap_or(rest.len());
            // What has begun before is waited for where this fails: by the drop.
            departing.begin(&lane, next..next + count)?;
            next += count;
        }
        Ok(departing)
    }
}

/// Buffers that devices copy from, or have copied from, and the memory that they fill. Nobody writes to
/// the buffers meanwhile. Dropped, it waits until neither is used any more.
#[derive(Debug)]
pub struct Departing {
    /// When all is done.
    events: Vec<Event>,
    /// How many bytes are copied.
    bytes: u64,
    bufs: Vec<IoBuf>,
    fills: Vec<Fill>,
    /// What kernels read beside the buffers.
    _lent: Option<Lent>,
}

impl Departing {
    /// What a kernel is to write, out of buffers and slots; it has not begun.
    pub(super) fn of_kernel(bufs: Vec<IoBuf>, fill: Fill, lent: Lent, bytes: u64) -> Departing {
        Departing {
            events: Vec::new(),
            bytes,
            bufs,
            fills: vec![fill],
            _lent: Some(lent),
        }
    }

    /// How many bytes are copied.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether all of it is in place.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): the device has failed.
    pub fn is_done(&self) -> Result<bool> {
        for event in &self.events {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until all of it is in place, and lets go of the buffers and the memory.
    ///
    /// # Errors
    /// As [`Departing::is_done`].
    pub fn wait(mut self) -> Result<()> {
        for event in &self.events {
            event.wait()?;
        }
        self.events.clear();
        Ok(())
    }

    /// Begins copies by one device.
    fn begin(&mut self, lane: &Lane, numbers: Range<usize>) -> Result<()> {
        let mut pieces: Vec<Piece> = Vec::with_capacity(numbers.len());
        for Fill { to, at, buf, from } in &self.fills[numbers] {
            let buf = &self.bufs[*buf];
            assert!(
                from.start <= from.end && from.end <= buf.len(),
                "beyond the buffer"
            );
            self.bytes += to.pieces(*at, buf.address() + from.start, from.len(), &mut pieces);
        }
        self.begin_by(lane, |stream| {
            // SAFETY: both sides stay where they are until this has waited, also where it is dropped. Nobody
            // else reaches the buffers; the items are the scatters' alone (`DeviceArrayMut::new`), of which no
            // two have one in common.
            unsafe { stream.copy(Direction::ToDevice, &pieces) }
        })
    }

    /// Has something queued, and notes when it is done.
    pub(super) fn begin_by(
        &mut self,
        lane: &Lane,
        queue: impl FnOnce(&Stream) -> penstock_cuda::Result<()>,
    ) -> Result<()> {
        let event = queue(lane.back()).and_then(|()| lane.back().record());
        let event = event.inspect_err(|_| {
            // Some may have been queued.
            lane.back().settle();
        })?;
        self.events.push(event);
        Ok(())
    }
}

impl Drop for Departing {
    fn drop(&mut self) {
        self.events.drain(..).for_each(|event| event.settle());
    }
}
