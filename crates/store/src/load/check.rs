//! Checks file bytes that the caller has read itself against their digests.
//!
//! A load reads and checks in one pass. A caller that reads files in place repeatedly, into its own
//! memory, checks the bytes here before it uses them.

use std::ops::Range;
use std::thread;

use penstock_io::trace;

use crate::error::{Error, Result};
use crate::format::digest::{CHUNK_BYTES, Digest};
use crate::load::checkpoint::Checkpoint;
use crate::pipeline::damage::Damage;
use crate::sign::FileHasher;

/// Thread limit: a few threads reach memory bandwidth.
const THREADS_MAX: usize = 4;

/// Minimum number of chunks per thread: digesting them takes a fraction of a millisecond.
const CHUNKS_MIN: usize = 8;

impl Checkpoint {
    /// Compares whole chunks of a file with their digests.
    ///
    /// `pieces` hold the bytes of the file from `start` on, in order. If bytes may be damaged, an
    /// affected tensor in `wanted` is named first.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if they differ from those saved, [`Error::Signature`] from those signed.
    /// [`Error::Mismatch`] if they are not
    /// whole chunks of a file of this checkpoint.
    pub fn check(
        &self,
        file: &str,
        start: u64,
        pieces: &[&[u8]],
        wanted: Range<u64>,
    ) -> Result<()> {
        let _span = trace::span("digest");
        let files = &self.part().files;
        let bytes = pieces.iter().map(|piece| piece.len() as u64).sum::<u64>();
        let index = self.whole_chunks(file, start, bytes)?;
        let end = start + bytes;
        let chunks = cut(pieces);
        let first = (start / CHUNK_BYTES) as usize;
        let digests = &files[index].chunks[first..first + chunks.len()];
        let range = |place: usize| {
            let begin = start + place as u64 * CHUNK_BYTES;
            begin..end.min(begin + CHUNK_BYTES)
        };
        let mut damage = Damage {
            file: index,
            range: 0..0,
            byte: None,
            unreadable: None,
            is_tampered: false,
        };
        if let Some((place, found)) = first_wrong(&chunks, digests) {
            let range = range(place);
            let byte = digests[place].changed_byte(found, range.end - range.start);
            damage.byte = byte.map(|byte| range.start + byte);
            damage.range = range;
        } else if let Some(place) = self.first_unsigned(index, first, &chunks)? {
            damage.range = range(place);
            damage.is_tampered = true;
        } else {
            return Ok(());
        }
        Err(self.corrupt(index, &damage, &self.tensors_in(index, wanted)))
    }

    /// The index of a file, if these bytes are whole chunks of it.
    pub(super) fn whole_chunks(&self, file: &str, start: u64, bytes: u64) -> Result<usize> {
        let files = &self.part().files;
        let mismatch = |detail: &str| Error::Mismatch {
            key: file.to_owned(),
            detail: detail.to_owned(),
        };
        let Some(index) = files.iter().position(|entry| entry.name == file) else {
            return Err(mismatch("the checkpoint has no such file"));
        };
        let end = start.saturating_add(bytes);
        let is_end = end == files[index].bytes || end.is_multiple_of(CHUNK_BYTES);
        if !start.is_multiple_of(CHUNK_BYTES) || !is_end || end > files[index].bytes {
            return Err(mismatch("no whole chunks of it"));
        }
        Ok(index)
    }

    /// Indices of the tensors in a range of a file.
    pub(super) fn tensors_in(&self, file: usize, wanted: Range<u64>) -> Vec<usize> {
        let tensors = self.part().tensors.iter().enumerate();
        let is_wanted = |range: (u64, u64)| range.0 < wanted.end && wanted.start < range.1;
        tensors
            .filter(|(_, entry)| entry.file == file && is_wanted(entry.range))
            .map(|(tensor, _)| tensor)
            .collect()
    }
}

/// Number of threads for so many chunks.
pub(super) fn threads_for(chunks: usize) -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    cores.min(THREADS_MAX).min(chunks / CHUNKS_MIN).max(1)
}

