//! Eager copies: sources in host and device memory that a job copies during its call.

use std::sync::Arc;

use penstock_cuda::{Device, Foreign};
use penstock_io::buffer::{DeviceStreams, HostRegion, Memory, Pool, Region, Snapshot};

use crate::error::Result;

/// Largest source that a lazy job copies eagerly, so that its caller may change small values
/// without waiting: counters, losses, states of random number generators.
const SMALL_BYTES_MAX: u64 = 64 << 10;

/// Limit on the total of these copies.
const SMALL_TOTAL_BYTES_MAX: u64 = 64 << 20;

/// Size of the buffers that collect small device tensors.
const SNAPSHOT_BYTES: u64 = 1 << 20;

/// The device that copies some of the sources, if any.
pub(super) fn device(sources: &[Region]) -> Option<&Arc<Device>> {
    let device = sources.iter().find_map(Region::device);
    device.map(|region| region.device_streams().device())
}

pub(super) fn bytes_of(sources: &[Region], indices: &[usize]) -> u64 {
    indices.iter().map(|&index| sources[index].len()).sum()
}

/// Selects small sources up to the total limit, in order. The smallest are preferred: they are the
/// values that change during a step, such as counters and running statistics.
pub(super) fn small(sources: &[Region], is_asked: impl Fn(&Region) -> bool) -> Vec<usize> {
    let is_small = |source: &Region| (1..=SMALL_BYTES_MAX).contains(&source.len());
    let mut small: Vec<usize> = (0..sources.len())
        .filter(|&index| is_small(&sources[index]) && is_asked(&sources[index]))
        .collect();
    small.sort_by_key(|&index| sources[index].len());
    let mut total_bytes = 0;
    small.retain(|&index| {
        let bytes = sources[index].len();
        let fits = total_bytes + bytes <= SMALL_TOTAL_BYTES_MAX;
        total_bytes += if fits { bytes } else { 0 };
        fits
    });
    small.sort_unstable();
    small
}

/// Replaces small device sources by copies, without waiting for the device: streams that receive
/// work later wait for the copies. Returns the indices of those sources.
pub(super) fn replace_by_snapshots(
    sources: &mut [Region],
    streams: &[Foreign],
) -> Result<Vec<usize>> {
    let indices = small(sources, |source| source.device().is_some());
    let Some(first) = indices.first().and_then(|&index| sources[index].device()) else {
        return Ok(indices);
    };
    // The unused end of a buffer is smaller than the largest source.
    let buffers = bytes_of(sources, &indices).div_ceil(SNAPSHOT_BYTES - SMALL_BYTES_MAX) + 1;
    let budget_bytes = buffers * SNAPSHOT_BYTES;
    let device = first.device_streams().device();
    let pool = Pool::pinned_and_kept(SNAPSHOT_BYTES as usize, budget_bytes as usize, device);
    let mut all_streams = Vec::new();
    let mut regions = Vec::with_capacity(indices.len());
    for &index in &indices {
        let taken = std::mem::replace(&mut sources[index], HostRegion::from(Vec::new()).into());
        if let Region::Device(region) = taken {
            all_streams.push(Arc::clone(region.device_streams()));
            regions.push(region);
        }
    }
    let snapshots = Snapshot::take(regions, &pool)?;
    hold(streams, all_streams.iter())?;
    for (&index, snapshot) in indices.iter().zip(snapshots) {
        sources[index] = snapshot.into();
    }
    Ok(indices)
}

/// Makes streams wait for the copies that the copy streams of their devices have begun.
pub(super) fn hold<'a>(
    streams: &[Foreign],
    all_streams: impl Iterator<Item = &'a Arc<DeviceStreams>>,
) -> Result<()> {
    let mut known: Vec<&Arc<DeviceStreams>> = Vec::new();
    for device_streams in all_streams {
        if known.iter().any(|known| Arc::ptr_eq(known, device_streams)) {
            continue;
        }
        known.push(device_streams);
        let is_of =
            |stream: &&Foreign| stream.device().ordinal() == device_streams.device().ordinal();
        for stream in streams.iter().filter(is_of) {
            device_streams.hold(stream)?;
        }
    }
    Ok(())
}

pub(super) fn replace_by_copies(sources: &mut [Region], indices: &[usize]) -> Result<()> {
    let mut memory = Memory::allocate(bytes_of(sources, indices) as usize)?;
    let mut rest = memory.as_mut_slice();
    for &index in indices {
        let source = sources[index].host().expect("they are the host's");
        let copy = rest.split_off_mut(..source.len() as usize);
        source.copy_to(0, copy.expect("there is room for all of them"));
    }
    let memory = Arc::new(memory);
    let mut start = 0;
    for &index in indices {
        let end = start + sources[index].len() as usize;
        sources[index] = HostRegion::within(&memory, start..end).into();
        start = end;
    }
    Ok(())
}
