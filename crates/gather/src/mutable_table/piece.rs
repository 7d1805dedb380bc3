//! A piece: a file with a range of rows, their checksums, and a trailer that marks it complete. It
//! is never modified, only replaced by another file.
//!
//! Layout: rows, padded to whole blocks; a checksum for each of these blocks, padded to whole
//! blocks; a block with the trailer.

use std::path::Path;
use std::sync::Arc;

use crc_fast::CrcAlgorithm::Crc64Nvme;
use penstock_io::buffer::Memory;
use penstock_io::file::File;
use penstock_io::file_system::Change;

use super::form::{Form, whole_blocks};
use super::storage::{Storage, target};
use crate::error::{Error, Result};
use crate::table::Segment;
use crate::table::checks::{BLOCK_BYTES, Checks};

const MAGIC: &[u8; 8] = b"PSTKROWS";

/// Identifies a piece of a table.
#[derive(Clone, Copy)]
pub(super) struct Of<'a> {
    pub(super) table: u64,
    pub(super) form: &'a Form,
    pub(super) piece: u64,
}

/// Positions within a piece.
#[derive(Clone, Copy)]
struct Layout {
    rows_bytes: u64,
    sums_at: u64,
    sums: u64,
    end_at: u64,
    bytes: u64,
}

impl Layout {
    fn of(form: &Form, piece: u64) -> Layout {
        let rows_bytes = form.bytes_of(piece);
        let sums = form.blocks_of(piece);
        let sums_at = whole_blocks(rows_bytes);
        let end_at = sums_at + whole_blocks(4 * sums);
        Layout {
            rows_bytes,
            sums_at,
            sums,
            end_at,
            bytes: end_at + BLOCK_BYTES,
        }
    }
}

/// Bytes of a piece's file.
pub(super) fn file_bytes(form: &Form, piece: u64) -> u64 {
    Layout::of(form, piece).bytes
}

/// Writes a piece, durable except for its name.
///
/// # Arguments
/// `memory` has the size of the whole file, and its rows are set.
pub(super) fn write(storage: &Storage, path: &Path, of: Of<'_>, mut memory: Memory) -> Result<()> {
    let layout = Layout::of(of.form, of.piece);
    let bytes = memory.as_mut_slice();
    assert_eq!(bytes.len() as u64, layout.bytes, "a whole file");
    let (rows, rest) = bytes.split_at_mut(layout.sums_at as usize);
    let rows = &rows[..layout.rows_bytes as usize];
    let sums = rows.chunks(BLOCK_BYTES as usize).map(Checks::of);
    set_end(rest, sums, layout, of);
    storage.make(path, |file| {
        storage.reserve(file, layout.bytes)?;
        let memory = Arc::new(memory);
        storage.write(file, 0, &memory, layout.bytes)?.wait(None)?;
        storage.change(Change::SyncData(file))
    })
}

/// As [`write`], for rows that are all zero, which allocate no storage.
pub(super) fn write_zeros(storage: &Storage, path: &Path, of: Of<'_>) -> Result<()> {
    let layout = Layout::of(of.form, of.piece);
    let mut memory = Memory::allocate((layout.bytes - layout.sums_at) as usize)?;
    let zeros = [0; BLOCK_BYTES as usize];
    let whole = Checks::of(&zeros);
    let last = layout.rows_bytes - (layout.sums - 1) * BLOCK_BYTES;
    let last = Checks::of(&zeros[..last as usize]);
    let sums = (0..layout.sums - 1).map(|_| whole).chain([last]);
    set_end(memory.as_mut_slice(), sums, layout, of);
    storage.make(path, |file| {
        storage.change(Change::Truncate(file, layout.bytes))?;
        let (bytes, memory) = (memory.len() as u64, Arc::new(memory));
        let written = storage.write(file, layout.sums_at, &memory, bytes)?;
        written.wait(None)?;
        storage.change(Change::SyncData(file))
    })
}

/// Writes the checksums and the trailer.
fn set_end(rest: &mut [u8], sums: impl Iterator<Item = u32>, layout: Layout, of: Of<'_>) {
    let words = rest.as_chunks_mut::<4>().0;
    for (word, sum) in words.iter_mut().zip(sums) {
        *word = sum.to_le_bytes();
    }
    let (sums, end) = rest.split_at_mut((layout.end_at - layout.sums_at) as usize);
    end[..END_BYTES].copy_from_slice(&end_of(of, sums));
}

const END_BYTES: usize = 64;

fn end_of(of: Of<'_>, sums: &[u8]) -> [u8; END_BYTES] {
    let mut end = [0; END_BYTES];
    let form = of.form;
    let rows = form.rows_of(of.piece);
    let numbers = [
        of.table,
        rows.start,
        rows.end,
        form.row_bytes,
        form.value_bytes,
        crc_fast::checksum(Crc64Nvme, sums),
    ];
    end[..8].copy_from_slice(MAGIC);
    for (at, number) in numbers.into_iter().enumerate() {
        end[8 + 8 * at..16 + 8 * at].copy_from_slice(&number.to_le_bytes());
    }
    let whole = crc_fast::checksum(Crc64Nvme, &end[..END_BYTES - 8]);
    end[END_BYTES - 8..].copy_from_slice(&whole.to_le_bytes());
    end
}

/// Opens a piece.
///
/// # Errors
/// [`Error::Broken`] if its size, checksums or trailer are not those that were written. Its rows
/// are not read.
pub(super) fn open(storage: &Storage, path: &Path, of: Of<'_>) -> Result<Segment> {
    let layout = Layout::of(of.form, of.piece);
    let file: Arc<File> = storage.open(path)?;
    let broken = |detail: &str| Error::Broken {
        path: path.to_owned(),
        detail: detail.to_owned(),
    };
    if file.len()? != layout.bytes {
        return Err(broken("its length is not that of the piece of the table"));
    }
    let end = storage.bytes(&file, layout.sums_at, layout.bytes - layout.sums_at)?;
    let (sums, end) = end
        .as_slice()
        .split_at((layout.end_at - layout.sums_at) as usize);
    if end[..END_BYTES] != end_of(of, sums) {
        return Err(broken("its end is not what was written for this table"));
    }
    let words = sums.as_chunks::<4>().0.iter();
    let sums = words.map(|word| u32::from_le_bytes(*word));
    let rows = of.form.rows_of(of.piece);
    Ok(Segment {
        target: target(&file),
        offset: 0,
        rows: rows.end - rows.start,
        checks: Some(Arc::new(Checks::new(sums.take(layout.sums as usize)))),
        opener: None,
    })
}
