//! Snapshots of all rows, and compaction: updated rows moved from logs into pieces.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use penstock_io::buffer::Memory;
use penstock_io::executor::{self, Kind, Request};
use penstock_io::file_system::Change;
use penstock_io::trace;

use super::append::Writer;
use super::core::{Core, Held};
use super::form::whole_blocks;
use super::manifest::{log_path, piece_path};
use super::newest::{Address, Sealed};
use super::piece::{self, Of};
use crate::error::{Error, Result};
use crate::reader::shared::ReaderShared;
use crate::table::checks::BLOCK_BYTES;
use crate::table::{Segment, Span};

/// Gaps between rows of a log up to this size are read rather than skipped.
const GAP_BYTES: u64 = 64 << 10;

/// Most bytes of one request, and of the requests of one part.
const SPAN_BYTES_MAX: u64 = 1 << 20;
const PART_BYTES_MAX: u64 = 32 << 20;

/// A snapshot of all rows. While it exists, no other compaction runs.
#[derive(Debug)]
pub struct Frozen {
    core: Arc<Core>,
    sealed: Sealed,
    /// Ids of updated rows, in ascending order.
    ids: Vec<u64>,
    /// How many of them have been compacted.
    done: usize,
    compacted: Compaction,
    pieces: Vec<Segment>,
    /// The logs with the updated rows, by number.
    logs: BTreeMap<u64, Arc<ReaderShared>>,
    _held: Held,
}

/// Rows of a log by position, and the ranges to read for them.
struct Part<'a> {
    rows: &'a [(Address, u64)],
    spans: Vec<Range<u64>>,
}

/// Divides rows of a log into parts that fit into memory. A gap between rows is read if a second
/// request would take longer.
fn parts(mut rows: &[(Address, u64)], row_bytes: u64) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    while !rows.is_empty() {
        let (mut spans, mut bytes, mut count): (Vec<Range<u64>>, u64, usize) = (Vec::new(), 0, 0);
        for (address, _) in rows {
            let start = address.place() - address.place() % BLOCK_BYTES;
            let end = whole_blocks(address.place() + row_bytes);
            match spans.last_mut() {
                Some(last)
                    if start.saturating_sub(last.end) <= GAP_BYTES
                        && end - last.start <= SPAN_BYTES_MAX.max(row_bytes + 2 * BLOCK_BYTES) =>
                {
                    bytes += end.max(last.end) - last.end;
                    last.end = end.max(last.end);
                }
                // Two ranges may share a block.
                _ => {
                    bytes += end - start;
                    spans.push(start..end);
                }
            }
            count += 1;
            if bytes > PART_BYTES_MAX {
                break;
            }
        }
        let (here, rest) = rows.split_at(count);
        parts.push(Part { rows: here, spans });
        rows = rest;
    }
    parts
}

/// Results of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compaction {
    /// Rows moved into pieces.
    pub rows: u64,
    /// Pieces written for them.
    pub pieces: u64,
    /// Bytes of these pieces.
    pub bytes: u64,
}

impl Frozen {
    /// Takes a snapshot; later updates go to another log.
    pub(super) fn new(core: &Arc<Core>, held: Held, writer: &mut Writer) -> Result<Frozen> {
        writer.close_log(core)?;
        let numbers: Vec<u64> = core
            .manifest()
            .closed
            .iter()
            .map(|one| one.number)
            .collect();
        let mut inner = core.inner();
        let sealed = inner.newest.seal();
        let log = |number| (number, Arc::clone(&inner.logs[&number]));
        let logs = numbers.into_iter().map(log).collect();
        let pieces = inner.pieces.clone();
        drop(inner);
        Ok(Frozen {
            core: Arc::clone(core),
            sealed,
            ids: Vec::new(),
            done: 0,
            compacted: Compaction::default(),
            pieces,
            logs,
            _held: held,
        })
    }

    /// Sorts the ids of the updated rows.
    pub(super) fn sort(&mut self) {
        self.ids = self.sealed.keys().copied().collect();
        self.ids.sort_unstable();
    }

