//! Reads and writes of files from and to device memory.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use penstock_cuda::Event;

use super::device_transfer::{DeviceMoved, DeviceTransfer, TransferShared};
use super::{CopyJob, Inbound, Outbound, StagingPipeline};
use crate::buffer::{
    DeviceArrayMut, DeviceCopies, DeviceFills, DeviceRegion, DeviceScatter, DeviceStreams,
    DeviceToHost, HostToDevice, IoBuf, Lease,
};
use crate::executor::{Kind, Landing, Moved, Request, Share, Source, Target, Transfer, page_bytes};
use crate::file::File;
use crate::{Error, Result};

/// A request: bytes of a file, from or to device memory.
#[derive(Debug)]
pub struct DeviceRequest {
    /// The file.
    pub target: Target,
    /// Offset of the bytes in the file.
    pub offset: u64,
    /// The direction, and the memory.
    pub kind: DeviceKind,
}

/// The direction of a request, with its memory.
#[derive(Debug)]
pub enum DeviceKind {
    /// From the file, in row-major order.
    Read(DeviceArrayMut),
    /// To the file, in row-major order.
    Write(DeviceRegion),
}

/// An event of a caller's stream, and the copy streams of its device.
pub type Moment = (Arc<DeviceStreams>, Event);

/// Requests that form one transfer, before it begins: those of devices, and perhaps the host's.
pub struct DeviceCopyJob {
    share: Arc<Share>,
    left: VecDeque<Left>,
    piece_bytes: usize,
    /// Events of callers' streams that the copies have to wait for, as the streams may still write
    /// or use the memory; taken by the first copy.
    moments: Vec<Moment>,
    /// The host's part of the transfer, in flight.
    host_transfer: Option<Transfer>,
    syncs: Vec<Arc<File>>,
    done: DeviceMoved,
    shared: Arc<TransferShared>,
}

/// The part of a request that has not begun.
#[derive(Debug)]
struct Left {
    target: Target,
    offset: u64,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    Read(DeviceScatter),
    /// The region, and the range of its content.
    Write(Arc<DeviceRegion>, Range<u64>),
}

impl Left {
    fn bytes(&self) -> u64 {
        match &self.memory {
            Memory::Read(scatter) => scatter.range().end - scatter.range().start,
            Memory::Write(_, content) => content.end - content.start,
        }
    }

    /// Bytes to leave free in front, so that direct I/O reaches the bytes in page-aligned memory.
    fn shift(&self) -> usize {
        (self.offset % page_bytes()) as usize
    }

    /// Cuts it in two: the first `bytes` bytes, and the rest, if any.
    fn split(self, bytes: u64) -> (Left, Option<Left>) {
        let Left {
            target,
            offset,
            memory,
        } = self;
        let rest = |memory| Left {
            target: target.clone(),
            offset: offset + bytes,
            memory,
        };
        let (memory, rest) = match memory {
            Memory::Read(mut scatter) => {
                let at = scatter.range().start + bytes;
                let behind = scatter.split_off(at);
                let is_left = behind.range().start < behind.range().end;
                (
                    Memory::Read(scatter),
                    is_left.then(|| rest(Memory::Read(behind))),
                )
            }
            Memory::Write(region, Range { start, end }) => {
                let at = start + bytes;
                let behind = (at < end).then(|| Memory::Write(Arc::clone(&region), at..end));
                (Memory::Write(region, start..at), behind.map(rest))
            }
        };
        let first = Left {
            target,
            offset,
            memory,
        };
        (first, rest)
    }
}

/// Part of a piece: a request, or some of it, and the range of its bytes in the memory.
#[derive(Debug)]
pub struct Part {
    left: Left,
    at: Range<usize>,
}

