//! Small device tensors, copied together before anything else.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::DeviceRegion;
use super::in_flight::{Copy, InFlightCopy};
use crate::Result;
use crate::buffer::{IoBuf, Pool};

/// One buffer of content copied from devices.
#[derive(Debug)]
struct SnapshotShared {
    /// The copy and its source regions, until somebody has waited for it.
    device_to_host: Mutex<Option<(InFlightCopy, Vec<DeviceRegion>)>>,
    here: OnceLock<IoBuf>,
}

/// The content of device memory at one moment of its stream, which may still be to come.
#[derive(Clone, Debug)]
pub struct Snapshot {
    shared: Arc<SnapshotShared>,
    start: usize,
    len: usize,
}

impl Snapshot {
    /// Begins to copy whole regions to buffers of a pool, and returns a snapshot of each. Later
    /// copies on the regions' streams are ordered after these. Only an exhausted pool makes this
    /// wait.
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
            let device_to_host = InFlightCopy::begin(buf, &copies)?;
            let shared = Arc::new(SnapshotShared {
                device_to_host: Mutex::new(Some((device_to_host, taken))),
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

    /// Whether the content has arrived.
    pub fn is_done(&self) -> Result<bool> {
        // The thread that holds the lock is waiting for the copy.
        let Ok(device_to_host) = self.shared.device_to_host.try_lock() else {
            return Ok(false);
        };
        let is_done = device_to_host
            .as_ref()
            .map(|(device_to_host, _)| device_to_host.is_done());
        is_done.unwrap_or(Ok(true))
    }

    /// Waits until the content has arrived, and releases the source regions.
    pub fn wait(&self) -> Result<()> {
        self.buf().map(drop)
    }

    /// Fills `dst` with the content from byte `start` on; waits until it has arrived.
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
        if let Some((device_to_host, _)) = waiting.as_ref() {
            // After an error the copy stays in place, and the next call fails as well.
            device_to_host.wait()?;
        }
        let mut regions = None;
        if let Some((device_to_host, from)) = waiting.take() {
            self.shared.here.get_or_init(|| device_to_host.take());
            regions = Some(from);
        }
        drop(waiting);
        // Dropped outside of the lock: owners run code of the caller.
        drop(regions);
        Ok(self
            .shared
            .here
            .get()
            .expect("whoever took it has put it here"))
    }

    fn lock(&self) -> MutexGuard<'_, Option<(InFlightCopy, Vec<DeviceRegion>)>> {
        self.shared
            .device_to_host
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
