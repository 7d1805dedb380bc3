//! Memory of a device that is nobody's tensor: what measurements move bytes from and to.
#![allow(unsafe_code)]

use std::sync::Arc;

use penstock_cuda::{DeviceMemory, Direction, Event, Piece, Stream};

use super::Lane;
use crate::Result;
use crate::buffer::IoBuf;

/// In which pieces bytes are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Of a piece; the last one may be shorter.
    pub piece_bytes: usize,
    /// Whether all are queued by one call, where the driver has it; else each by one of its own.
    pub is_batched: bool,
}

/// Memory of a device that is used by copies alone. Two of them that meet in the same bytes mix what these
/// hold, and nothing else comes of it.
#[derive(Clone, Debug)]
pub struct DeviceBlock {
    lane: Arc<Lane>,
    memory: Arc<DeviceMemory>,
}

impl DeviceBlock {
    /// So many bytes; what they hold is not said.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda), notably where the device has no room.
    ///
    /// # Panics
    /// If `len` is zero.
    pub fn allocate(lane: &Arc<Lane>, len: usize) -> Result<DeviceBlock> {
        Ok(DeviceBlock {
            lane: Arc::clone(lane),
            memory: Arc::new(DeviceMemory::allocate(lane.device(), len)?),
        })
    }

    /// Its device's.
    pub fn lane(&self) -> &Arc<Lane> {
        &self.lane
    }

    /// Its memory, for what moves bytes without a buffer.
    pub fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// Begins to copy a buffer to it, from byte `offset` on.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Nothing is copied any more then, and the buffer is dropped.
    ///
    /// # Panics
    /// If it reaches beyond the block, or pieces are empty.
    pub fn fill(&self, offset: usize, buf: IoBuf, cut: Cut) -> Result<Moving> {
        self.begin(Direction::ToDevice, offset, buf, cut)
    }

    /// Begins to copy it to a buffer, from byte `offset` on.
    ///
    /// # Errors
    /// As [`DeviceBlock::fill`].
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
            Piece::run(
                buf.address() + start,
                self.memory.address() + (offset + start) as u64,
                cut.piece_bytes.min(buf.len() - start),
            )
        };
        let pieces: Vec<Piece> = starts.map(piece).collect();
        let mut moving = Moving {
            buf: Some(buf),
            event: None,
            _memory: Arc::clone(&self.memory),
        };
        let stream = match direction {
            Direction::ToHost => self.lane.out(),
            Direction::ToDevice => self.lane.back(),
        };
        match queue(stream, direction, &pieces, cut.is_batched) {
            Ok(event) => moving.event = Some(event),
            Err(error) => {
                // Some may have been queued.
                stream.settle();
                return Err(error.into());
            }
        }
        Ok(moving)
    }
}

fn queue(
    stream: &Stream,
    direction: Direction,
    pieces: &[Piece],
    is_batched: bool,
) -> penstock_cuda::Result<Event> {
    let calls = if is_batched { pieces.len().max(1) } else { 1 };
    for pieces in pieces.chunks(calls) {
        // SAFETY: the buffer is nobody else's, and both sides stay where they are, until `Moving` has waited,
        // also where it is dropped. The block's bytes are only ever copied, by this type.
        unsafe { stream.copy(direction, pieces) }?;
    }
    stream.record()
}

/// A buffer that is copied to or from a block. Dropped, it waits for the copies.
#[derive(Debug)]
pub struct Moving {
    /// None once it is given back.
    buf: Option<IoBuf>,
    /// None where nothing was queued.
    event: Option<Event>,
    _memory: Arc<DeviceMemory>,
}

impl Moving {
    /// Whether all of it is copied.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): the device has failed.
    pub fn is_done(&self) -> Result<bool> {
        Ok(match &self.event {
            Some(event) => event.is_done()?,
            None => true,
        })
    }

    /// The buffer, once all of it is copied.
    ///
    /// # Errors
    /// As [`Moving::is_done`].
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
            event.settle();
        }
    }
}
