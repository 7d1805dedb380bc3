//! Opens sealed file bytes that the caller has read itself.
//!
//! The counterpart of `check` for a sealed checkpoint: a caller that reads its files in place again
//! and again opens the chunks after every read. A file sealed by blocks opens by [`FileBlocks`].

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use penstock_io::trace;

use crate::error::{Error, Result};
use crate::format::digest::{CHUNK_BYTES, Digest};
use crate::format::part::FileOpener;
use crate::load::check::threads_for;
use crate::load::checkpoint::Checkpoint;
use crate::pipeline::damage::Damage;
use crate::seal::{BlockOpener, FileSeal, ShardOpener};

impl Checkpoint {
    /// Opens whole chunks of a sealed file in place.
    ///
    /// `pieces` hold the bytes of the file from `start` on, in order, and have their text
    /// afterwards. Digests are not compared: after an error, read the bytes again and
    /// [`check`](Checkpoint::check) them, which tells damage from tampering.
    ///
    /// # Errors
    /// [`Error::Tampered`] if a chunk does not open, which then is zeros; others may still be
    /// sealed. An affected tensor in `wanted` is named first. [`Error::Mismatch`] if they are not
    /// whole chunks of a file that is sealed by chunks. [`Error::Sealed`] without identities.
    pub fn open_chunks(
        &self,
        file: &str,
        start: u64,
        pieces: Vec<&mut [u8]>,
        wanted: Range<u64>,
    ) -> Result<()> {
        let _span = trace::span("open sealed");
        let bytes = pieces.iter().map(|piece| piece.len() as u64).sum::<u64>();
        let index = self.whole_chunks(file, start, bytes)?;
        let opener = match self.openers()? {
            Some(openers) => match &openers[index] {
                FileOpener::Chunks(opener) => opener,
                FileOpener::Blocks(_) => return Err(self.read_by_blocks(index)),
            },
            None => return Err(mismatch(file, "it is not sealed")),
        };
        let Some(place) = first_closed(opener, start / CHUNK_BYTES, cut(pieces)) else {
            return Ok(());
        };
        let begin = start + place as u64 * CHUNK_BYTES;
        let damage = Damage {
            file: index,
            range: begin..(begin + CHUNK_BYTES).min(start + bytes),
            byte: None,
            unreadable: None,
            is_tampered: true,
        };
        Err(self.corrupt(index, &damage, &self.tensors_in(index, wanted)))
    }

    /// The seal of a file that is sealed by chunks with a key of its own, as a file of a state that
    /// changes: other checkpoints may link the file with it. `None` if it has no such key.
    ///
    /// # Errors
    /// [`Error::Sealed`] without identities.
    pub fn file_seal(&self, file: &str) -> Result<Option<Arc<FileSeal>>> {
        let index = self
            .part()
            .files
            .iter()
            .position(|entry| entry.name == file);
        let (Some(index), Some(openers)) = (index, self.openers()?) else {
            return Ok(None);
        };
        Ok(match &openers[index] {
            FileOpener::Chunks(opener) => opener.seal().cloned(),
            FileOpener::Blocks(_) => None,
        })
    }

    /// The opener of a file that is sealed by blocks.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if there is no such file, or the number of tags is not that of its
    /// blocks. [`Error::Sealed`] without identities.
    pub fn open_blocks(&self, file: &str, tags: Vec<[u8; 16]>) -> Result<FileBlocks> {
        let files = &self.part().files;
        let index = files.iter().position(|entry| entry.name == file);
        let key = match (index, self.openers()?) {
            (Some(index), Some(openers)) => match &openers[index] {
                FileOpener::Blocks(key) => Some((key, &files[index])),
                FileOpener::Chunks(_) => None,
            },
            _ => None,
        };
        let (key, entry) = key.ok_or_else(|| mismatch(file, "it is not sealed by blocks"))?;
        let opener = BlockOpener::new(key, tags, entry.bytes);
        let opener =
            opener.ok_or_else(|| mismatch(file, "its blocks have another number of tags"))?;
        Ok(FileBlocks {
            opener,
            path: self.path().join(file),
            bytes: entry.bytes,
            chunks: entry.chunks.clone(),
        })
    }

