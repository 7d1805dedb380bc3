//! A record of a log: rows written together, with their ids. One checksum covers all of it, so it
//! is valid as a whole or not at all.
//!
//! Layout: a block with the header, and the ids if they fit; the rows, padded to whole blocks; the
//! ids if they did not fit, padded to whole blocks.

use std::ops::Range;

use crc_fast::CrcAlgorithm::Crc64Nvme;
use penstock_io::buffer::{HostRegion, Memory};

use super::form::whole_blocks;
use crate::table::checks::BLOCK_BYTES;

const MAGIC: &[u8; 8] = b"PSTKFRAM";
const RECORD_HEADER_BYTES: usize = 64;
const SUM_AT: usize = RECORD_HEADER_BYTES - 8;
const IDS_INSIDE_MAX: u64 = (BLOCK_BYTES - RECORD_HEADER_BYTES as u64) / 8;

/// Header fields that identify the expected record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Expected {
    /// Id of the log.
    pub(super) log: u64,
    /// Number of records of the table before it.
    pub(super) sequence: u64,
    /// Where in the log it begins, in bytes.
    pub(super) begin: u64,
    /// Bytes of a row.
    pub(super) row_bytes: u64,
}

/// Positions within a record.
#[derive(Clone, Copy)]
struct Layout {
    rows: u64,
    rows_end: u64,
    ids_at: u64,
    bytes: u64,
}

impl Layout {
    fn of(rows: u64, row_bytes: u64) -> Layout {
        let rows_end = BLOCK_BYTES + rows * row_bytes;
        let (ids_at, bytes) = match rows <= IDS_INSIDE_MAX {
            true => (RECORD_HEADER_BYTES as u64, whole_blocks(rows_end)),
            false => {
                let at = whole_blocks(rows_end);
                (at, whole_blocks(at + 8 * rows))
            }
        };
        Layout {
            rows,
            rows_end,
            ids_at,
            bytes,
        }
    }

    fn ids(&self) -> Range<usize> {
        self.ids_at as usize..(self.ids_at + 8 * self.rows) as usize
    }
}

/// Bytes of a record with so many rows.
pub(super) fn bytes_of(rows: u64, row_bytes: u64) -> u64 {
    Layout::of(rows, row_bytes).bytes
}

/// Rows that fit into a record of so many bytes.
pub(super) fn rows_within(bytes: u64, row_bytes: u64) -> u64 {
    let mut rows = bytes.saturating_sub(BLOCK_BYTES) / row_bytes;
    while rows > 0 && bytes_of(rows, row_bytes) > bytes {
        rows -= 1;
    }
    rows
}

/// A record that is being filled.
#[derive(Debug)]
pub(super) struct Filling {
    memory: Memory,
    ids: Vec<u64>,
    rows_max: u64,
    row_bytes: u64,
    /// Where in the log it begins, in bytes.
    pub(super) begin: u64,
}

impl Filling {
    /// A record of at most `rows_max` rows, in memory that has room for them.
    pub(super) fn new(memory: Memory, begin: u64, rows_max: u64, row_bytes: u64) -> Filling {
        Filling {
            memory,
            ids: Vec::new(),
            rows_max,
            row_bytes,
            begin,
        }
    }

    /// How many more rows fit.
    pub(super) fn room(&self) -> u64 {
        self.rows_max - self.ids.len() as u64
    }

    /// Adds a row of `bytes` bytes from `start` in `rows`.
    ///
    /// # Returns
    /// Where in the log it is, in bytes.
    pub(super) fn push(&mut self, id: u64, rows: &HostRegion, start: u64, bytes: usize) -> u64 {
        let at = BLOCK_BYTES + self.ids.len() as u64 * self.row_bytes;
        let row = &mut self.memory.as_mut_slice()[at as usize..(at + self.row_bytes) as usize];
        rows.copy_to(start, &mut row[..bytes]);
        row[bytes..].fill(0);
        self.ids.push(id);
        self.begin + at
    }

    /// Its bytes from a position in the log on.
    pub(super) fn bytes_at(&self, place: u64) -> &[u8] {
        &self.memory.as_slice()[(place - self.begin) as usize..]
    }

