//! Support for the fuzz targets: a heap whose peak is compared to the size of the input, and
//! mutations of JSON.
#![forbid(unsafe_code)]

pub mod checks;
pub mod json;

use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Heap bytes that a byte of input may cost. The most expensive is a number of a shape: two bytes
/// of text, eight in a vector that doubles as it grows.
const HEAP_BYTES_PER_INPUT_BYTE: usize = 32;
/// Heap bytes that any input may cost: messages, first capacities, the allocations of the checks.
const HEAP_BYTES_FIXED: usize = 64 << 10;

/// Runs a check on an input of that many bytes and asserts that its heap stayed in proportion.
pub fn bounded(input_bytes: usize, check: impl FnOnce()) {
    bounded_beside(0, input_bytes, check);
}

/// [`bounded`] for a check that needs `fixed_bytes` more for any input.
pub fn bounded_beside(fixed_bytes: usize, input_bytes: usize, check: impl FnOnce()) {
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    check();
    let peak = HEAP.peak_usage().saturating_sub(before);
    let limit = HEAP_BYTES_PER_INPUT_BYTE * input_bytes + HEAP_BYTES_FIXED + fixed_bytes;
    assert!(
        peak <= limit,
        "{peak} bytes of heap for {input_bytes} of input, {limit} allowed"
    );
}
