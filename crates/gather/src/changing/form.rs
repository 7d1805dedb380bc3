//! `Form`: how many rows a table has, of what size, and how they are cut into files.

use std::ops::Range;

use crate::checks::{BLOCK_BYTES, Checks};

/// What does not change of a table that changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// How many rows there are; at least 1.
    pub rows: u64,
    /// What a row takes in files; a multiple of 8.
    pub row_bytes: u64,
    /// Of these the first ones, which are values.
    pub value_bytes: u64,
    /// Rows of a file; the last one may have fewer. At least 1.
    pub piece_rows: u64,
}

impl Form {
    /// How many files have them.
    pub(super) fn pieces(&self) -> u64 {
        self.rows.div_ceil(self.piece_rows)
    }

    /// The rows of a file.
    pub(super) fn rows_of(&self, piece: u64) -> Range<u64> {
        let first = piece * self.piece_rows;
        first..self.rows.min(first + self.piece_rows)
    }

    /// Bytes that the rows of a file take.
    pub(super) fn bytes_of(&self, piece: u64) -> u64 {
        let rows = self.rows_of(piece);
        (rows.end - rows.start) * self.row_bytes
    }

    /// Blocks of rows of a file.
    pub(super) fn blocks_of(&self, piece: u64) -> u64 {
        Checks::blocks(self.bytes_of(piece))
    }

    /// Whether it is one that can be stored.
    pub(super) fn is_sound(&self) -> bool {
        self.rows > 0
            && self.rows < 1 << 48
            && self.piece_rows > 0
            && self.row_bytes.is_multiple_of(8)
            && self.row_bytes <= 1 << 30
            && (1..=self.row_bytes).contains(&self.value_bytes)
            && self.piece_rows.checked_mul(self.row_bytes).is_some()
            && self.rows.checked_mul(self.row_bytes).is_some()
    }
}

/// Up to whole blocks.
pub(super) fn whole_blocks(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK_BYTES)
}
