//! Planned failures, and the state of a context after one.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use penstock_cuda_fake::Kind;

use crate::device::{Device, made};
use crate::raw::CUDA;

#[test]
fn the_nth_call_fails_and_does_nothing() {
    let device = Device::new();
    device.control.fail_call("cuMemAlloc_v2", 2, 46);
    device.memory(8, 0);
    assert_eq!((CUDA.cuMemAlloc_v2)(&mut 0, 8), 46);
    device.memory(8, 0);
    assert_eq!(device.control.leaks().allocations, 2);
    assert_eq!(device.control.calls("cuMemAlloc_v2"), 3);
    assert_eq!(device.control.calls("cuInit"), 1);
    assert_eq!(device.control.calls("cuNothing"), 0);
}

#[test]
fn the_nth_operation_fails_and_its_context_with_it() {
    let device = Device::new();
    let stream = device.stream();
    let (address, pinned) = (device.memory(64, 7), device.pinned(64, 0));
    device
        .control
        .fail_operation(Some(Kind::DeviceToHost), 2, 214);
    assert_eq!((CUDA.cuMemsetD8Async)(address, 1, 32, stream), 0);
    assert_eq!(
        (CUDA.cuMemcpyDtoHAsync_v2)(pinned.pointer, address, 32, stream),
        0
    );
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    let hold = device.control.hold();
    let second = pinned.pointer.wrapping_add(32);
    assert_eq!((CUDA.cuMemcpyDtoHAsync_v2)(second, address, 32, stream), 0);
    let event = device.record(stream);
    assert_eq!((CUDA.cuMemsetD8Async)(address, 9, 64, stream), 0);
    drop(hold);
    assert_eq!((CUDA.cuEventSynchronize)(event), 214);
    assert_eq!(pinned.read(&device), [[1; 32], [0xA5; 32]].concat());
    assert_eq!(device.peek(address, 64), [[1; 32], [7; 32]].concat());
    assert_eq!((CUDA.cuEventQuery)(event), 214);
    assert_eq!((CUDA.cuStreamQuery)(stream), 214);
    assert_eq!(
        (CUDA.cuMemcpyDtoHAsync_v2)(second, address, 32, stream),
        214
    );
    assert_eq!((CUDA.cuEventCreate)(&mut 0, 3), 214);
    assert_eq!((CUDA.cuCtxSynchronize)(), 214);
    let last = *device.control.journal().last().unwrap();
    assert_eq!((last.kind, last.status), (Kind::DeviceToHost, 214));
}

#[test]
fn what_a_failed_context_made_can_be_released() {
    let device = Device::new();
    let (stream, event) = (device.stream(), device.event());
    let (address, pinned) = (device.memory(64, 7), device.pinned(64, 0));
    device.control.fail_operation(None, 1, 719);
    assert_eq!((CUDA.cuEventRecord)(event, stream), 0);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 719);
    assert_eq!((CUDA.cuMemFree_v2)(address), 719);
    assert_eq!((CUDA.cuMemFreeHost)(pinned.pointer), 719);
    assert_eq!((CUDA.cuEventDestroy_v2)(event), 719);
    assert_eq!((CUDA.cuStreamDestroy_v2)(stream), 719);
    let leaks = device.control.leaks();
    assert_eq!((leaks.allocations, leaks.pinned_allocations), (0, 0));
    assert_eq!((leaks.events, leaks.streams), (0, 0));
    assert_eq!((CUDA.cuDevicePrimaryCtxRelease_v2)(0), 0);
    let new = made(|context| (CUDA.cuDevicePrimaryCtxRetain)(context, 0));
    assert_eq!((CUDA.cuCtxSetCurrent)(new), 0);
    assert_eq!((CUDA.cuCtxSynchronize)(), 0);
}

#[test]
fn another_context_does_not_fail() {
    let device = Device::new();
    device.control.set_devices(2);
    let other = made(|context| (CUDA.cuDevicePrimaryCtxRetain)(context, 1));
    let stream = device.stream();
    device.control.fail_operation(None, 1, 700);
    let event = device.record(stream);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 700);
    assert_eq!((CUDA.cuCtxPushCurrent_v2)(other), 0);
    assert_eq!((CUDA.cuCtxSynchronize)(), 0);
    assert_eq!((CUDA.cuEventSynchronize)(event), 700);
    assert_eq!((CUDA.cuMemAlloc_v2)(&mut 0, 8), 0);
}

#[test]
fn a_failure_is_reported_when_no_copy_writes_any_more() {
    for seed in 0..20 {
        let device = Device::new();
        device.control.set_seed(seed);
        device.control.set_delay_us_max(2_000);
        let (failing, copying) = (device.stream(), device.stream());
        let (address, pinned) = (device.memory(64, 7), device.pinned(64, 0));
        device.control.fail_operation(Some(Kind::Memset), 1, 700);
        assert_eq!(
            (CUDA.cuMemcpyDtoHAsync_v2)(pinned.pointer, address, 64, copying),
            0
        );
        assert_eq!((CUDA.cuMemsetD8Async)(address, 1, 64, failing), 0);
        assert_eq!((CUDA.cuStreamSynchronize)(failing), 700);
        assert_eq!(device.control.pending(copying), 0, "seed {seed}");
    }
}

static BEGAN: AtomicBool = AtomicBool::new(false);
static RETURNS: AtomicBool = AtomicBool::new(false);

extern "C" fn wait_to_return(_: *mut c_void) {
    BEGAN.store(true, Ordering::Release);
    while !RETURNS.load(Ordering::Acquire) {
        thread::yield_now();
    }
}

#[test]
fn what_is_dropped_is_awaited_by_nobody() {
    let device = Device::new();
    let (busy, failing) = (device.stream(), device.stream());
    let address = device.memory(64, 7);
    assert_eq!(
        (CUDA.cuLaunchHostFunc)(busy, wait_to_return, std::ptr::null_mut()),
        0
    );
    for _ in 0..3 {
        assert_eq!((CUDA.cuMemsetD8Async)(address, 1, 64, busy), 0);
    }
    device
        .control
        .fail_operation(Some(Kind::EventRecord), 1, 700);
    device.record(failing);
    // A host function is not waited for, as it may wait for this thread.
    assert_eq!((CUDA.cuStreamSynchronize)(failing), 700);
    RETURNS.store(true, Ordering::Release);
    assert_eq!((CUDA.cuMemFree_v2)(address), 700);
    assert_eq!(device.control.pending(busy), 0);
}
