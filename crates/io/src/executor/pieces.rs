//! Cuts requests into single operations of an engine.
//!
//! Bytes that direct I/O can reach move directly from and to the caller's memory. The others go
//! through staging: reads whose address or offset is unaligned, and writes of whole pages from an
//! unaligned address. A write of part of a page goes through the page cache, where the kernel
//! preserves the rest of the page for other writers. Direct writes cover whole pages only, so two
//! writes without a common byte never meet in a page with one in the cache and one past it.

use std::sync::Arc;

use super::request::{Kind, Landing, Request, Source, Target, Visit, Visitor};
use crate::buffer::{HostRegion, IoBuf};
use crate::file::{Alignment, File};

/// Unaligned reads up to this size are one operation, though part of them could be direct.
const READ_WHOLE_BYTES_MAX: u64 = 64 << 10;

/// The unit that no two writes may share: the page of the page cache, which no alignment exceeds.
pub fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// The part of a request that has not begun.
pub(super) struct Rest {
    target: Target,
    offset: u64,
    left: Left,
}

enum Left {
    Read(Landing),
    Write(Source, u64),
    Sync(Arc<File>),
    Nothing,
}

/// One operation, and its memory.
pub(super) struct RequestPart {
    pub(super) file: Arc<File>,
    /// Offset of the caller's bytes.
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) way: Way,
}

pub(super) enum Way {
    /// Directly into the caller's memory, and the visitor to call afterwards, if any.
    Read(IoBuf, Option<Box<dyn Visitor>>),
    /// Into staging, which holds whole units from `offset - before` on, then copied to the caller's
    /// memory.
    ReadStaged {
        landing: Landing,
        before: u64,
    },
    /// Directly from the caller's memory.
    Write(IoBuf),
    /// From a copy in staging.
    WriteStaged(Copied),
    Sync,
}

impl RequestPart {
    /// The operation as a verb.
    pub(super) fn operation(&self) -> &'static str {
        match self.way {
            Way::Read(..) | Way::ReadStaged { .. } => "read",
            Way::Write(_) | Way::WriteStaged(_) => "write",
            Way::Sync => "fdatasync",
        }
    }

    /// Bytes of staging that it needs, in whole units of the file.
    pub(super) fn staged_bytes(&self) -> usize {
        let unit = self.file.alignment().offset;
        match self.way {
            Way::ReadStaged { before, .. } => {
                (before + self.bytes).next_multiple_of(unit as u64) as usize
            }
            Way::WriteStaged(_) => self.bytes as usize,
            Way::Read(..) | Way::Write(_) | Way::Sync => 0,
        }
    }
}

/// Bytes that are copied to staging before they are written.
pub(super) enum Copied {
    Window(IoBuf),
    Region(Arc<HostRegion>, u64),
}

impl Copied {
    pub(super) fn copy_to(&self, to: &mut [u8]) {
        match self {
            Copied::Window(buf) => to.copy_from_slice(buf.as_slice()),
            Copied::Region(region, start) => region.copy_to(*start, to),
        }
    }
}

impl Rest {
    pub(super) fn of(request: Request) -> Rest {
        let Request {
            target,
            offset,
            kind,
        } = request;
        let left = match kind {
            Kind::Read(landing) if landing.is_empty() => Left::Nothing,
            Kind::Read(landing) => Left::Read(landing),
            Kind::Write(source) if source.is_empty() => Left::Nothing,
            Kind::Write(source) => Left::Write(source, 0),
        };
        Rest {
            target,
            offset,
            left,
        }
    }

