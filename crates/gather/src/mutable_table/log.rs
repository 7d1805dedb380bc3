//! A log: a file of consecutive records.
//!
//! Layout: a block that identifies the log, a block with the mark, records. The mark is written
//! after a sync and says up to where the log was durable. It distinguishes a missing record that
//! was never acknowledged, because a power cut tore it, from a damaged one that was.

use std::path::Path;
use std::sync::Arc;

use crc_fast::CrcAlgorithm::Crc64Nvme;
use penstock_io::buffer::Memory;
use penstock_io::executor::Transfer;
use penstock_io::file::File;
use penstock_io::file_system::Change;

use super::form::Form;
use super::record::{self, Expected};
use super::storage::{Storage, target};
use crate::error::{Error, Result};
use crate::table::checks::{BLOCK_BYTES, Checks};
use crate::table::{Segment, Table};

const MAGIC: &[u8; 8] = b"PSTKLOGF";
const MARK_MAGIC: &[u8; 8] = b"PSTKMARK";

/// Where the mark is, in bytes.
const MARK_AT: u64 = BLOCK_BYTES;

/// Where the first record begins, in bytes.
pub(super) const FIRST: u64 = 2 * BLOCK_BYTES;

/// Rows begin at multiples of this many bytes.
pub(super) const STEP_BYTES: u64 = 8;

/// Identifies a log of a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named {
    pub(super) table: u64,
    /// Its file number.
    pub(super) number: u64,
}

/// A log's file and properties.
#[derive(Debug)]
pub(super) struct Log {
    /// Its file number.
    pub(super) number: u64,
    /// A random identifier of this log.
    pub(super) id: u64,
    /// The sequence number of its first record.
    pub(super) first_sequence: u64,
    /// Its size in bytes, including room for more records.
    pub(super) capacity: u64,
    file: Arc<File>,
    /// Checksums of the records' blocks, set as they are written or read.
    pub(super) checks: Arc<Checks>,
}

/// The end of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reached {
    /// Where the next record would begin, in bytes.
    pub(super) end: u64,
    /// Its sequence number.
    pub(super) sequence: u64,
}

impl Log {
    /// Creates a new log, durable except for its name.
    pub(super) fn create(
        storage: &Storage,
        path: &Path,
        named: Named,
        row_bytes: u64,
        first_sequence: u64,
        capacity: u64,
    ) -> Result<Log> {
        let Named { table, number } = named;
        let id = uuid::Uuid::new_v4().as_u64_pair().0;
        let mut memory = Memory::allocate(BLOCK_BYTES as usize)?;
        set(
            memory.as_mut_slice(),
            MAGIC,
            &[number, id, first_sequence, row_bytes, capacity, table],
        );
        let file = storage.make(path, |file| {
            storage.reserve(file, capacity)?;
            let written = storage.write(file, 0, &Arc::new(memory), BLOCK_BYTES)?;
            written.wait(None)?;
            storage.change(Change::SyncData(file))?;
            Ok(Arc::clone(file))
        })?;
        Ok(Log {
            number,
            id,
            first_sequence,
            capacity,
            file,
            checks: Arc::new(Checks::unknown(capacity / BLOCK_BYTES)),
        })
    }

