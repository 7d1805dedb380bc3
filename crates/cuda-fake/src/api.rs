//! The functions of `cuda.h`, under its names and with its signatures. Handles are numbers of the
//! size of a pointer; a pointer through which a function returns a value is an [`Out`].
//!
//! `Needs` determines what a function may do in a context that failed, or without a context.

// The names are those of `cuda.h`.
#![allow(non_snake_case)]

mod batch;
mod capture;
mod context;
mod copy;
mod cufile;
mod device;
mod error;
mod event;
mod kernel;
mod memory;
mod pinned;
mod rows;
mod stream;

use std::ffi::c_char;
use std::mem::MaybeUninit;

use crate::status::{Answer, Status};

/// A pointer for a result. The caller's pointer is null, or can be written to during the call.
type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

fn put<T>(out: Out<'_, T>, value: T) -> Answer {
    out.ok_or(Status::INVALID_VALUE)?.write(value);
    Ok(())
}

/// Fails where `put` would, before anything is done.
fn wanted<T>(out: &Out<'_, T>) -> Answer {
    out.is_some().then_some(()).ok_or(Status::INVALID_VALUE)
}

/// Writes a C string to a buffer of the caller, truncated to its length.
fn put_text(out: *mut c_char, length: i32, text: &str) -> Answer {
    let length = usize::try_from(length).unwrap_or_default();
    if out.is_null() || length == 0 {
        return Err(Status::INVALID_VALUE);
    }
    let bytes = &text.as_bytes()[..text.len().min(length - 1)];
    let out = out.cast::<u8>();
    // SAFETY: the caller has room for `length` bytes, of which this leaves one for the zero.
    unsafe { out.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    let end = out.wrapping_add(bytes.len());
    // SAFETY: this is the byte left for the zero.
    unsafe { end.write(0) };
    Ok(())
}
