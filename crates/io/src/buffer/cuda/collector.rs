//! Rows that a kernel puts together: from slots in memory of the host, and from what was staged.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::sync::{Arc, Mutex, PoisonError};

use penstock_cuda::{Device, DeviceMemory, Direction, Foreign, Kernel, Module, Piece};

use super::departing::Fill;
use super::{Departing, DeviceScatter};
use crate::Result;
use crate::buffer::IoBuf;
use crate::buffer::slots::Lent;
use crate::kernels::{BLOCK_THREADS, LANES, PTX};

const KERNEL: &CStr = c"penstock_collect";

/// So many blocks keep a link busy, and leave the device to others.
const BLOCKS_MAX: usize = 256;

/// Bytes of an address, and where one begins.
const WORD: usize = 8;

/// A kernel of a device that collects rows, and memory of the device for what it is told.
#[derive(Debug)]
pub struct Collector {
    kernel: Kernel,
    /// Used by one piece after the other, in the order of the lane's stream. It stays as long as the lane does:
    /// to free memory of a device waits for all that it has.
    told: DeviceMemory,
    /// Held from the copy of what is told until the kernel is queued that reads it.
    turn: Mutex<()>,
}

/// Where rows go: the first one, and how far the next one is.
struct Places {
    first: u64,
    stride_bytes: u64,
}

impl Collector {
    /// Bytes of a piece's memory, at most.
    pub const MEMORY_BYTES_MAX: usize = 16 << 20;

    pub(super) fn new(device: &Arc<Device>) -> Result<Collector> {
        Ok(Collector {
            kernel: Module::load(device, PTX)?.kernel(KERNEL)?,
            told: DeviceMemory::allocate(device, Collector::MEMORY_BYTES_MAX)?,
            turn: Mutex::default(),
        })
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
        assert!(
            rows * row_bytes == bytes && staged.len() + lent.len() * row_bytes == bytes,
            "a row for each place"
        );
        assert!(
            lent.is_empty()
                || row_bytes <= lent.stride_bytes()
                    && lent
                        .device()
                        .is_some_and(|device| Arc::ptr_eq(device, self.told.device())),
            "slots of this device"
        );
        let list = staged.len().next_multiple_of(WORD);
        assert!(
            list + rows * WORD <= self.told.len(),
            "more than it was made for"
        );
        let mut next = self.told.address();
        let mut places = lent.places().iter().peekable();
        for (position, word) in memory.as_mut_slice()[..rows * WORD]
            .chunks_mut(WORD)
            .enumerate()
        {
            let address = match places.next_if(|(at, _)| *at == position) {
                Some(&(_, address)) => address,
                None => {
                    next += row_bytes as u64;
                    next - row_bytes as u64
                }
            };
            word.copy_from_slice(&address.to_ne_bytes());
        }
        assert!(
            places.next().is_none() && next == self.told.address() + staged.len() as u64,
            "each row is at one position"
        );
        let told = self.told.address();
        let mut pieces = vec![Piece::run(
            memory.address(),
            told + list as u64,
            rows * WORD,
        )];
        if !staged.is_empty() {
            pieces.push(Piece::run(staged.address(), told, staged.len()));
        }
        let lane = Arc::clone(to.lane());
        assert!(
            Arc::ptr_eq(lane.device(), self.told.device()),
            "its own device"
        );
        let fill = Fill::whole(to, range.start, bytes);
        let mut departing = Departing::of_kernel(vec![staged, memory], fill, lent, bytes as u64);
        let arguments = [
            place.first,
            place.stride_bytes,
            told + list as u64,
            rows as u64,
            row_bytes as u64,
        ];
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        departing.begin_by(&lane, |stream| {
            // SAFETY: both sides stay where they are until the departure has ended, also where that is dropped.
            // What is told is used by one piece after the other, on the one stream of the lane that has this.
            unsafe { stream.copy(Direction::ToDevice, &pieces) }?;
            // SAFETY: the lane's stream is there as long as the lane is.
            let foreign = unsafe { Foreign::new(lane.device(), stream.raw()) };
            let blocks = rows
                .div_ceil((BLOCK_THREADS / LANES) as usize)
                .min(BLOCKS_MAX);
            // SAFETY: the kernel has these arguments. It reads what was told and slots that are lent, and writes
            // places that are the scatter's alone; all of it stays until the departure has ended.
            unsafe {
                self.kernel
                    .launch(&foreign, blocks as u32, BLOCK_THREADS, arguments)
            }
        })?;
        Ok(departing)
    }
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
