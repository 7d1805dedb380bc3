//! Filling the caller's memory with boxes of tensors, independently of the boxes in which they are
//! stored.
//!
//! Runs that are contiguous both in a file and in memory are read in place. Other runs, and bytes
//! of a file that several boxes need, are read into staging and scattered from there after
//! verification. So each byte is read once, and the additional memory is that of any load.

use std::fmt;
use std::ops::Range;

use penstock_io::buffer::{ArrayMut, Bounds, OverlapUndecided};

use crate::error::{Error, Result};
use crate::load::checkpoint::Checkpoint;
use crate::load::checkpoint::fetch::Fetch;
use crate::options::Options;
use crate::pipeline::target::{Places, Sink, Target};
use crate::plan::read::{Goal, Request};
use crate::plan::reshard::{Fragment, GlobalTensor, WantedBox, text};
use crate::progress::Progress;
use crate::report::LoadReport;

/// The tensor that a box is part of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whole {
    /// The global tensor with this name.
    Tensor(String),
    /// The entry with this index, even if it is a box itself.
    Entry(usize),
}

/// A requested box of a tensor.
#[derive(Debug)]
pub struct Fill {
    /// The tensor that it is part of.
    pub of: Whole,
    /// First index along each dimension.
    pub start: Vec<u64>,
    /// The memory to fill, of the box's shape.
    pub into: ArrayMut,
}

/// A run of a file with its memory.
struct PlacedFragment {
    file: usize,
    entry: usize,
    range: Range<u64>,
    source_strides: Vec<usize>,
    into: ArrayMut,
}

impl PlacedFragment {
    fn into_sink(self) -> Sink {
        let places = match self.into {
            ArrayMut::Host(array) => Places::Host(array.into_scatter(&self.source_strides)),
            ArrayMut::Device(array) => Places::Device(array.into_scatter(&self.source_strides)),
        };
        Sink {
            start: self.range.start,
            places,
        }
    }

    /// Reads in place if the run is contiguous on both sides and storage can write to the memory;
    /// scatters otherwise.
    fn into_target(self) -> (Goal, Target) {
        let bytes = self.range.end - self.range.start;
        if self.into.len() as u64 != bytes {
            return scattered(vec![self]);
        }
        let into = match self.into {
            ArrayMut::Host(array) => array.into_region(),
            ArrayMut::Device(_) => return scattered(vec![self]),
        };
        match into {
            Ok(memory) => (Goal::Plain(memory.address()), Target::Plain(memory)),
            Err(array) => {
                let into = array.into();
                scattered(vec![PlacedFragment { into, ..self }])
            }
        }
    }
}

fn scattered(placed: Vec<PlacedFragment>) -> (Goal, Target) {
    let sinks = placed.into_iter().map(PlacedFragment::into_sink).collect();
    (Goal::Scattered, Target::Scattered(sinks))
}

impl Checkpoint {
    /// Reads boxes of tensors into the caller's memory. The memories must not overlap; boxes may,
    /// and each byte of a file is read once for all of them. Copies made by devices are complete
    /// when this returns.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a box outside of its tensor, [`Error::Malformed`] for one that the
    /// stored boxes do not cover, both before anything is read. Otherwise as [`Checkpoint::load`]:
    /// the memory may have been filled in part.
    pub fn fill(
        &self,
        fills: Vec<Fill>,
        options: &Options,
        progress: &Progress,
    ) -> Result<LoadReport> {
        let tensors = fills.len();
        let bytes = fills.iter().map(|fill| fill.into.len() as u64).sum();
        let mut placed = Vec::new();
        for fill in fills {
            self.cut(fill, &mut placed)?;
        }
        let mut entries: Vec<usize> = placed.iter().map(|one| one.entry).collect();
        entries.sort_unstable();
        entries.dedup();
        let (requests, targets) = share(placed);
        let fetch = Fetch {
            requests,
            targets,
            entries,
            bytes,
            tensors,
            is_all: false,
        };
        Ok(self.fetch(fetch, options, progress)?.report)
    }

