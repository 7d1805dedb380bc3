//! Gathers batches of a table's rows.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use penstock_io::buffer::{IoBuf, Reading};
use penstock_io::executor::{self, Kind, Request, Transfer, Visit};

use crate::batch::Batch;
use crate::cache::{Cache, Claimed, Found};
use crate::checks::BLOCK_BYTES;
use crate::error::{Error, Result};
use crate::index::{FETCHED, Index, Slot};
use crate::landing::{Landing, Row, Straight};
use crate::runs::{Merging, Run, runs};
use crate::shared::{Counts, Shared};
use crate::state::{Place, State, Waiting};
use crate::table::Table;

/// Rows that are looked up under one lock, and bytes of them that are copied behind it, while nobody
/// can have other rows come.
const LOOKED_UP: usize = 16 << 10;
const COPIED_BYTES: usize = 16 << 20;

/// From so many bytes on several threads copy: to start one takes as long as to copy some of them.
const SHARED_OUT_BYTES: usize = 4 << 20;
const COPIERS_MAX: usize = 8;

/// A table, a claim on an executor to read it with, and perhaps a cache.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
}

/// A row that has to be read.
struct Miss {
    row: u64,
    position: usize,
    claimed: Option<Claimed>,
}

impl Reader {
    /// Reads a table.
    ///
    /// # Panics
    /// If slots of the cache do not have the size of rows, or a row with the blocks that it begins
    /// and ends in is longer than a request of the executor.
    pub fn new(
        table: Table,
        share: executor::Share,
        cache: Option<Arc<Cache>>,
        merging: Merging,
    ) -> Reader {
        let fits = |cache: &Cache| cache.row_bytes() as u64 == table.value_bytes();
        assert!(cache.as_deref().is_none_or(fits), "slots are rows");
        let longest = share.block_bytes().saturating_sub(2 * BLOCK_BYTES);
        assert!(
            table.row_bytes() <= longest,
            "a row is longer than a request"
        );
        let merging = Merging {
            run_bytes_max: merging.run_bytes_max.min(share.block_bytes()),
            ..merging
        };
        Reader {
            shared: Arc::new(Shared {
                number: cache.as_ref().map_or(0, |cache| cache.add_table()),
                table,
                cache,
                share,
                merging,
                counts: Counts::default(),
                next_batch: AtomicU64::new(0),
                process: std::process::id(),
            }),
        }
    }

    /// The table.
    pub fn table(&self) -> &Table {
        &self.shared.table
    }

    /// What was done so far.
    pub fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    /// Begins to gather rows, in the order of their ids, which may repeat.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], before anything is read; [`Error::Io`] in a fork of the process that
    /// made the executor.
    ///
    /// # Panics
    /// If `out` does not have the bytes of so many values.
    pub fn gather(&self, ids: &[u64], out: IoBuf) -> Result<Batch> {
        self.gather_foreseen(ids, out, None)
    }

    /// As [`gather`](Reader::gather), of a batch that [`foresee`](Reader::foresee) was told of,
    /// which is over then.
    ///
    /// # Errors
    /// As [`gather`](Reader::gather).
    ///
    /// # Panics
    /// As [`gather`](Reader::gather).
    pub fn gather_foreseen(
        &self,
        ids: &[u64],
        mut out: IoBuf,
        foreseen: Option<u64>,
    ) -> Result<Batch> {
        let shared = &self.shared;
        let width = shared.table.value_bytes() as usize;
        assert_eq!(out.len(), ids.len() * width, "room for each row");
        shared.check_process()?;
        shared.check(ids)?;
        shared.counts.rows.fetch_add(ids.len() as u64, Relaxed);
        let mut misses = Vec::new();
        let mut later = Vec::new();
        let batch = shared.next_batch.fetch_add(1, Relaxed);
        match &shared.cache {
            None => misses.extend((0..ids.len()).map(|position| Miss {
                row: ids[position],
                position,
                claimed: None,
            })),
            Some(cache) => {
                if let Some(foreseen) = foreseen {
                    cache.lock().index.reach(foreseen);
                }
                let out = out.as_mut_slice();
                let step = LOOKED_UP.min(COPIED_BYTES.div_ceil(width));
                for first in (0..ids.len()).step_by(step) {
                    let last = ids.len().min(first + step);
                    let mut looked_up = LookedUp {
                        batch: (shared.number, batch),
                        misses: &mut misses,
                        later: &mut later,
                    };
                    shared.look_up(cache, &ids[first..last], first, out, &mut looked_up);
                }
                if let Some(foreseen) = foreseen {
                    cache.lock().index.cancel(foreseen);
                }
            }
        }
        let places = carve(out, width, &mut misses, &mut later, ids);
        shared.begin(places.0, places.1)
    }

