//! A checksum for each block of a table, so that every read of a row is verified.
//!
//! The digests of checkpoints cover a mebibyte each, too much to read for a row. CRC-32C of 4 KiB
//! takes a thousandth of the room.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use penstock_io::buffer::HostRegion;

/// Bytes covered by one checksum: a page, the least that most devices read.
pub const BLOCK_BYTES: u64 = 4096;

/// CRC-32C of every block of a segment. The last block may be shorter.
#[derive(Debug)]
pub struct Checks {
    sums: Box<[AtomicU32]>,
}

impl Checks {
    /// Stored checksums.
    pub fn new(sums: impl IntoIterator<Item = u32>) -> Checks {
        Checks {
            sums: sums.into_iter().map(AtomicU32::new).collect(),
        }
    }

    /// Checksums of a growing file, to be set as its blocks are written.
    pub(crate) fn unknown(count: u64) -> Checks {
        Checks::new((0..count).map(|_| 0))
    }

    /// Sets the checksums of consecutive blocks, before any reader asks for these.
    pub(crate) fn note(&self, first: u64, bytes: &[u8]) {
        let blocks = bytes.chunks(BLOCK_BYTES as usize);
        for (sum, bytes) in self.sums[first as usize..].iter().zip(blocks) {
            sum.store(Checks::of(bytes), Relaxed);
        }
    }

    /// Number of blocks.
    pub fn count(&self) -> u64 {
        self.sums.len() as u64
    }

    /// The checksum of one block.
    pub fn of(bytes: &[u8]) -> u32 {
        // The algorithm has 32 bits.
        crc_fast::checksum(Crc32Iscsi, bytes) as u32
    }

    /// The checksum of each block of memory that begins at a block boundary.
    pub fn of_memory(region: &HostRegion) -> Vec<u32> {
        let mut block = [0; BLOCK_BYTES as usize];
        let starts = (0..region.len()).step_by(BLOCK_BYTES as usize);
        let sums = starts.map(|start| {
            let here = &mut block[..BLOCK_BYTES.min(region.len() - start) as usize];
            region.copy_to(start, here);
            Checks::of(here)
        });
        sums.collect()
    }

    /// Whether a block's bytes match its checksum.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn agrees(&self, block: u64, bytes: &[u8]) -> bool {
        self.sums[block as usize].load(Relaxed) == Checks::of(bytes)
    }

    /// Number of blocks in so many bytes.
    pub fn blocks(bytes: u64) -> u64 {
        bytes.div_ceil(BLOCK_BYTES)
    }
}
