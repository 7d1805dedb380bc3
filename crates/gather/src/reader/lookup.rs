//! Finds the rows of a batch in the cache, and claims slots for the others.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use penstock_io::buffer::{IoBuf, Lent};
use penstock_io::executor::{ParallelWork, Share};

use super::copying::{Copying, Pieces, ResultPiece, copy_rows};
use super::shared::Counts;
use crate::cache::{Cache, CachedRow, Claimed, Inner};
use crate::error::Result;
use crate::index::{FETCHED, Slot};

/// Rows looked up under one lock, and bytes of them copied while their slots cannot be reused.
const LOOKED_UP: usize = 16 << 10;
const COPIED_BYTES: usize = 16 << 20;

/// Bytes that one thread copies at a time, in some dozen microseconds.
const PIECE_BYTES: usize = 128 << 10;
/// Number of pieces from which other threads help: waking one takes as long as copying a piece.
const SHARED_OUT: usize = 8;
const HELPERS_MAX: usize = 7;

/// A row that is not in the cache.
#[derive(Debug)]
pub(crate) struct Miss {
    /// Its index in the batch.
    pub(crate) position: usize,
    pub(crate) how: How,
}

/// The source of a row that is not in the cache.
#[derive(Debug)]
pub(crate) enum How {
    /// The caller reads it, into a slot if it has claimed one.
    Read(Option<Claimed>),
    /// Another batch reads it.
    Comes,
}

/// A batch to look up in a cache.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) cache: &'a Cache,
    pub(crate) counts: &'a Counts,
    /// The executor whose threads may help to copy.
    pub(crate) share: &'a Share,
    /// Number of rows in the batch.
    pub(crate) rows: usize,
    /// Bytes of a row in the result.
    pub(crate) width: usize,
}

impl Asked<'_> {
    /// Copies the cached rows, and passes the others to `take`, step by step in the order of
    /// positions, each step with its part of the result.
    pub(crate) fn look_up(
        &self,
        key: impl Fn(usize) -> u64,
        out: IoBuf,
        mut take: impl FnMut(&[usize], Pieces) -> Result<()>,
    ) -> Result<()> {
        if self.rows <= LOOKED_UP && self.rows * self.width < PIECE_BYTES * SHARED_OUT {
            let (rest, out) = self.copy_alone(&key, out);
            return match rest.is_empty() {
                true => Ok(()),
                false => take(&rest, Pieces::whole(out, self.width)),
            };
        }
        let piece = (PIECE_BYTES / self.width).clamp(1, LOOKED_UP);
        let step = piece * (COPIED_BYTES / (piece * self.width)).clamp(1, LOOKED_UP / piece);
        let mut out = Some(out);
        for first in (0..self.rows).step_by(step) {
            let last = self.rows.min(first + step);
            let mut here = out.take().expect("there is more");
            if last < self.rows {
                out = Some(here.split_off((last - first) * self.width));
            }
            let mut pieces = Pieces::of(here, first, self.width, piece);
            let rest = self.copy_what_is_there(first..last, piece, &key, &mut pieces);
            if !rest.is_empty() {
                take(&rest, pieces)?;
            }
        }
        Ok(())
    }

    /// Copies the cached rows of a batch too small for other threads to help, without cutting its
    /// result into pieces. Returns the positions of the others, and the result.
    fn copy_alone(&self, key: impl Fn(usize) -> u64, mut out: IoBuf) -> (Vec<usize>, IoBuf) {
        let mut rest = Vec::new();
        let mut there = Vec::with_capacity(self.rows);
        let mut inner = self.cache.lock();
        // Before the lookup: a slot found after it keeps its row.
        let reading = self.cache.slots().read();
        find(&mut inner, 0..self.rows, key, &mut there, &mut rest);
        drop(inner);
        let found = rest.len();
        copy_rows(&reading, &there, 0, self.width, &mut out, &mut rest);
        drop(reading);
        let hits = self.rows - rest.len();
        self.counts.hits.fetch_add(hits as u64, Relaxed);
        if rest.len() > found {
            rest.sort_unstable();
        }
        (rest, out)
    }

    fn copy_what_is_there(
        &self,
        positions: Range<usize>,
        piece: usize,
        key: impl Fn(usize) -> u64,
        pieces: &mut Pieces,
    ) -> Vec<usize> {
        let mut rest = Vec::new();
        let copying = Copying::new(self.cache.slots(), self.width, self.rows * self.width);
        let mut inner = self.cache.lock();
        // Before the lookup: a slot found after it keeps its row.
        let reading = self.cache.slots().read();
        let helpers = helpers(positions.len().div_ceil(piece));
        for (count, first) in positions.clone().step_by(piece).enumerate() {
            let last = positions.end.min(first + piece);
            let mut there = Vec::with_capacity(last - first);
            find(&mut inner, first..last, &key, &mut there, &mut rest);
            let memory = pieces.take();
            copying.push(ResultPiece {
                first,
                memory,
                there,
            });
            if count == 0 && helpers > 0 {
                let run_part: Arc<dyn ParallelWork> = Arc::clone(&copying) as _;
                self.share.offer(&run_part, helpers);
            }
        }
        drop(inner);
        let found = rest.len();
        let mut hits = 0;
        for copied in copying.finish(&reading) {
            hits += copied.rows as u64;
            rest.extend(copied.coming);
            pieces.put(copied.memory);
        }
        drop(reading);
        self.counts.hits.fetch_add(hits, Relaxed);
        if rest.len() > found {
            rest.sort_unstable();
        }
        rest
    }

    /// Claims slots for missing rows, looking each up again, because another batch may have
    /// claimed it since.
    ///
    /// `batch` is the table and number of the batch that reads them.
    pub(crate) fn claim(
        &self,
        positions: &[usize],
        key: impl Fn(usize) -> u64,
        batch: (u64, u64),
    ) -> Vec<Miss> {
        let mut inner = self.cache.lock();
        let how = |&position: &usize| {
            let how = match self.cache.find(&mut inner, key(position), batch) {
                CachedRow::Here | CachedRow::Comes { is_own: false } => How::Comes,
                CachedRow::Comes { is_own: true } => How::Read(None),
                CachedRow::Missing(claimed) => How::Read(claimed),
            };
            Miss { position, how }
        };
        positions.iter().map(how).collect()
    }
}