    /// Tells the cache of a batch that will be gathered behind those that it knows.
    ///
    /// # Returns
    /// What it is called; `None` without a cache.
    ///
    /// # Errors
    /// As [`gather`](Reader::gather).
    pub fn foresee(&self, ids: &[u64]) -> Result<Option<u64>> {
        self.with_keys(ids, |index, keys| index.foresee(keys))
    }

    /// A batch that was foreseen will not be gathered.
    pub fn forget(&self, foreseen: u64) {
        if let Some(cache) = &self.shared.cache
            && self.shared.process == std::process::id()
        {
            cache.lock().index.cancel(foreseen);
        }
    }

    /// Has rows stay in the cache, once they are there.
    ///
    /// # Returns
    /// How many of the cache's rows do; `None` without a cache.
    ///
    /// # Errors
    /// As [`gather`](Reader::gather).
    pub fn pin(&self, ids: &[u64]) -> Result<Option<usize>> {
        self.with_keys(ids, |index, keys| index.pin(keys))
    }

    /// Has rows that were pinned go like others.
    ///
    /// # Errors
    /// As [`gather`](Reader::gather).
    pub fn unpin(&self, ids: &[u64]) -> Result<()> {
        self.with_keys(ids, |index, keys| index.unpin(keys))
            .map(drop)
    }

    fn with_keys<T>(
        &self,
        ids: &[u64],
        tell: impl FnOnce(&mut Index, &[u64]) -> T,
    ) -> Result<Option<T>> {
        let shared = &self.shared;
        shared.check_process()?;
        shared.check(ids)?;
        let Some(cache) = &shared.cache else {
            return Ok(None);
        };
        let keys: Vec<u64> = ids.iter().map(|&row| shared.key(row)).collect();
        Ok(Some(tell(&mut cache.lock().index, &keys)))
    }
}

/// What lookups find that is not there.
struct LookedUp<'a> {
    batch: (u64, u64),
    misses: &'a mut Vec<Miss>,
    /// Positions of rows that another batch reads.
    later: &'a mut Vec<usize>,
}

/// Cuts out of a result the places of rows that are not there yet.
fn carve(
    mut out: IoBuf,
    width: usize,
    misses: &mut Vec<Miss>,
    later: &mut Vec<usize>,
    ids: &[u64],
) -> (Vec<(Miss, Place)>, Vec<Place>) {
    let mut cut = |position: usize| {
        let mut memory = out.split_off(position * width);
        drop(memory.split_off(width));
        Place {
            row: ids[position],
            memory,
        }
    };
    let (mut missing, mut waiting) = (Vec::with_capacity(misses.len()), Vec::new());
    while let Some(position) = misses
        .last()
        .map(|miss| miss.position)
        .max(later.last().copied())
    {
        let place = cut(position);
        match misses.pop_if(|miss| miss.position == position) {
            Some(miss) => missing.push((miss, place)),
            None => {
                later.pop();
                waiting.push(place);
            }
        }
    }
    (missing, waiting)
}

impl Shared {
    fn check_process(&self) -> Result<()> {
        let process = self.process;
        match process == std::process::id() {
            true => Ok(()),
            false => Err(penstock_io::Error::Forked { process }.into()),
        }
    }

    fn check(&self, ids: &[u64]) -> Result<()> {
        let rows = self.table.rows();
        match ids.iter().position(|&id| id >= rows) {
            None => Ok(()),
            Some(position) => Err(Error::OutOfRange {
                position,
                id: i128::from(ids[position]),
                rows,
            }),
        }
    }

    fn key(&self, row: u64) -> u64 {
        self.number << 48 | row
    }

