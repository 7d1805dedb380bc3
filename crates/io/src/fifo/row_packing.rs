//! The cost of a kernel that reads rows of host memory.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_cuda::{Device, DeviceMemory, Direction, Foreign, Module, PitchedCopy, Stream};

use crate::buffer::Slots;
use crate::kernels::{BLOCK_THREADS, LANES, PTX};
use crate::{Error, Result};

/// The most blocks of a launch: more than any device runs at once.
const BLOCKS_MAX: u32 = 1 << 14;

/// Gathers `count` rows with a kernel, in random order, from a table of `rows` rows in pinned
/// memory; returns the time of the second run.
///
/// # Errors
/// [`Error::Cuda`]: memory cannot be allocated or pinned, or the kernel fails.
///
/// # Panics
/// If any number is zero.
pub fn measure_packing(
    device: &Arc<Device>,
    rows: u32,
    row_bytes: usize,
    count: usize,
) -> Result<Duration> {
    assert!(
        rows > 0 && row_bytes > 0 && count > 0,
        "there is something to gather"
    );
    let table = Slots::mapped(device, rows, row_bytes)?;
    let at = table.device_address().expect("it is mapped");
    // Any order that no cache predicts.
    let id = |position: u64| (position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % u64::from(rows);
    let ids: Vec<u8> = (0..count as u64)
        .flat_map(|one| id(one).to_ne_bytes())
        .collect();
    let stream = Stream::new(device)?;
    let asked = DeviceMemory::allocate(device, ids.len())?;
    let out = DeviceMemory::allocate(device, count * row_bytes)?;
    let piece = PitchedCopy::run(ids.as_ptr() as usize, asked.address(), ids.len());
    // SAFETY: both sides stay until the wait for the stream below.
    let copied = unsafe { stream.copy(Direction::ToDevice, &[piece]) };
    stream.drain();
    copied?;
    let kernel = Module::load(device, PTX)?.kernel(c"penstock_pack")?;
    // SAFETY: the stream lives as long as this is used.
    let foreign = unsafe { Foreign::new(device, stream.raw()) };
    let warps = u32::try_from(count).unwrap_or(u32::MAX);
    let blocks = warps.div_ceil(BLOCK_THREADS / LANES).min(BLOCKS_MAX);
    let arguments = [
        out.address(),
        at,
        asked.address(),
        count as u64,
        row_bytes as u64,
    ];
    let mut took = Duration::ZERO;
    for _ in 0..2 {
        let begun = Instant::now();
        // SAFETY: these are the kernel's arguments; the memory has the room, and stays until the
        // stream is done.
        let launched = unsafe { kernel.launch(&foreign, blocks, BLOCK_THREADS, arguments) };
        let ended = launched.and_then(|()| stream.synchronize());
        took = begun.elapsed();
        ended.inspect_err(|_| stream.drain()).map_err(Error::from)?;
    }
    Ok(took)
}
