//! Small tensors of devices, copied together before anything else.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::DeviceRegion;
use super::flight::{Copy, Flight};
use crate::Result;
use crate::buffer::{IoBuf, Pool};

/// A buffer's worth of what devices have.
#[derive(Debug)]
struct Shared {
    /// Until somebody has waited for it, with what it comes from.
    arriving: Mutex<Option<(Flight, Vec<DeviceRegion>)>>,
    here: OnceLock<IoBuf>,
}

/// The content of a device's memory as it was, or will be by its stream, at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    shared: Arc<Shared>,
    start: usize,
    len: usize,
}

impl Snapshot {
    /// Begins to copy all of some regions to buffers of a pool, and gives a snapshot for each. What the
    /// regions' lanes do later comes after it; nobody waits here, unless the pool has no buffer left.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda), and those of [`Pool::take`].
    ///
    /// # Panics
    /// If a region is larger than a buffer.
    pub fn take(regions: Vec<DeviceRegion>, pool: &Pool) -> Result<Vec<Snapshot>> {
        let mut snapshots = Vec::with_capacity(regions.len());
        let mut rest = regions.into_iter().peekable();
        while rest.peek().is_some() {
            let buf = pool.take()?;
            let (mut end, mut ranges, mut taken) = (0, Vec::new(), Vec::new());
            while let Some(region) = rest.next_if(|next| next.len() as usize <= buf.len() - end) {
                ranges.push(end..end + region.len() as usize);
                end += region.len() as usize;
                taken.push(region);
            }
            assert!(!taken.is_empty(), "a region is larger than a buffer");
            let copy = |(region, range): (_, &Range<usize>)| (region, 0, range.clone());
            let copies: Vec<Copy<'_>> = taken.iter().zip(&ranges).map(copy).collect();
            let arriving = Flight::begin(buf, &copies)?;
            let shared = Arc::new(Shared {
                arriving: Mutex::new(Some((arriving, taken))),
                here: OnceLock::new(),
            });
            snapshots.extend(ranges.into_iter().map(|range| Snapshot {
                shared: Arc::clone(&shared),
                start: range.start,
                len: range.len(),
            }));
        }
        Ok(snapshots)
    }

    /// The length of the content.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether there is no content.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it has arrived.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): the device has failed.
    pub fn is_here(&self) -> Result<bool> {
        // Whoever has it at the moment waits for it.
        let Ok(arriving) = self.shared.arriving.try_lock() else {
            return Ok(false);
        };
        let is_here = arriving.as_ref().map(|(arriving, _)| arriving.is_here());
        is_here.unwrap_or(Ok(true))
    }

    /// Waits until it has arrived, and lets go of what it comes from.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): the device has failed.
    pub fn wait(&self) -> Result<()> {
        self.buf().map(drop)
    }

    /// Fills `dst` with the content from byte `start` on, waiting until it has arrived.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): the device has failed.
    ///
    /// # Panics
    /// If that reaches beyond the content.
    pub fn copy_to(&self, start: u64, dst: &mut [u8]) -> Result<()> {
        let content = &self.buf()?.as_slice()[self.start..][..self.len];
        dst.copy_from_slice(&content[start as usize..][..dst.len()]);
        Ok(())
    }

    fn buf(&self) -> Result<&IoBuf> {
        if let Some(buf) = self.shared.here.get() {
            return Ok(buf);
        }
        let mut waiting = self.lock();
        if let Some((arriving, _)) = waiting.as_ref() {
            // Where this fails it stays there, and fails again.
            arriving.wait()?;
        }
        let mut regions = None;
        if let Some((arriving, from)) = waiting.take() {
            self.shared.here.get_or_init(|| arriving.take());
            regions = Some(from);
        }
        drop(waiting);
        // Owners are somebody else's code.
        drop(regions);
        Ok(self
            .shared
            .here
            .get()
            .expect("whoever took it has put it here"))
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Flight, Vec<DeviceRegion>)>> {
        self.shared
            .arriving
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
