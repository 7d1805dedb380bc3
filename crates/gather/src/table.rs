//! Rows of equal size in files.

pub(crate) mod checks;
pub(crate) mod runs;
pub(crate) mod seal;

use std::ops::Range;
use std::sync::Arc;

use penstock_io::executor::Target;

use self::checks::{BLOCK_BYTES, Checks};
use self::seal::OpenBlocks;

/// Consecutive rows in one file.
#[derive(Clone, Debug)]
pub struct Segment {
    /// The file, opened for reading.
    pub target: Target,
    /// Offset of the first row in the file, in bytes.
    pub offset: u64,
    /// Number of rows.
    pub rows: u64,
    /// Checksums of its blocks, the last of which may be shorter. `None` if none were stored.
    pub checks: Option<Arc<Checks>>,
    /// Opens its blocks, if they are sealed. It has no checksums then.
    pub opener: Option<Arc<dyn OpenBlocks>>,
}

/// Rows of equal size, stored in segments.
#[derive(Debug)]
pub struct Table {
    segments: Vec<Placed>,
    step_bytes: u64,
    row_bytes: u64,
    value_bytes: u64,
    rows: u64,
}

/// A segment, and the number of rows before it in the table.
#[derive(Debug)]
struct Placed {
    segment: Segment,
    first_row: u64,
}

/// The bytes of one row, or of neighbouring ones, in a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) segment: usize,
    /// From the start of the segment.
    pub(crate) bytes: Range<u64>,
}

impl Table {
    /// A table of consecutive segments.
    ///
    /// # Panics
    /// If rows have no bytes or fewer than their values, the size of a segment exceeds `u64`, or
    /// the number of checksums is not that of the blocks.
    pub fn new(segments: Vec<Segment>, row_bytes: u64, value_bytes: u64) -> Table {
        Table::stepped(segments, row_bytes, row_bytes, value_bytes)
    }

    /// A table whose rows may begin at any multiple of `step_bytes`; each multiple has a row
    /// number, whether a row begins there or not.
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

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Bytes of a row in its file.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Bytes of a row's values, which come first.
    pub fn value_bytes(&self) -> u64 {
        self.value_bytes
    }

    /// The bytes of a row.
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

    /// The bytes to read for a span: whole blocks if they have checksums or are sealed.
    pub(crate) fn read(&self, span: Span) -> Span {
        let Segment { checks, opener, .. } = &self.segments[span.segment].segment;
        if checks.is_none() && opener.is_none() {
            return span;
        }
        let end = self.segment_bytes(span.segment);
        let Range { start, end: last } = span.bytes;
        Span {
            segment: span.segment,
            bytes: start - start % BLOCK_BYTES..last.next_multiple_of(BLOCK_BYTES).min(end),
        }
    }

    /// Opens the blocks of a segment, if they are sealed.
    pub(crate) fn opener(&self, segment: usize) -> Option<&Arc<dyn OpenBlocks>> {
        self.segments[segment].segment.opener.as_ref()
    }

    /// The file of a segment.
    pub(crate) fn target(&self, segment: usize) -> &Target {
        &self.segments[segment].segment.target
    }

    /// Bytes of a segment.
    pub(crate) fn segment_bytes(&self, segment: usize) -> u64 {
        (self.segments[segment].segment.rows - 1) * self.step_bytes + self.row_bytes
    }

    /// Offset of a segment's byte in its file.
    pub(crate) fn offset(&self, segment: usize, byte: u64) -> u64 {
        self.segments[segment].segment.offset + byte
    }

    /// The damaged blocks of a span returned by `read`: their offsets in the segment.
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
