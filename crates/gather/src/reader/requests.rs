//! Requests that read rows of a batch.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use penstock_io::buffer::IoBuf;
use penstock_io::executor::{self, Kind, Request, Transfer, Visit};
use smallvec::{SmallVec, smallvec};

use super::landing::{Landing, Row, ZeroCopy};
use super::lookup::How;
use super::shared::ReaderShared;
use crate::batch::Batch;
use crate::batch::state::{BatchState, Place, Waiting};
use crate::cache::{Cache, Claimed};
use crate::error::Result;
use crate::table::runs::{Run, runs};

/// A row that is not cached, and its destination.
pub(crate) struct Missing {
    pub(crate) place: Place,
    pub(crate) how: How,
}

impl ReaderShared {
    /// Begins to read rows, and to wait for those that other batches read.
    pub(crate) fn begin(self: &Arc<Self>, missing: Vec<Missing>) -> Result<Batch> {
        let (mut reads, mut waiting) = (Vec::with_capacity(missing.len()), Vec::new());
        for Missing { place, how } in missing {
            match how {
                How::Read(claimed) => reads.push((place, claimed)),
                How::Comes => waiting.push(place),
            }
        }
        // A place with a claimed slot is the first of its row.
        reads.sort_unstable_by_key(|(place, claimed)| (place.row, claimed.is_none()));
        let mut rows: Vec<Row> = Vec::with_capacity(reads.len());
        for (place, claimed) in reads {
            match rows.last_mut() {
                Some(last) if last.row == place.row => last.places.push(place),
                _ => rows.push(Row {
                    row: place.row,
                    key: place.key,
                    claimed,
                    places: smallvec![place],
                }),
            }
        }
        let state = Arc::new(BatchState::default());
        let mut transfers = Vec::new();
        transfers.extend(self.submit(rows, &state, false)?);
        let rest = self.wait_for_others(waiting, &state);
        match self.submit(rest, &state, false) {
            Ok(transfer) => transfers.extend(transfer),
            Err(error) => {
                // Requests in flight write to the caller's memory, which is returned with the
                // error.
                transfers.iter().for_each(|begun| drop(begun.wait(None)));
                return Err(error);
            }
        }
        let (shared, waiting) = (Arc::clone(self), Arc::clone(&state));
        let again = move |places| shared.read_again(&waiting, places);
        let slots = self.cache.as_deref().map(|cache| Arc::clone(cache.slots()));
        Ok(Batch::new(state, Box::new(again), slots, transfers))
    }

    /// Adds places to the rows that other batches are reading.
    ///
    /// # Returns
    /// The rows that are no longer being read and are not cached either.
    fn wait_for_others(&self, waiting: Vec<Place>, state: &Arc<BatchState>) -> Vec<Row> {
        let Some(cache) = &self.cache else {
            return Vec::new();
        };
        let mut rest = Vec::new();
        let mut inner = cache.lock();
        for place in waiting {
            let key = place.key;
            let waiting = Waiting::new(place, state);
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

    /// Reads rows a second time, past the cache.
    fn read_again(
        self: &Arc<Self>,
        state: &Arc<BatchState>,
        mut places: Vec<Place>,
    ) -> Result<Option<Transfer>> {
        let again = &self.counts.read_again;
        again.fetch_add(places.len() as u64, Relaxed);
        self.submit(by_row(&mut places), state, true)
    }

    /// Reads rows in ascending order, each once.
    fn submit(
        self: &Arc<Self>,
        rows: Vec<Row>,
        state: &Arc<BatchState>,
        is_again: bool,
    ) -> Result<Option<Transfer>> {
        if rows.is_empty() {
            return Ok(None);
        }
        let table = &self.table;
        let spans = rows.iter().map(|row| table.read(table.span(row.row)));
        let found = runs(spans, |segment| table.offset(segment, 0), self.merging);
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
        mut rows: SmallVec<[Row; 1]>,
        state: &Arc<BatchState>,
        is_again: bool,
    ) -> Request {
        let Run { span, .. } = run;
        let target = self.table.target(span.segment).clone();
        let offset = self.table.offset(span.segment, span.bytes.start);
        let bytes = span.bytes.end - span.bytes.start;
        let (mut memory, mut zero_copy) = (None, ZeroCopy::No);
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
                (memory, zero_copy) = (Some(buf), ZeroCopy::Slot { key, slot });
            } else if row
                .places
                .last()
                .is_some_and(|place| is_reached(&place.memory))
                && let Some(place) = row.places.pop()
            {
                (memory, zero_copy) = (Some(place.memory), ZeroCopy::Place);
            }
        }
        let landing = Landing {
            shared: Arc::clone(self),
            state: Arc::clone(state),
            span,
            rows,
            zero_copy,
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

/// Groups places by row.
fn by_row(places: &mut Vec<Place>) -> Vec<Row> {
    places.sort_unstable_by_key(|place| place.row);
    let mut rows: Vec<Row> = Vec::new();
    for place in places.drain(..) {
        match rows.last_mut() {
            Some(last) if last.row == place.row => last.places.push(place),
            _ => rows.push(Row {
                row: place.row,
                key: place.key,
                claimed: None,
                places: smallvec![place],
            }),
        }
    }
    rows
}
