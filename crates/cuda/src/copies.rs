//! Copies between a device and host memory.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;

use crate::device::Entered;
use crate::error::{Error, Result};
use crate::raw::{self, Copy2D, CopyAttributes, Location};
use crate::stream::Stream;

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the device to the host.
    ToHost,
    /// From the host to the device.
    ToDevice,
}

/// Bytes that are contiguous on both sides, or rows of such bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PitchedCopy {
    /// Host address of the first byte.
    pub host: usize,
    /// Device address of the first byte.
    pub device: u64,
    /// Bytes of each row.
    pub row_bytes: usize,
    /// Number of rows, at least one.
    pub rows: usize,
    /// Distance between rows on the host, at least `row_bytes`.
    pub host_pitch: usize,
    /// Distance between rows on the device, at least `row_bytes`.
    pub device_pitch: usize,
}

impl PitchedCopy {
    /// A contiguous piece.
    pub fn run(host: usize, device: u64, bytes: usize) -> PitchedCopy {
        PitchedCopy {
            host,
            device,
            row_bytes: bytes,
            rows: 1,
            host_pitch: bytes,
            device_pitch: bytes,
        }
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        self.row_bytes * self.rows
    }

    /// The piece that is one of its rows.
    fn row(&self, row: usize) -> PitchedCopy {
        PitchedCopy::run(
            self.host + row * self.host_pitch,
            self.device + (row * self.device_pitch) as u64,
            self.row_bytes,
        )
    }
}

/// From this many runs on, one call queues them all, where the driver has it.
const BATCH_MIN: usize = 2;

impl Stream {
    /// Queues copies. They read their sources and write their destinations before an event recorded
    /// later completes. Unpinned host memory is copied before this returns.
    ///
    /// # Errors
    /// The driver's error. Some copies may have been queued then.
    ///
    /// # Safety
    /// Until such an event has completed, or the stream is synchronized, the memory on both sides
    /// stays in place; all other reads and writes of the destinations, and all writes of the
    /// sources, are ordered before or after the copies by events.
    pub unsafe fn copy(&self, direction: Direction, pieces: &[PitchedCopy]) -> Result<()> {
        let entered = self.device().enter()?;
        let queue = Queue {
            stream: self,
            entered: &entered,
            direction,
        };
        let (runs, rows): (Vec<&PitchedCopy>, Vec<&PitchedCopy>) = pieces
            .iter()
            .filter(|piece| piece.bytes() > 0)
            .partition(|piece| piece.rows == 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { queue.runs(&runs) }?;
        for piece in rows {
            // SAFETY: as above.
            unsafe { queue.rows(piece) }?;
        }
        Ok(())
    }
}

/// Whether to try single calls after this error; they report an error of their own if there is one.
fn is_declined(error: &Error) -> bool {
    matches!(error.code(), Some(raw::NOT_SUPPORTED | raw::INVALID_VALUE))
}

struct Queue<'a> {
    stream: &'a Stream,
    entered: &'a Entered<'a>,
    direction: Direction,
}

