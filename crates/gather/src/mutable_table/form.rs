//! `Form`: number and size of a table's rows, and their division into files.

use std::ops::Range;

use crate::table::checks::{BLOCK_BYTES, Checks};

/// The fixed properties of a mutable table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// Number of rows, at least 1.
    pub rows: u64,
    /// Bytes of a row in its file, a multiple of 8.
    pub row_bytes: u64,
    /// Bytes of a row's values, which come first.
    pub value_bytes: u64,
    /// Rows of a piece, at least 1; the last piece may have fewer.
    pub piece_rows: u64,
}

impl Form {
    /// Number of pieces.
    pub(super) fn pieces(&self) -> u64 {
        self.rows.div_ceil(self.piece_rows)
    }

    /// The rows of a piece.
    pub(super) fn rows_of(&self, piece: u64) -> Range<u64> {
        let first = piece * self.piece_rows;
        first..self.rows.min(first + self.piece_rows)
    }

    /// Bytes of the rows of a piece.
    pub(super) fn bytes_of(&self, piece: u64) -> u64 {
        let rows = self.rows_of(piece);
        (rows.end - rows.start) * self.row_bytes
    }

    /// Number of blocks of a piece's rows.
    pub(super) fn blocks_of(&self, piece: u64) -> u64 {
        Checks::blocks(self.bytes_of(piece))
    }

    /// Whether it can be stored.
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

/// Rounds up to whole blocks.
pub(super) fn whole_blocks(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK_BYTES)
}