    fn with_tensor<T>(
        &self,
        of: &Whole,
        with: impl FnOnce(&GlobalTensor) -> Result<T>,
    ) -> Result<T> {
        let missing = || Error::Mismatch {
            key: of.to_string(),
            detail: "there is no such tensor".to_owned(),
        };
        match of {
            Whole::Tensor(name) => with(self.global_tensors().get(name).ok_or_else(missing)?),
            Whole::Entry(index) => {
                let entry = self.part().tensors.get(*index).ok_or_else(missing)?;
                with(&GlobalTensor::alone(*index, entry))
            }
        }
    }

    /// Finds the runs of files that make up a box, and divides its memory accordingly.
    fn cut(&self, fill: Fill, placed: &mut Vec<PlacedFragment>) -> Result<()> {
        let Fill { of, start, into } = fill;
        let shape = into.shape().iter().map(|&size| size as u64).collect();
        let wanted = Bounds { start, shape };
        let entries = &self.part().tensors;
        let fragments: Vec<Fragment> = self.with_tensor(&of, |tensor| {
            let mismatch = |detail: String| Error::Mismatch {
                key: self.name_of(&of),
                detail,
            };
            if !wanted.fits(&tensor.shape) {
                let (shape, start) = (&wanted.shape, &wanted.start);
                let stored = &tensor.shape;
                let detail = format!("no box of {shape:?} at {start:?} is in one of {stored:?}");
                return Err(mismatch(detail));
            }
            if tensor.item_bytes != into.item_bytes() {
                let (stored, given) = (tensor.item_bytes, into.item_bytes());
                let detail =
                    format!("items of {stored} bytes are stored, the target's have {given}");
                return Err(mismatch(detail));
            }
            if into.is_empty() {
                return Ok(Vec::new());
            }
            let wanted = WantedBox {
                bounds: &wanted,
                item_bytes: tensor.item_bytes,
                strides: into.strides_bytes(),
            };
            tensor.cut(&wanted, entries).map_err(|hole| {
                let asked = text(wanted.bounds);
                self.incomplete(
                    &of,
                    format!("no rank stored {hole} of it; {asked} was asked for"),
                )
            })
        })?;
        let boxes: Vec<Bounds> = fragments
            .iter()
            .map(|fragment| fragment.to.clone())
            .collect();
        let undecided = |error: OverlapUndecided| self.incomplete(&of, error.to_string());
        let arrays = into.split(&boxes).map_err(undecided)?;
        placed.extend(
            fragments
                .into_iter()
                .zip(arrays)
                .map(|(fragment, into)| PlacedFragment {
                    file: entries[fragment.entry].file,
                    entry: fragment.entry,
                    range: fragment.range,
                    source_strides: fragment.source_strides,
                    into,
                }),
        );
        Ok(())
    }

    fn name_of(&self, of: &Whole) -> String {
        match of {
            Whole::Tensor(name) => name.clone(),
            Whole::Entry(index) => self.part().tensors[*index].name.clone(),
        }
    }

    /// Returns an error about a tensor that its stored boxes do not cover.
    fn incomplete(&self, of: &Whole, detail: String) -> Error {
        Error::Malformed {
            path: self.path().to_owned(),
            file: None,
            tensor: Some(self.name_of(of)),
            detail,
        }
    }
}

impl fmt::Display for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Whole::Tensor(name) => f.write_str(name),
            Whole::Entry(index) => write!(f, "tensor {index}"),
        }
    }
}

/// Merges all fragments that share bytes of a file into one request.
fn share(mut placed: Vec<PlacedFragment>) -> (Vec<Request>, Vec<Target>) {
    placed.sort_unstable_by_key(|one| (one.file, one.range.start));
    let mut requests: Vec<Request> = Vec::with_capacity(placed.len());
    let mut targets = Vec::with_capacity(placed.len());
    let mut placed = placed.into_iter().peekable();
    while let Some(first) = placed.next() {
        let (file, mut range) = (first.file, first.range.clone());
        let mut shared = vec![first];
        while let Some(one) = placed.next_if(|p| p.file == file && p.range.start < range.end) {
            range.end = range.end.max(one.range.end);
            shared.push(one);
        }
        let (goal, target) = match shared.len() {
            1 => shared.remove(0).into_target(),
            _ => scattered(shared),
        };
        requests.push(Request { file, range, goal });
        targets.push(target);
    }
    (requests, targets)
}
