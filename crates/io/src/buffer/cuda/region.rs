//! Device memory that a caller lends.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use penstock_cuda::{Event, PitchedCopy};

use super::DeviceStreams;
use crate::Result;
use crate::buffer::region::content_bytes;
use crate::buffer::strided::{Rows, Strided};

/// Borrowed device memory to copy from, contiguous or strided. Dropping it waits for the copies
/// from it.
pub struct DeviceRegion {
    device_streams: Arc<DeviceStreams>,
    address: u64,
    len: u64,
    /// `None` for contiguous memory.
    strided: Option<Strided>,
    /// Recorded behind the last copy from it that has begun.
    last: Mutex<Option<Arc<Event>>>,
    /// Dropped last.
    _owner: Box<dyn Any + Send + Sync>,
}

impl DeviceRegion {
    /// An array of `shape` with items of `item_bytes`, its first item at `address`. Without
    /// `strides_bytes` the order is row-major; strides may be zero or negative.
    ///
    /// # Panics
    /// If `shape` and `strides_bytes` differ in length, or the content exceeds `u64` bytes.
    ///
    /// # Safety
    /// Every item reachable through the shape and the strides is memory of `device_streams`'s device and
    /// stays so while `owner` lives. The work that writes its content is queued on streams that
    /// `device_streams` [follows](DeviceStreams::follow).
    #[expect(unsafe_code, reason = "the memory is somebody else's")]
    pub unsafe fn new(
        device_streams: &Arc<DeviceStreams>,
        address: u64,
        item_bytes: usize,
        shape: &[usize],
        strides_bytes: Option<&[isize]>,
        owner: Box<dyn Any + Send + Sync>,
    ) -> DeviceRegion {
        let len = content_bytes(item_bytes, shape);
        let strided = strides_bytes.filter(|_| len > 0).map(|strides| {
            assert_eq!(shape.len(), strides.len(), "a stride per dimension");
            Strided::to_content(item_bytes, shape, strides)
        });
        DeviceRegion {
            device_streams: Arc::clone(device_streams),
            address,
            len,
            strided: strided.filter(|strided| !strided.is_contiguous()),
            last: Mutex::default(),
            _owner: owner,
        }
    }

    /// Bytes of the content: the number of items times their size.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is no content.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The streams of its device.
    pub fn device_streams(&self) -> &Arc<DeviceStreams> {
        &self.device_streams
    }

    /// Adds to `found` the copies of the content from byte `start` on to `bytes` bytes at `host`.
    pub(super) fn pieces(
        &self,
        start: u64,
        host: usize,
        bytes: usize,
        found: &mut Vec<PitchedCopy>,
    ) {
        let range = start..start + bytes as u64;
        assert!(
            range.end <= self.len,
            "{range:?} reaches beyond {}",
            self.len
        );
        let Some(strided) = &self.strided else {
            found.push(PitchedCopy::run(host, self.address + start, bytes));
            return;
        };
        strided.find_rows(range, &mut |rows: Rows| {
            let host = host + (rows.dst_offset as u64 - start) as usize;
            let device = self.address.wrapping_add_signed(rows.src_offset as i64);
            let pitch = usize::try_from(rows.src_stride).unwrap_or(0);
            if pitch >= rows.row_bytes {
                found.push(PitchedCopy {
                    host,
                    device,
                    row_bytes: rows.row_bytes,
                    rows: rows.count,
                    host_pitch: rows.row_bytes,
                    device_pitch: pitch,
                });
                return;
            }
            // Device copies take no overlapping or reversed rows, so these are copied one by one.
            for row in 0..rows.count {
                let device = device.wrapping_add_signed((rows.src_stride * row as isize) as i64);
                let host = host + row * rows.row_bytes;
                found.push(PitchedCopy::run(host, device, rows.row_bytes));
            }
        });
    }

    /// Whether all copies from it that have begun are done.
    pub fn is_idle(&self) -> Result<bool> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(match last.as_ref() {
            Some(event) => event.is_done()?,
            None => true,
        })
    }

    /// Records the event behind the last copy that has begun.
    pub(super) fn is_copied_at(&self, event: &Arc<Event>) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last = Some(Arc::clone(event));
    }
}

impl Drop for DeviceRegion {
    fn drop(&mut self) {
        let last = self.last.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(event) = last.take() {
            event.drain();
        }
    }
}

impl fmt::Debug for DeviceRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceRegion")
            .field("device", &self.device_streams.device())
            .field("address", &self.address)
            .field("len", &self.len)
            .field("strided", &self.strided)
            .finish_non_exhaustive()
    }
}
