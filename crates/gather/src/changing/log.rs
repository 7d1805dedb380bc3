//! A log: frames, one behind the other, in a file of its own.
//!
//! A block that says which log it is, a block with a mark, frames. The mark says how far the log was
//! durable when it was written, which is after that: with it, a frame that is missing because a power
//! cut tore what nobody was told of is not taken for one that was told of and is damaged.

use std::path::Path;
use std::sync::Arc;

use crc_fast::CrcAlgorithm::Crc64Nvme;
use penstock_io::buffer::Memory;
use penstock_io::executor::Transfer;
use penstock_io::file::File;
use penstock_io::file_system::Change;

use super::form::Form;
use super::frame::{self, Expected};
use super::storage::{Storage, target};
use crate::checks::{BLOCK_BYTES, Checks};
use crate::error::{Error, Result};
use crate::table::{Segment, Table};

const MAGIC: &[u8; 8] = b"PSTKLOGF";
const MARK_MAGIC: &[u8; 8] = b"PSTKMARK";

/// Where the mark is.
const MARK_AT: u64 = BLOCK_BYTES;

/// Where the first frame begins.
pub(super) const FIRST: u64 = 2 * BLOCK_BYTES;

/// Rows may begin at multiples of so many bytes.
pub(super) const STEP_BYTES: u64 = 8;

/// A log's file, and what is known of it.
#[derive(Debug)]
pub(super) struct Log {
    /// Of the file.
    pub(super) number: u64,
    /// Of this very log.
    pub(super) id: u64,
    /// The sequence of its first frame.
    pub(super) first_sequence: u64,
    /// Bytes that it has room for, or has.
    pub(super) capacity: u64,
    file: Arc<File>,
    /// Of the blocks of frames, once they are there.
    pub(super) checks: Arc<Checks>,
}

/// Up to where a log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reached {
    /// Where the next frame would begin.
    pub(super) end: u64,
    /// Its sequence.
    pub(super) sequence: u64,
}

impl Log {
    /// Makes a new log, durable but for its name.
    pub(super) fn create(
        storage: &Storage,
        path: &Path,
        number: u64,
        row_bytes: u64,
        first_sequence: u64,
        capacity: u64,
    ) -> Result<Log> {
        let id = uuid::Uuid::new_v4().as_u64_pair().0;
        let mut memory = Memory::allocate(BLOCK_BYTES as usize)?;
        set(
            memory.as_mut_slice(),
            MAGIC,
            &[number, id, first_sequence, row_bytes, capacity],
        );
        let file = storage.create(path)?;
        storage.change(Change::Allocate(&file, capacity))?;
        storage
            .write(&file, 0, &Arc::new(memory), BLOCK_BYTES)?
            .wait(None)?;
        storage.change(Change::SyncData(&file))?;
        Ok(Log {
            number,
            id,
            first_sequence,
            capacity,
            file,
            checks: Arc::new(Checks::unknown(capacity / BLOCK_BYTES)),
        })
    }

