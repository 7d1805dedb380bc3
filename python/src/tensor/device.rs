//! Device memory that Python owns.
#![allow(unsafe_code)]

use std::sync::Arc;

use penstock_cuda::Foreign;
use penstock_io::Result;
use penstock_io::buffer::{DeviceArrayMut, DeviceRegion, DeviceStreams};
use penstock_io::fifo::Fifo;
use pyo3::prelude::*;

use crate::owner::Owner;

/// A device's number, and the handle of the stream on which its memory is valid.
pub(crate) type NativeDevice = (u32, usize);

/// Devices and streams of one save or load, each of whose queued work is waited for once.
#[derive(Default)]
pub(crate) struct Followed {
    all_streams: Vec<(NativeDevice, Arc<DeviceStreams>)>,
}

impl Followed {
    /// The copy streams of a device, which wait for the work queued on the caller's stream so far.
    pub(crate) fn device_streams(&mut self, device: NativeDevice) -> Result<Arc<DeviceStreams>> {
        if let Some((_, device_streams)) =
            self.all_streams.iter().find(|(known, _)| *known == device)
        {
            return Ok(Arc::clone(device_streams));
        }
        let device_streams = DeviceStreams::of(device.0)?;
        device_streams.follow(&foreign(&device_streams, device.1))?;
        self.all_streams.push((device, Arc::clone(&device_streams)));
        Ok(device_streams)
    }

    /// The copy streams of a device, which fill memory after the work queued on the caller's
    /// stream so far.
    pub(crate) fn streams_to_fill(&mut self, device: NativeDevice) -> Result<Arc<DeviceStreams>> {
        if let Some((_, device_streams)) =
            self.all_streams.iter().find(|(known, _)| *known == device)
        {
            return Ok(Arc::clone(device_streams));
        }
        let device_streams = DeviceStreams::of(device.0)?;
        device_streams.fill_after(&foreign(&device_streams, device.1))?;
        self.all_streams.push((device, Arc::clone(&device_streams)));
        Ok(device_streams)
    }

    /// All callers' streams.
    pub(crate) fn streams(&self) -> Vec<Foreign> {
        let streams = self.all_streams.iter();
        streams
            .map(|((_, stream), device_streams)| foreign(device_streams, *stream))
            .collect()
    }
}

/// Streams of callers that are to wait.
pub(crate) fn streams(devices: Vec<NativeDevice>) -> Result<Vec<Foreign>> {
    let stream = |(ordinal, handle)| Ok(foreign(&*DeviceStreams::of(ordinal)?, handle));
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
    device_streams: &Arc<DeviceStreams>,
    address: usize,
    item_bytes: usize,
    shape: &[usize],
    strides: Option<&[isize]>,
    owner: Box<Owner>,
) -> DeviceRegion {
    // SAFETY: the package passes the data pointer and the strides of a live tensor of this device,
    // shape and item size, with the object itself as the owner, and the stream that its user works
    // on.
    unsafe {
        DeviceRegion::new(
            device_streams,
            address as u64,
            item_bytes,
            shape,
            strides,
            owner,
        )
    }
}

/// Device memory to fill.
pub(super) fn array(
    device_streams: &Arc<DeviceStreams>,
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
    unsafe {
        DeviceArrayMut::new(
            device_streams,
            address as u64,
            item_bytes,
            shape,
            strides,
            owner,
        )
    }
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
    let device_streams = DeviceStreams::of(device.0)?;
    // SAFETY: the package passes the data pointers of live, contiguous tensors of this device, of
    // `count` ids and with room for their rows, and the stream that its user works on: PyTorch
    // orders every later use of their memory after the kernel on that stream.
    unsafe {
        fifo.gather(
            &foreign(&device_streams, device.1),
            ids,
            id_bytes,
            count,
            out,
        )
    }
}

/// Waits until the work queued on a stream so far has completed.
pub(crate) fn wait_for(device: NativeDevice) -> Result<()> {
    let device_streams = DeviceStreams::of(device.0)?;
    Ok(foreign(&device_streams, device.1).record()?.wait()?)
}

pub(crate) fn foreign(device_streams: &DeviceStreams, handle: usize) -> Foreign {
    // SAFETY: the package passes the handle of the current stream of a device, which PyTorch never
    // destroys.
    unsafe { Foreign::new(device_streams.device(), handle) }
}