impl DeviceCopyJob {
    /// Requests of one direction, in pieces of at most `piece_bytes` of pinned memory. The copies
    /// wait for `moments`, events behind the work that callers' streams had queued at the call.
    ///
    /// `host_transfer` is the host's part of the transfer, and `syncs` are files to sync once everything
    /// is written.
    pub fn new(
        share: &Arc<Share>,
        requests: Vec<DeviceRequest>,
        piece_bytes: usize,
        moments: Vec<Moment>,
        host_transfer: Option<Transfer>,
        syncs: Vec<Arc<File>>,
    ) -> DeviceCopyJob {
        let is_something = |request: &DeviceRequest| match &request.kind {
            DeviceKind::Read(array) => !array.is_empty(),
            DeviceKind::Write(region) => !region.is_empty(),
        };
        let left = |DeviceRequest {
                        target,
                        offset,
                        kind,
                    }| Left {
            target,
            offset,
            memory: match kind {
                DeviceKind::Read(array) => Memory::Read(array.into_content()),
                DeviceKind::Write(region) => {
                    let content = 0..region.len();
                    Memory::Write(Arc::new(region), content)
                }
            },
        };
        DeviceCopyJob {
            share: Arc::clone(share),
            left: requests
                .into_iter()
                .filter(is_something)
                .map(left)
                .collect(),
            piece_bytes,
            moments,
            shared: Arc::new(TransferShared::new(host_transfer.clone())),
            host_transfer,
            syncs,
            done: DeviceMoved::default(),
        }
    }

    /// Submits the transfer to a pipeline.
    ///
    /// # Errors
    /// Those of [`StagingPipeline::submit`].
    pub fn begin(self, pipeline: &StagingPipeline<DeviceCopyJob>) -> Result<DeviceTransfer> {
        let transfer = DeviceTransfer::of(&self.shared);
        pipeline.submit(self)?;
        Ok(transfer)
    }

    /// The next piece: its number of whole requests, the bytes it takes of the request after those,
    /// and its length in memory.
    fn next(&self) -> (usize, u64, usize) {
        let (mut whole, mut end) = (0, 0_usize);
        for left in &self.left {
            let start = place(end, left);
            let room = self.piece_bytes.saturating_sub(start) as u64;
            if left.bytes() <= room {
                end = start + left.bytes() as usize;
                whole += 1;
                continue;
            }
            if whole > 0 {
                break;
            }
            // Up to a page boundary of the file.
            let bytes = room - (left.offset + room) % page_bytes();
            return (0, bytes, start + bytes as usize);
        }
        (whole, 0, end)
    }
}

/// The offset of a request's bytes in the memory, of which `end` bytes are used.
fn place(end: usize, left: &Left) -> usize {
    end.next_multiple_of(page_bytes() as usize) + left.shift()
}

/// A piece on its way to the pinned memory.
pub enum Incoming {
    /// From files.
    Read(Transfer, Lease, Vec<Part>),
    /// From the device.
    Write(DeviceToHost, Vec<Part>),
}

impl Inbound for Incoming {
    fn has_arrived(&self) -> bool {
        match self {
            Incoming::Read(transfer, ..) => transfer.is_done(),
            Incoming::Write(device_to_host, _) => device_to_host.has_arrived(),
        }
    }
}

/// A piece on its way from the pinned memory.
pub enum Outgoing {
    /// To the device.
    Read(HostToDevice),
    /// To files.
    Write(Transfer),
    /// The host's part of the transfer, or a sync.
    Host(Transfer),
}

impl Outbound for Outgoing {
    fn has_left(&self) -> bool {
        match self {
            Outgoing::Read(host_to_device) => host_to_device.has_left(),
            Outgoing::Write(transfer) | Outgoing::Host(transfer) => transfer.is_done(),
        }
    }
}

impl CopyJob for DeviceCopyJob {
    type Error = Error;
    type Inbound = Incoming;
    type Outbound = Outgoing;

    fn next_bytes(&self) -> Option<usize> {
        let (whole, bytes, end) = self.next();
        (whole > 0 || bytes > 0).then_some(end)
    }

    fn begin(&mut self, mut memory: IoBuf) -> Result<Incoming> {
        if self.shared.is_cancelled() {
            return Err(Error::Cancelled);
        }
        let (whole, bytes, _) = self.next();
        let mut parts = Vec::with_capacity(whole.max(1));
        let mut end = 0;
        let mut add = |left: Left, parts: &mut Vec<Part>| {
            let start = place(end, &left);
            end = start + left.bytes() as usize;
            parts.push(Part {
                left,
                at: start..end,
            });
        };
        for left in self.left.drain(..whole) {
            add(left, &mut parts);
        }
        if bytes > 0 {
            let left = self.left.pop_front().expect("some of it is next");
            let (first, rest) = left.split(bytes);
            if let Some(rest) = rest {
                self.left.push_front(rest);
            }
            add(first, &mut parts);
        }
        if matches!(parts[0].left.memory, Memory::Write(..)) {
            for (device_streams, moment) in self.moments.drain(..) {
                device_streams.follow_at(&moment)?;
            }
            let mut copies = DeviceCopies::default();
            for Part { left, at } in &parts {
                if let Memory::Write(region, content) = &left.memory {
                    copies.add(region, content.start, at.clone());
                }
            }
            let device_to_host = copies.begin(memory)?;
            return Ok(Incoming::Write(device_to_host, parts));
        }
        let (lease, lent) = Lease::of(memory);
        memory = lent;
        let mut requests = Vec::with_capacity(parts.len());
        for Part { left, at } in parts.iter().rev() {
            drop(memory.split_off(at.end));
            requests.push(Request {
                target: left.target.clone(),
                offset: left.offset,
                kind: Kind::Read(Landing::Window(memory.split_off(at.start))),
            });
        }
        drop(memory);
        requests.reverse();
        Ok(Incoming::Read(self.share.submit(requests)?, lease, parts))
    }

