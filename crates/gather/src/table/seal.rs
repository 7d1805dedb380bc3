//! Blocks that are sealed on storage.

use std::fmt::Debug;

/// Opens the sealed blocks of a segment, from any thread.
///
/// Blocks have [`BLOCK_BYTES`](super::checks::BLOCK_BYTES), the last one may be shorter. They count
/// from the start of the segment. A block opens only if it is the one that was sealed for its place.
pub trait OpenBlocks: Debug + Send + Sync {
    /// Opens a block into memory of its size; returns whether it opened. If not, the memory is
    /// zeros.
    fn open(&self, block: u64, sealed: &[u8], text: &mut [u8]) -> bool;

    /// Opens a block in place, as [`open`](OpenBlocks::open) does.
    fn open_in_place(&self, block: u64, text: &mut [u8]) -> bool;

    /// Whether storage has damaged a block that does not open. If not, somebody has changed it.
    fn is_damaged(&self, block: u64) -> bool;
}
