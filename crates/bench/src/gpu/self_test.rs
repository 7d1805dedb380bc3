//! Checks that a copy engine transfers bytes unchanged to and from pinned memory.
//!
//! In a confidential virtual machine a device cannot access the guest's memory, so the driver
//! copies through memory of its own. If pinned memory bypasses that, garbage arrives and no call
//! fails.

use std::sync::Arc;

use penstock_io::Result;
use penstock_io::buffer::{Cut, DeviceBlock, DeviceStreams, IoBuf, Pool};
use serde::Serialize;

const BYTES: usize = 4 << 20;
/// Memory to pin: more than the default limit on locked memory, which shows whether that limit
/// applies.
const PINNED_BYTES: usize = 64 << 20;
/// Neither a power of two nor a multiple of a page.
const PIECE_BYTES: usize = 100_003;

/// Result of the test.
#[derive(Clone, Debug, Serialize)]
pub struct SelfTest {
    /// The first wrong byte, and how its copy was queued; `None` if all bytes are right.
    pub wrong: Option<Wrong>,
    /// Host memory pinned at once, in bytes.
    pub pinned_bytes: usize,
    /// Why host memory could not be pinned, if so: then pinned memory was not tested.
    pub unpinned: Option<String>,
}

/// A wrong byte.
#[derive(Clone, Debug, Serialize)]
pub struct Wrong {
    /// Its offset in the copy.
    pub offset: usize,
    /// Whether one call queued many copies.
    pub is_batched: bool,
}

/// Copies bytes to a device and back, through pinned memory.
pub fn self_test(device_streams: &Arc<DeviceStreams>) -> Result<SelfTest> {
    let pool = Pool::pinned(BYTES, PINNED_BYTES, device_streams.device());
    let block = DeviceBlock::allocate(device_streams, BYTES)?;
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
        // The bytes that were sent may be the damaged ones.
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

/// Never zero, and different for each kind of queueing.
fn content(offset: usize, is_batched: bool) -> u8 {
    let mixed = (offset as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
    (mixed as u8 ^ u8::from(is_batched).wrapping_mul(0x55)) | 1
}
