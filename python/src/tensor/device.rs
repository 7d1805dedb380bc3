//! Device memory that Python owns.
#![allow(unsafe_code)]

use std::sync::Arc;

use penstock_cuda::Foreign;
use penstock_io::Result;
use penstock_io::buffer::{DeviceArrayMut, DeviceRegion, Lane};
use penstock_io::fifo::Fifo;
use pyo3::prelude::*;

use crate::owner::Owner;

/// A device's number, and the handle of the stream on which its memory is valid.
pub(crate) type NativeDevice = (u32, usize);

/// Devices and streams of one save or load, each of whose queued work is waited for once.
#[derive(Default)]
pub(crate) struct Followed {
    lanes: Vec<(NativeDevice, Arc<Lane>)>,
}

impl Followed {
    /// The copy streams of a device, which wait for the work queued on the caller's stream so far.
    pub(crate) fn lane(&mut self, device: NativeDevice) -> Result<Arc<Lane>> {
        if let Some((_, lane)) = self.lanes.iter().find(|(known, _)| *known == device) {
            return Ok(Arc::clone(lane));
        }
        let lane = Lane::of(device.0)?;
        lane.follow(&foreign(&lane, device.1))?;
        self.lanes.push((device, Arc::clone(&lane)));
        Ok(lane)
    }

    /// The copy streams of a device, which fill memory after the work queued on the caller's
    /// stream so far.
    pub(crate) fn lane_to_fill(&mut self, device: NativeDevice) -> Result<Arc<Lane>> {
        if let Some((_, lane)) = self.lanes.iter().find(|(known, _)| *known == device) {
            return Ok(Arc::clone(lane));
        }
        let lane = Lane::of(device.0)?;
        lane.fill_after(&foreign(&lane, device.1))?;
        self.lanes.push((device, Arc::clone(&lane)));
        Ok(lane)
    }

    /// All callers' streams.
    pub(crate) fn streams(&self) -> Vec<Foreign> {
        let streams = self.lanes.iter();
        streams
            .map(|((_, stream), lane)| foreign(lane, *stream))
            .collect()
    }
}

/// Streams of callers that are to wait.
pub(crate) fn streams(devices: Vec<NativeDevice>) -> Result<Vec<Foreign>> {
    let stream = |(ordinal, handle)| Ok(foreign(&*Lane::of(ordinal)?, handle));
    devices.into_iter().map(stream).collect()
}

/// Why devices are unusable, if they are.
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
    // SAFETY: the package passes the data pointer and the strides of a live tensor of this device,
    // shape and item size, with the object itself as the owner, and the stream that its user works
    // on.
    unsafe { DeviceRegion::new(lane, address as u64, item_bytes, shape, strides, owner) }
}

/// Device memory to fill.
pub(super) fn array(
    lane: &Arc<Lane>,
    address: usize,
    item_bytes: usize,
    shape: &[usize],
    strides: Option<&[isize]>,
    owner: Box<Owner>,
) -> Option<DeviceArrayMut> {
    // SAFETY: the package passes the data pointer and the strides of a live, writable tensor of
    // this device, shape and item size, with the object as the owner, and no two targets that
    // share memory. Work queued on its user's stream so far runs before the copies, and work
    // queued after this call has returned runs after them.
    unsafe { DeviceArrayMut::new(lane, address as u64, item_bytes, shape, strides, owner) }
}

/// Queues a kernel that gathers rows through a host queue.
pub(crate) fn gather_by(
    fifo: &Fifo,
    device: NativeDevice,
    ids: u64,
    id_bytes: usize,
    count: usize,
    out: u64,
) -> Result<()> {
    let lane = Lane::of(device.0)?;
    // SAFETY: the package passes the data pointers of live, contiguous tensors of this device, of
    // `count` ids and with room for their rows, and the stream that its user works on: PyTorch
    // orders every later use of their memory after the kernel on that stream.
    unsafe { fifo.gather(&foreign(&lane, device.1), ids, id_bytes, count, out) }
}

/// Waits until the work queued on a stream so far has completed.
pub(crate) fn wait_for(device: NativeDevice) -> Result<()> {
    let lane = Lane::of(device.0)?;
    Ok(foreign(&lane, device.1).record()?.wait()?)
}

pub(crate) fn foreign(lane: &Lane, handle: usize) -> Foreign {
    // SAFETY: the package passes the handle of the current stream of a device, which PyTorch never
    // destroys.
    unsafe { Foreign::new(lane.device(), handle) }
}
