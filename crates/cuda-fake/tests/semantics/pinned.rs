//! Pinned host memory: which memory may be pinned, and in which contexts it counts as pinned.

use std::thread;
use std::time::Duration;

use crate::device::{Device, made};
use crate::raw::CUDA;

const PAGE: usize = 4096;

/// Pages of the test, page aligned.
struct Pages {
    bytes: Vec<u8>,
    skipped: usize,
}

impl Pages {
    fn new(count: usize) -> Pages {
        let bytes = vec![0_u8; (count + 1) * PAGE];
        let skipped = bytes.as_ptr().align_offset(PAGE);
        Pages { bytes, skipped }
    }

    fn at(&mut self, offset: usize) -> *mut u8 {
        self.bytes[self.skipped + offset..].as_mut_ptr()
    }
}

#[test]
fn no_page_is_registered_twice() {
    let device = Device::new();
    let mut pages = Pages::new(4);
    let (first, whole) = (pages.at(0), 2 * PAGE);
    assert_eq!((CUDA.cuMemHostRegister_v2)(first, whole, 0), 0);
    assert_eq!((CUDA.cuMemHostRegister_v2)(first, whole, 0), 712);
    assert_eq!((CUDA.cuMemHostRegister_v2)(pages.at(PAGE), PAGE, 0), 712);
    assert_eq!((CUDA.cuMemHostRegister_v2)(pages.at(2 * PAGE), 100, 0), 0);
    // Another part of a page that is pinned as a whole.
    assert_eq!(
        (CUDA.cuMemHostRegister_v2)(pages.at(2 * PAGE + 200), 100, 0),
        712
    );
    assert_eq!(device.control.leaks().registered, 2);
    assert_eq!(device.control.leaks().pinned_bytes, whole as u64 + 100);
    assert_eq!((CUDA.cuMemHostUnregister)(first.wrapping_add(1)), 713);
    assert_eq!((CUDA.cuMemHostUnregister)(first), 0);
    assert_eq!((CUDA.cuMemHostUnregister)(first), 713);
}

#[test]
fn only_memory_that_is_there_is_registered() {
    let _device = Device::new();
    let mut pages = Pages::new(1);
    assert_eq!(
        (CUDA.cuMemHostRegister_v2)(std::ptr::null_mut(), PAGE, 0),
        1
    );
    assert_eq!((CUDA.cuMemHostRegister_v2)(pages.at(0), 0, 0), 1);
    assert_eq!((CUDA.cuMemHostRegister_v2)(pages.at(0), PAGE, 64), 1);
    assert_eq!((CUDA.cuMemHostRegister_v2)(PAGE as *mut u8, PAGE, 0), 1);
}

#[test]
fn pinning_has_limits() {
    let device = Device::new();
    let mut pages = Pages::new(2);
    device.control.set_pinned_bytes_max(PAGE as u64);
    assert_eq!((CUDA.cuMemHostRegister_v2)(pages.at(0), 2 * PAGE, 0), 2);
    assert_eq!((CUDA.cuMemHostRegister_v2)(pages.at(0), PAGE, 0), 0);
    assert_eq!((CUDA.cuMemHostAlloc)(&mut std::ptr::null_mut(), 1, 0), 2);
    assert_eq!((CUDA.cuMemHostUnregister)(pages.at(0)), 0);
    device.control.set_pinning_permitted(false);
    assert_eq!((CUDA.cuMemHostRegister_v2)(pages.at(0), PAGE, 0), 800);
}

#[test]
fn registered_memory_is_copied_asynchronously() {
    let device = Device::new();
    let stream = device.stream();
    let address = device.memory(PAGE, 7);
    let mut pages = Pages::new(1);
    let pointer = pages.at(0);
    assert_eq!((CUDA.cuMemHostRegister_v2)(pointer, PAGE, 0), 0);
    let hold = device.control.hold();
    assert_eq!(
        (CUDA.cuMemcpyDtoHAsync_v2)(pointer, address, PAGE, stream),
        0
    );
    assert_eq!(device.peek(pointer as u64, PAGE), [0xA5; PAGE]);
    drop(hold);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    assert_eq!(device.peek(pointer as u64, PAGE), [7; PAGE]);
}

#[test]
fn a_copy_from_memory_that_is_no_longer_registered_fails() {
    let device = Device::new();
    let stream = device.stream();
    let address = device.memory(PAGE, 7);
    let mut pages = Pages::new(1);
    let pointer = pages.at(0);
    assert_eq!((CUDA.cuMemHostRegister_v2)(pointer, PAGE, 0), 0);
    let hold = device.control.hold();
    assert_eq!(
        (CUDA.cuMemcpyDtoHAsync_v2)(pointer, address, PAGE, stream),
        0
    );
    assert_eq!((CUDA.cuMemHostUnregister)(pointer), 0);
    drop(hold);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 700);
}