    /// Opens an existing log.
    pub(super) fn open(
        storage: &Storage,
        path: &Path,
        named: Named,
        row_bytes: u64,
    ) -> Result<Log> {
        let file = storage.open(path)?;
        if !file.is_direct() {
            // After a failed sync the page cache may still show bytes that are not on the device.
            file.drop_cache()?;
        }
        let broken = |detail: &str| Error::Broken {
            path: path.to_owned(),
            detail: detail.to_owned(),
        };
        let bytes = file.len()?;
        if bytes < FIRST || !bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(broken("it is cut off"));
        }
        let block = storage.bytes(&file, 0, BLOCK_BYTES)?;
        let Some([found, id, first_sequence, of_row, _, table]) = get(block.as_slice(), MAGIC)
        else {
            return Err(broken("its first block is not what was written"));
        };
        if (table, found, of_row) != (named.table, named.number, row_bytes) {
            return Err(broken("it is another log"));
        }
        Ok(Log {
            number: named.number,
            id,
            first_sequence,
            capacity: bytes,
            file,
            checks: Arc::new(Checks::unknown(bytes / BLOCK_BYTES)),
        })
    }

    /// The log as a table whose rows are numbered by position in steps of [`STEP_BYTES`].
    pub(super) fn table(&self, storage: &Storage, form: &Form) -> Result<Table> {
        let segment = Segment {
            target: target(&storage.open(self.file.path())?),
            offset: 0,
            rows: (self.capacity - form.row_bytes) / STEP_BYTES + 1,
            checks: Some(Arc::clone(&self.checks)),
            opener: None,
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

    /// Begins to write a record.
    pub(super) fn append(
        &self,
        storage: &Storage,
        begin: u64,
        memory: &Arc<Memory>,
        bytes: u64,
    ) -> Result<Transfer> {
        let record = &memory.as_slice()[..bytes as usize];
        self.checks.note(begin / BLOCK_BYTES, record);
        storage.write(&self.file, begin, memory, bytes)
    }

    /// Makes all written records durable.
    pub(super) fn sync(&self, storage: &Storage) -> Result<()> {
        storage.change(Change::SyncData(&self.file))
    }

    /// Begins to write the mark.
    pub(super) fn mark(&self, storage: &Storage, reached: Reached) -> Result<Transfer> {
        let mut memory = Memory::allocate(BLOCK_BYTES as usize)?;
        let Reached { end, sequence } = reached;
        set(
            memory.as_mut_slice(),
            MARK_MAGIC,
            &[self.id, end, sequence, 0, 0, 0],
        );
        storage.write(&self.file, MARK_AT, &Arc::new(memory), BLOCK_BYTES)
    }

    /// Releases the room after the last record of a closed log.
    pub(super) fn cut(&self, storage: &Storage, end: u64) -> Result<()> {
        storage.change(Change::Truncate(&self.file, end))
    }

    /// Reads the records up to the first invalid one, or to a known end.
    ///
    /// # Arguments
    /// `row` is called with the id of each row and where it begins, oldest first.
    ///
    /// # Errors
    /// [`Error::Broken`] if records are missing that the mark or the end covers.
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
        let mut ahead = Ahead {
            storage,
            file: &self.file,
            begin: 0,
            memory: Memory::allocate(0)?,
            last,
        };
        while let Some(bytes) = self.replay_record(&mut ahead, row_bytes, reached, &mut row)? {
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

    fn replay_record(
        &self,
        ahead: &mut Ahead<'_>,
        row_bytes: u64,
        at: Reached,
        row: &mut impl FnMut(u64, u64),
    ) -> Result<Option<u64>> {
        let expected = Expected {
            log: self.id,
            sequence: at.sequence,
            begin: at.end,
            row_bytes,
        };
        let Some(block) = ahead.bytes(at.end, BLOCK_BYTES)? else {
            return Ok(None);
        };
        let Some(bytes) = record::bytes_after(block, expected) else {
            return Ok(None);
        };
        let Some(record) = ahead.bytes(at.end, bytes)? else {
            return Ok(None);
        };
        let Some(rows) = record::rows_in(record, expected) else {
            return Ok(None);
        };
        self.checks.note(at.end / BLOCK_BYTES, record);
        for (id, place) in rows {
            row(id, place);
        }
        Ok(Some(bytes))
    }

    /// The end up to which the log was durable; `None` if no mark was written.
    fn marked(&self, storage: &Storage) -> Result<Option<Reached>> {
        let block = storage.bytes(&self.file, MARK_AT, BLOCK_BYTES)?;
        if block.as_slice().iter().all(|&byte| byte == 0) {
            return Ok(None);
        }
        match get(block.as_slice(), MARK_MAGIC) {
            Some([log, end, sequence, ..]) if log == self.id => Ok(Some(Reached { end, sequence })),
            _ => Err(Error::Broken {
                path: self.file.path().to_owned(),
                detail: "its mark is not what was written".to_owned(),
            }),
        }
    }
}

/// Reads a log from its beginning, with readahead.
struct Ahead<'a> {
    storage: &'a Storage,
    file: &'a Arc<File>,
    /// Where in the file the memory begins.
    begin: u64,
    memory: Memory,
    /// The end of the log.
    last: u64,
}

/// Bytes of one read.
const AHEAD_BYTES: u64 = 8 << 20;

impl Ahead<'_> {
    /// Bytes from a position on; `None` beyond the end.
    fn bytes(&mut self, at: u64, bytes: u64) -> Result<Option<&mut [u8]>> {
        if self.last < at || self.last - at < bytes {
            return Ok(None);
        }
        if at < self.begin || at + bytes > self.begin + self.memory.len() as u64 {
            let more = bytes.max(AHEAD_BYTES).min(self.last - at);
            self.memory = self.storage.bytes(self.file, at, more)?;
            self.begin = at;
        }
        let from = (at - self.begin) as usize;
        let memory = self.memory.as_mut_slice();
        Ok(Some(&mut memory[from..from + bytes as usize]))
    }
}

/// Writes numbers at the beginning of a block, with a magic and a checksum, all within one sector.
fn set(block: &mut [u8], magic: &[u8; 8], numbers: &[u64; 6]) {
    let words = block.as_chunks_mut::<8>().0;
    words[0] = *magic;
    for (word, number) in words[1..].iter_mut().zip(numbers) {
        *word = number.to_le_bytes();
    }
    let sum = crc_fast::checksum(Crc64Nvme, words[..7].as_flattened());
    words[7] = sum.to_le_bytes();
}

fn get(block: &[u8], magic: &[u8; 8]) -> Option<[u64; 6]> {
    let words = block.as_chunks::<8>().0;
    let sum = crc_fast::checksum(Crc64Nvme, words[..7].as_flattened());
    if words[0] != *magic || words[7] != sum.to_le_bytes() {
        return None;
    }
    Some(std::array::from_fn(|at| u64::from_le_bytes(words[1 + at])))
}
