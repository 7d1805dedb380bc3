//! Claims: extents that one thread copies.

use std::ops::Range;
use std::sync::Arc;

use penstock_io::buffer::{DeviceCopies, IoBuf, Region};
use penstock_io::trace;

use super::StagingQueue;
use super::state::Filled;
use crate::error::Result;
use crate::format::shard::PAGE_BYTES;
use crate::plan::write::ExtentPart;

/// Extents that one thread has claimed, in order.
pub(super) struct Claim<'a> {
    staging_queue: &'a StagingQueue,
    /// `None` only while dropping.
    sources: Option<Arc<Vec<Region>>>,
    /// Not copied yet.
    pub(super) numbers: Range<u64>,
    is_stager: bool,
}

impl StagingQueue {
    /// Claims up to `extents` extents; `None` once all are claimed or the save is over.
    pub(super) fn claim(&self, extents: u64, is_stager: bool) -> Option<Claim<'_>> {
        let mut state = self.lock();
        if state.is_over() || state.is_exhausted() {
            return None;
        }
        let start = state.next;
        state.next = start.saturating_add(extents).min(self.plan.extents());
        match is_stager {
            true => state.staging += 1,
            false => state.filling += 1,
        }
        Some(Claim {
            staging_queue: self,
            sources: state.sources.lent().cloned(),
            numbers: start..state.next,
            is_stager,
        })
    }
}

impl Claim<'_> {
    /// Copies the next extent into the buffer, or queues its device copies, and pads it to a whole
    /// page.
    pub(super) fn copy(&mut self, buf: IoBuf) -> Result<Filled> {
        let mut copied = self.copy_all(vec![buf])?;
        Ok(copied.pop().expect("one for each buffer"))
    }

    /// Copies as many extents as there are buffers.
    pub(super) fn copy_all(&mut self, bufs: Vec<IoBuf>) -> Result<Vec<Filled>> {
        let numbers = self.numbers.start..self.numbers.start + bufs.len() as u64;
        let sources = self.sources.clone().expect("the claim is not dropped");
        let place = |(number, buf)| self.place(&sources, number, buf);
        let placed = numbers.clone().zip(bufs).map(place).collect();
        let device_to_host = DeviceCopies::begin_all(placed)?;
        self.numbers.start = numbers.end;
        let filled = |(number, buf)| Filled { number, buf };
        Ok(numbers.zip(device_to_host).map(filled).collect())
    }

    /// Copies the host's part of an extent, and lists the device's part.
    fn place<'a>(
        &self,
        sources: &'a [Region],
        number: u64,
        mut buf: IoBuf,
    ) -> (DeviceCopies<'a>, IoBuf) {
        let _span = trace::span("copy");
        let plan = &self.staging_queue.plan;
        let extent = plan.extent(number);
        let bytes = extent.bytes();
        buf.set_len(bytes.next_multiple_of(PAGE_BYTES as usize));
        let (mut rest, padding) = buf.as_mut_slice().split_at_mut(bytes);
        let mut copies = DeviceCopies::default();
        plan.pieces(&extent, |piece| match piece {
            ExtentPart::Header(header) => take(&mut rest, header.len()).copy_from_slice(header),
            ExtentPart::Tensor {
                tensor,
                start,
                bytes: piece_bytes,
            } => {
                let at = bytes - rest.len();
                let place = take(&mut rest, piece_bytes as usize);
                match &sources[tensor] {
                    Region::Snapshot(source) => {
                        copies.add_snapshot(source, start, at..at + place.len());
                    }
                    Region::Device(source) => copies.add(source, start, at..at + place.len()),
                    Region::Host(source) => {
                        // A worker digests and writes the extent at once; a staged one waits, so it
                        // bypasses the caches.
                        match self.is_stager {
                            true => source.stream_to(start, place),
                            false => source.copy_to(start, place),
                        }
                        if let Some(edges) = &self.staging_queue.edges {
                            edges.put_over(tensor, source, start, place);
                        }
                    }
                }
            }
        });
        padding.fill(0);
        (copies, buf)
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Dropped before the count changes: dropping the last reference waits for devices.
        self.sources = None;
        let mut state = self.staging_queue.lock();
        match self.is_stager {
            true => state.staging -= 1,
            false => state.filling -= 1,
        }
        // No other thread copies the extents that this claim gives up.
        if !self.numbers.is_empty() {
            state.end();
        }
        self.staging_queue.release_sources(state);
    }
}

/// Splits the first `bytes` off `rest`.
fn take<'a>(rest: &mut &'a mut [u8], bytes: usize) -> &'a mut [u8] {
    rest.split_off_mut(..bytes)
        .expect("the pieces of an extent add up to its length")
}
