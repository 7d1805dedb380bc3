//! Rows that were written anew, put back into pieces; and all rows as they were at one moment.

use std::collections::BTreeMap;
use std::sync::Arc;

use penstock_io::buffer::Memory;
use penstock_io::file_system::Change;
use penstock_io::trace;

use super::append::Writer;
use super::core::{Core, Held};
use super::head::{log_path, piece_path};
use super::newest::Sealed;
use super::piece;
use crate::batch::Batch;
use crate::checks::BLOCK_BYTES;
use crate::error::{Error, Result};
use crate::lookup::{How, carve};
use crate::requests::Missing;
use crate::shared::{Shared, key_of};
use crate::state::Place;
use crate::table::Segment;

/// All rows as they were at one moment. While it is there, nothing else is folded.
#[derive(Debug)]
pub struct Frozen {
    core: Arc<Core>,
    sealed: Sealed,
    /// Ids that were written anew, in order.
    ids: Vec<u64>,
    pieces: Vec<Segment>,
    /// The logs that have what was written anew, by number.
    logs: BTreeMap<u64, Arc<Shared>>,
    _held: Held,
}

/// What a fold did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Folded {
    /// Rows that were put back.
    pub rows: u64,
    /// Pieces that were written for it.
    pub pieces: u64,
    /// Bytes of these.
    pub bytes: u64,
}

impl Frozen {
    /// Has all rows stay as they are now; those to come go to another log.
    pub(super) fn new(core: &Arc<Core>, held: Held, writer: &mut Writer) -> Result<Frozen> {
        writer.close_log(core)?;
        let numbers: Vec<u64> = core.head().closed.iter().map(|one| one.number).collect();
        let mut inner = core.inner();
        let sealed = inner.newest.seal();
        let log = |number| (number, Arc::clone(&inner.logs[&number]));
        let logs = numbers.into_iter().map(log).collect();
        let pieces = inner.pieces.clone();
        drop(inner);
        let mut ids: Vec<u64> = sealed.keys().copied().collect();
        ids.sort_unstable();
        Ok(Frozen {
            core: Arc::clone(core),
            sealed,
            ids,
            pieces,
            logs,
            _held: held,
        })
    }

    /// How many pieces the rows are cut into.
    pub fn pieces(&self) -> u64 {
        self.core.form.pieces()
    }

    /// The rows of a piece, as they lie in files, and more memory behind them.
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
        let (newest, width) = (self.read_logs(written)?, form.value_bytes as usize);
        let bytes = memory.as_mut_slice();
        for (row, id) in newest.as_slice().chunks_exact(width).zip(written) {
            let at = ((id - rows.start) * form.row_bytes) as usize;
            bytes[at..at + width].copy_from_slice(row);
        }
        Ok(memory)
    }

    /// A piece as it is in its file, compared with its checksums.
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

    /// The values of rows that were written anew, one behind the other.
    fn read_logs(&self, ids: &[u64]) -> Result<Memory> {
        let width = self.core.form.value_bytes as usize;
        let (handle, out) = Memory::allocate(ids.len() * width)?.share();
        let positions: Vec<usize> = (0..ids.len()).collect();
        let mut by_log: BTreeMap<u64, Vec<Missing>> = BTreeMap::new();
        for (id, memory) in ids.iter().zip(carve(out, width, &positions)) {
            let address = self.sealed[id];
            let place = Place {
                row: address.step(),
                key: key_of(self.core.number, *id),
                memory,
            };
            let how = How::Read(None);
            let those = by_log.entry(address.log()).or_default();
            those.push(Missing { place, how });
        }
        let begin = |(log, missing): (u64, Vec<Missing>)| self.logs[&log].begin(missing);
        let begun = by_log.into_iter().map(begin).collect::<Result<_>>()?;
        Batch::of_all(begun).wait(None)?;
        Ok(handle.reclaim().expect("the batch has ended"))
    }

    /// Puts rows that were written anew back into pieces, and lets go of their logs.
    ///
    /// Each piece that has some is written anew and committed on its own: what ends halfway leaves a
    /// table that is whole, and is done again.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Io`].
    pub fn fold(self) -> Result<Folded> {
        let form = &self.core.form;
        let mut folded = Folded::default();
        let mut ids = &self.ids[..];
        while let Some(&first) = ids.first() {
            let piece = first / form.piece_rows;
            let end = form.rows_of(piece).end;
            let (here, rest) = ids.split_at(ids.partition_point(|&id| id < end));
            self.fold_piece(piece)?;
            folded.rows += here.len() as u64;
            folded.pieces += 1;
            folded.bytes += form.bytes_of(piece);
            ids = rest;
        }
        self.let_go()?;
        Ok(folded)
    }

    /// Writes a piece anew, and has it take the place of the one that was.
    fn fold_piece(&self, piece: u64) -> Result<()> {
        let _span = trace::span("fold");
        let core = &*self.core;
        let memory = self.rows_of(piece)?;
        let number = core.head().take_piece();
        let path = piece_path(&core.home, number);
        piece::write(&core.storage, &path, &core.form, piece, memory)?;
        let segment = core.open_piece(piece, number)?;
        let mut head = core.head();
        let mut next = head.clone();
        let old = std::mem::replace(&mut next.pieces[piece as usize], number);
        next.commit(&core.home, &*core.storage.file_system)?;
        *head = next;
        let mut inner = core.inner();
        inner.pieces[piece as usize] = segment;
        inner.base = core.shared_of_pieces(&inner.pieces);
        drop(inner);
        let path = piece_path(&core.home, old);
        core.storage.change(Change::RemoveFile(&path))
    }

    /// What was written anew is in pieces now: nobody needs its logs.
    fn let_go(&self) -> Result<()> {
        let core = &*self.core;
        let mut head = core.head();
        let mut next = head.clone();
        next.closed
            .retain(|one| !self.logs.contains_key(&one.number));
        next.commit(&core.home, &*core.storage.file_system)?;
        *head = next;
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
