//! What callers ask of an executor: bytes of a file, from or to memory that lies anyhow.

use std::fmt;
use std::sync::Arc;

use crate::buffer::{HostRegion, IoBuf, Scatter};
use crate::file::File;

/// A file that requests name.
#[derive(Clone, Debug)]
pub struct Target {
    /// As it was opened; whole pages go through this one.
    pub file: Arc<File>,
    /// The same file through the page cache, for the ragged edges of writes; `None` where the file
    /// is buffered itself, or is only read.
    pub edges: Option<Arc<File>>,
}

/// Memory to read into.
#[derive(Debug)]
pub enum Landing {
    /// In one piece.
    Window(IoBuf),
    /// Items at strides; the run is the content in row-major order.
    Scattered(Scatter),
    /// Wherever a visitor takes the bytes.
    Visited(Visit),
}

/// What is done with the bytes of a request when they are there, on a thread of the executor.
///
/// It is dropped unheard where they do not come. It must not wait.
pub trait Visitor: Send {
    /// All bytes of the request, in its order: in the memory of the visit if it has some, which is
    /// given back, else in memory that is used again.
    fn arrived(self: Box<Self>, bytes: Arrived<'_>);
}

/// Work of a caller on the processor, in parts, that threads of the executor may help with while
/// they have nothing to begin.
pub trait Assist: Send + Sync {
    /// Does one part, of some dozen microseconds: requests that have ended meanwhile wait for it. It
    /// must not wait.
    ///
    /// # Returns
    /// Whether there may be more.
    fn assist(&self) -> bool;
}

/// Where bytes of a visited request are.
pub enum Arrived<'a> {
    /// In the memory of the visit.
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

/// A request of at most a block, which is one operation, and whose bytes a [`Visitor`] takes.
pub struct Visit {
    /// How many.
    pub bytes: u64,
    /// Where they go, if the caller has a place for them: they land there without a copy where
    /// direct I/O can reach it.
    pub memory: Option<IoBuf>,
    /// Who takes them.
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
    /// In one piece.
    Window(IoBuf),
    /// The content of an array, in row-major order.
    Gathered(Arc<HostRegion>),
}

/// What to do.
#[derive(Debug)]
pub enum Kind {
    /// Reads as many bytes as the memory has; a file that ends before is an error.
    Read(Landing),
    /// Writes all bytes of the memory.
    Write(Source),
}

/// One request: some bytes of a file.
#[derive(Debug)]
pub struct Request {
    /// The file.
    pub target: Target,
    /// Where in the file they begin, in bytes.
    pub offset: u64,
    /// Which way, and the memory.
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

    /// Whether it is one operation, whatever its length.
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

    /// Takes its bytes.
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
