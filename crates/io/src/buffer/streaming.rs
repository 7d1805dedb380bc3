//! Copies whose destination is not read again soon.
//!
//! An ordinary store first loads the cache line that it changes, so a copy moves every byte three
//! times: the source in, the destination in, the destination out. Non-temporal stores skip the
//! second, and leave the caches to other threads' data.

#![allow(unsafe_code)]

use std::ptr;

/// A shorter destination may well be in a cache, and the fence costs more than it saves.
#[cfg(target_arch = "x86_64")]
const STREAMED_BYTES_MIN: usize = 4 << 10;

/// Copies bytes to a `dst` that is not read again soon, past the caches where that pays and the
/// processor supports it.
///
/// # Panics
/// If the lengths differ.
pub fn stream_copy(src: &[u8], dst: &mut [u8]) {
    assert_eq!(src.len(), dst.len(), "as many bytes");
    // SAFETY: both have the same length, and nothing else reaches `dst`.
    unsafe { copy(src.as_ptr(), dst.as_mut_ptr(), src.len()) }
}

/// Copies `len` bytes past the caches, where the processor supports it.
///
/// # Safety
/// `len` bytes are readable at `src` and writable at `dst`, and the two are apart.
pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= STREAMED_BYTES_MIN {
        // SAFETY: the caller's promise.
        return unsafe { stream(src, dst, len) };
    }
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(src, dst, len) }
}

/// # Safety
/// As [`copy`]. Every x86_64 has SSE2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse2")]
unsafe fn stream(mut src: *const u8, mut dst: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    const WORD_BYTES: usize = size_of::<__m128i>();

    // Streaming stores need aligned words.
    let head = dst.align_offset(WORD_BYTES).min(len);
    // SAFETY: the first bytes of the caller's range.
    unsafe { ptr::copy_nonoverlapping(src, dst, head) };
    src = src.wrapping_add(head);
    dst = dst.wrapping_add(head);
    for _ in 0..(len - head) / WORD_BYTES {
        // SAFETY: a word of the caller's range.
        let word = unsafe { _mm_loadu_si128(src.cast()) };
        // SAFETY: as above, and `dst` is aligned.
        unsafe { _mm_stream_si128(dst.cast(), word) };
        src = src.wrapping_add(WORD_BYTES);
        dst = dst.wrapping_add(WORD_BYTES);
    }
    let tail = (len - head) % WORD_BYTES;
    // SAFETY: the last bytes of the caller's range.
    unsafe { ptr::copy_nonoverlapping(src, dst, tail) };
    // Orders the stores before everything that follows, as ordinary stores are.
    _mm_sfence();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_at_every_alignment_arrives_and_nothing_beside_it() {
        let source: Vec<u8> = (0..3 * 4096_u32).map(|byte| (byte % 251) as u8).collect();
        let lengths = (0..=80).chain(4090..=4200).chain([8191, 8192, 8193]);
        for len in lengths {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (7, 9), (15, 16), (3, 31)] {
                let mut found = vec![0xaa; source.len()];
                let (src, dst) = (source[from..].as_ptr(), found[to..].as_mut_ptr());
                assert!(from.max(to) + len <= source.len());
                // SAFETY: both ranges were just found to be inside of their vectors.
                unsafe { copy(src, dst, len) };
                assert_eq!(found[to..to + len], source[from..from + len]);
                let mut beside = found[..to].iter().chain(&found[to + len..]);
                assert!(
                    beside.all(|&byte| byte == 0xaa),
                    "{len} from {from} to {to}"
                );
            }
        }
    }
}
