//! Delivers rows once their bytes have been read, on a thread of the executor.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use penstock_io::executor::{Arrived, Visitor};
use smallvec::SmallVec;

use super::shared::ReaderShared;
use crate::batch::state::{BatchState, Damage, Place};
use crate::cache::{Cache, Claimed};
use crate::index::key::row_of;
use crate::table::Span;
use crate::table::checks::BLOCK_BYTES;
use crate::table::seal::OpenBlocks;

/// A row that is read once, and all its destinations.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) row: u64,
    /// Its key in the cache.
    pub(crate) key: u64,
    pub(crate) claimed: Option<Claimed>,
    /// Nearly always one: it needs no memory of its own.
    pub(crate) places: SmallVec<[Place; 1]>,
}

type Claims = SmallVec<[Claimed; 1]>;

/// The rows of one request.
pub(crate) struct Landing {
    pub(crate) shared: Arc<ReaderShared>,
    pub(crate) state: Arc<BatchState>,
    pub(crate) span: Span,
    /// In ascending order; one, unless neighbours are read together.
    pub(crate) rows: SmallVec<[Row; 1]>,
    /// The destination that the request reads into without a copy.
    pub(crate) zero_copy: ZeroCopy,
    /// Whether this is a second read, of rows that were damaged or lost.
    pub(crate) is_again: bool,
}

/// The destination of a row that is read without a copy.
#[derive(Debug)]
pub(crate) enum ZeroCopy {
    /// None: it passes the executor's memory.
    No,
    /// The row's place in a result, which is missing in the row's places.
    Place,
    /// The row's slot in the cache, with the rest of its claim.
    Slot { key: u64, slot: u32 },
}

impl Visitor for Landing {
    fn arrived(mut self: Box<Self>, arrived: Arrived<'_>) {
        let shared = Arc::clone(&self.shared);
        shared
            .counts
            .read_bytes
            .fetch_add(self.span.bytes.end - self.span.bytes.start, Relaxed);
        match (shared.table.opener(self.span.segment), arrived) {
            (None, arrived) => {
                let damaged = shared.table.damaged(&self.span, arrived.as_slice());
                self.checked(&damaged, arrived);
            }
            (Some(opener), Arrived::Own(mut memory)) => {
                let closed = self.open_in_place(opener.as_ref(), memory.as_mut_slice());
                self.checked(&closed, Arrived::Own(memory));
            }
            (Some(opener), Arrived::Lent(sealed)) => TEXT.with_borrow_mut(|text| {
                if text.len() < sealed.len() {
                    text.resize(sealed.len(), 0);
                }
                let text = &mut text[..sealed.len()];
                let closed = self.open(opener.as_ref(), sealed, text);
                self.checked(&closed, Arrived::Lent(text));
            }),
        }
    }
}