    /// Completes the record.
    ///
    /// # Returns
    /// The memory, and the bytes of the record in it.
    pub(super) fn seal(mut self, log: u64, sequence: u64) -> (Memory, u64) {
        let layout = Layout::of(self.ids.len() as u64, self.row_bytes);
        let bytes = &mut self.memory.as_mut_slice()[..layout.bytes as usize];
        bytes[..BLOCK_BYTES as usize].fill(0);
        bytes[layout.rows_end as usize..].fill(0);
        let ids = &mut bytes[layout.ids()];
        for (word, id) in ids.as_chunks_mut::<8>().0.iter_mut().zip(&self.ids) {
            *word = id.to_le_bytes();
        }
        let manifest = [
            u64::from_le_bytes(*MAGIC),
            log,
            sequence,
            self.begin,
            layout.rows,
            self.row_bytes,
            layout.bytes,
        ];
        for (word, number) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(manifest) {
            *word = number.to_le_bytes();
        }
        let sum = crc_fast::checksum(Crc64Nvme, bytes);
        bytes[SUM_AT..RECORD_HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
        (self.memory, layout.bytes)
    }

    /// Whether it has no rows.
    pub(super) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Its memory, discarding the record.
    pub(super) fn into_memory(self) -> Memory {
        self.memory
    }
}

/// The size in bytes of the record that begins with this block; `None` if it is not the expected
/// one.
pub(super) fn bytes_after(block: &[u8], expected: Expected) -> Option<u64> {
    let words = block.as_chunks::<8>().0;
    let word = |at: usize| u64::from_le_bytes(words[at]);
    let found = Expected {
        log: word(1),
        sequence: word(2),
        begin: word(3),
        row_bytes: word(5),
    };
    let rows = word(4);
    if word(0) != u64::from_le_bytes(*MAGIC) || found != expected || rows == 0 || rows >= 1 << 32 {
        return None;
    }
    let bytes = bytes_of(rows, expected.row_bytes);
    (bytes == word(6)).then_some(bytes)
}

/// The ids of a complete record's rows, and where each row begins in the log; `None` if the
/// checksum does not match.
pub(super) fn rows_in(bytes: &mut [u8], expected: Expected) -> Option<Vec<(u64, u64)>> {
    let rows = u64::from_le_bytes(bytes.as_chunks::<8>().0[4]);
    let layout = Layout::of(rows, expected.row_bytes);
    let sum = bytes[SUM_AT..RECORD_HEADER_BYTES].to_vec();
    bytes[SUM_AT..RECORD_HEADER_BYTES].fill(0);
    let found = crc_fast::checksum(Crc64Nvme, bytes).to_le_bytes();
    bytes[SUM_AT..RECORD_HEADER_BYTES].copy_from_slice(&sum);
    if found[..] != sum[..] {
        return None;
    }
    let ids = bytes[layout.ids()].as_chunks::<8>().0.iter();
    let place = |index: u64| expected.begin + BLOCK_BYTES + index * expected.row_bytes;
    let row = |(index, id): (u64, &[u8; 8])| (u64::from_le_bytes(*id), place(index));
    Some((0..).zip(ids).map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sealed_is_read_back_and_nothing_else() {
        for rows in [1, 7, 504, 505, 2000_u64] {
            let row_bytes = 24;
            let memory = Memory::allocate(bytes_of(rows, row_bytes) as usize).unwrap();
            let mut filling = Filling::new(memory, 8192, rows, row_bytes);
            let source = std::sync::Arc::new(Memory::allocate(24).unwrap());
            let region = HostRegion::within(&source, 0..24);
            for id in 0..rows {
                filling.push(3 * id, &region, 0, 20);
            }
            assert_eq!(filling.room(), 0);
            let (mut memory, bytes) = filling.seal(5, 9);
            let record = &mut memory.as_mut_slice()[..bytes as usize];
            let expected = Expected {
                log: 5,
                sequence: 9,
                begin: 8192,
                row_bytes,
            };
            assert_eq!(bytes_after(record, expected), Some(bytes));
            let found = rows_in(record, expected).unwrap();
            assert_eq!(found.len() as u64, rows);
            assert_eq!(found[rows as usize - 1].0, 3 * (rows - 1));
            for other in [
                Expected { log: 6, ..expected },
                Expected {
                    sequence: 8,
                    ..expected
                },
                Expected {
                    begin: 4096,
                    ..expected
                },
                Expected {
                    row_bytes: 16,
                    ..expected
                },
            ] {
                assert_eq!(bytes_after(record, other), None);
            }
            for at in [0, 57, 64, 4096, bytes as usize - 1] {
                record[at] ^= 1;
                assert!(at < 8 || rows_in(record, expected).is_none(), "byte {at}");
                record[at] ^= 1;
            }
            let fitting = rows_within(bytes, row_bytes);
            assert!(fitting >= rows && bytes_of(fitting, row_bytes) <= bytes);
        }
    }
}
