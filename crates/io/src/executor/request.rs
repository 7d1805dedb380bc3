//! Requests to an executor: bytes of a file, from or to memory of any layout.

use std::fmt;
use std::sync::Arc;

use crate::buffer::{HostRegion, IoBuf, Scatter};
use crate::file::File;

/// A file that requests name.
#[derive(Clone, Debug)]
pub struct Target {
    /// The file as opened; whole pages use this one.
    pub file: Arc<File>,
    /// The same file through the page cache, for unaligned edges of writes; `None` where the file
    /// is buffered itself, or is only read.
    pub edges: Option<Arc<File>>,
}

/// Memory to read into.
#[derive(Debug)]
pub enum Landing {
    /// Contiguous memory.
    Window(IoBuf),
    /// Items at strides; the run in the file is the content in row-major order.
    Scattered(Scatter),
    /// Passed to a visitor.
    Visited(Visit),
}

/// Handles the bytes of a request once they have arrived, on a thread of the executor.
///
/// It is dropped without a call where the read fails. It must not wait.
pub trait Visitor: Send {
    /// Receives all bytes of the request, in order: in the visit's own memory, if it has some,
    /// which is returned; else in memory that is reused after the call.
    fn arrived(self: Box<Self>, bytes: Arrived<'_>);
}

/// A computation of a caller, in parts, which idle threads of the executor may help with.
pub trait ParallelWork: Send + Sync {
    /// Does one part, of some dozen microseconds: completed requests wait meanwhile. It must not
    /// block.
    ///
    /// # Returns
    /// Whether there may be more parts.
    fn run_part(&self) -> bool;
}

/// The bytes of a visited request.
pub enum Arrived<'a> {
    /// In the visit's own memory.
    Own(IoBuf),
    /// In memory of the executor.
    Lent(&'a [u8]),
}

impl Arrived<'_> {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Arrived::Own(buf) => buf.as_slice(),
            Arrived::Lent(bytes) => bytes,
        }
    }
}

/// A request of at most a block, done as one operation, whose bytes a [`Visitor`] receives.
pub struct Visit {
    /// Bytes to read.
    pub bytes: u64,
    /// The caller's memory for the bytes, if it has some: direct I/O writes to it without a copy
    /// where it can reach it.
    pub memory: Option<IoBuf>,
    /// Receives the bytes.
    pub visitor: Box<dyn Visitor>,
}

impl fmt::Debug for Visit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Visit")
            .field("bytes", &self.bytes)
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

/// Memory to write from, which nobody changes meanwhile.
#[derive(Debug)]
pub enum Source {
    /// Contiguous memory.
    Window(IoBuf),
    /// The content of an array, in row-major order.
    Gathered(Arc<HostRegion>),
}

/// The direction of a request, with its memory.
#[derive(Debug)]
pub enum Kind {
    /// Reads as many bytes as the memory has; a file that ends earlier is an error.
    Read(Landing),
    /// Writes all bytes of the memory.
    Write(Source),
}

/// One request: some bytes of a file.
#[derive(Debug)]
pub struct Request {
    /// The file.
    pub target: Target,
    /// Offset of the bytes in the file.
    pub offset: u64,
    /// The direction, and the memory.
    pub kind: Kind,
}

impl Landing {
    /// Bytes to read.
    pub fn len(&self) -> u64 {
        match self {
            Landing::Window(buf) => buf.len() as u64,
            Landing::Scattered(scatter) => scatter.range().end - scatter.range().start,
            Landing::Visited(visit) => visit.bytes,
        }
    }

    /// Whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it must be one operation, whatever its length.
    pub(super) fn is_whole(&self) -> bool {
        matches!(self, Landing::Visited(_))
    }

    /// Cuts it in two: `self` keeps the first `bytes`, the result takes the rest.
    pub(super) fn split_off(&mut self, bytes: u64) -> Landing {
        match self {
            Landing::Window(buf) => Landing::Window(buf.split_off(bytes as usize)),
            Landing::Scattered(scatter) => {
                let at = scatter.range().start + bytes;
                Landing::Scattered(scatter.split_off(at))
            }
            Landing::Visited(_) => unreachable!("what is visited is one operation"),
        }
    }

    /// Copies `bytes` into it.
    pub(super) fn fill(self, bytes: &[u8]) {
        match self {
            Landing::Window(mut buf) => buf.as_mut_slice().copy_from_slice(bytes),
            Landing::Scattered(mut scatter) => {
                let at = scatter.range().start;
                scatter.fill(at, bytes);
            }
            Landing::Visited(Visit {
                memory: None,
                visitor,
                ..
            }) => {
                visitor.arrived(Arrived::Lent(bytes));
            }
            Landing::Visited(Visit {
                memory: Some(mut buf),
                visitor,
                ..
            }) => {
                buf.as_mut_slice().copy_from_slice(bytes);
                visitor.arrived(Arrived::Own(buf));
            }
        }
    }
}

impl Source {
    /// Bytes to write.
    pub fn len(&self) -> u64 {
        match self {
            Source::Window(buf) => buf.len() as u64,
            Source::Gathered(region) => region.len(),
        }
    }

    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
