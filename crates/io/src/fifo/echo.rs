//! What posts cost that nothing is read for.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_cuda::{Device, DeviceMemory, Direction, Foreign, Piece, Stream};

use super::{Answer, Fifo};
use crate::Result;

/// The least that a row can be copied in words of.
const ROW_BYTES: usize = 16;
const STAGING_BYTES: usize = 16 << 20;
/// How long nobody looks whether the kernel has ended by itself.
const LOOK: Duration = Duration::from_millis(10);

/// Has so many warps post, each one after the other, so often in all, and answers at once with whatever is
/// there; says how long that took, with the launch. With one warp it is the time of a round trip each.
///
/// # Errors
/// As [`Fifo::new`], and [`Error::Cuda`](crate::Error::Cuda) where the kernel fails.
///
/// # Panics
/// If there are no warps or no posts.
pub fn echo(device: &Arc<Device>, warps: usize, posts: usize) -> Result<Duration> {
    assert!(warps > 0 && posts > 0, "there is something to measure");
    let fifo = Arc::new(Fifo::new(device, ROW_BYTES, STAGING_BYTES)?);
    let count = posts * fifo.post_rows();
    let stream = Stream::new(device)?;
    let ids = DeviceMemory::allocate(device, 8 * count)?;
    let out = DeviceMemory::allocate(device, ROW_BYTES * count)?;
    let zeros = vec![0_u8; ids.len()];
    let piece = Piece::run(zeros.as_ptr() as usize, ids.address(), ids.len());
    // SAFETY: both sides stay until the stream is settled.
    let copied = unsafe { stream.copy(Direction::ToDevice, &[piece]) };
    stream.settle();
    copied?;
    let mut asked = fifo.posts();
    // SAFETY: it is there as long as this is used.
    let foreign = unsafe { Foreign::new(device, stream.raw()) };
    let begun = Instant::now();
    // SAFETY: the memory has the room, and is there until the stream is settled.
    unsafe { fifo.launch(&foreign, ids.address(), 8, count, out.address(), warps) }?;
    let ended = stream.record();
    let mut looked = begun;
    let mut left = if ended.is_ok() { posts } else { 0 };
    while left > 0 {
        if let Some(post) = asked.take() {
            post.answer(Answer::Done);
            left -= 1;
        } else if looked.elapsed() > LOOK {
            looked = Instant::now();
            if ended
                .as_ref()
                .is_ok_and(|event| event.is_done().unwrap_or(true))
            {
                break;
            }
        }
    }
    let synchronized = ended.and_then(|event| event.wait());
    let elapsed = begun.elapsed();
    fifo.stop();
    stream.settle();
    synchronized?;
    Ok(elapsed)
}
