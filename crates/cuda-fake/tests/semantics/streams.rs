//! Streams: the order within one, the order between them, and the work left in a destroyed one.

use std::ffi::c_void;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::thread;

use penstock_cuda_fake::Kind;

use crate::device::{Device, NOT_READY, made};
use crate::raw::CUDA;

/// Fills memory of a distinct length, which identifies the fill in the journal.
fn fill(device: &Device, bytes: usize, stream: u64) {
    let address = device.memory(bytes, 0);
    assert_eq!((CUDA.cuMemsetD8Async)(address, 1, bytes, stream), 0);
}

fn order(device: &Device) -> Vec<u64> {
    device
        .control
        .journal()
        .iter()
        .map(|entry| entry.bytes)
        .collect()
}

#[test]
fn a_stream_keeps_its_order_and_streams_have_none() {
    let device = Device::new();
    let (first, second) = (device.stream(), device.stream());
    let hold = device.control.hold();
    for bytes in 1..=3 {
        fill(&device, bytes, first);
        fill(&device, 10 + bytes, second);
    }
    hold.step(second, 2);
    hold.step(first, 3);
    hold.step(second, 1);
    assert_eq!(order(&device), [11, 12, 1, 2, 3, 13]);
    assert_eq!((CUDA.cuCtxSynchronize)(), 0);
    let streams: Vec<u64> = device
        .control
        .journal()
        .iter()
        .map(|entry| entry.stream)
        .collect();
    assert_eq!(streams, [second, second, first, first, first, second]);
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_and_they_for_it() {
    let device = Device::new();
    let (blocking, other) = (device.blocking_stream(), device.stream());
    let hold = device.control.hold();
    fill(&device, 1, blocking);
    fill(&device, 2, 0);
    fill(&device, 3, blocking);
    fill(&device, 4, other);
    // Each is released before it may begin.
    hold.allow(0, 1);
    hold.step(other, 1);
    assert_eq!(order(&device), [4]);
    hold.step(blocking, 1);
    hold.allow(blocking, 1);
    assert_eq!((CUDA.cuCtxSynchronize)(), 0);
    assert_eq!(order(&device), [4, 1, 2, 3]);
    let legacy = device.control.journal()[2];
    assert_eq!((legacy.kind, legacy.stream), (Kind::Memset, 0));
}

#[test]
fn who_waits_for_the_legacy_stream_waits_for_blocking_streams() {
    let device = Device::new();
    let (blocking, other) = (device.blocking_stream(), device.stream());
    let hold = device.control.hold();
    fill(&device, 1, other);
    assert_eq!((CUDA.cuStreamQuery)(0), 0);
    fill(&device, 2, blocking);
    assert_eq!((CUDA.cuStreamQuery)(0), NOT_READY);
    hold.step(blocking, 1);
    assert_eq!((CUDA.cuStreamSynchronize)(0), 0);
    assert_eq!(device.control.pending(other), 1);
}

#[test]
fn the_stream_of_a_thread_is_its_own_and_blocking() {
    let device = Device::new();
    let hold = device.control.hold_stream(2);
    fill(&device, 1, 2);
    assert_eq!((CUDA.cuStreamQuery)(2), NOT_READY);
    thread::scope(|scope| {
        let other = || {
            assert_eq!((CUDA.cuCtxPushCurrent_v2)(device.context), 0);
            assert_eq!((CUDA.cuStreamQuery)(2), 0);
        };
        scope.spawn(other).join().unwrap();
    });
    fill(&device, 2, 0);
    assert_eq!((CUDA.cuStreamQuery)(0), NOT_READY);
    drop(hold);
    assert_eq!((CUDA.cuStreamSynchronize)(0), 0);
    assert_eq!(order(&device), [1, 2]);
}

#[test]
fn a_stream_that_is_destroyed_finishes_its_work() {
    let device = Device::new();
    let stream = device.stream();
    let (address, pinned) = (device.memory(64, 7), device.pinned(64, 0));
    let hold = device.control.hold();
    assert_eq!(
        (CUDA.cuMemcpyDtoHAsync_v2)(pinned.pointer, address, 64, stream),
        0
    );
    let event = device.record(stream);
    assert_eq!((CUDA.cuStreamDestroy_v2)(stream), 0);
    assert_eq!((CUDA.cuStreamQuery)(stream), 400);
    assert_eq!((CUDA.cuStreamDestroy_v2)(stream), 400);
    assert_eq!(
        (CUDA.cuMemcpyDtoHAsync_v2)(pinned.pointer, address, 64, stream),
        400
    );
    assert_eq!((CUDA.cuEventRecord)(event, stream), 400);
    assert_eq!(device.control.leaks().streams, 0);
    assert_eq!((CUDA.cuEventQuery)(event), NOT_READY);
    drop(hold);
    assert_eq!((CUDA.cuEventSynchronize)(event), 0);
    assert_eq!(pinned.read(&device), [7; 64]);
    // The default streams cannot be destroyed.
    assert_eq!((CUDA.cuStreamDestroy_v2)(0), 400);
    assert_eq!((CUDA.cuStreamDestroy_v2)(2), 400);
}

#[test]
fn streams_are_made_with_known_flags() {
    let device = Device::new();
    assert_eq!((CUDA.cuStreamCreate)(&mut 0, 2), 1);
    let stream = made(|stream| (CUDA.cuStreamCreateWithPriority)(stream, 1, -5));
    assert_eq!((CUDA.cuStreamQuery)(stream), 0);
    assert_eq!(device.control.leaks().streams, 1);
    assert_eq!((CUDA.cuStreamQuery)(12_345), 400);
}

static CALLED: AtomicU64 = AtomicU64::new(0);
static REFUSED: AtomicI32 = AtomicI32::new(0);

extern "C" fn add(data: *mut c_void) {
    CALLED.fetch_add(data as u64, Ordering::SeqCst);
    REFUSED.store((CUDA.cuCtxSynchronize)(), Ordering::SeqCst);
}

#[test]
fn a_host_function_runs_in_order_and_may_call_nothing() {
    let device = Device::new();
    let stream = device.stream();
    let hold = device.control.hold();
    assert_eq!((CUDA.cuLaunchHostFunc)(stream, add, 5 as *mut c_void), 0);
    assert_eq!(CALLED.load(Ordering::SeqCst), 0);
    drop(hold);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    assert_eq!(CALLED.load(Ordering::SeqCst), 5);
    assert_eq!(REFUSED.load(Ordering::SeqCst), 800);
}
