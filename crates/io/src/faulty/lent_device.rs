//! Memory of a device whose owner goes on working with it.

#![allow(unsafe_code)]

use std::sync::Arc;

use penstock_cuda::{DeviceMemory, Direction, Foreign, Piece, Stream};

use crate::Result;
use crate::buffer::{DeviceRegion, IoBuf, Lane, Pool};

/// Memory of a device that is lent to a save, and changed on a stream of its owner's: what a training loop
/// does with its tensors. The host never waits for the stream.
pub struct LentDevice {
    lane: Arc<Lane>,
    stream: Arc<Stream>,
    memory: Arc<DeviceMemory>,
    /// Where new contents come from, until they have arrived.
    contents: Vec<IoBuf>,
}

impl LentDevice {
    /// Memory with a content, which it gets on `stream`.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn new(lane: &Arc<Lane>, stream: &Arc<Stream>, content: &[u8]) -> Result<LentDevice> {
        let memory = DeviceMemory::allocate(lane.device(), content.len().max(1))?;
        let mut lent = LentDevice {
            lane: Arc::clone(lane),
            stream: Arc::clone(stream),
            memory: Arc::new(memory),
            contents: Vec::new(),
        };
        lent.change(content)?;
        Ok(lent)
    }

    /// Gives it another content, on the stream, when all is done that the stream has.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    ///
    /// # Panics
    /// If the content is larger than the memory.
    pub fn change(&mut self, content: &[u8]) -> Result<()> {
        assert!(
            content.len() <= self.memory.len(),
            "there is no room for it"
        );
        if content.is_empty() {
            return Ok(());
        }
        let pool = Pool::pinned(content.len(), content.len(), self.lane.device());
        let mut buf = pool.take()?;
        buf.as_mut_slice().copy_from_slice(content);
        let piece = Piece::run(buf.address(), self.memory.address(), content.len());
        // SAFETY: both sides live until the stream is synchronized by the drop, and nobody writes to
        // the buffer. A test that reads the memory meanwhile tests just that this does no harm.
        unsafe { self.stream.copy(Direction::ToDevice, &[piece]) }?;
        self.contents.push(buf);
        Ok(())
    }

    /// Its owner's stream, as a save knows it.
    pub fn foreign(&self) -> Foreign {
        // SAFETY: the stream is there as long as this is, and a test lets go of this last.
        unsafe { Foreign::new(self.lane.device(), self.stream.raw()) }
    }

    /// Lends all of it, as bytes.
    pub fn region(&self) -> DeviceRegion {
        self.view(0, 1, &[self.memory.len()], &[1])
    }

    /// Lends an array in it, which begins at byte `offset`.
    ///
    /// # Panics
    /// If some of the array lies beyond the memory.
    pub fn view(
        &self,
        offset: usize,
        item_bytes: usize,
        shape: &[usize],
        strides_bytes: &[isize],
    ) -> DeviceRegion {
        if !shape.contains(&0) {
            let (mut low, mut high) = (offset as isize, (offset + item_bytes) as isize);
            for (&size, &stride) in shape.iter().zip(strides_bytes) {
                let reach = stride * (size as isize - 1);
                low += reach.min(0);
                high += reach.max(0);
            }
            assert!(
                low >= 0 && high <= self.memory.len() as isize,
                "beyond the memory"
            );
        }
        let address = self.memory.address() + offset as u64;
        let owner = Box::new(Arc::clone(&self.memory));
        // SAFETY: every item is in the memory (checked above), which lives as long as the owner.
        unsafe { DeviceRegion::new(&self.lane, address, item_bytes, shape, strides_bytes, owner) }
    }

    /// Whether every region on it is gone.
    pub fn is_returned(&self) -> bool {
        Arc::strong_count(&self.memory) == 1
    }
}

impl Drop for LentDevice {
    fn drop(&mut self) {
        self.stream.settle();
    }
}
