//! The compiled kernels of this crate.

use std::ffi::CStr;

/// Compiled from `kernels/gather.cu`, for devices of compute capability 7.0 and more.
pub(crate) const PTX: &CStr = match CStr::from_bytes_with_nul(
    concat!(include_str!("../kernels/gather.ptx"), "\0").as_bytes(),
) {
    Ok(text) => text,
    Err(_) => panic!("the text has no zero"),
};

/// Threads of a warp.
pub(crate) const LANES: u32 = 32;

/// Threads of a block: small, so that other kernels find room next to it.
pub(crate) const BLOCK_THREADS: u32 = 128;