thread_local! {
    /// Text of blocks that were read into memory of the executor, until rows are copied from it.
    static TEXT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Landing {
    /// Delivers rows, but for those in damaged blocks.
    fn checked(&mut self, damaged: &[u64], arrived: Arrived<'_>) {
        if !damaged.is_empty() {
            self.damaged(damaged, arrived);
            return;
        }
        let rows = std::mem::take(&mut self.rows);
        let mut claims = Claims::new();
        for row in rows {
            self.land(row, arrived.as_slice(), &mut claims);
        }
        self.keep(arrived, claims);
    }

    /// Opens the blocks of the only row of the request, in place; returns the offsets in the
    /// segment of those that do not open.
    fn open_in_place(&self, opener: &dyn OpenBlocks, bytes: &mut [u8]) -> Vec<u64> {
        let first = self.span.bytes.start / BLOCK_BYTES;
        let blocks = bytes.chunks_mut(BLOCK_BYTES as usize);
        let closed = (first..).zip(blocks).filter_map(|(block, text)| {
            (!opener.open_in_place(block, text)).then_some(block * BLOCK_BYTES)
        });
        closed.collect()
    }

    /// Opens the blocks that rows of the request touch, as `open_in_place` does.
    fn open(&self, opener: &dyn OpenBlocks, sealed: &[u8], text: &mut [u8]) -> Vec<u64> {
        let table = &self.shared.table;
        let begin = self.span.bytes.start;
        let mut closed = Vec::new();
        let mut next = begin;
        for row in &self.rows {
            let bytes = table.span(row.row).bytes;
            let first = bytes.start - bytes.start % BLOCK_BYTES;
            for start in (first.max(next)..bytes.end).step_by(BLOCK_BYTES as usize) {
                let end = (start + BLOCK_BYTES).min(self.span.bytes.end);
                let here = (start - begin) as usize..(end - begin) as usize;
                if !opener.open(start / BLOCK_BYTES, &sealed[here.clone()], &mut text[here]) {
                    closed.push(start);
                }
                next = end;
            }
        }
        closed
    }

    fn bytes_of<'a>(&self, row: u64, bytes: &'a [u8]) -> &'a [u8] {
        let table = &self.shared.table;
        let start = (table.span(row).bytes.start - self.span.bytes.start) as usize;
        &bytes[start..start + table.value_bytes() as usize]
    }

    /// Copies a row to all its destinations.
    fn land(&self, row: Row, bytes: &[u8], claims: &mut Claims) {
        let bytes = self.bytes_of(row.row, bytes);
        for mut place in row.places {
            place.memory.as_mut_slice().copy_from_slice(bytes);
        }
        if let Some(mut claimed) = row.claimed {
            claimed.memory.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
            claims.push(claimed);
        }
    }

    /// Adds rows to the cache, in the slots that they were read into.
    fn keep(&mut self, arrived: Arrived<'_>, mut claims: Claims) {
        let zero_copy = std::mem::replace(&mut self.zero_copy, ZeroCopy::No);
        if let (ZeroCopy::Slot { key, slot }, Arrived::Own(memory)) = (zero_copy, arrived) {
            claims.push(Claimed { key, slot, memory });
        }
        if let (Some(cache), false) = (&self.shared.cache, claims.is_empty()) {
            cache.arrive(claims);
        }
    }

    /// Handles damaged blocks: rows in the other blocks are delivered, and rows in these are read
    /// again.
    fn damaged(&mut self, blocks: &[u64], arrived: Arrived<'_>) {
        let table = &self.shared.table;
        let is_damaged = |row: u64| {
            let bytes = table.span(row).bytes;
            let hit = |&&start: &&u64| start < bytes.end && bytes.start < start + BLOCK_BYTES;
            blocks.iter().find(hit).copied()
        };
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for row in std::mem::take(&mut self.rows) {
            match is_damaged(row.row) {
                None => good.push(row),
                Some(start) => bad.push((row, start)),
            }
        }
        let mut claims = Claims::new();
        for row in good {
            self.land(row, arrived.as_slice(), &mut claims);
        }
        if let (Some((row, start)), true) = (bad.first(), self.is_again) {
            let segment_end = table.segment_bytes(self.span.segment);
            self.state.damage(Damage {
                row: row_of(row.key),
                path: table.target(self.span.segment).file.path().to_owned(),
                offset: table.offset(self.span.segment, *start),
                bytes: BLOCK_BYTES.min(segment_end - start),
                is_tampered: table
                    .opener(self.span.segment)
                    .is_some_and(|opener| !opener.is_damaged(start / BLOCK_BYTES)),
            });
        }
        let mut rows: SmallVec<[Row; 1]> = bad.into_iter().map(|(row, _)| row).collect();
        match (
            std::mem::replace(&mut self.zero_copy, ZeroCopy::No),
            arrived,
        ) {
            // Then there is only one row.
            (ZeroCopy::Place, Arrived::Own(memory)) => {
                let Row { row, key, .. } = rows[0];
                rows[0].places.push(Place { row, key, memory });
            }
            (ZeroCopy::Slot { key, slot }, Arrived::Own(memory)) => {
                rows[0].claimed = Some(Claimed { key, slot, memory });
            }
            _ => {}
        }
        self.rows = rows;
        self.keep(Arrived::Lent(&[]), claims);
    }
}

impl Drop for Landing {
    /// Leaves rows that did not arrive to the thread that waits for the batch, which may read them
    /// again.
    fn drop(&mut self) {
        let rows = std::mem::take(&mut self.rows);
        let mut places = Vec::new();
        let mut claims = Claims::new();
        for row in rows {
            places.extend(row.places);
            claims.extend(row.claimed);
        }
        if let (Some(cache), false) = (&self.shared.cache, claims.is_empty()) {
            let mut inner = cache.lock();
            for claimed in claims {
                Cache::lost(&mut inner, claimed);
            }
        }
        if let ZeroCopy::Slot { key, slot } = self.zero_copy
            && let Some(cache) = &self.shared.cache
        {
            // Its memory went with the operation.
            Cache::lost_zero_copy(&mut cache.lock(), key, slot);
        }
        if !places.is_empty() {
            self.state.lose(places);
        }
    }
}