    /// Copies what the cache has of some ids, and notes the rest.
    fn look_up(
        &self,
        cache: &Cache,
        ids: &[u64],
        first: usize,
        out: &mut [u8],
        found: &mut LookedUp<'_>,
    ) {
        let width = self.table.value_bytes() as usize;
        let mut there = Vec::with_capacity(ids.len());
        let mut rest = Vec::new();
        let mut inner = cache.lock();
        let mut keys = [0; FETCHED];
        for (piece, rows) in ids.chunks(FETCHED).enumerate() {
            let keys = &mut keys[..rows.len()];
            for (key, &row) in keys.iter_mut().zip(rows) {
                *key = self.key(row);
            }
            inner.index.fetch(keys);
            for (at, &key) in keys.iter().enumerate() {
                let place = piece * FETCHED + at;
                match inner.index.find(key) {
                    Some(slot) => there.push((place, slot)),
                    None => rest.push(place),
                }
            }
        }
        let reading = cache.slots().read();
        drop(inner);
        let out = &mut out[first * width..(first + ids.len()) * width];
        let coming = copy_all(&reading, &there, out, width);
        drop(reading);
        self.counts
            .hits
            .fetch_add((there.len() - coming.len()) as u64, Relaxed);
        if rest.is_empty() && coming.is_empty() {
            return;
        }
        rest.extend(coming);
        rest.sort_unstable();
        let mut inner = cache.lock();
        for place in rest {
            let (row, position) = (ids[place], first + place);
            let claimed = match cache.find(&mut inner, self.key(row), found.batch) {
                // Somebody else had it come meanwhile, or has.
                Found::Here | Found::Comes { is_own: false } => {
                    found.later.push(position);
                    continue;
                }
                Found::Comes { is_own: true } => None,
                Found::Missing(claimed) => claimed,
            };
            found.misses.push(Miss {
                row,
                position,
                claimed,
            });
        }
    }

    /// Has what is missing read, and what others read come from them.
    fn begin(
        self: &Arc<Self>,
        mut missing: Vec<(Miss, Place)>,
        waiting: Vec<Place>,
    ) -> Result<Batch> {
        // The one that has a claim comes first of its row.
        missing.sort_unstable_by_key(|(miss, _)| (miss.row, miss.claimed.is_none()));
        let mut rows: Vec<Row> = Vec::with_capacity(missing.len());
        for (miss, place) in missing {
            match rows.last_mut() {
                Some(last) if last.row == miss.row => last.places.push(place),
                _ => rows.push(Row {
                    row: miss.row,
                    claimed: miss.claimed,
                    places: vec![place],
                }),
            }
        }
        let state = Arc::new(State::default());
        let mut transfers = Vec::new();
        transfers.extend(self.submit(rows, &state, false)?);
        let rest = self.wait_for_others(waiting, &state);
        transfers.extend(self.submit(rest, &state, false)?);
        let (shared, waiting) = (Arc::clone(self), Arc::clone(&state));
        let again = move |places| shared.read_again(&waiting, places);
        Ok(Batch::new(state, Box::new(again), transfers))
    }

    /// Has rows come from the batches that read them.
    ///
    /// # Returns
    /// Those that are neither on their way any more nor there.
    fn wait_for_others(&self, waiting: Vec<Place>, state: &Arc<State>) -> Vec<Row> {
        let Some(cache) = &self.cache else {
            return Vec::new();
        };
        let mut rest = Vec::new();
        let mut inner = cache.lock();
        for place in waiting {
            let waiting = Waiting::new(place, state);
            let key = self.key(waiting.row());
            match Cache::wait_for(&mut inner, key, waiting) {
                Ok(()) => {
                    self.counts.shared.fetch_add(1, Relaxed);
                }
                Err((Some(slot), waiting)) => {
                    let reading = cache.slots().read();
                    let bytes = reading.slot(slot);
                    waiting.have(bytes.expect("who writes to a slot has it coming"));
                    self.counts.hits.fetch_add(1, Relaxed);
                }
                Err((None, waiting)) => rest.push(waiting),
            }
        }
        drop(inner);
        let mut places: Vec<Place> = rest.into_iter().filter_map(Waiting::into_place).collect();
        by_row(&mut places)
    }

