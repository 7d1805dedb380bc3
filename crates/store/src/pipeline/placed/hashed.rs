//! Hashing the chunks of an item where they were read.

use std::ops::Range;

use super::PlacedItem;
use crate::format::digest::CHUNK_BYTES;
use crate::sign::{ChunkHash, FileHasher};

impl PlacedItem {
    /// Hashes every chunk of the item; passes each with its index and its bytes in the file.
    pub(in crate::pipeline) fn hash_chunks(
        &self,
        hasher: &FileHasher,
        mut each: impl FnMut(usize, Range<u64>, ChunkHash),
    ) {
        let starts = (self.range.start..self.range.end).step_by(CHUNK_BYTES as usize);
        for start in starts {
            let chunk = start..(start + CHUNK_BYTES).min(self.range.end);
            let first = self
                .landings
                .partition_point(|landing| landing.range.end <= chunk.start);
            let inside = self.landings[first..]
                .iter()
                .take_while(|landing| landing.range.start < chunk.end);
            let pieces = inside.map(|landing| {
                let bytes = self.bytes(landing);
                let begin = chunk.start.saturating_sub(landing.range.start) as usize;
                let end = (chunk.end.min(landing.range.end) - landing.range.start) as usize;
                &bytes[begin..end]
            });
            let index = start / CHUNK_BYTES;
            let hash = hasher.chunk(index, pieces);
            each(index as usize, chunk, hash);
        }
    }
}