/// Looks up the rows of some positions: adds the slots of cached ones to `there`, and the positions
/// of the others to `rest`.
fn find(
    inner: &mut Inner,
    positions: Range<usize>,
    key: impl Fn(usize) -> u64,
    there: &mut Vec<(usize, Slot)>,
    rest: &mut Vec<usize>,
) {
    let mut keys = [0; FETCHED];
    for first in positions.clone().step_by(FETCHED) {
        let last = positions.end.min(first + FETCHED);
        let keys = &mut keys[..last - first];
        for (known, position) in keys.iter_mut().zip(first..last) {
            *known = key(position);
        }
        for (position, slot) in (first..last).zip(inner.index.find_each(keys)) {
            match slot {
                Some(slot) => there.push((position, slot)),
                None => rest.push(position),
            }
        }
    }
}

/// Lends the cached ones of these rows to a device; returns the positions of the others too.
pub(crate) fn lend(
    cache: &Cache,
    counts: &Counts,
    rows: usize,
    key: impl Fn(usize) -> u64,
) -> (Lent, Vec<usize>) {
    let (mut lent, mut rest) = (Lent::of(cache.slots()), Vec::new());
    let mut keys = [0; FETCHED];
    for step in (0..rows).step_by(LOOKED_UP) {
        let end = rows.min(step + LOOKED_UP);
        let mut inner = cache.lock();
        let reading = cache.slots().read();
        for first in (step..end).step_by(FETCHED) {
            let last = end.min(first + FETCHED);
            let keys = &mut keys[..last - first];
            for (known, position) in keys.iter_mut().zip(first..last) {
                *known = key(position);
            }
            let slots = inner.index.find_each(keys);
            lent.fetch(slots[..keys.len()].iter().flatten().copied());
            for (position, slot) in (first..last).zip(slots) {
                if !slot.is_some_and(|slot| lent.take(&reading, position, slot)) {
                    rest.push(position);
                }
            }
        }
    }
    counts.hits.fetch_add(lent.len() as u64, Relaxed);
    (lent, rest)
}

/// Number of threads that may help to copy so many pieces.
fn helpers(pieces: usize) -> usize {
    if pieces < SHARED_OUT {
        return 0;
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    (cores - 1).min(HELPERS_MAX).min(pieces - 1)
}