    fn forward(&mut self, coming: Incoming) -> Result<Outgoing> {
        match coming {
            Incoming::Read(transfer, lease, parts) => {
                let moved = transfer.wait(None)?.expect("it has all the time");
                let memory = lease.reclaim().expect("nothing works on it any more");
                for (device_streams, moment) in self.moments.drain(..) {
                    device_streams.fill_at(&moment)?;
                }
                let mut fills = DeviceFills::default();
                for Part { left, at } in parts {
                    if let Memory::Read(scatter) = left.memory {
                        let start = scatter.range().start;
                        fills.add(scatter, start, 0, at);
                    }
                }
                fills.keep([memory]);
                let host_to_device = fills.begin()?;
                self.add(moved, host_to_device.bytes());
                Ok(Outgoing::Read(host_to_device))
            }
            Incoming::Write(device_to_host, parts) => {
                let mut memory = device_to_host.wait()?;
                let mut requests = Vec::with_capacity(parts.len());
                for Part { left, at } in parts.into_iter().rev() {
                    drop(memory.split_off(at.end));
                    self.add(Moved::default(), at.len() as u64);
                    requests.push(Request {
                        target: left.target,
                        offset: left.offset,
                        kind: Kind::Write(Source::Window(memory.split_off(at.start))),
                    });
                }
                drop(memory);
                requests.reverse();
                Ok(Outgoing::Write(self.share.submit(requests)?))
            }
        }
    }

    fn leave(&mut self, going: Outgoing) -> Result<()> {
        match going {
            Outgoing::Read(host_to_device) => host_to_device.wait(),
            Outgoing::Write(transfer) | Outgoing::Host(transfer) => {
                let moved = transfer.wait(None)?.expect("it has all the time");
                self.add(moved, 0);
                Ok(())
            }
        }
    }

    fn follow_up(&mut self) -> Result<Option<Outgoing>> {
        if let Some(host_transfer) = self.host_transfer.take() {
            return Ok(Some(Outgoing::Host(host_transfer)));
        }
        if self.shared.is_cancelled() {
            return Err(Error::Cancelled);
        }
        if self.syncs.is_empty() {
            return Ok(None);
        }
        let syncs = std::mem::take(&mut self.syncs);
        let transfer = self.share.submit_synced(Vec::new(), syncs)?;
        Ok(Some(Outgoing::Host(transfer)))
    }

    fn end(mut self, result: Result<()>) {
        let result = result.map(|()| self.done);
        if let (Err(_), Some(host_transfer)) = (&result, self.host_transfer.take()) {
            // Once a failure is reported, nothing may be in flight.
            drop(
                host_transfer
                    .cancel()
                    .and_then(|()| host_transfer.wait(None)),
            );
        }
        // The callers' memory is released before the result is reported.
        self.left.clear();
        self.shared.resolve(result);
    }
}

impl Drop for DeviceCopyJob {
    fn drop(&mut self) {
        // A pipeline may drop the request unfinished; its waiters must not wait forever.
        self.shared.resolve(Err(Error::Engine {
            operation: "the staging pipeline",
            source: std::io::Error::other("a copy job was dropped unfinished"),
        }));
    }
}

impl DeviceCopyJob {
    fn add(&mut self, moved: Moved, device_bytes: u64) {
        let DeviceMoved {
            moved: done,
            device_bytes: copied,
        } = &mut self.done;
        done.bytes += moved.bytes;
        done.staged_bytes += moved.staged_bytes;
        done.cached_bytes += moved.cached_bytes;
        *copied += device_bytes;
    }
}

impl fmt::Debug for DeviceCopyJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceCopyJob")
            .field("left", &self.left.len())
            .finish_non_exhaustive()
    }
}