    /// Opens a log that somebody has left.
    pub(super) fn open(storage: &Storage, path: &Path, number: u64, row_bytes: u64) -> Result<Log> {
        let file = storage.open(path)?;
        let broken = |detail: &str| Error::Broken {
            path: path.to_owned(),
            detail: detail.to_owned(),
        };
        let bytes = file.len()?;
        if bytes < FIRST || !bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(broken("it is cut off"));
        }
        let block = storage.bytes(&file, 0, BLOCK_BYTES)?;
        let Some([found, id, first_sequence, of_row, _]) = get(block.as_slice(), MAGIC) else {
            return Err(broken("its first block is not what was written"));
        };
        if found != number || of_row != row_bytes {
            return Err(broken("it is another log"));
        }
        Ok(Log {
            number,
            id,
            first_sequence,
            capacity: bytes,
            file,
            checks: Arc::new(Checks::unknown(bytes / BLOCK_BYTES)),
        })
    }

    /// Its rows, by where they begin, in steps.
    pub(super) fn table(&self, storage: &Storage, form: &Form) -> Result<Table> {
        let segment = Segment {
            target: target(&storage.open(self.file.path())?),
            offset: 0,
            rows: (self.capacity - form.row_bytes) / STEP_BYTES + 1,
            checks: Some(Arc::clone(&self.checks)),
        };
        let Form {
            row_bytes,
            value_bytes,
            ..
        } = *form;
        Ok(Table::stepped(
            vec![segment],
            STEP_BYTES,
            row_bytes,
            value_bytes,
        ))
    }

    /// Begins to write a frame.
    pub(super) fn append(
        &self,
        storage: &Storage,
        begin: u64,
        memory: &Arc<Memory>,
        bytes: u64,
    ) -> Result<Transfer> {
        let frame = &memory.as_slice()[..bytes as usize];
        self.checks.note(begin / BLOCK_BYTES, frame);
        storage.write(&self.file, begin, memory, bytes)
    }

    /// Makes durable what was written.
    pub(super) fn sync(&self, storage: &Storage) -> Result<()> {
        storage.change(Change::SyncData(&self.file))
    }

    /// Begins to write down how far the log is durable.
    pub(super) fn mark(&self, storage: &Storage, reached: Reached) -> Result<Transfer> {
        let mut memory = Memory::allocate(BLOCK_BYTES as usize)?;
        let Reached { end, sequence } = reached;
        set(
            memory.as_mut_slice(),
            MARK_MAGIC,
            &[self.id, end, sequence, 0, 0],
        );
        storage.write(&self.file, MARK_AT, &Arc::new(memory), BLOCK_BYTES)
    }

    /// Gives back room behind the last frame of a log that nothing is appended to any more.
    pub(super) fn cut(&self, storage: &Storage, end: u64) -> Result<()> {
        storage.change(Change::Truncate(&self.file, end))
    }

    /// Reads the frames up to the first that is not whole, or to an end that is known.
    ///
    /// # Arguments
    /// `row` is called with the id of each row and where it begins, oldest first.
    ///
    /// # Errors
    /// [`Error::Broken`] where frames are missing that are known to have been there.
    pub(super) fn replay(
        &self,
        storage: &Storage,
        row_bytes: u64,
        end: Option<u64>,
        mut row: impl FnMut(u64, u64),
    ) -> Result<Reached> {
        let mut reached = Reached {
            end: FIRST,
            sequence: self.first_sequence,
        };
        let last = end.unwrap_or(self.capacity).min(self.capacity);
        while let Some(bytes) = self.replay_frame(storage, row_bytes, reached, last, &mut row)? {
            reached.end += bytes;
            reached.sequence += 1;
        }
        let known = match end {
            Some(end) => end,
            None => self.marked(storage)?.map_or(FIRST, |mark| mark.end),
        };
        if reached.end < known {
            return Err(Error::Broken {
                path: self.file.path().to_owned(),
                detail: format!(
                    "the rows in bytes {} to {} are not those that were written",
                    reached.end,
                    known - 1
                ),
            });
        }
        Ok(reached)
    }

    fn replay_frame(
        &self,
        storage: &Storage,
        row_bytes: u64,
        at: Reached,
        last: u64,
        row: &mut impl FnMut(u64, u64),
    ) -> Result<Option<u64>> {
        if last - at.end < BLOCK_BYTES {
            return Ok(None);
        }
        let expected = Expected {
            log: self.id,
            sequence: at.sequence,
            begin: at.end,
            row_bytes,
        };
        let block = storage.bytes(&self.file, at.end, BLOCK_BYTES)?;
        let Some(bytes) = frame::bytes_after(block.as_slice(), expected) else {
            return Ok(None);
        };
        if bytes > last - at.end {
            return Ok(None);
        }
        let mut memory = storage.bytes(&self.file, at.end, bytes)?;
        let Some(rows) = frame::rows_in(memory.as_mut_slice(), expected) else {
            return Ok(None);
        };
        self.checks.note(at.end / BLOCK_BYTES, memory.as_slice());
        for (id, place) in rows {
            row(id, place);
        }
        Ok(Some(bytes))
    }

    /// How far it was durable at least; `None` where no mark is there, or none that is whole.
    fn marked(&self, storage: &Storage) -> Result<Option<Reached>> {
        let block = storage.bytes(&self.file, MARK_AT, BLOCK_BYTES)?;
        let mark = get(block.as_slice(), MARK_MAGIC);
        let mark = mark.filter(|[log, ..]| *log == self.id);
        Ok(mark.map(|[_, end, sequence, _, _]| Reached { end, sequence }))
    }
}

/// Writes numbers at the beginning of a block, with what they are and a checksum: within a sector.
fn set(block: &mut [u8], magic: &[u8; 8], numbers: &[u64; 5]) {
    let words = block.as_chunks_mut::<8>().0;
    words[0] = *magic;
    for (word, number) in words[1..].iter_mut().zip(numbers) {
        *word = number.to_le_bytes();
    }
    let sum = crc_fast::checksum(Crc64Nvme, words[..6].as_flattened());
    words[6] = sum.to_le_bytes();
}

fn get(block: &[u8], magic: &[u8; 8]) -> Option<[u64; 5]> {
    let words = block.as_chunks::<8>().0;
    let sum = crc_fast::checksum(Crc64Nvme, words[..6].as_flattened());
    if words[0] != *magic || words[6] != sum.to_le_bytes() {
        return None;
    }
    Some(std::array::from_fn(|at| u64::from_le_bytes(words[1 + at])))
}
