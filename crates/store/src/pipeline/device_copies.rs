//! Copies of verified bytes to devices, shared by the workers of one read.
//!
//! A driver serializes the calls of all threads, and threads that wait for it lose more time than
//! the calls take. So workers queue what devices have to copy, and one worker at a time passes on
//! everything that is queued, by one call.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use penstock_io::buffer::{DeviceFills, HostToDevice};
use penstock_io::trace;

use crate::error::Result;

/// The most bytes that one call passes on, approximately: 0.3 ms of a fast link.
const CALL_BYTES_MAX: usize = 16 << 20;

/// Calls under way that the staging memory has room for, with the reads of the next ones.
const CALLS: usize = 16;

/// The copies of one read.
pub(super) struct DeviceCopies {
    /// From this many queued bytes on, they are passed on.
    call_bytes: usize,
    /// Copies that no device knows of yet.
    queued: Mutex<DeviceFills>,
    /// Calls of the driver are made under this lock.
    under_way: Mutex<UnderWay>,
}

#[derive(Default)]
struct UnderWay {
    /// The oldest first.
    copies: VecDeque<HostToDevice>,
    /// Bytes of all copies so far.
    bytes: u64,
}

impl DeviceCopies {
    /// No copies yet, from so many bytes of staging memory.
    pub(super) fn new(staging_bytes: usize) -> DeviceCopies {
        DeviceCopies {
            call_bytes: (staging_bytes / CALLS).min(CALL_BYTES_MAX),
            queued: Mutex::default(),
            under_way: Mutex::default(),
        }
    }

    /// Queues copies. Once enough are queued, passes them on, unless another worker is doing that.
    pub(super) fn queue(&self, fills: DeviceFills) -> Result<()> {
        if fills.is_empty() {
            return Ok(());
        }
        let mut queued = lock(&self.queued);
        queued.append(fills);
        let is_due = queued.bytes() >= self.call_bytes;
        drop(queued);
        match is_due {
            true => self.try_flush(),
            false => Ok(()),
        }
    }

    /// As [`flush`](DeviceCopies::flush), unless another worker calls the driver, or waits for it.
    pub(super) fn try_flush(&self) -> Result<()> {
        match self.under_way.try_lock() {
            Ok(under_way) => self.pass_on(under_way),
            Err(_) => Ok(()),
        }
    }

    /// Passes on all copies that are queued, and takes back the buffers of those that are done.
    pub(super) fn flush(&self) -> Result<()> {
        self.pass_on(lock(&self.under_way))
    }

    /// Waits for the oldest copies under way; returns false if there are none.
    pub(super) fn wait_oldest(&self) -> Result<bool> {
        let mut under_way = lock(&self.under_way);
        let Some(oldest) = under_way.copies.pop_front() else {
            return Ok(false);
        };
        let _span = trace::span("wait for device");
        oldest.wait()?;
        Ok(true)
    }

    /// Bytes that devices were asked to copy.
    pub(super) fn bytes(&self) -> u64 {
        lock(&self.under_way).bytes
    }

    fn pass_on(&self, mut under_way: MutexGuard<'_, UnderWay>) -> Result<()> {
        let _span = trace::span("call device");
        let fills = std::mem::take(&mut *lock(&self.queued));
        if !fills.is_empty() {
            let copies = fills.begin()?;
            under_way.bytes += copies.bytes();
            under_way.copies.push_back(copies);
        }
        while let Some(oldest) = under_way.copies.front()
            && oldest.is_done()?
        {
            under_way.copies.pop_front();
        }
        Ok(())
    }
}

/// The copies of a worker that panicked are dropped with the read.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
