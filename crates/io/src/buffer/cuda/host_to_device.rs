//! Buffers that devices copy from.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use penstock_cuda::{Direction, Event, PitchedCopy, Stream};

use super::{DeviceScatter, DeviceStreams};
use crate::Result;
use crate::buffer::IoBuf;
use crate::buffer::slots::Lent;

/// Copies from buffers to devices that have not begun.
#[derive(Debug, Default)]
pub struct DeviceFills {
    fills: Vec<Fill>,
    bufs: Vec<IoBuf>,
    bytes: usize,
}

/// Bytes of a buffer, and their destination.
#[derive(Debug)]
pub(super) struct Fill {
    to: DeviceScatter,
    /// Offset of the bytes in the run that is scattered.
    at: u64,
    /// The index of the buffer, and the range in it.
    buf: usize,
    from: Range<usize>,
}

impl Fill {
    /// `bytes` bytes of a run from byte `at` on that a kernel writes, and no buffer holds.
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
    /// Adds a copy: `from` of buffer number `buf` holds the run's bytes from `at` on.
    pub fn add(&mut self, to: DeviceScatter, at: u64, buf: usize, from: Range<usize>) {
        self.bytes += from.len();
        self.fills.push(Fill { to, at, buf, from });
    }

    /// Adds buffers, numbered on from those already added.
    pub fn keep(&mut self, bufs: impl IntoIterator<Item = IoBuf>) {
        self.bufs.extend(bufs);
    }

    /// Adds copies and buffers of others behind these.
    pub fn append(&mut self, others: DeviceFills) {
        let first = self.bufs.len();
        self.bytes += others.bytes;
        self.bufs.extend(others.bufs);
        self.fills.extend(others.fills.into_iter().map(|fill| Fill {
            buf: first + fill.buf,
            ..fill
        }));
    }

    /// The number of buffers, which is the number of the next one.
    pub fn bufs(&self) -> usize {
        self.bufs.len()
    }

    /// Bytes of buffers to copy.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether there is no copy.
    pub fn is_empty(&self) -> bool {
        self.fills.is_empty()
    }

    /// Begins the copies, those of each device by one call.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). No copy is in flight then, but some may have been done.
    ///
    /// # Panics
    /// If a copy reaches beyond its buffer or its run, or names a buffer that was not added.
    pub fn begin(self) -> Result<HostToDevice> {
        let mut host_to_device = HostToDevice {
            events: Vec::new(),
            bytes: 0,
            bufs: self.bufs,
            fills: self.fills,
            _lent: None,
        };
        // Copies of several workers alternate between devices.
        host_to_device
            .fills
            .sort_by_key(|fill| Arc::as_ptr(fill.to.device_streams()));
        let mut next = 0;
        while let Some(first) = host_to_device.fills.get(next) {
            let device_streams = Arc::clone(first.to.device_streams());
            let rest = &host_to_device.fills[next..];
            let is_other = |fill: &Fill| !Arc::ptr_eq(fill.to.device_streams(), &device_streams);
            let count = rest.iter().position(is_other).unwrap_or(rest.len());
            // On an error, dropping `host_to_device` waits for the copies that have begun.
            host_to_device.begin(&device_streams, next..next + count)?;
            next += count;
        }
        Ok(host_to_device)
    }
}

/// Buffers that devices copy from, or have copied from, and the memory that the copies fill. Nobody
/// writes to the buffers meanwhile. Dropping it waits until the devices use neither any more.
#[derive(Debug)]
pub struct HostToDevice {
    /// Recorded behind the last copy or kernel of each device.
    events: Vec<Event>,
    /// Bytes that the copies move.
    bytes: u64,
    bufs: Vec<IoBuf>,
    fills: Vec<Fill>,
    /// Slots that kernels read in addition to the buffers.
    _lent: Option<Lent>,
}

impl HostToDevice {
    /// The buffers, slots and destination of a kernel that has not been queued yet.
    pub(super) fn of_kernel(bufs: Vec<IoBuf>, fill: Fill, lent: Lent, bytes: u64) -> HostToDevice {
        HostToDevice {
            events: Vec::new(),
            bytes,
            bufs,
            fills: vec![fill],
            _lent: Some(lent),
        }
    }

    /// Bytes that the copies move.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether all bytes are in place.
    pub fn is_done(&self) -> Result<bool> {
        for event in &self.events {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until all bytes are in place, and releases the buffers and the memory.
    pub fn wait(mut self) -> Result<()> {
        for event in &self.events {
            event.wait()?;
        }
        self.events.clear();
        Ok(())
    }

    /// Begins the copies of one device.
    fn begin(&mut self, device_streams: &DeviceStreams, numbers: Range<usize>) -> Result<()> {
        let mut pieces: Vec<PitchedCopy> = Vec::with_capacity(numbers.len());
        for Fill { to, at, buf, from } in &self.fills[numbers] {
            let buf = &self.bufs[*buf];
            assert!(
                from.start <= from.end && from.end <= buf.len(),
                "beyond the buffer"
            );
            self.bytes += to.pieces(*at, buf.address() + from.start, from.len(), &mut pieces);
        }
        self.begin_by(device_streams, |stream| {
            // SAFETY: both sides stay in place until this has waited, which its drop does too.
            // Nothing else reaches the buffers; the items belong to the scatters alone
            // (`DeviceArrayMut::new`), and no two scatters share one.
            unsafe { stream.copy(Direction::ToDevice, &pieces) }
        })
    }

    /// Queues work through `queue`, and records an event behind it.
    pub(super) fn begin_by(
        &mut self,
        device_streams: &DeviceStreams,
        queue: impl FnOnce(&Stream) -> penstock_cuda::Result<()>,
    ) -> Result<()> {
        let event = queue(device_streams.back()).and_then(|()| device_streams.back().record());
        let event = event.inspect_err(|_| {
            // Some copies may have been queued.
            device_streams.back().drain();
        })?;
        self.events.push(event);
        Ok(())
    }
}

impl Drop for HostToDevice {
    fn drop(&mut self) {
        self.events.drain(..).for_each(|event| event.drain());
    }
}