    /// Number of pieces of the table.
    pub fn pieces(&self) -> u64 {
        self.core.form.pieces()
    }

    /// The current rows of a piece in the layout of its file, in memory with room for the rest of
    /// it.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Io`].
    ///
    /// # Panics
    /// If there is no such piece.
    pub fn rows_of(&self, piece: u64) -> Result<Memory> {
        let form = &self.core.form;
        let rows = form.rows_of(piece);
        let below = |end: u64| self.ids.partition_point(|&id| id < end);
        let written = &self.ids[below(rows.start)..below(rows.end)];
        let mut memory = self.read_piece(piece)?;
        let mut newest: Vec<(Address, u64)> =
            written.iter().map(|id| (self.sealed[id], *id)).collect();
        newest.sort_unstable();
        for of_log in newest.chunk_by(|one, next| one.0.log() == next.0.log()) {
            let log = &self.logs[&of_log[0].0.log()];
            for part in parts(of_log, form.row_bytes) {
                self.lay_over(log, &part, rows.start, memory.as_mut_slice())?;
            }
        }
        Ok(memory)
    }

    /// Reads a piece's file and verifies its checksums.
    fn read_piece(&self, piece: u64) -> Result<Memory> {
        let form = &self.core.form;
        let segment = &self.pieces[piece as usize];
        let (file, bytes) = (&segment.target.file, form.bytes_of(piece));
        let mut is_again = false;
        loop {
            let memory = Memory::allocate(piece::file_bytes(form, piece) as usize)?;
            let (handle, mut all) = memory.share();
            drop(all.split_off(bytes as usize));
            self.core.storage.read(file, 0, all)?;
            let memory = handle.reclaim().expect("the transfer has ended");
            let checks = segment.checks.as_ref().expect("a piece has checksums");
            let blocks = memory.as_slice()[..bytes as usize].chunks(BLOCK_BYTES as usize);
            let damaged = (0..)
                .zip(blocks)
                .find(|(block, bytes)| !checks.agrees(*block, bytes));
            match damaged {
                None => return Ok(memory),
                Some(_) if !is_again => is_again = true,
                Some((block, damaged)) => {
                    return Err(Error::Damaged {
                        row: form.rows_of(piece).start + block * BLOCK_BYTES / form.row_bytes,
                        path: file.path().to_owned(),
                        offset: block * BLOCK_BYTES,
                        bytes: damaged.len() as u64,
                    });
                }
            }
        }
    }

    /// Reads rows of a log and copies them over those of a piece whose first row is `first`.
    fn lay_over(
        &self,
        log: &ReaderShared,
        part: &Part<'_>,
        first: u64,
        piece: &mut [u8],
    ) -> Result<()> {
        let form = &self.core.form;
        let memory = self.read_part(log, part)?;
        let (mut spans, mut begin) = (part.spans.iter().peekable(), 0);
        for (address, id) in part.rows {
            let place = address.place();
            while let Some(span) = spans.next_if(|span| span.end < place + form.row_bytes) {
                begin += span.end - span.start;
            }
            let span = spans.peek().expect("each row is in a span");
            let from = (begin + place - span.start) as usize;
            let to = ((id - first) * form.row_bytes) as usize;
            let width = form.value_bytes as usize;
            piece[to..to + width].copy_from_slice(&memory.as_slice()[from..from + width]);
        }
        Ok(())
    }

