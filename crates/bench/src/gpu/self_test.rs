//! Whether what a copy engine brings into pinned memory is what it was given.
//!
//! In a guest of confidential computing a device does not see the guest's memory. Drivers there copy through
//! memory of their own; where something passes that by, what arrives is garbage and no call fails.

use std::sync::Arc;

use penstock_io::Result;
use penstock_io::buffer::{Cut, DeviceBlock, IoBuf, Lane, Pool};
use serde::Serialize;

const BYTES: usize = 4 << 20;
/// Pinned for it: more than a process may lock where nobody has raised that limit, which tells whether it counts.
const PINNED_BYTES: usize = 64 << 20;
/// Neither a power of two nor a multiple of a page.
const PIECE_BYTES: usize = 100_003;

/// What came back.
#[derive(Clone, Debug, Serialize)]
pub struct SelfTest {
    /// The first byte that is another, by how copies were queued; none where all is right.
    pub wrong: Option<Wrong>,
    /// How much memory of the host was pinned at once.
    pub pinned_bytes: usize,
    /// Why memory of the host was not pinned, where it was not: then nothing is said of pinned memory.
    pub unpinned: Option<String>,
}

/// Where something else came back.
#[derive(Clone, Debug, Serialize)]
pub struct Wrong {
    /// The first such byte.
    pub offset: usize,
    /// Whether copies were queued many by one call.
    pub is_batched: bool,
}

/// Sends bytes to a device and back, through pinned memory.
///
/// # Errors
/// [`Error::Cuda`](penstock_io::Error::Cuda).
pub fn self_test(lane: &Arc<Lane>) -> Result<SelfTest> {
    let pool = Pool::pinned(BYTES, PINNED_BYTES, lane.device());
    let block = DeviceBlock::allocate(lane, BYTES)?;
    let (mut there, mut back) = (pool.take()?, pool.take()?);
    let mut tested = SelfTest {
        wrong: None,
        pinned_bytes: pool.held_bytes(),
        unpinned: pool.unpinned(),
    };
    if tested.unpinned.is_some() {
        tested.pinned_bytes = 0;
    }
    for is_batched in [false, true] {
        let cut = Cut {
            piece_bytes: PIECE_BYTES,
            is_batched,
        };
        write(&mut there, is_batched);
        back.as_mut_slice().fill(0);
        there = block.fill(0, there, cut)?.wait()?;
        back = block.read(0, back, cut)?.wait()?;
        // What was sent may be what is damaged.
        let sent = there.as_slice().iter().zip(back.as_slice());
        let is_kept = |offset: usize, byte: u8| byte == content(offset, is_batched);
        let wrong = sent
            .enumerate()
            .position(|(offset, (&sent, &came))| sent != came || !is_kept(offset, came));
        if let Some(offset) = wrong {
            tested.wrong = Some(Wrong { offset, is_batched });
            break;
        }
    }
    Ok(tested)
}

fn write(buf: &mut IoBuf, is_batched: bool) {
    for (offset, byte) in buf.as_mut_slice().iter_mut().enumerate() {
        *byte = content(offset, is_batched);
    }
}

/// Never zero, and another one for each way.
fn content(offset: usize, is_batched: bool) -> u8 {
    let mixed = (offset as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
    (mixed as u8 ^ u8::from(is_batched).wrapping_mul(0x55)) | 1
}
