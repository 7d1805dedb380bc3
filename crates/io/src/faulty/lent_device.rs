//! Device memory whose owner keeps using it.

#![allow(unsafe_code)]

use std::sync::Arc;

use penstock_cuda::{DeviceMemory, Direction, Foreign, PitchedCopy, Stream};

use crate::Result;
use crate::buffer::{DeviceArrayMut, DeviceRegion, DeviceStreams, IoBuf, Pool};
use crate::fifo::Fifo;

/// Device memory lent to a save or a load, while its owner changes and reads it on a stream, as a
/// training loop does with its tensors. The host waits for the stream only where a test asks for
/// that.
pub struct LentDevice {
    device_streams: Arc<DeviceStreams>,
    stream: Arc<Stream>,
    memory: Arc<DeviceMemory>,
    /// Sources of new contents, until the stream has copied them.
    contents: Vec<IoBuf>,
}

impl LentDevice {
    /// Allocates memory and fills it with a content on `stream`.
    pub fn new(
        device_streams: &Arc<DeviceStreams>,
        stream: &Arc<Stream>,
        content: &[u8],
    ) -> Result<LentDevice> {
        let memory = DeviceMemory::allocate(device_streams.device(), content.len().max(1))?;
        let mut lent = LentDevice {
            device_streams: Arc::clone(device_streams),
            stream: Arc::clone(stream),
            memory: Arc::new(memory),
            contents: Vec::new(),
        };
        lent.change(content)?;
        Ok(lent)
    }

    /// Changes the content on the stream, after the work already queued there.
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
        let pool = Pool::pinned(content.len(), content.len(), self.device_streams.device());
        let mut buf = pool.take()?;
        buf.as_mut_slice().copy_from_slice(content);
        let piece = PitchedCopy::run(buf.address(), self.memory.address(), content.len());
        // SAFETY: both sides live until the drop synchronizes the stream, and nobody writes to the
        // buffer. The point of a test that reads the memory meanwhile is that this does no harm.
        unsafe { self.stream.copy(Direction::ToDevice, &[piece]) }?;
        self.contents.push(buf);
        Ok(())
    }

    /// The device address of the first byte.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// The owner's stream, for a save or a load.
    pub fn foreign(&self) -> Foreign {
        // SAFETY: the stream lives as long as this value, and a test drops this value last.
        unsafe { Foreign::new(self.device_streams.device(), self.stream.raw()) }
    }

    /// Gathers rows on the stream to the start of this memory, by the ids in another one.
    ///
    /// # Panics
    /// If there is no room for the rows, or `ids` has fewer ids.
    pub fn gather(
        &self,
        fifo: &Fifo,
        ids: &LentDevice,
        id_bytes: usize,
        count: usize,
    ) -> Result<()> {
        assert!(
            count * id_bytes <= ids.memory.len(),
            "there are so many ids"
        );
        let bytes = count * fifo.row_bytes();
        assert!(bytes <= self.memory.len(), "there is room for the rows");
        let (from, to) = (ids.address(), self.address());
        // SAFETY: both have the room, and are freed after all work of the device.
        unsafe { fifo.gather(&self.foreign(), from, id_bytes, count, to) }
    }

    /// Lends all of it, as bytes.
    pub fn region(&self) -> DeviceRegion {
        self.view(0, 1, &[self.memory.len()], &[1])
    }

    /// Lends an array that begins at byte `offset`.
    ///
    /// # Panics
    /// If part of the array is beyond the memory.
    pub fn view(
        &self,
        offset: usize,
        item_bytes: usize,
        shape: &[usize],
        strides_bytes: &[isize],
    ) -> DeviceRegion {
        self.check(offset, item_bytes, shape, strides_bytes);
        let address = self.memory.address() + offset as u64;
        let owner = Box::new(Arc::clone(&self.memory));
        // SAFETY: every item is in the memory (checked above), which lives as long as the owner.
        unsafe {
            DeviceRegion::new(
                &self.device_streams,
                address,
                item_bytes,
                shape,
                Some(strides_bytes),
                owner,
            )
        }
    }

    /// Lends all of it for filling, as bytes.
    ///
    /// # Panics
    /// Never: see [`LentDevice::array`].
    pub fn target(&self) -> DeviceArrayMut {
        self.array(0, 1, &[self.memory.len()], &[1])
    }

    /// Lends an array that begins at byte `offset` for filling.
    ///
    /// # Panics
    /// If part of the array is beyond the memory, or two of its items share memory.
    pub fn array(
        &self,
        offset: usize,
        item_bytes: usize,
        shape: &[usize],
        strides_bytes: &[isize],
    ) -> DeviceArrayMut {
        self.check(offset, item_bytes, shape, strides_bytes);
        let address = self.memory.address() + offset as u64;
        let (strides, owner) = (Some(strides_bytes), Box::new(Arc::clone(&self.memory)));
        // SAFETY: every item is in the memory (checked above), which lives as long as the owner.
        // The point of a test that uses the memory meanwhile is that this does no harm.
        let array = unsafe {
            DeviceArrayMut::new(
                &self.device_streams,
                address,
                item_bytes,
                shape,
                strides,
                owner,
            )
        };
        array.expect("no two items share memory")
    }

    fn check(&self, offset: usize, item_bytes: usize, shape: &[usize], strides_bytes: &[isize]) {
        if shape.contains(&0) {
            return;
        }
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

    /// Copies the content to the host on the stream, after the work already queued there.
    pub fn read_back(&self) -> Result<ReadBack> {
        let pool = Pool::pinned(
            self.memory.len(),
            self.memory.len(),
            self.device_streams.device(),
        );
        let buf = pool.take()?;
        let piece = PitchedCopy::run(buf.address(), self.memory.address(), self.memory.len());
        let read_back = ReadBack {
            buf,
            stream: Arc::clone(&self.stream),
            _memory: Arc::clone(&self.memory),
        };
        // SAFETY: both sides live until the drop synchronizes the stream, and nothing else reaches
        // the buffer.
        unsafe { self.stream.copy(Direction::ToHost, &[piece]) }?;
        Ok(read_back)
    }

    /// Waits for the stream and returns the content.
    pub fn content(&self) -> Result<Vec<u8>> {
        self.read_back()?.content()
    }

    /// Whether all its regions are dropped.
    pub fn is_returned(&self) -> bool {
        Arc::strong_count(&self.memory) == 1
    }
}

/// A copy of device memory, made in order with its owner's stream.
pub struct ReadBack {
    buf: IoBuf,
    stream: Arc<Stream>,
    _memory: Arc<DeviceMemory>,
}

impl ReadBack {
    /// Waits for the copy and returns it.
    pub fn content(self) -> Result<Vec<u8>> {
        self.stream.synchronize()?;
        Ok(self.buf.as_slice().to_vec())
    }
}

impl Drop for ReadBack {
    fn drop(&mut self) {
        self.stream.drain();
    }
}

impl Drop for LentDevice {
    fn drop(&mut self) {
        self.stream.drain();
    }
}