    pub(super) fn sync(file: Arc<File>) -> Rest {
        let target = Target {
            file: Arc::clone(&file),
            edges: None,
        };
        Rest {
            target,
            offset: 0,
            left: Left::Sync(file),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        matches!(self.left, Left::Nothing)
    }

    /// The most bytes that the next piece has, for the schedule's accounting.
    pub(super) fn next_bytes(&self, block_bytes: u64) -> u64 {
        let left = match &self.left {
            Left::Read(landing) => landing.len(),
            Left::Write(source, done) => source.len() - done,
            Left::Sync(_) | Left::Nothing => 0,
        };
        left.min(block_bytes)
    }

    /// Takes the next piece.
    ///
    /// # Panics
    /// If nothing is left.
    pub(super) fn take(&mut self, block_bytes: u64) -> RequestPart {
        let block_left = block_bytes - self.offset % block_bytes;
        match std::mem::replace(&mut self.left, Left::Nothing) {
            Left::Read(landing) => self.take_read(landing, block_left),
            Left::Write(source, done) => self.take_write(source, done, block_left),
            Left::Sync(file) => RequestPart {
                file,
                offset: 0,
                bytes: 0,
                way: Way::Sync,
            },
            Left::Nothing => unreachable!("there is something left to do"),
        }
    }

    fn take_read(&mut self, mut landing: Landing, block_left: u64) -> RequestPart {
        let len = landing.len();
        let file = Arc::clone(&self.target.file);
        let direct = direct_read(&landing, self.offset, file.alignment());
        let bytes = match landing.is_whole() {
            true => len,
            false => direct.bytes(len).min(block_left),
        };
        if bytes < len {
            self.left = Left::Read(landing.split_off(bytes));
        }
        let offset = self.offset;
        self.offset += bytes;
        let way = match (direct, landing) {
            (DirectRun::For(_), Landing::Window(buf)) => Way::Read(buf, None),
            (
                DirectRun::For(direct),
                Landing::Visited(Visit {
                    memory: Some(buf),
                    visitor,
                    ..
                }),
            ) if direct == len => Way::Read(buf, Some(visitor)),
            (_, landing) => {
                let before = offset % file.alignment().offset as u64;
                Way::ReadStaged { landing, before }
            }
        };
        RequestPart {
            file,
            offset,
            bytes,
            way,
        }
    }

    fn take_write(&mut self, source: Source, done: u64, block_left: u64) -> RequestPart {
        let len = source.len() - done;
        let file = Arc::clone(&self.target.file);
        let alignment = file.alignment();
        let offset = self.offset;
        let page = page_bytes();
        let (file, bytes) = match &self.target.edges {
            Some(edges) if alignment.offset > 1 => match offset % page {
                0 if len >= page => (file, (len - len % page).min(block_left)),
                before => (Arc::clone(edges), len.min(page - before)),
            },
            // Without a second, buffered file, the kernel decides about unaligned writes.
            _ => (file, len.min(block_left)),
        };
        self.offset += bytes;
        let (copied, rest) = match source {
            Source::Window(mut buf) => {
                let rest = buf.split_off(bytes as usize);
                (Copied::Window(buf), Source::Window(rest))
            }
            Source::Gathered(region) => (
                Copied::Region(Arc::clone(&region), done),
                Source::Gathered(region),
            ),
        };
        let done = match &rest {
            Source::Window(_) => 0,
            Source::Gathered(_) => done + bytes,
        };
        if rest.len() > done {
            self.left = Left::Write(rest, done);
        }
        let memory = file.alignment().memory;
        let way = match copied {
            Copied::Window(buf) if buf.address() % memory == 0 => Way::Write(buf),
            copied => Way::WriteStaged(copied),
        };
        RequestPart {
            file,
            offset,
            bytes,
            way,
        }
    }
}

/// How the next bytes of a read move.
enum DirectRun {
    /// This many, directly.
    For(u64),
    /// This many through staging, followed by direct ones.
    After(u64),
    /// All through staging.
    Never,
}

impl DirectRun {
    fn bytes(&self, len: u64) -> u64 {
        match *self {
            DirectRun::For(bytes) | DirectRun::After(bytes) => bytes,
            DirectRun::Never => len,
        }
    }
}

fn direct_read(landing: &Landing, offset: u64, alignment: Alignment) -> DirectRun {
    let (Landing::Window(buf)
    | Landing::Visited(Visit {
        memory: Some(buf), ..
    })) = landing
    else {
        return DirectRun::Never;
    };
    let len = buf.len() as u64;
    let (unit, memory) = (alignment.offset as u64, alignment.memory as u64);
    let head = offset.next_multiple_of(unit) - offset;
    if !(buf.address() as u64 + head).is_multiple_of(memory) {
        return DirectRun::Never;
    }
    let is_ragged = head != 0 || !len.is_multiple_of(unit);
    if is_ragged && len <= READ_WHOLE_BYTES_MAX {
        return DirectRun::Never;
    }
    match head {
        0 => DirectRun::For(len - len % unit),
        head => DirectRun::After(head),
    }
}