    /// Reads rows once more, past the cache.
    fn read_again(
        self: &Arc<Self>,
        state: &Arc<State>,
        mut places: Vec<Place>,
    ) -> Result<Option<Transfer>> {
        let again = &self.counts.read_again;
        again.fetch_add(places.len() as u64, Relaxed);
        self.submit(by_row(&mut places), state, true)
    }

    /// Reads rows, which are in order, each once.
    fn submit(
        self: &Arc<Self>,
        rows: Vec<Row>,
        state: &Arc<State>,
        is_again: bool,
    ) -> Result<Option<Transfer>> {
        if rows.is_empty() {
            return Ok(None);
        }
        let found = runs(&self.table, rows.iter().map(|row| row.row), self.merging);
        self.counts.read_rows.fetch_add(rows.len() as u64, Relaxed);
        self.counts.requests.fetch_add(found.len() as u64, Relaxed);
        let mut rows = rows.into_iter();
        let requests = found.into_iter().map(|run| {
            let rows = rows.by_ref().take(run.rows.len()).collect();
            self.request(run, rows, state, is_again)
        });
        let transfer = self.share.submit(requests.collect())?;
        state.expect(1);
        let ending = Arc::clone(state);
        transfer.on_done(Box::new(move || ending.end()))?;
        Ok(Some(transfer))
    }

    fn request(
        self: &Arc<Self>,
        run: Run,
        mut rows: Vec<Row>,
        state: &Arc<State>,
        is_again: bool,
    ) -> Request {
        let Run { span, .. } = run;
        let target = self.table.target(span.segment).clone();
        let offset = self.table.offset(span.segment, span.bytes.start);
        let bytes = span.bytes.end - span.bytes.start;
        let (mut memory, mut straight) = (None, Straight::No);
        let alignment = target.file.alignment();
        let is_reached = |buf: &IoBuf| {
            buf.len() as u64 == bytes
                && offset.is_multiple_of(alignment.offset as u64)
                && bytes.is_multiple_of(alignment.offset as u64)
                && buf.address().is_multiple_of(alignment.memory)
        };
        if let [row] = &mut rows[..] {
            if let Some(claimed) = row.claimed.take_if(|one| is_reached(&one.memory)) {
                let Claimed {
                    key,
                    slot,
                    memory: buf,
                } = claimed;
                (memory, straight) = (Some(buf), Straight::Slot { key, slot });
            } else if let Some(place) = row.places.pop_if(|place| is_reached(&place.memory)) {
                (memory, straight) = (Some(place.memory), Straight::Place);
            }
        }
        let landing = Landing {
            shared: Arc::clone(self),
            state: Arc::clone(state),
            span,
            rows,
            straight,
            is_again,
        };
        Request {
            target,
            offset,
            kind: Kind::Read(executor::Landing::Visited(Visit {
                bytes,
                memory,
                visitor: Box::new(landing),
            })),
        }
    }
}

/// Copies slots to places of rows in a result, by several threads where that pays.
///
/// # Returns
/// Places whose slots somebody writes to.
fn copy_all(
    reading: &Reading<'_>,
    there: &[(usize, Slot)],
    out: &mut [u8],
    width: usize,
) -> Vec<usize> {
    let copiers = match there.len() * width >= SHARED_OUT_BYTES {
        true => thread::available_parallelism().map_or(1, usize::from),
        false => 1,
    };
    let part = there.len().div_ceil(copiers.min(COPIERS_MAX)).max(1);
    if part >= there.len() {
        return copy(reading, there, 0, out, width);
    }
    thread::scope(|scope| {
        let (mut left, mut begin) = (out, 0);
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

/// Places as rows, each row once.
fn by_row(places: &mut Vec<Place>) -> Vec<Row> {
    places.sort_unstable_by_key(|place| place.row);
    let mut rows: Vec<Row> = Vec::new();
    for place in places.drain(..) {
        match rows.last_mut() {
            Some(last) if last.row == place.row => last.places.push(place),
            _ => rows.push(Row {
                row: place.row,
                claimed: None,
                places: vec![place],
            }),
        }
    }
    rows
}
