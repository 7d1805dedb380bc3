//! Memory of devices that Python owns.
#![allow(unsafe_code)]

use std::sync::Arc;

use penstock_cuda::Foreign;
use penstock_io::Result;
use penstock_io::buffer::{DeviceArrayMut, DeviceRegion, Lane};
use penstock_io::fifo::Fifo;
use pyo3::prelude::*;

use crate::owner::Owner;

/// A device by its number, and the stream on which its memory is what it should be, by its handle.
pub(crate) type NativeDevice = (u32, usize);

/// Devices and streams of one call, a save or a load: what a stream has queued is waited for once.
#[derive(Default)]
pub(crate) struct Followed {
    lanes: Vec<(NativeDevice, Arc<Lane>)>,
}

impl Followed {
    /// The lane of a device, which sees what the stream has queued until now.
    pub(crate) fn lane(&mut self, device: NativeDevice) -> Result<Arc<Lane>> {
        if let Some((_, lane)) = self.lanes.iter().find(|(known, _)| *known == device) {
            return Ok(Arc::clone(lane));
        }
        let lane = Lane::of(device.0)?;
        lane.follow(&foreign(&lane, device.1))?;
        self.lanes.push((device, Arc::clone(&lane)));
        Ok(lane)
    }

    /// The lane of a device, which fills memory once the stream has done what it has queued until now.
    pub(crate) fn lane_to_fill(&mut self, device: NativeDevice) -> Result<Arc<Lane>> {
        if let Some((_, lane)) = self.lanes.iter().find(|(known, _)| *known == device) {
            return Ok(Arc::clone(lane));
        }
        let lane = Lane::of(device.0)?;
        lane.fill_after(&foreign(&lane, device.1))?;
        self.lanes.push((device, Arc::clone(&lane)));
        Ok(lane)
    }

    /// All of the streams.
    pub(crate) fn streams(&self) -> Vec<Foreign> {
        let streams = self.lanes.iter();
        streams
            .map(|((_, stream), lane)| foreign(lane, *stream))
            .collect()
    }
}

/// Streams of callers, to be held up.
pub(crate) fn streams(devices: Vec<NativeDevice>) -> Result<Vec<Foreign>> {
    let stream = |(ordinal, handle)| Ok(foreign(&*Lane::of(ordinal)?, handle));
    devices.into_iter().map(stream).collect()
}

/// Why devices cannot be reached, if they cannot.
#[pyfunction]
pub fn cuda_problem() -> Option<String> {
    let problem = penstock_cuda::Driver::shared().err();
    problem.map(|problem| problem.to_string())
}

/// The memory of a source.
pub(super) fn region(
    lane: &Arc<Lane>,
    address: usize,
    item_bytes: usize,
    shape: &[usize],
    strides: Option<&[isize]>,
    owner: Box<Owner>,
) -> DeviceRegion {
    // SAFETY: the package passes the data pointer and the strides of a live tensor of this device, shape
    // and item size, with the object itself as the owner, and the stream that its user works on.
    unsafe { DeviceRegion::new(lane, address as u64, item_bytes, shape, strides, owner) }
}

/// The memory of a device that is to be filled.
pub(super) fn array(
    lane: &Arc<Lane>,
    address: usize,
    item_bytes: usize,
    shape: &[usize],
    strides: Option<&[isize]>,
    owner: Box<Owner>,
) -> Option<DeviceArrayMut> {
    // SAFETY: the package passes the data pointer and the strides of a live, writable tensor of this
    // device, shape and item size, with the object as the owner, and no two targets that share memory.
    // What its user's stream has queued comes before, and what it gets when this has returned after.
    unsafe { DeviceArrayMut::new(lane, address as u64, item_bytes, shape, strides, owner) }
}

/// Has a kernel gather rows by a FIFO.
pub(crate) fn gather_by(
    fifo: &Fifo,
    device: NativeDevice,
    ids: u64,
    id_bytes: usize,
    count: usize,
    out: u64,
) -> Result<()> {
    let lane = Lane::of(device.0)?;
    // SAFETY: the package passes the data pointers of live, contiguous tensors of this device, of so many
    // ids and with room for their rows, and the stream that its user works on: what PyTorch gives their
    // memory to later comes after it on that stream.
    unsafe { fifo.gather(&foreign(&lane, device.1), ids, id_bytes, count, out) }
}

/// Waits until a stream has done what it has now.
pub(crate) fn wait_for(device: NativeDevice) -> Result<()> {
    let lane = Lane::of(device.0)?;
    Ok(foreign(&lane, device.1).record()?.wait()?)
}

pub(crate) fn foreign(lane: &Lane, handle: usize) -> Foreign {
    // SAFETY: the package passes the handle of the current stream of a device, which PyTorch never
    // destroys.
    unsafe { Foreign::new(lane.device(), handle) }
}
