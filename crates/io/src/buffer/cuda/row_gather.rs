//! Row gather by a kernel: from slots in host memory, and from staged rows.
#![allow(unsafe_code)]

use std::sync::Arc;

use penstock_cuda::{Device, Direction, Foreign, PitchedCopy};

use super::host_to_device::Fill;
use super::kernel_params::KernelParams;
use super::streams::KERNEL_PARAMS_BYTES;
use super::{DeviceScatter, DeviceStreams, HostToDevice};
use crate::Result;
use crate::buffer::IoBuf;
use crate::buffer::slots::Lent;
use crate::kernels::{BLOCK_THREADS, LANES};

/// Enough blocks to keep the link busy while other kernels still find room.
const BLOCKS_MAX: usize = 256;

/// Bytes of an address, and the alignment of the list of addresses.
const WORD: usize = 8;

/// Gathers rows with a kernel, on a device's stream for copies to the device.
#[derive(Debug)]
pub struct RowGatherKernel<'a> {
    device_streams: &'a Arc<DeviceStreams>,
    kernel_params: &'a KernelParams,
}

/// Destination of the rows: the first address, and the distance between two.
struct Places {
    first: u64,
    stride_bytes: u64,
}

impl<'a> RowGatherKernel<'a> {
    /// The most bytes of parameter memory that one piece uses.
    pub const MEMORY_BYTES_MAX: usize = KERNEL_PARAMS_BYTES;

    /// The gather kernel of a device; `None` where the device has no memory left, or is too old for
    /// the kernel.
    pub fn of(device_streams: &'a Arc<DeviceStreams>) -> Option<RowGatherKernel<'a>> {
        let kernel_params = device_streams.kernel_params()?;
        Some(RowGatherKernel {
            device_streams,
            kernel_params,
        })
    }

    /// Bytes of parameter memory for `rows` rows that are all staged.
    pub fn memory_bytes(rows: usize, row_bytes: usize) -> usize {
        rows * (row_bytes + WORD) + WORD
    }

    /// How many rows fit into `memory_bytes` of parameter memory.
    pub fn rows(memory_bytes: usize, row_bytes: usize) -> usize {
        memory_bytes.saturating_sub(WORD) / (row_bytes + WORD)
    }

    /// Whether the kernel can write rows of `row_bytes` bytes to `to`.
    pub fn reaches(to: &DeviceScatter, row_bytes: usize) -> bool {
        let range = to.range();
        places(
            to,
            range.start,
            (range.end - range.start) as usize,
            row_bytes,
        )
        .is_some()
    }

    /// Begins to gather the rows of `to` from byte `at` on. Rows in `lent` go to the positions
    /// listed there, the rows of `staged`, in order, to all other positions. `memory` takes the
    /// kernel's parameters.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). No copy is in flight then, but some may have been done.
    ///
    /// # Panics
    /// If the number of rows differs from that of places, [`reaches`](RowGatherKernel::reaches) is false,
    /// the slots are not mapped for the device, or `memory` is too small.
    pub fn begin(
        &self,
        to: DeviceScatter,
        row_bytes: usize,
        staged: IoBuf,
        mut memory: IoBuf,
        lent: Lent,
    ) -> Result<HostToDevice> {
        let range = to.range();
        let bytes = (range.end - range.start) as usize;
        let rows = bytes / row_bytes;
        let place = places(&to, range.start, bytes, row_bytes).expect("places that it reaches");
        let device = self.device_streams.device();
        let is_its = |found: &Arc<Device>| Arc::ptr_eq(found, device);
        assert!(
            Arc::ptr_eq(to.device_streams(), self.device_streams)
                && rows * row_bytes == bytes
                && staged.len() + lent.len() * row_bytes == bytes,
            "a row for each place, and a place of its own lane"
        );
        assert!(
            lent.is_empty()
                || row_bytes <= lent.stride_bytes() && lent.device().is_some_and(is_its),
            "slots of this device"
        );
        let params = self.kernel_params.memory.address();
        let list = staged.len().next_multiple_of(WORD);
        let list_bytes = rows * WORD;
        assert!(
            list + list_bytes <= self.kernel_params.memory.len(),
            "more than it was made for"
        );
        let listed = list_sources(
            &mut memory.as_mut_slice()[..list_bytes],
            &lent,
            params,
            row_bytes,
        );
        assert_eq!(listed, staged.len() as u64, "each row is at one position");
        let mut pieces = vec![PitchedCopy::run(
            memory.address(),
            params + list as u64,
            list_bytes,
        )];
        if !staged.is_empty() {
            pieces.push(PitchedCopy::run(staged.address(), params, staged.len()));
        }
        let fill = Fill::whole(to, range.start, bytes);
        let mut host_to_device =
            HostToDevice::of_kernel(vec![staged, memory], fill, lent, bytes as u64);
        let arguments = [
            place.first,
            place.stride_bytes,
            params + list as u64,
            rows as u64,
            row_bytes as u64,
        ];
        let warps = (BLOCK_THREADS / LANES) as usize;
        let blocks = rows.div_ceil(warps).min(BLOCKS_MAX) as u32;
        let _turn = self.kernel_params.turn();
        host_to_device.begin_by(self.device_streams, |stream| {
            // SAFETY: both sides stay in place until `host_to_device` has ended, which its drop waits
            // for. Pieces use the parameter memory one after the other, on the one stream for
            // copies to the device.
            unsafe { stream.copy(Direction::ToDevice, &pieces) }?;
            // SAFETY: the stream lives as long as `self.device_streams`.
            let foreign = unsafe { Foreign::new(device, stream.raw()) };
            let kernel = &self.kernel_params.kernel;
            // SAFETY: these are the kernel's arguments. It reads its parameters and lent slots, and
            // writes places that are the scatter's alone; all of it stays in place until
            // `host_to_device` has ended.
            unsafe { kernel.launch(&foreign, blocks, BLOCK_THREADS, arguments) }
        })?;
        Ok(host_to_device)
    }
}

/// Lists the address of each row: that of its lent slot, or the next staged row's, which are
/// contiguous from `params` on. Returns how many bytes the staged rows have.
fn list_sources(list: &mut [u8], lent: &Lent, params: u64, row_bytes: usize) -> u64 {
    let mut staged = 0;
    let mut places = lent.places().iter().peekable();
    for (position, word) in list.chunks_mut(WORD).enumerate() {
        let address = match places.next_if(|(at, _)| *at == position) {
            Some(&(_, address)) => address,
            None => {
                staged += row_bytes as u64;
                params + staged - row_bytes as u64
            }
        };
        word.copy_from_slice(&address.to_ne_bytes());
    }
    assert!(places.next().is_none(), "no position is beyond the rows");
    staged
}

/// The places of rows at equal distances; `None` where the distances differ.
fn places(to: &DeviceScatter, at: u64, bytes: usize, row_bytes: usize) -> Option<Places> {
    let mut pieces = Vec::new();
    to.pieces(at, 0, bytes, &mut pieces);
    let [piece] = pieces[..] else { return None };
    let stride_bytes = match piece.rows {
        1 => row_bytes,
        _ if piece.row_bytes == row_bytes => piece.device_pitch,
        _ => return None,
    };
    Some(Places {
        first: piece.device,
        stride_bytes: stride_bytes as u64,
    })
}