    /// The error of a load of a file that is sealed by blocks.
    pub(super) fn read_by_blocks(&self, file: usize) -> Error {
        let entries = self.part().tensors.iter();
        let inside = entries.filter(|entry| entry.file == file);
        let key = inside.map(|entry| entry.name.clone()).next();
        Error::SealedByBlocks {
            path: self.path().to_owned(),
            key: key.unwrap_or_default(),
        }
    }
}

/// The blocks of a file that is sealed by blocks.
#[derive(Debug)]
pub struct FileBlocks {
    opener: BlockOpener,
    path: PathBuf,
    bytes: u64,
    chunks: Vec<Digest>,
}

impl FileBlocks {
    /// Opens blocks.
    pub fn opener(&self) -> &BlockOpener {
        &self.opener
    }

    /// Whether storage has damaged a block that does not open: the digest of its chunk is wrong, or
    /// it cannot be read. If not, somebody has changed both.
    pub fn is_damaged(&self, block: u64) -> bool {
        let offset = self.opener.header_bytes() + block * self.opener.block_bytes();
        let end = self.bytes.min(offset + self.opener.block_bytes());
        let Ok(file) = File::open(&self.path) else {
            return true;
        };
        // A block may cross the end of a chunk.
        (offset / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES)).any(|chunk| {
            let start = chunk * CHUNK_BYTES;
            let mut bytes = vec![0; CHUNK_BYTES.min(self.bytes - start) as usize];
            let is_read = file.read_exact_at(&mut bytes, start).is_ok();
            !is_read || Digest::of(&bytes) != self.chunks[chunk as usize]
        })
    }
}

fn mismatch(file: &str, detail: &str) -> Error {
    Error::Mismatch {
        key: file.to_owned(),
        detail: detail.to_owned(),
    }
}

/// Groups the pieces by chunk; the first one begins a chunk.
fn cut(pieces: Vec<&mut [u8]>) -> Vec<Vec<&mut [u8]>> {
    let mut chunks: Vec<Vec<&mut [u8]>> = Vec::new();
    let mut room = 0;
    for mut rest in pieces {
        while !rest.is_empty() {
            if room == 0 {
                chunks.push(Vec::new());
                room = CHUNK_BYTES as usize;
            }
            let (now, later) = rest.split_at_mut(rest.len().min(room));
            room -= now.len();
            chunks.last_mut().expect("it was begun").push(now);
            rest = later;
        }
    }
    chunks
}

/// Opens chunks, of which the first has this number in the file; returns the place of the first
/// one that does not open.
fn first_closed(
    opener: &ShardOpener,
    number: u64,
    mut chunks: Vec<Vec<&mut [u8]>>,
) -> Option<usize> {
    let threads = threads_for(chunks.len());
    let share = chunks.len().div_ceil(threads).max(1);
    let closed = AtomicUsize::new(usize::MAX);
    let open_from = |first: usize, chunks: &mut [Vec<&mut [u8]>]| {
        for (place, pieces) in (first..).zip(chunks) {
            if !open(opener, number + place as u64, pieces) {
                closed.fetch_min(place, Ordering::Relaxed);
                return;
            }
        }
    };
    thread::scope(|scope| {
        let mut shares = (0..).step_by(share).zip(chunks.chunks_mut(share));
        let own = shares.next();
        for (first, chunks) in shares {
            scope.spawn(move || open_from(first, chunks));
        }
        if let Some((first, chunks)) = own {
            open_from(first, chunks);
        }
    });
    let closed = closed.into_inner();
    (closed != usize::MAX).then_some(closed)
}

/// Opens one chunk in its pieces; returns whether it opened. If not, they are zeros.
fn open(opener: &ShardOpener, number: u64, pieces: &mut [&mut [u8]]) -> bool {
    let header_bytes = match number {
        0 => opener.header_bytes() as usize,
        _ => 0,
    };
    if let [chunk] = pieces {
        let (header, text) = chunk.split_at_mut(header_bytes);
        return opener.open_in_place(number, header, text).is_ok();
    }
    // A tag covers the whole chunk, whose pieces lie in several places.
    let mut chunk = pieces.concat();
    let (header, text) = chunk.split_at_mut(header_bytes);
    let is_open = opener.open_in_place(number, header, text).is_ok();
    let mut rest = chunk.as_slice();
    for piece in pieces {
        let (now, later) = rest.split_at(piece.len());
        piece.copy_from_slice(now);
        rest = later;
    }
    is_open
}
