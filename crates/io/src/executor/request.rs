//! What callers ask of an executor: bytes of a file, from or to memory that lies anyhow.

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
        }
    }

    /// Whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Cuts it in two: `self` keeps the first `bytes`, the result takes the rest.
    pub(super) fn split_off(&mut self, bytes: u64) -> Landing {
        match self {
            Landing::Window(buf) => Landing::Window(buf.split_off(bytes as usize)),
            Landing::Scattered(scatter) => {
                let at = scatter.range().start + bytes;
                Landing::Scattered(scatter.split_off(at))
            }
        }
    }

    /// Takes its bytes.
    pub(super) fn fill(&mut self, bytes: &[u8]) {
        match self {
            Landing::Window(buf) => buf.as_mut_slice().copy_from_slice(bytes),
            Landing::Scattered(scatter) => {
                let at = scatter.range().start;
                scatter.fill(at, bytes);
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