    /// Reads the ranges of a part, one after the other, and verifies their checksums.
    fn read_part(&self, log: &ReaderShared, part: &Part<'_>) -> Result<Memory> {
        let bytes: u64 = part.spans.iter().map(|span| span.end - span.start).sum();
        let mut is_again = false;
        loop {
            let (handle, mut rest) = Memory::allocate(bytes as usize)?.share();
            let mut requests = Vec::with_capacity(part.spans.len());
            for span in &part.spans {
                let next = rest.split_off((span.end - span.start) as usize);
                requests.push(Request {
                    target: log.table.target(0).clone(),
                    offset: span.start,
                    kind: Kind::Read(executor::Landing::Window(std::mem::replace(
                        &mut rest, next,
                    ))),
                });
            }
            drop(rest);
            self.core.storage.share.submit(requests)?.wait(None)?;
            let memory = handle.reclaim().expect("the transfer has ended");
            let mut left = memory.as_slice();
            let damaged = part.spans.iter().find_map(|span| {
                let (here, rest) = left.split_at((span.end - span.start) as usize);
                left = rest;
                let span = Span {
                    segment: 0,
                    bytes: span.clone(),
                };
                log.table.damaged(&span, here).first().copied()
            });
            match damaged {
                None => return Ok(memory),
                Some(_) if !is_again => is_again = true,
                Some(offset) => {
                    let reaches = |(address, _): &&(Address, u64)| {
                        address.place() + self.core.form.row_bytes > offset
                    };
                    let (_, row) = part.rows.iter().find(reaches).expect("blocks have rows");
                    return Err(Error::Damaged {
                        row: *row,
                        path: log.table.target(0).file.path().to_owned(),
                        offset,
                        bytes: BLOCK_BYTES,
                    });
                }
            }
        }
    }

    /// Compacts: moves updated rows into pieces and removes their logs.
    ///
    /// Each piece with such rows is rewritten and committed by itself, so an interrupted
    /// compaction leaves a valid table and can be repeated.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Io`].
    pub fn compact(mut self) -> Result<Compaction> {
        loop {
            if let Some(compacted) = self.compact_more()? {
                return Ok(compacted);
            }
        }
    }

    /// As [`compact`](Frozen::compact), for one piece.
    ///
    /// # Returns
    /// The results once all pieces are done.
    pub fn compact_more(&mut self) -> Result<Option<Compaction>> {
        let form = &self.core.form;
        let ids = &self.ids[self.done..];
        let Some(&first) = ids.first() else {
            self.drop_logs()?;
            return Ok(Some(self.compacted));
        };
        let piece = first / form.piece_rows;
        let end = form.rows_of(piece).end;
        let count = ids.partition_point(|&id| id < end);
        self.compact_piece(piece)?;
        self.done += count;
        self.compacted.rows += count as u64;
        self.compacted.pieces += 1;
        self.compacted.bytes += form.bytes_of(piece);
        Ok(None)
    }

    /// Rewrites a piece and replaces the old one.
    fn compact_piece(&self, piece: u64) -> Result<()> {
        let _span = trace::span("compact");
        let core = &*self.core;
        let memory = self.rows_of(piece)?;
        core.lock.check()?;
        let number = core.manifest().take_piece();
        let path = piece_path(&core.home, number);
        let of = Of {
            table: core.manifest().id(),
            form: &core.form,
            piece,
        };
        piece::write(&core.storage, &path, of, memory)?;
        let segment = core.open_piece(piece, number)?;
        let mut manifest = core.manifest();
        let mut next = manifest.clone();
        let old = std::mem::replace(&mut next.pieces[piece as usize], number);
        core.commit(&next)?;
        *manifest = next;
        let mut inner = core.inner();
        inner.pieces[piece as usize] = segment;
        inner.base = core.shared_of_pieces(&inner.pieces);
        drop(inner);
        let path = piece_path(&core.home, old);
        core.storage.change(Change::RemoveFile(&path))
    }

    /// Removes the logs, whose rows are all in pieces.
    fn drop_logs(&self) -> Result<()> {
        if self.logs.is_empty() {
            return Ok(());
        }
        let core = &*self.core;
        let mut manifest = core.manifest();
        let mut next = manifest.clone();
        next.closed
            .retain(|one| !self.logs.contains_key(&one.number));
        core.commit(&next)?;
        *manifest = next;
        let mut inner = core.inner();
        inner.newest.unseal();
        inner
            .logs
            .retain(|number, _| !self.logs.contains_key(number));
        drop(inner);
        for &number in self.logs.keys() {
            let path = log_path(&core.home, number);
            core.storage.change(Change::RemoveFile(&path))?;
        }
        Ok(())
    }
}
