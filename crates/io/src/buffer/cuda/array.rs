//! Strided device memory that a caller lends for filling: as a whole, box by box, or from byte runs
//! of a file that holds such a box. The counterpart of `HostArrayMut`.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use penstock_cuda::PitchedCopy;

use super::DeviceStreams;
use crate::buffer::array::is_apart;
use crate::buffer::bounds::{Bounds, OverlapUndecided, find_overlap};
use crate::buffer::strided::{Rows, Strided, row_major};

/// A borrowed array of a device to fill; its items share no memory. Only copies that have begun get
/// its address, and they hold its owner until they are done.
pub struct DeviceArrayMut {
    device_streams: Arc<DeviceStreams>,
    address: u64,
    item_bytes: usize,
    shape: Vec<usize>,
    strides: Vec<isize>,
    owner: Arc<dyn Any + Send + Sync>,
}

impl DeviceArrayMut {
    /// An array of `shape` with items of `item_bytes`, its first item at `address`. Without
    /// `strides_bytes` the order is row-major; strides may be negative. Returns `None` where two
    /// items share memory, or where the strides are too irregular to exclude it; slices and
    /// transposes of plain arrays are accepted.
    ///
    /// # Safety
    /// Every item is memory of `device_streams`'s device and stays so while `owner` lives. Until this array
    /// and everything made from it are dropped, all other reads and writes of the items are ordered
    /// before or after the copies: by [`DeviceStreams::fill_after`] and [`DeviceStreams::hold_for_fills`], or by a
    /// thread that waits for the copies.
    #[expect(unsafe_code, reason = "the memory is somebody else's")]
    pub unsafe fn new(
        device_streams: &Arc<DeviceStreams>,
        address: u64,
        item_bytes: usize,
        shape: &[usize],
        strides_bytes: Option<&[isize]>,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Option<DeviceArrayMut> {
        let strides = match strides_bytes {
            Some(strides) => strides.to_vec(),
            None => row_major(item_bytes, shape),
        };
        is_apart(item_bytes, shape, &strides).then(|| DeviceArrayMut {
            device_streams: Arc::clone(device_streams),
            address,
            item_bytes,
            shape: shape.to_vec(),
            strides,
            owner: Arc::new(owner),
        })
    }

    /// The streams of the array's device.
    pub fn device_streams(&self) -> &Arc<DeviceStreams> {
        &self.device_streams
    }

    /// Bytes of an item.
    pub fn item_bytes(&self) -> usize {
        self.item_bytes
    }

    /// Dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Bytes between neighbours along each dimension.
    pub fn strides_bytes(&self) -> &[isize] {
        &self.strides
    }

    /// Bytes to fill.
    pub fn len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.item_bytes
    }

    /// Whether there is nothing to fill.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Splits the array into the given boxes; items in no box stay untouched.
    ///
    /// # Errors
    /// [`OverlapUndecided`] where proving that no two boxes overlap would take too long.
    ///
    /// # Panics
    /// If a box reaches beyond the array or overlaps another.
    pub fn split(self, boxes: &[Bounds]) -> Result<Vec<DeviceArrayMut>, OverlapUndecided> {
        let shape: Vec<u64> = self.shape.iter().map(|&size| size as u64).collect();
        assert!(
            boxes.iter().all(|part| part.fits(&shape)),
            "boxes fit the array"
        );
        let overlap = find_overlap(boxes)?;
        assert!(overlap.is_none(), "boxes {overlap:?} overlap");
        let part = |part: &Bounds| {
            let places = part.start.iter().zip(&self.strides);
            let address = places.fold(self.address, |address, (&start, &stride)| {
                address.wrapping_add_signed((start as i64).wrapping_mul(stride as i64))
            });
            DeviceArrayMut {
                device_streams: Arc::clone(&self.device_streams),
                address,
                item_bytes: self.item_bytes,
                shape: part.shape.iter().map(|&size| size as usize).collect(),
                strides: self.strides.clone(),
                owner: Arc::clone(&self.owner),
            }
        };
        Ok(boxes.iter().map(part).collect())
    }

