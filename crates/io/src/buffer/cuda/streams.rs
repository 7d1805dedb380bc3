//! The copy streams of one device, shared by the whole process.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use penstock_cuda::{Device, DeviceMemory, Direction, Driver, Event, Foreign, PitchedCopy, Stream};

use super::kernel_params::KernelParams;
use crate::Result;
use crate::buffer::{IoBuf, Pool};

/// Device memory for the parameters of the gather kernel, staged rows included.
pub(super) const KERNEL_PARAMS_BYTES: usize = 16 << 20;

/// Bytes copied to a device and back as a test before its first use.
const CHECKED_BYTES: usize = 64 << 10;

/// A device with one stream for copies to the host and one for copies to the device.
#[derive(Debug)]
pub struct DeviceStreams {
    out: Stream,
    /// Held while copies to the host are queued and noted, so that the last one noted is the last
    /// one queued.
    turn: Mutex<()>,
    back: Stream,
    /// Memory of the self-test. It is kept, as freeing device memory waits for all work of the
    /// device.
    tried: Option<DeviceMemory>,
    /// Made on first use; `None` inside where the device cannot have one.
    kernel_params: OnceLock<Option<KernelParams>>,
}

/// The streams of this process, found by their devices' numbers.
static STREAMS: Mutex<Vec<Arc<DeviceStreams>>> = Mutex::new(Vec::new());

impl DeviceStreams {
    /// The streams of a device that all of this process share, made on first use.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): there is no such device, or no driver.
    pub fn of(ordinal: u32) -> Result<Arc<DeviceStreams>> {
        let mut all_streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
        let found = all_streams
            .iter()
            .find(|device_streams| device_streams.device().ordinal() == ordinal);
        if let Some(device_streams) = found {
            return Ok(Arc::clone(device_streams));
        }
        let device = Driver::shared()?.device(ordinal)?;
        let device_streams = Arc::new(DeviceStreams::checked(&device)?);
        all_streams.push(Arc::clone(&device_streams));
        Ok(device_streams)
    }

    /// New streams of a device.
    pub fn new(device: &Arc<Device>) -> Result<DeviceStreams> {
        Ok(DeviceStreams {
            out: Stream::new(device)?,
            turn: Mutex::default(),
            back: Stream::new(device)?,
            tried: None,
            kernel_params: OnceLock::new(),
        })
    }

    /// New streams, after a test that bytes survive the way to the device and back: in confidential
    /// computing, addresses of the host may not be the memory that they seem, and copies return
    /// garbage.
    pub fn checked(device: &Arc<Device>) -> Result<DeviceStreams> {
        let mut device_streams = DeviceStreams::new(device)?;
        // A device that has no memory left is used without the test.
        if let Ok(memory) = DeviceMemory::allocate(device, CHECKED_BYTES) {
            device_streams.check(&memory)?;
            device_streams.tried = Some(memory);
        }
        Ok(device_streams)
    }

    /// Copies bytes to memory of the device and back, and compares them.
    fn check(&self, memory: &DeviceMemory) -> Result<()> {
        let pool = Pool::pinned_and_kept(CHECKED_BYTES, 2 * CHECKED_BYTES, self.device());
        let (mut given, mut back) = (pool.take()?, pool.take()?);
        for (at, byte) in given.as_mut_slice().iter_mut().enumerate() {
            *byte = (at * 31 + 7) as u8;
        }
        back.as_mut_slice().fill(0);
        let piece = |buf: &IoBuf| PitchedCopy::run(buf.address(), memory.address(), CHECKED_BYTES);
        // SAFETY: both sides stay, and nothing else reaches them, until both streams are done: see
        // below.
        let gone = unsafe { self.back.copy(Direction::ToDevice, &[piece(&given)]) };
        let followed = gone.and_then(|()| self.out.wait_for(&self.back.record()?));
        let copied = followed.and_then(|()| {
            // SAFETY: as above.
            unsafe { self.out.copy(Direction::ToHost, &[piece(&back)]) }
        });
        self.back.drain();
        self.out.drain();
        copied?;
        if given.as_slice() != back.as_slice() {
            let reason =
                "what is copied to it does not come back (is it in confidential computing?)";
            return Err(penstock_cuda::Error::Unusable {
                ordinal: self.device().ordinal(),
                reason: reason.to_owned(),
            }
            .into());
        }
        Ok(())
    }

    /// The device of both streams.
    pub fn device(&self) -> &Arc<Device> {
        self.out.device()
    }

    /// The gather kernel on the stream for copies to the device; `None` where the device has no
    /// memory left, or is too old for the kernel.
    pub(super) fn kernel_params(&self) -> Option<&KernelParams> {
        let make = || KernelParams::new(self.device(), KERNEL_PARAMS_BYTES).ok();
        self.kernel_params.get_or_init(make).as_ref()
    }

    /// Makes later copies to the host wait for the work now queued on `stream`.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda), notably where the stream is captured into a graph.
    pub fn follow(&self, stream: &Foreign) -> Result<()> {
        Ok(self.out.wait_for(&stream.record()?)?)
    }

    /// Makes later work of `stream` wait for the copies to the host that have begun.
    pub fn hold(&self, stream: &Foreign) -> Result<()> {
        Ok(stream.wait_for(&self.out.record()?)?)
    }

    /// Makes later copies to the device wait for the work now queued on `stream`, which may still
    /// use the memory that they fill, even memory just allocated.
    pub fn fill_after(&self, stream: &Foreign) -> Result<()> {
        Ok(self.back.wait_for(&stream.record()?)?)
    }

    /// Makes later work of `stream` wait for the copies to the device that have begun.
    pub fn hold_for_fills(&self, stream: &Foreign) -> Result<()> {
        Ok(stream.wait_for(&self.back.record()?)?)
    }

    /// Makes later copies to the host wait for an event of another stream.
    pub fn follow_at(&self, moment: &Event) -> Result<()> {
        Ok(self.out.wait_for(moment)?)
    }

    /// Makes later copies to the device wait for an event of another stream.
    pub fn fill_at(&self, moment: &Event) -> Result<()> {
        Ok(self.back.wait_for(moment)?)
    }

    /// Records an event behind the copies to the device that have begun.
    pub fn filled(&self) -> Result<Event> {
        Ok(self.back.record()?)
    }

    /// Locks the queueing of copies to the host: from the first copy until its event is noted.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn out(&self) -> &Stream {
        &self.out
    }

    pub(super) fn back(&self) -> &Stream {
        &self.back
    }
}
