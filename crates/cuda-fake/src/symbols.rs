//! The functions by which tests control the library: `penstock_fake_*`, for any language.
//!
//! None of them counts as a call of the driver, and none fails except as documented. In a result of
//! type `i32`, `0` is yes and `1` is no.

use std::ffi::{CStr, c_char};

use crate::driver::Session;
use crate::executor;
use crate::journal::Entry;
use crate::leaks::Leaks;
use crate::status::Status;

/// Removes everything that was made, set or counted.
#[unsafe(no_mangle)]
extern "C" fn penstock_fake_reset() {
    executor::reset();
}

#[unsafe(no_mangle)]
extern "C" fn penstock_fake_seed(seed: u64) {
    Session::begin().config.seed = seed;
}

#[unsafe(no_mangle)]
extern "C" fn penstock_fake_devices(count: u32) {
    Session::begin().config.devices = count.min(64) as i32;
}

#[unsafe(no_mangle)]
extern "C" fn penstock_fake_memory_bytes(bytes: u64) {
    Session::begin().config.memory_bytes = bytes;
}

#[unsafe(no_mangle)]
extern "C" fn penstock_fake_delay_us_max(delay_us_max: u64) {
    Session::begin().config.delay_us_max = delay_us_max;
}

#[unsafe(no_mangle)]
extern "C" fn penstock_fake_driver_version(version: i32) {
    Session::begin().config.driver_version = version;
}

#[unsafe(no_mangle)]
extern "C" fn penstock_fake_attribute(device: i32, attribute: i32, value: i32) {
    Session::begin()
        .config
        .attributes
        .insert((device, attribute), value);
}

#[unsafe(no_mangle)]
extern "C" fn penstock_fake_pinned_bytes_max(bytes: u64) {
    Session::begin().config.pinned_bytes_max = bytes;
}

#[unsafe(no_mangle)]
extern "C" fn penstock_fake_pinning_permitted(is_permitted: i32) {
    Session::begin().config.pinning_permitted = is_permitted != 0;
}

#[unsafe(no_mangle)]
extern "C" fn penstock_fake_garbles(does: i32) {
    Session::begin().config.garbles = does != 0;
}

/// Makes the `nth` next call of a function (1 is the next) return a code and do nothing.
#[unsafe(no_mangle)]
extern "C" fn penstock_fake_fail_call(function: *const c_char, nth: u64, status: i32) {
    let function = text(function);
    Session::begin()
        .faults
        .fail_call(&function, nth, Status(status));
}

/// Makes the `nth` next operation (1 is the next), of a kind or of all (0), fail with a code, and
/// its context with it.
#[unsafe(no_mangle)]
extern "C" fn penstock_fake_fail_operation(kind: u32, nth: u64, status: i32) {
    Session::begin()
        .faults
        .fail_operation(kind, nth, Status(status));
}

#[unsafe(no_mangle)]
extern "C" fn penstock_fake_clear_faults() {
    Session::begin().faults.clear();
}

/// The number of calls of a function.
#[unsafe(no_mangle)]
extern "C" fn penstock_fake_calls(function: *const c_char) -> u64 {
    let function = text(function);
    Session::begin().faults.calls(&function)
}

#[unsafe(no_mangle)]
extern "C" fn penstock_fake_leaks(leaks: Option<&mut Leaks>) {
    if let Some(leaks) = leaks {
        *leaks = Leaks::count(&Session::begin());
    }
}

/// Holds all streams: none begins an operation.
#[unsafe(no_mangle)]
extern "C" fn penstock_fake_hold_all() {
    Session::begin().holds.hold_all();
}

/// Holds one stream; 0 is the legacy stream of each context.
#[unsafe(no_mangle)]
extern "C" fn penstock_fake_hold(stream: u64) {
    Session::begin().holds.hold(stream);
}

/// Releases all streams.
#[unsafe(no_mangle)]
extern "C" fn penstock_fake_release_all() {
    let mut session = Session::begin();
    session.holds.release_all();
    session.changed();
}

#[unsafe(no_mangle)]
extern "C" fn penstock_fake_release(stream: u64) {
    let mut session = Session::begin();
    session.holds.release(stream);
    session.changed();
}

/// Allows a held stream to begin `operations` operations, and returns at once.
#[unsafe(no_mangle)]
extern "C" fn penstock_fake_allow(stream: u64, operations: u64) {
    let mut session = Session::begin();
    session.holds.allow(stream, operations);
    session.changed();
}

/// The number of operations of a stream that are not done yet.
#[unsafe(no_mangle)]
extern "C" fn penstock_fake_pending(stream: u64) -> u64 {
    let session = Session::begin();
    let streams = session
        .streams
        .iter()
        .filter(|(_, known)| known.public == stream);
    streams
        .map(|(_, known)| known.operations().count() as u64)
        .sum()
}

/// Copies bytes of the driver's memory, as they are now.
#[unsafe(no_mangle)]
extern "C" fn penstock_fake_peek(address: u64, into: *mut u8, bytes: u64) -> i32 {
    let session = Session::begin();
    let Some(from) = session.memory.inspect(address, bytes) else {
        return 1;
    };
    // SAFETY: the driver's memory has all of these bytes, and its lock keeps them allocated. The
    // caller has room for them.
    unsafe { into.copy_from_nonoverlapping(from, bytes as usize) };
    0
}

/// Overwrites bytes of the driver's memory.
#[unsafe(no_mangle)]
extern "C" fn penstock_fake_poke(address: u64, from: *const u8, bytes: u64) -> i32 {
    let session = Session::begin();
    let Some(into) = session.memory.inspect(address, bytes) else {
        return 1;
    };
    // SAFETY: as for `penstock_fake_peek`, the other way.
    unsafe { into.copy_from_nonoverlapping(from, bytes as usize) };
    0
}

/// The number of executed operations that are in the journal.
#[unsafe(no_mangle)]
extern "C" fn penstock_fake_journal_length() -> u64 {
    Session::begin().journal.len()
}

#[unsafe(no_mangle)]
extern "C" fn penstock_fake_journal_entry(index: u64, entry: Option<&mut Entry>) -> i32 {
    match (Session::begin().journal.get(index), entry) {
        (Some(found), Some(entry)) => {
            *entry = found;
            0
        }
        _ => 1,
    }
}

#[unsafe(no_mangle)]
extern "C" fn penstock_fake_journal_clear() {
    Session::begin().journal.clear();
}

/// A text of the caller; an invalid one names no function.
fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the caller gives a text that ends with a zero.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_string_lossy().into_owned()
}
