//! Rows of equal bytes in files.

use std::ops::Range;
use std::sync::Arc;

use penstock_io::executor::Target;

use crate::checks::{BLOCK_BYTES, Checks};

/// Rows that lie together in one file.
#[derive(Clone, Debug)]
pub struct Segment {
    /// The file, opened to be read.
    pub target: Target,
    /// Where in the file the first of them begins, in bytes.
    pub offset: u64,
    /// How many there are.
    pub rows: u64,
    /// Of each of its blocks; the last one may be shorter. `None` where nobody has stored any.
    pub checks: Option<Arc<Checks>>,
}

/// See the module's description.
#[derive(Debug)]
pub struct Table {
    segments: Vec<Placed>,
    step_bytes: u64,
    row_bytes: u64,
    value_bytes: u64,
    rows: u64,
}

/// A segment, and how many rows come before it in the table.
#[derive(Debug)]
struct Placed {
    segment: Segment,
    first_row: u64,
}

/// A row, or neighbouring ones: bytes of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) segment: usize,
    /// From the start of the segment.
    pub(crate) bytes: Range<u64>,
}

impl Table {
    /// The rows of segments, one behind the other.
    ///
    /// # Panics
    /// If rows have no bytes or fewer than their values, the bytes of a segment exceed `u64`, or
    /// checksums are not as many as the blocks.
    pub fn new(segments: Vec<Segment>, row_bytes: u64, value_bytes: u64) -> Table {
        Table::stepped(segments, row_bytes, row_bytes, value_bytes)
    }

    /// Rows may begin at any multiple of so many bytes, and have each its number, whether one begins
    /// there or not.
    ///
    /// # Panics
    /// As [`new`](Table::new).
    pub(crate) fn stepped(
        segments: Vec<Segment>,
        step_bytes: u64,
        row_bytes: u64,
        value_bytes: u64,
    ) -> Table {
        assert!(
            (1..=row_bytes).contains(&value_bytes),
            "rows of {row_bytes} bytes do not hold values of {value_bytes}"
        );
        let mut table = Table {
            segments: Vec::with_capacity(segments.len()),
            step_bytes,
            row_bytes,
            value_bytes,
            rows: 0,
        };
        for segment in segments.into_iter().filter(|one| one.rows > 0) {
            let bytes = (segment.rows - 1).checked_mul(step_bytes);
            let bytes = bytes.and_then(|bytes| bytes.checked_add(row_bytes));
            let end = bytes.and_then(|bytes| segment.offset.checked_add(bytes));
            assert!(end.is_some(), "a segment is too large");
            let (first_row, rows) = (table.rows, segment.rows);
            table.segments.push(Placed { segment, first_row });
            table.rows += rows;
            let last = table.segments.len() - 1;
            if let Some(checks) = &table.segments[last].segment.checks {
                let blocks = Checks::blocks(table.segment_bytes(last));
                assert_eq!(checks.count(), blocks, "each block has a checksum");
            }
        }
        table
    }

    /// How many rows there are.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// What a row takes in its file, in bytes.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// The bytes of a row that are values, at its beginning.
    pub fn value_bytes(&self) -> u64 {
        self.value_bytes
    }

    /// Where a row lies.
    ///
    /// # Panics
    /// If there is no such row.
    pub(crate) fn span(&self, row: u64) -> Span {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let segment = match self.segments.len() {
            1 => 0,
            _ => self.segments.partition_point(|one| one.first_row <= row) - 1,
        };
        let start = (row - self.segments[segment].first_row) * self.step_bytes;
        Span {
            segment,
            bytes: start..start + self.row_bytes,
        }
    }

    /// What has to be read for a span: whole blocks where they are compared.
    pub(crate) fn read(&self, span: Span) -> Span {
        if self.segments[span.segment].segment.checks.is_none() {
            return span;
        }
        let end = self.segment_bytes(span.segment);
        let Range { start, end: last } = span.bytes;
        Span {
            segment: span.segment,
            bytes: start - start % BLOCK_BYTES..last.next_multiple_of(BLOCK_BYTES).min(end),
        }
    }

    /// The file of a segment.
    pub(crate) fn target(&self, segment: usize) -> &Target {
        &self.segments[segment].segment.target
    }

    /// Bytes of a segment.
    pub(crate) fn segment_bytes(&self, segment: usize) -> u64 {
        (self.segments[segment].segment.rows - 1) * self.step_bytes + self.row_bytes
    }

    /// Where in its file a byte of a segment is.
    pub(crate) fn offset(&self, segment: usize, byte: u64) -> u64 {
        self.segments[segment].segment.offset + byte
    }

    /// Blocks of a span, as `read` has given it, that are not those that were written: where they
    /// begin in the segment.
    pub(crate) fn damaged(&self, span: &Span, bytes: &[u8]) -> Vec<u64> {
        let Some(checks) = &self.segments[span.segment].segment.checks else {
            return Vec::new();
        };
        let first = span.bytes.start / BLOCK_BYTES;
        let blocks = bytes.chunks(BLOCK_BYTES as usize).zip(first..);
        blocks
            .filter(|(bytes, block)| !checks.agrees(*block, bytes))
            .map(|(_, block)| (block - first) * BLOCK_BYTES + span.bytes.start)
            .collect()
    }
}
