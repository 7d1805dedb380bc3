//! The cost of posts by themselves, without reads.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_cuda::{Device, DeviceMemory, Direction, Foreign, PitchedCopy, Stream};

use super::{Answer, Fifo};
use crate::Result;

/// The smallest row that is copied in whole words.
const ROW_BYTES: usize = 16;
const STAGING_BYTES: usize = 16 << 20;
/// How often the host checks whether the kernel has ended early.
const CHECK_PAUSE: Duration = Duration::from_millis(10);

/// Launches a kernel whose `warps` warps post one id after the other, `posts` in all, and answers
/// each at once without rows; returns how long that took, the launch included. With one warp, each
/// post is a round trip.
///
/// # Panics
/// If there are no warps or no posts.
pub fn measure_posts(device: &Arc<Device>, warps: usize, posts: usize) -> Result<Duration> {
    assert!(warps > 0 && posts > 0, "there is something to measure");
    let fifo = Arc::new(Fifo::new(device, ROW_BYTES, STAGING_BYTES)?);
    let count = posts * fifo.post_rows();
    let stream = Stream::new(device)?;
    let ids = DeviceMemory::allocate(device, 8 * count)?;
    let out = DeviceMemory::allocate(device, ROW_BYTES * count)?;
    let zeros = vec![0_u8; ids.len()];
    let piece = PitchedCopy::run(zeros.as_ptr() as usize, ids.address(), ids.len());
    // SAFETY: both sides stay until the wait for the stream below.
    let copied = unsafe { stream.copy(Direction::ToDevice, &[piece]) };
    stream.drain();
    copied?;
    let mut asked = fifo.posts();
    // SAFETY: the stream lives as long as this is used.
    let foreign = unsafe { Foreign::new(device, stream.raw()) };
    let begun = Instant::now();
    // SAFETY: the memory has the room, and stays until the wait for the stream below.
    unsafe { fifo.launch(&foreign, ids.address(), 8, count, out.address(), warps) }?;
    let ended = stream.record();
    let mut checked = begun;
    let mut left = if ended.is_ok() { posts } else { 0 };
    while left > 0 {
        if let Some(post) = asked.take() {
            post.answer(Answer::Done);
            left -= 1;
        } else if checked.elapsed() > CHECK_PAUSE {
            checked = Instant::now();
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
    stream.drain();
    synchronized?;
    Ok(elapsed)
}