#[test]
fn what_has_begun_is_done_when_memory_is_no_longer_registered() {
    for seed in 0..20 {
        let device = Device::new();
        device.control.set_seed(seed);
        device.control.set_delay_us_max(2_000);
        let stream = device.stream();
        let address = device.memory(PAGE, 7);
        let mut pages = Pages::new(1);
        let pointer = pages.at(0);
        assert_eq!((CUDA.cuMemHostRegister_v2)(pointer, PAGE, 0), 0);
        assert_eq!(
            (CUDA.cuMemcpyDtoHAsync_v2)(pointer, address, PAGE, stream),
            0
        );
        // Time for the copy to begin; the test also holds if it does not.
        thread::sleep(Duration::from_micros(200));
        assert_eq!((CUDA.cuMemHostUnregister)(pointer), 0);
        let skipped = pages.skipped;
        let is_copied = pages.bytes[skipped..skipped + PAGE] == [7; PAGE];
        let expected = if is_copied { 0 } else { 700 };
        assert_eq!((CUDA.cuStreamSynchronize)(stream), expected, "seed {seed}");
    }
}

#[test]
fn two_ranges_side_by_side_are_not_one() {
    let device = Device::new();
    let stream = device.stream();
    let address = device.memory(2 * PAGE, 7);
    let mut pages = Pages::new(2);
    let pointer = pages.at(0);
    for half in [0, PAGE] {
        assert_eq!((CUDA.cuMemHostRegister_v2)(pages.at(half), PAGE, 0), 0);
    }
    assert_eq!(
        (CUDA.cuMemcpyDtoHAsync_v2)(pointer, address, 2 * PAGE, stream),
        1
    );
}

#[test]
fn devices_reach_what_is_mapped() {
    let device = Device::new();
    let mut pages = Pages::new(2);
    let (mapped, other) = (pages.at(0), pages.at(PAGE));
    assert_eq!((CUDA.cuMemHostRegister_v2)(mapped, PAGE, 2), 0);
    assert_eq!((CUDA.cuMemHostRegister_v2)(other, PAGE, 1), 0);
    let pointer = made(|pointer| (CUDA.cuMemHostGetDevicePointer_v2)(pointer, mapped, 0));
    assert_eq!(pointer, mapped as u64);
    assert_eq!((CUDA.cuMemHostGetDevicePointer_v2)(&mut 0, other, 0), 1);
    assert_eq!(made(|flags| (CUDA.cuMemHostGetFlags)(flags, mapped)), 2);
    let allocated = device.pinned(64, 0);
    assert_eq!(
        (CUDA.cuMemHostGetDevicePointer_v2)(&mut 0, allocated.pointer, 0),
        0
    );
    let stream = device.stream();
    assert_eq!((CUDA.cuMemsetD8Async)(pointer, 5, PAGE, stream), 0);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    assert_eq!(device.peek(pointer, PAGE), [5; PAGE]);
}

#[test]
fn portable_memory_is_pinned_in_every_context() {
    let device = Device::new();
    device.control.set_devices(2);
    let mut pages = Pages::new(2);
    assert_eq!((CUDA.cuMemHostRegister_v2)(pages.at(0), PAGE, 1), 0);
    assert_eq!((CUDA.cuMemHostRegister_v2)(pages.at(PAGE), PAGE, 0), 0);
    let other = made(|context| (CUDA.cuDevicePrimaryCtxRetain)(context, 1));
    assert_eq!((CUDA.cuCtxPushCurrent_v2)(other), 0);
    let (stream, address) = (device.stream(), device.memory(PAGE, 7));
    let portable = pages.at(0);
    let hold = device.control.hold();
    assert_eq!(
        (CUDA.cuMemcpyDtoHAsync_v2)(portable, address, PAGE, stream),
        0
    );
    assert_eq!(device.peek(portable as u64, PAGE), [0xA5; PAGE]);
    drop(hold);
    // Not portable: already written when the call returns.
    let bound = pages.at(PAGE);
    assert_eq!((CUDA.cuMemcpyDtoHAsync_v2)(bound, address, PAGE, stream), 0);
    assert_eq!(device.peek(bound as u64, PAGE), [7; PAGE]);
}

#[test]
fn allocated_memory_is_freed_once() {
    let device = Device::new();
    let pinned = device.pinned(64, 1);
    assert_eq!((CUDA.cuMemFreeHost)(pinned.pointer.wrapping_add(1)), 1);
    assert_eq!((CUDA.cuMemFreeHost)(pinned.pointer), 0);
    assert_eq!((CUDA.cuMemFreeHost)(pinned.pointer), 1);
    assert_eq!((CUDA.cuMemAllocHost_v2)(&mut std::ptr::null_mut(), 0), 1);
    assert_eq!(device.control.leaks().pinned_bytes, 0);
}
