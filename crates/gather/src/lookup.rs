//! What of a batch is in the cache, and memory for the rest.

use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use penstock_io::buffer::{IoBuf, Reading};

use crate::cache::{Cache, Claimed, Found};
use crate::index::{FETCHED, Slot};
use crate::shared::Counts;

/// Rows that are looked up under one lock, and bytes of them that are copied behind it, while nobody
/// can have other rows come.
const LOOKED_UP: usize = 16 << 10;
const COPIED_BYTES: usize = 16 << 20;

/// From so many bytes on several threads copy: to start one takes as long as to copy some of them.
const SHARED_OUT_BYTES: usize = 4 << 20;
const COPIERS_MAX: usize = 8;

/// A row that is not in the cache.
#[derive(Debug)]
pub(crate) struct Miss {
    /// Which of the batch.
    pub(crate) position: usize,
    pub(crate) how: How,
}

/// Where a row that is not in the cache comes from.
#[derive(Debug)]
pub(crate) enum How {
    /// It is to be read, into a slot of its own if there is one.
    Read(Option<Claimed>),
    /// Another batch reads it.
    Comes,
}

/// A batch that a cache is asked for.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) cache: &'a Cache,
    pub(crate) counts: &'a Counts,
    /// Its number, and that of its table.
    pub(crate) batch: (u64, u64),
    /// How many there are.
    pub(crate) rows: usize,
    /// Bytes of a row in the result.
    pub(crate) width: usize,
}

impl Asked<'_> {
    /// Copies what the cache has, and has `claim` find out about the rest, piece by piece, in order
    /// of the positions.
    pub(crate) fn look_up(
        &self,
        key: impl Fn(usize) -> u64,
        out: &mut [u8],
        mut claim: impl FnMut(&[usize], &mut [u8]),
    ) {
        let step = LOOKED_UP.min(COPIED_BYTES.div_ceil(self.width));
        for first in (0..self.rows).step_by(step) {
            let rest = self.copy_what_is_there(first..self.rows.min(first + step), &key, out);
            if !rest.is_empty() {
                claim(&rest, out);
            }
        }
    }

    fn copy_what_is_there(
        &self,
        positions: std::ops::Range<usize>,
        key: impl Fn(usize) -> u64,
        out: &mut [u8],
    ) -> Vec<usize> {
        let mut there = Vec::with_capacity(positions.len());
        let mut rest = Vec::new();
        let mut inner = self.cache.lock();
        let mut keys = [0; FETCHED];
        for first in positions.clone().step_by(FETCHED) {
            let last = positions.end.min(first + FETCHED);
            let keys = &mut keys[..last - first];
            for (known, position) in keys.iter_mut().zip(first..last) {
                *known = key(position);
            }
            inner.index.fetch(keys);
            for (position, &key) in (first..last).zip(&*keys) {
                match inner.index.find(key) {
                    Some(slot) => there.push((position, slot)),
                    None => rest.push(position),
                }
            }
        }
        let reading = self.cache.slots().read();
        drop(inner);
        let out = &mut out[positions.start * self.width..positions.end * self.width];
        let coming = copy_all(&reading, &there, positions.start, out, self.width);
        drop(reading);
        let hits = (there.len() - coming.len()) as u64;
        self.counts.hits.fetch_add(hits, Relaxed);
        if !coming.is_empty() {
            rest.extend(coming);
            rest.sort_unstable();
        }
        rest
    }

    /// Has rows come that were not there: once more, as somebody else may have had them come since.
    pub(crate) fn claim(
        &self,
        positions: &[usize],
        key: impl Fn(usize) -> u64,
        misses: &mut Vec<Miss>,
    ) {
        let mut inner = self.cache.lock();
        let how = |&position: &usize| {
            let how = match self.cache.find(&mut inner, key(position), self.batch) {
                Found::Here | Found::Comes { is_own: false } => How::Comes,
                Found::Comes { is_own: true } => How::Read(None),
                Found::Missing(claimed) => How::Read(claimed),
            };
            Miss { position, how }
        };
        misses.extend(positions.iter().map(how));
    }
}

/// Cuts places out of a result, in ascending order.
pub(crate) fn carve(mut out: IoBuf, width: usize, positions: &[usize]) -> Vec<IoBuf> {
    let mut places: Vec<IoBuf> = Vec::with_capacity(positions.len());
    for &position in positions.iter().rev() {
        let mut memory = out.split_off(position * width);
        drop(memory.split_off(width));
        places.push(memory);
    }
    places.reverse();
    places
}

/// Copies slots to a result that begins at a position, by several threads where that pays.
///
/// # Returns
/// Places whose slots somebody writes to.
fn copy_all(
    reading: &Reading<'_>,
    there: &[(usize, Slot)],
    first: usize,
    out: &mut [u8],
    width: usize,
) -> Vec<usize> {
    let copiers = match there.len() * width >= SHARED_OUT_BYTES {
        true => thread::available_parallelism().map_or(1, usize::from),
        false => 1,
    };
    let part = there.len().div_ceil(copiers.min(COPIERS_MAX)).max(1);
    if part >= there.len() {
        return copy(reading, there, first, out, width);
    }
    thread::scope(|scope| {
        let (mut left, mut begin) = (out, first);
        let mut copying = Vec::new();
        for (index, part_of) in there.chunks(part).enumerate() {
            let end = there.get((index + 1) * part).map(|(place, _)| *place);
            let bytes = end.map_or(left.len(), |end| (end - begin) * width);
            let (mine, rest) = left.split_at_mut(bytes);
            left = rest;
            copying.push(scope.spawn(move || copy(reading, part_of, begin, mine, width)));
            begin = end.unwrap_or(begin);
        }
        let coming = copying.into_iter().map(|one| one.join());
        coming
            .flat_map(|one| one.expect("copying does not panic"))
            .collect()
    })
}

fn copy(
    reading: &Reading<'_>,
    there: &[(usize, Slot)],
    begin: usize,
    out: &mut [u8],
    width: usize,
) -> Vec<usize> {
    let mut coming = Vec::new();
    for &(place, slot) in there {
        let Some(bytes) = reading.slot(slot) else {
            coming.push(place);
            continue;
        };
        let start = (place - begin) * width;
        out[start..start + width].copy_from_slice(bytes);
    }
    coming
}
