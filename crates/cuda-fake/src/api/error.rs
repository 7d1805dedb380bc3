//! Names of codes. They work in a forked child too, as they need no state.

use std::ffi::{CStr, c_char};
use std::ptr;

use super::Out;
use crate::status::{Status, described};

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(error: i32, text: Out<'_, *const c_char>) -> i32 {
    answer(described(error).map(|(name, _)| name), text)
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(error: i32, text: Out<'_, *const c_char>) -> i32 {
    answer(described(error).map(|(_, text)| text), text)
}

fn answer(found: Option<&'static CStr>, text: Out<'_, *const c_char>) -> i32 {
    let Some(text) = text else {
        return Status::INVALID_VALUE.0;
    };
    text.write(found.map_or(ptr::null(), CStr::as_ptr));
    if found.is_some() {
        0
    } else {
        Status::INVALID_VALUE.0
    }
}
