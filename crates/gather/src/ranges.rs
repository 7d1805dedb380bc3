//! Reads byte ranges of one file: rows whose lengths differ.
//!
//! A range is read where it lies, whole: there are no rows of equal size, so there is neither a
//! cache nor a checksum here. Ranges of a batch that touch, overlap or lie close together are one
//! request; a longer one is cut by the executor.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use penstock_io::buffer::IoBuf;
use penstock_io::executor::{self, Arrived, Kind, Request, Target, Transfer, Visit, Visitor};
use penstock_io::trace;

use crate::error::Result;
use crate::reader::shared::Counts;
use crate::table::Span;
use crate::table::checks::BLOCK_BYTES;
use crate::table::runs::{Merging, runs};

/// A file, and a share of an executor that reads ranges of it.
#[derive(Debug)]
pub struct RangeReader {
    target: Target,
    share: Arc<executor::Share>,
    merging: Merging,
    /// Longest run of several ranges: one operation reads it, with its partial blocks.
    visited_bytes_max: u64,
    counts: Counts,
}

/// A range, and the part of the result that takes it.
struct Piece {
    bytes: Range<u64>,
    memory: IoBuf,
}

impl RangeReader {
    /// A reader of a file.
    ///
    /// # Panics
    /// If a request of the executor has no room for two blocks and a byte.
    pub fn new(target: Target, share: Arc<executor::Share>, merging: Merging) -> RangeReader {
        let visited_bytes_max = share.block_bytes().saturating_sub(2 * BLOCK_BYTES);
        assert!(visited_bytes_max > 0, "a request is longer than two blocks");
        let merging = Merging {
            run_bytes_max: merging.run_bytes_max.min(visited_bytes_max),
            ..merging
        };
        RangeReader {
            target,
            share,
            merging,
            visited_bytes_max,
            counts: Counts::default(),
        }
    }

    /// Counters since the reader was made; a row is a range.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Begins to read ranges into consecutive parts of `out`, in the order of the ranges, which may
    /// repeat and overlap.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) in a fork of the process that made the executor. That the
    /// file ends before a range does is an error of the transfer.
    ///
    /// # Panics
    /// If a range ends before it begins, or the length of `out` is not that of all ranges.
    pub fn read(&self, ranges: &[Range<u64>], out: IoBuf) -> Result<Transfer> {
        let _span = trace::span("gather");
        let mut pieces = pieces(ranges, out);
        pieces.sort_unstable_by_key(|piece| piece.bytes.start);
        let span = |piece: &Piece| Span {
            segment: 0,
            bytes: piece.bytes.clone(),
        };
        let found = runs(pieces.iter().map(span), |_| 0, self.merging);
        self.counts.rows.fetch_add(ranges.len() as u64, Relaxed);
        self.counts
            .read_rows
            .fetch_add(pieces.len() as u64, Relaxed);
        let (mut requests, mut read_bytes) = (Vec::with_capacity(found.len()), 0);
        let mut pieces = pieces.into_iter();
        for run in found {
            let mine: Vec<Piece> = pieces.by_ref().take(run.rows.len()).collect();
            let bytes = run.span.bytes;
            if mine.len() == 1 || bytes.end - bytes.start > self.visited_bytes_max {
                read_bytes += mine
                    .iter()
                    .map(|piece| piece.memory.len() as u64)
                    .sum::<u64>();
                requests.extend(mine.into_iter().map(|piece| self.alone(piece)));
            } else {
                read_bytes += bytes.end - bytes.start;
                requests.push(self.together(bytes, mine));
            }
        }
        self.counts.read_bytes.fetch_add(read_bytes, Relaxed);
        self.counts
            .requests
            .fetch_add(requests.len() as u64, Relaxed);
        Ok(self.share.submit(requests)?)
    }

    /// Reads a range into its place, without a copy where direct I/O reaches it.
    fn alone(&self, piece: Piece) -> Request {
        Request {
            target: self.target.clone(),
            offset: piece.bytes.start,
            kind: Kind::Read(executor::Landing::Window(piece.memory)),
        }
    }

    /// Reads a run, and copies its ranges to their places.
    fn together(&self, bytes: Range<u64>, pieces: Vec<Piece>) -> Request {
        Request {
            target: self.target.clone(),
            offset: bytes.start,
            kind: Kind::Read(executor::Landing::Visited(Visit {
                bytes: bytes.end - bytes.start,
                memory: None,
                visitor: Box::new(Pieces {
                    start: bytes.start,
                    pieces,
                }),
            })),
        }
    }
}

/// The ranges that have bytes, each with its part of the result.
fn pieces(ranges: &[Range<u64>], mut out: IoBuf) -> Vec<Piece> {
    let mut found = Vec::with_capacity(ranges.len());
    for bytes in ranges {
        let length = bytes.end.checked_sub(bytes.start);
        let length = length.expect("a range ends after its beginning") as usize;
        assert!(length <= out.len(), "the result has room for all ranges");
        let rest = out.split_off(length);
        let memory = std::mem::replace(&mut out, rest);
        if length > 0 {
            found.push(Piece {
                bytes: bytes.clone(),
                memory,
            });
        }
    }
    assert!(out.is_empty(), "the ranges fill the result");
    found
}

/// The ranges of one request.
struct Pieces {
    start: u64,
    pieces: Vec<Piece>,
}

impl Visitor for Pieces {
    fn arrived(self: Box<Self>, arrived: Arrived<'_>) {
        let bytes = arrived.as_slice();
        for mut piece in self.pieces {
            let begin = (piece.bytes.start - self.start) as usize;
            let memory = piece.memory.as_mut_slice();
            memory.copy_from_slice(&bytes[begin..begin + memory.len()]);
        }
    }
}
