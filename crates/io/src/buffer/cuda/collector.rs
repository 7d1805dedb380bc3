//! Rows that a kernel puts together: from slots in memory of the host, and from what was staged.
#![allow(unsafe_code)]

use std::sync::Arc;

use penstock_cuda::{Device, Direction, Foreign, Piece};

use super::departing::Fill;
use super::lane::TELLING_BYTES;
use super::telling::Telling;
use super::{Departing, DeviceScatter, Lane};
use crate::Result;
use crate::buffer::IoBuf;
use crate::buffer::slots::Lent;
use crate::kernels::{BLOCK_THREADS, LANES};

/// So many blocks keep a link busy, and leave the device to others.
const BLOCKS_MAX: usize = 256;

/// Bytes of an address, and where one begins.
const WORD: usize = 8;

/// What has a kernel of a lane's device put rows together, on the lane's stream for copies to the device.
#[derive(Debug)]
pub struct Collector<'a> {
    lane: &'a Arc<Lane>,
    telling: &'a Telling,
}

/// Where rows go: the first one, and how far the next one is.
struct Places {
    first: u64,
    stride_bytes: u64,
}

impl<'a> Collector<'a> {
    /// Bytes of a piece's memory, at most.
    pub const MEMORY_BYTES_MAX: usize = TELLING_BYTES;

    /// That of a lane; none where the device has no room, or is too old for the kernel.
    pub fn of(lane: &'a Arc<Lane>) -> Option<Collector<'a>> {
        let telling = lane.telling()?;
        Some(Collector { lane, telling })
    }

    /// Bytes of memory that so many rows take, if all of them are staged.
    pub fn memory_bytes(rows: usize, row_bytes: usize) -> usize {
        rows * (row_bytes + WORD) + WORD
    }

    /// For how many rows so much memory will do.
    pub fn rows(memory_bytes: usize, row_bytes: usize) -> usize {
        memory_bytes.saturating_sub(WORD) / (row_bytes + WORD)
    }

    /// Whether it can put rows of so many bytes there.
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

    /// Begins to put together the rows of `to` from byte `at` on: those that are `lent`, by their positions
    /// among them, and at all other positions the rows of `staged`, in order. `memory` is for telling the
    /// device.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Nothing is copied any more then, but some may have been.
    ///
    /// # Panics
    /// If the rows are not as many as there are places, [`reaches`](Collector::reaches) is false, the slots
    /// are not mapped for the device, or memory is too small.
    pub fn begin(
        &self,
        to: DeviceScatter,
        row_bytes: usize,
        staged: IoBuf,
        mut memory: IoBuf,
        lent: Lent,
    ) -> Result<Departing> {
        let range = to.range();
        let bytes = (range.end - range.start) as usize;
        let rows = bytes / row_bytes;
        let place = places(&to, range.start, bytes, row_bytes).expect("places that it reaches");
        let device = self.lane.device();
        let is_its = |found: &Arc<Device>| Arc::ptr_eq(found, device);
        assert!(
            Arc::ptr_eq(to.lane(), self.lane)
                && rows * row_bytes == bytes
                && staged.len() + lent.len() * row_bytes == bytes,
            "a row for each place, and a place of its own lane"
        );
        assert!(
            lent.is_empty()
                || row_bytes <= lent.stride_bytes() && lent.device().is_some_and(is_its),
            "slots of this device"
        );
        let told = self.telling.memory.address();
        let list = staged.len().next_multiple_of(WORD);
        let list_bytes = rows * WORD;
        assert!(
            list + list_bytes <= self.telling.memory.len(),
            "more than it was made for"
        );
        let listed = list_sources(
            &mut memory.as_mut_slice()[..list_bytes],
            &lent,
            told,
            row_bytes,
        );
        assert_eq!(listed, staged.len() as u64, "each row is at one position");
        let mut pieces = vec![Piece::run(memory.address(), told + list as u64, list_bytes)];
        if !staged.is_empty() {
            pieces.push(Piece::run(staged.address(), told, staged.len()));
        }
        let fill = Fill::whole(to, range.start, bytes);
        let mut departing = Departing::of_kernel(vec![staged, memory], fill, lent, bytes as u64);
        let arguments = [
            place.first,
            place.stride_bytes,
            told + list as u64,
            rows as u64,
            row_bytes as u64,
        ];
        let warps = (BLOCK_THREADS / LANES) as usize;
        let blocks = rows.div_ceil(warps).min(BLOCKS_MAX) as u32;
        let _turn = self.telling.turn();
        departing.begin_by(self.lane, |stream| {
            // SAFETY: both sides stay where they are until the departure has ended, also where that is dropped.
            // What is told is used by one piece after the other, on the one stream of the lane that has it.
            unsafe { stream.copy(Direction::ToDevice, &pieces) }?;
            // SAFETY: the lane's stream is there as long as the lane is.
            let foreign = unsafe { Foreign::new(device, stream.raw()) };
            let kernel = &self.telling.kernel;
            // SAFETY: the kernel has these arguments. It reads what was told and slots that are lent, and writes
            // places that are the scatter's alone; all of it stays until the departure has ended.
            unsafe { kernel.launch(&foreign, blocks, BLOCK_THREADS, arguments) }
        })?;
        Ok(departing)
    }
}

/// Writes down where each row is: in a slot that is lent, or among those that were staged, one behind the other
/// from `told` on. Returns how many bytes those have.
fn list_sources(list: &mut [u8], lent: &Lent, told: u64, row_bytes: usize) -> u64 {
    let mut staged = 0;
    let mut places = lent.places().iter().peekable();
    for (position, word) in list.chunks_mut(WORD).enumerate() {
        let address = match places.next_if(|(at, _)| *at == position) {
            Some(&(_, address)) => address,
            None => {
                staged += row_bytes as u64;
                told + staged - row_bytes as u64
            }
        };
        word.copy_from_slice(&address.to_ne_bytes());
    }
    assert!(places.next().is_none(), "no position is beyond the rows");
    staged
}

/// Places of rows that follow each other at equal distances; none where they do not.
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