impl Queue<'_> {
    /// # Safety
    /// As [`Stream::copy`].
    unsafe fn runs(&self, runs: &[&PitchedCopy]) -> Result<()> {
        if runs.len() >= BATCH_MIN {
            // SAFETY: the caller's promise is passed on.
            match unsafe { self.batch(runs) } {
                // A driver may have the call and not support it, or not for unpinned memory.
                None => {}
                Some(Err(error)) if is_declined(&error) => {}
                Some(done) => return done,
            }
        }
        for run in runs {
            // SAFETY: as above.
            unsafe { self.run(run) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`Stream::copy`].
    unsafe fn run(&self, run: &PitchedCopy) -> Result<()> {
        let (bytes, stream) = (run.row_bytes, self.stream.handle());
        match self.direction {
            Direction::ToHost => {
                let to: *mut c_void = ptr::with_exposed_provenance_mut(run.host);
                // SAFETY: the caller's promise.
                unsafe { self.entered.copy_to_host(to, run.device, bytes, stream) }
            }
            Direction::ToDevice => {
                let from: *const c_void = ptr::with_exposed_provenance(run.host);
                // SAFETY: the caller's promise.
                unsafe { self.entered.copy_to_device(run.device, from, bytes, stream) }
            }
        }
    }

    /// Queues all runs by one call; `None` where the driver has no such call.
    ///
    /// # Safety
    /// As [`Stream::copy`].
    unsafe fn batch(&self, runs: &[&PitchedCopy]) -> Option<Result<()>> {
        // With unified addressing, the host's addresses are valid for the device too.
        let host: Vec<u64> = runs.iter().map(|run| run.host as u64).collect();
        let device: Vec<u64> = runs.iter().map(|run| run.device).collect();
        let mut bytes: Vec<usize> = runs.iter().map(|run| run.row_bytes).collect();
        let (mut to, mut from) = match self.direction {
            Direction::ToHost => (host, device),
            Direction::ToDevice => (device, host),
        };
        let nowhere = Location { kind: 0, id: 0 };
        let mut attributes = CopyAttributes {
            source_access_order: raw::SOURCE_ACCESS_ORDER_STREAM,
            src_location_hint: nowhere,
            dst_location_hint: nowhere,
            flags: 0,
        };
        let mut attribute_at = 0;
        let stream = self.stream.handle();
        let (to, from) = (to.as_mut_ptr(), from.as_mut_ptr());
        let (count, bytes) = (bytes.len(), bytes.as_mut_ptr());
        let (attributes, at) = (&raw mut attributes, &raw mut attribute_at);
        // SAFETY: the arrays have `count` numbers, and one attribute applies to all; the addresses
        // in them are covered by the caller's promise.
        let done = unsafe {
            self.entered
                .copy_batch(to, from, bytes, count, attributes, at, 1, stream)
        };
        done.or_else(|| {
            let mut failed = 0;
            // SAFETY: as above; it writes one number.
            unsafe {
                self.entered.copy_batch_12(
                    to,
                    from,
                    bytes,
                    count,
                    attributes,
                    at,
                    1,
                    &raw mut failed,
                    stream,
                )
            }
        })
    }

    /// # Safety
    /// As [`Stream::copy`].
    unsafe fn rows(&self, piece: &PitchedCopy) -> Result<()> {
        let pitch_max = self.stream.device().pitch_max();
        if piece.host_pitch.max(piece.device_pitch) > pitch_max {
            let rows: Vec<PitchedCopy> = (0..piece.rows).map(|row| piece.row(row)).collect();
            // SAFETY: the caller's promise is passed on.
            return unsafe { self.runs(&rows.iter().collect::<Vec<_>>()) };
        }
        let is_out = self.direction == Direction::ToHost;
        let host = ptr::with_exposed_provenance_mut(piece.host);
        let sides = match is_out {
            true => (raw::MEMORY_DEVICE, raw::MEMORY_HOST),
            false => (raw::MEMORY_HOST, raw::MEMORY_DEVICE),
        };
        let pitches = match is_out {
            true => (piece.device_pitch, piece.host_pitch),
            false => (piece.host_pitch, piece.device_pitch),
        };
        let copy = Copy2D {
            src_x_bytes: 0,
            src_y: 0,
            src_type: sides.0,
            src_host: host,
            src_device: piece.device,
            src_array: ptr::null_mut(),
            src_pitch: pitches.0,
            dst_x_bytes: 0,
            dst_y: 0,
            dst_type: sides.1,
            dst_host: host,
            dst_device: piece.device,
            dst_array: ptr::null_mut(),
            dst_pitch: pitches.1,
            width_bytes: piece.row_bytes,
            height: piece.rows,
        };
        // SAFETY: the description is read before this returns; its addresses are covered by the
        // caller's promise.
        unsafe { self.entered.copy_2d(&raw const copy, self.stream.handle()) }
    }
}

const _: () = assert!(size_of::<Copy2D>() == 128, "as `cuda.h` has it");
