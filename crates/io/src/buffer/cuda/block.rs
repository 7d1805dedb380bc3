//! Device memory without a tensor, which measurements copy from and to.
#![allow(unsafe_code)]

use std::sync::Arc;

use penstock_cuda::{DeviceMemory, Direction, Event, PitchedCopy, Stream};

use super::DeviceStreams;
use crate::Result;
use crate::buffer::IoBuf;

/// How a transfer is cut into pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Bytes of a piece; the last one may be shorter.
    pub piece_bytes: usize,
    /// Whether one driver call queues all pieces, where the driver has such a call; otherwise one
    /// call each.
    pub is_batched: bool,
}

/// Device memory that only copies use. Copies that overlap leave mixed bytes, which is harmless.
#[derive(Clone, Debug)]
pub struct DeviceBlock {
    device_streams: Arc<DeviceStreams>,
    memory: Arc<DeviceMemory>,
}

impl DeviceBlock {
    /// Allocates `len` bytes with undefined content.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda), notably where the device has no room.
    ///
    /// # Panics
    /// If `len` is zero.
    pub fn allocate(device_streams: &Arc<DeviceStreams>, len: usize) -> Result<DeviceBlock> {
        Ok(DeviceBlock {
            device_streams: Arc::clone(device_streams),
            memory: Arc::new(DeviceMemory::allocate(device_streams.device(), len)?),
        })
    }

    /// The streams of its device.
    pub fn device_streams(&self) -> &Arc<DeviceStreams> {
        &self.device_streams
    }

    /// Its memory, for transfers without a host buffer.
    pub fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// Begins to copy a buffer to the block, from byte `offset` on.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). No copy is in flight then, and the buffer is dropped.
    ///
    /// # Panics
    /// If the range reaches beyond the block, or pieces are empty.
    pub fn fill(&self, offset: usize, buf: IoBuf, cut: Cut) -> Result<Moving> {
        self.begin(Direction::ToDevice, offset, buf, cut)
    }

    /// Begins to copy the block from byte `offset` on to a buffer.
    ///
    /// # Panics
    /// As [`DeviceBlock::fill`].
    pub fn read(&self, offset: usize, buf: IoBuf, cut: Cut) -> Result<Moving> {
        self.begin(Direction::ToHost, offset, buf, cut)
    }

    fn begin(&self, direction: Direction, offset: usize, buf: IoBuf, cut: Cut) -> Result<Moving> {
        let end = offset.checked_add(buf.len());
        assert!(
            end.is_some_and(|end| end <= self.memory.len()),
            "{} bytes from {offset} on of {}",
            buf.len(),
            self.memory.len()
        );
        assert!(cut.piece_bytes > 0, "pieces of nothing");
        let starts = (0..buf.len()).step_by(cut.piece_bytes);
        let piece = |start: usize| {
            PitchedCopy::run(
                buf.address() + start,
                self.memory.address() + (offset + start) as u64,
                cut.piece_bytes.min(buf.len() - start),
            )
        };
        let pieces: Vec<PitchedCopy> = starts.map(piece).collect();
        let mut moving = Moving {
            buf: Some(buf),
            event: None,
            _memory: Arc::clone(&self.memory),
        };
        let stream = match direction {
            Direction::ToHost => self.device_streams.out(),
            Direction::ToDevice => self.device_streams.back(),
        };
        match queue(stream, direction, &pieces, cut.is_batched) {
            Ok(event) => moving.event = Some(event),
            Err(error) => {
                // Some copies may have been queued.
                stream.drain();
                return Err(error.into());
            }
        }
        Ok(moving)
    }
}

fn queue(
    stream: &Stream,
    direction: Direction,
    pieces: &[PitchedCopy],
    is_batched: bool,
) -> penstock_cuda::Result<Event> {
    let calls = if is_batched { pieces.len().max(1) } else { 1 };
    for pieces in pieces.chunks(calls) {
        // SAFETY: nothing else reaches the buffer, and both sides stay in place, until `Moving` has
        // waited, which its drop does too. Only this type's copies touch the block's bytes.
        unsafe { stream.copy(direction, pieces) }?;
    }
    stream.record()
}

/// A buffer that is being copied to or from a block. Dropping it waits for the copies.
#[derive(Debug)]
pub struct Moving {
    /// `None` once the buffer was given back.
    buf: Option<IoBuf>,
    /// `None` where nothing was queued.
    event: Option<Event>,
    _memory: Arc<DeviceMemory>,
}

impl Moving {
    /// Whether all bytes are copied.
    pub fn is_done(&self) -> Result<bool> {
        Ok(match &self.event {
            Some(event) => event.is_done()?,
            None => true,
        })
    }

    /// Waits until all bytes are copied, and returns the buffer.
    pub fn wait(mut self) -> Result<IoBuf> {
        if let Some(event) = &self.event {
            event.wait()?;
        }
        self.event = None;
        Ok(self.buf.take().expect("it is given once"))
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            event.drain();
        }
    }
}