    /// Converts to a destination that is filled from a run of bytes, in which the items have other
    /// strides.
    ///
    /// # Panics
    /// If the array is empty, or the items of the run are not in row-major order.
    pub fn into_scatter(self, source_strides_bytes: &[usize]) -> DeviceScatter {
        assert!(!self.is_empty(), "there is something to fill");
        let source: Vec<isize> = source_strides_bytes
            .iter()
            .map(|s| s.cast_signed())
            .collect();
        let strided = Strided::new(self.item_bytes, &self.shape, &source, &self.strides);
        assert!(strided.is_in_order(), "items come in row-major order");
        let reach = self.shape.iter().zip(source_strides_bytes);
        let last: usize = reach.map(|(size, stride)| (size - 1) * stride).sum();
        DeviceScatter {
            range: 0..(last + self.item_bytes) as u64,
            to: Arc::new(Destination {
                device_streams: self.device_streams,
                address: self.address,
                strided,
                _owner: self.owner,
            }),
        }
    }

    /// Converts to a destination that is filled from its content in row-major order.
    ///
    /// # Panics
    /// If the array is empty.
    pub fn into_content(self) -> DeviceScatter {
        let strides = row_major(self.item_bytes, &self.shape);
        let strides: Vec<usize> = strides.iter().map(|s| s.cast_unsigned()).collect();
        self.into_scatter(&strides)
    }
}

impl fmt::Debug for DeviceArrayMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceArrayMut")
            .field("device", &self.device_streams.device())
            .field("address", &self.address)
            .field("item_bytes", &self.item_bytes)
            .field("shape", &self.shape)
            .field("strides", &self.strides)
            .finish_non_exhaustive()
    }
}

struct Destination {
    device_streams: Arc<DeviceStreams>,
    address: u64,
    strided: Strided,
    /// Dropped last.
    _owner: Arc<dyn Any + Send + Sync>,
}

/// Items of a borrowed device array that a run of bytes holds, possibly with other items or gaps
/// between them. No two ranges overlap, so copies to several may be in flight at once.
pub struct DeviceScatter {
    /// The bytes of the run that have not been copied yet.
    range: Range<u64>,
    to: Arc<Destination>,
}

impl DeviceScatter {
    /// The range of bytes of the run that it takes; byte 0 is the first of the box.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// The streams of the array's device.
    pub fn device_streams(&self) -> &Arc<DeviceStreams> {
        &self.to.device_streams
    }

    /// Cuts it in two: `self` takes the bytes of the run before `at`, the result those from `at`
    /// on.
    ///
    /// # Panics
    /// If `at` lies outside the range.
    pub fn split_off(&mut self, at: u64) -> DeviceScatter {
        assert!(
            self.range.start <= at && at <= self.range.end,
            "cut at {at} of {:?}",
            self.range
        );
        let range = at..self.range.end;
        self.range.end = at;
        DeviceScatter {
            range,
            to: Arc::clone(&self.to),
        }
    }

    /// Adds to `found` the copies that bring the items in `bytes` bytes at `host`, the run's bytes
    /// from `at` on, to their places; returns how many bytes these copies have.
    pub(super) fn pieces(
        &self,
        at: u64,
        host: usize,
        bytes: usize,
        found: &mut Vec<PitchedCopy>,
    ) -> u64 {
        let end = at + bytes as u64;
        assert!(
            self.range.start <= at && end <= self.range.end,
            "bytes {at}..{end} of {:?}",
            self.range
        );
        let Destination {
            address, strided, ..
        } = &*self.to;
        let content = strided.content_before(at)..strided.content_before(end);
        let copied = content.end - content.start;
        let first = host.wrapping_sub(at as usize);
        strided.find_rows(content, &mut |rows: Rows| {
            let host = first.wrapping_add_signed(rows.src_offset);
            let device = address.wrapping_add_signed(rows.dst_offset as i64);
            let pitches = usize::try_from(rows.src_stride)
                .ok()
                .zip(usize::try_from(rows.dst_stride).ok());
            if let Some((host_pitch, device_pitch)) = pitches {
                found.push(PitchedCopy {
                    host,
                    device,
                    row_bytes: rows.row_bytes,
                    rows: rows.count,
                    // A single row has no pitch of its own; the driver wants at least the row's
                    // length.
                    host_pitch: host_pitch.max(rows.row_bytes),
                    device_pitch: device_pitch.max(rows.row_bytes),
                });
                return;
            }
            // Device copies take no negative pitch, so rows in reverse order are copied one by one.
            for row in (0..rows.count).map(usize::cast_signed) {
                let host = host.wrapping_add_signed(rows.src_stride * row);
                let device = device.wrapping_add_signed((rows.dst_stride * row) as i64);
                found.push(PitchedCopy::run(host, device, rows.row_bytes));
            }
        });
        copied
    }
}

impl fmt::Debug for DeviceScatter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceScatter")
            .field("range", &self.range)
            .field("device", &self.to.device_streams.device())
            .field("address", &self.to.address)
            .finish_non_exhaustive()
    }
}
