//! The streams of one device that everybody in a process shares.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use penstock_cuda::{Device, DeviceMemory, Direction, Driver, Event, Foreign, Piece, Stream};

use super::telling::Telling;
use crate::Result;
use crate::buffer::{IoBuf, Pool};

/// Memory for telling a kernel where rows are, those among it that were staged.
pub(super) const TELLING_BYTES: usize = 16 << 20;

/// What is copied to a device and back before it is used.
const CHECKED_BYTES: usize = 64 << 10;

/// A device, the stream on which it copies to the host, and the one on which it copies from there.
#[derive(Debug)]
pub struct Lane {
    out: Stream,
    /// Whose copies to the host are being queued and noted: the last noted is the last queued.
    turn: Mutex<()>,
    back: Stream,
    /// What it was tried with: to free memory of a device waits for all that it has.
    tried: Option<DeviceMemory>,
    /// From the first time that it was asked for; none where the device cannot have one.
    telling: OnceLock<Option<Telling>>,
}

/// Those of this process, by the numbers of their devices.
static LANES: Mutex<Vec<Arc<Lane>>> = Mutex::new(Vec::new());

impl Lane {
    /// That of a device of this process, which all share; made where nobody has asked before.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): there is no such device, or no driver.
    pub fn of(ordinal: u32) -> Result<Arc<Lane>> {
        let mut lanes = LANES.lock().unwrap_or_else(PoisonError::into_inner);
        let found = lanes.iter().find(|lane| lane.device().ordinal() == ordinal);
        if let Some(lane) = found {
            return Ok(Arc::clone(lane));
        }
        let device = Driver::shared()?.device(ordinal)?;
        let lane = Arc::new(Lane::checked(&device)?);
        lanes.push(Arc::clone(&lane));
        Ok(lane)
    }

    /// One of its own for a device.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn new(device: &Arc<Device>) -> Result<Lane> {
        Ok(Lane {
            out: Stream::new(device)?,
            turn: Mutex::default(),
            back: Stream::new(device)?,
            tried: None,
            telling: OnceLock::new(),
        })
    }

    /// One of its own, once it is known that what the device is given comes back: in confidential computing,
    /// addresses of the host may be of memory that is not what it seems, and copies bring rubbish.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn checked(device: &Arc<Device>) -> Result<Lane> {
        let mut lane = Lane::new(device)?;
        // A device without memory left is used all the same.
        if let Ok(memory) = DeviceMemory::allocate(device, CHECKED_BYTES) {
            lane.check(&memory)?;
            lane.tried = Some(memory);
        }
        Ok(lane)
    }

    /// Copies to memory of the device and back.
    fn check(&self, memory: &DeviceMemory) -> Result<()> {
        let pool = Pool::pinned_and_kept(CHECKED_BYTES, 2 * CHECKED_BYTES, self.device());
        let (mut given, mut back) = (pool.take()?, pool.take()?);
        for (at, byte) in given.as_mut_slice().iter_mut().enumerate() {
            *byte = (at * 31 + 7) as u8;
        }
        back.as_mut_slice().fill(0);
        let piece = |buf: &IoBuf| Piece::run(buf.address(), memory.address(), CHECKED_BYTES);
        // SAFETY: both sides are there, and nobody else's, until both streams are done: see below.
        let gone = unsafe { self.back.copy(Direction::ToDevice, &[piece(&given)]) };
        let followed = gone.and_then(|()| self.out.wait_for(&self.back.record()?));
        let copied = followed.and_then(|()| {
            // SAFETY: as above.
            unsafe { self.out.copy(Direction::ToHost, &[piece(&back)]) }
        });
        self.back.settle();
        self.out.settle();
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

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.out.device()
    }

    /// What has a kernel put rows together on the stream for copies to the device; none where the device has no
    /// room, or is too old for the kernel.
    pub(super) fn telling(&self) -> Option<&Telling> {
        let make = || Telling::new(self.device(), TELLING_BYTES).ok();
        self.telling.get_or_init(make).as_ref()
    }

    /// Has copies to the host that begin from now on see what `stream` has queued until now.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda), notably where the stream is captured into a graph.
    pub fn follow(&self, stream: &Foreign) -> Result<()> {
        Ok(self.out.wait_for(&stream.record()?)?)
    }

    /// Has what `stream` gets from now on wait for the copies to the host that have begun until now.
    ///
    /// # Errors
    /// As [`Lane::follow`].
    pub fn hold(&self, stream: &Foreign) -> Result<()> {
        Ok(stream.wait_for(&self.out.record()?)?)
    }

    /// Has copies to the device that begin from now on come after what `stream` has queued until now:
    /// it may still use the memory that they fill, also where that has just been allocated.
    ///
    /// # Errors
    /// As [`Lane::follow`].
    pub fn fill_after(&self, stream: &Foreign) -> Result<()> {
        Ok(self.back.wait_for(&stream.record()?)?)
    }

    /// Has what `stream` gets from now on see the copies to the device that have begun until now.
    ///
    /// # Errors
    /// As [`Lane::follow`].
    pub fn hold_for_fills(&self, stream: &Foreign) -> Result<()> {
        Ok(stream.wait_for(&self.back.record()?)?)
    }

    /// Has copies to the host that begin from now on come after a moment of another stream.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn follow_at(&self, moment: &Event) -> Result<()> {
        Ok(self.out.wait_for(moment)?)
    }

    /// Has copies to the device that begin from now on come after a moment of another stream.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn fill_at(&self, moment: &Event) -> Result<()> {
        Ok(self.back.wait_for(moment)?)
    }

    /// The moment when all copies to the device are done that have begun until now.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn filled(&self) -> Result<Event> {
        Ok(self.back.record()?)
    }

    /// Held from the first copy that is queued until its moment is noted.
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