impl Checkpoint {
    /// The first chunk that is not the signed one, if a signature is demanded.
    fn first_unsigned(
        &self,
        file: usize,
        first: usize,
        chunks: &[Vec<&[u8]>],
    ) -> Result<Option<usize>> {
        let Some(hashes) = self.learned_hashes(file)? else {
            return Ok(None);
        };
        let hasher = FileHasher::new(self.part().files[file].bytes);
        let is_wrong = |place: &usize| {
            let index = first + place;
            let pieces = chunks[*place].iter().copied();
            hasher.chunk(index as u64, pieces) != hashes[index]
        };
        Ok((0..chunks.len()).find(is_wrong))
    }
}

/// Groups the pieces by chunk; the first one begins a chunk.
fn cut<'a>(pieces: &[&'a [u8]]) -> Vec<Vec<&'a [u8]>> {
    let mut chunks: Vec<Vec<&[u8]>> = Vec::new();
    let mut room = 0;
    for &piece in pieces {
        let mut rest = piece;
        while !rest.is_empty() {
            if room == 0 {
                chunks.push(Vec::new());
                room = CHUNK_BYTES as usize;
            }
            let (now, later) = rest.split_at(rest.len().min(room));
            chunks
                .last_mut()
                .expect("one has room, and was begun")
                .push(now);
            room -= now.len();
            rest = later;
        }
    }
    chunks
}

/// The first chunk whose digest differs, and the digest found.
fn first_wrong(chunks: &[Vec<&[u8]>], digests: &[Digest]) -> Option<(usize, Digest)> {
    let threads = threads_for(chunks.len());
    let share = chunks.len().div_ceil(threads).max(1);
    let check_from = |begin: usize| {
        let end = (begin + share).min(chunks.len());
        (begin..end).find_map(|index| {
            let found = digest_of(&chunks[index]);
            (found != digests[index]).then_some((index, found))
        })
    };
    thread::scope(|scope| {
        let check_from = &check_from;
        let others: Vec<_> = (1..threads)
            .map(|thread| scope.spawn(move || check_from((thread * share).min(chunks.len()))))
            .collect();
        let own = check_from(0);
        let join = |other: thread::ScopedJoinHandle<'_, _>| other.join().expect("it cannot panic");
        let found: Vec<_> = others.into_iter().map(join).collect();
        own.or_else(|| found.into_iter().flatten().next())
    })
}

fn digest_of(pieces: &[&[u8]]) -> Digest {
    let next = |digest: Digest, piece: &&[u8]| digest.then(Digest::of(piece), piece.len() as u64);
    pieces.iter().fold(Digest::EMPTY, next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_digested_by_chunks_wherever_they_are_cut() {
        let bytes: Vec<u8> = (0..20 * CHUNK_BYTES + 77)
            .map(|at| (at * 31 % 251) as u8)
            .collect();
        let digests: Vec<Digest> = bytes.chunks(CHUNK_BYTES as usize).map(Digest::of).collect();
        for cuts in [
            vec![],
            vec![1],
            vec![5, 5, 1 << 20],
            vec![(1 << 20) + 1, 3 << 20, bytes.len()],
        ] {
            let mut pieces = Vec::new();
            let mut begin = 0;
            for cut in cuts.into_iter().chain([bytes.len()]) {
                pieces.push(&bytes[begin..cut]);
                begin = cut;
            }
            let chunks = cut(&pieces);
            assert_eq!(chunks.len(), digests.len());
            assert_eq!(first_wrong(&chunks, &digests), None);
        }
        for place in [0, 7, 19, 20] {
            let mut other = bytes.clone();
            other[place * CHUNK_BYTES as usize + 13] ^= 1;
            let (found, _) = first_wrong(&cut(&[&other]), &digests).expect("it was changed");
            assert_eq!(found, place);
        }
        assert_eq!(first_wrong(&cut(&[]), &[]), None);
    }
}
