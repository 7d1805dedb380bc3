//! Stream capture: captured work, refused calls, and invalidation.

use std::thread;

use crate::device::{Device, made};
use crate::raw::CUDA;

const GLOBAL: i32 = 0;
const THREAD_LOCAL: i32 = 1;
const RELAXED: i32 = 2;

fn begin(stream: u64, mode: i32) {
    assert_eq!((CUDA.cuStreamBeginCapture_v2)(stream, mode), 0);
}

/// Ends a capture, which returns a graph or a code.
fn end(stream: u64) -> i32 {
    let mut graph = 7;
    let status = (CUDA.cuStreamEndCapture)(stream, &mut graph);
    if status == 0 {
        assert_eq!((CUDA.cuGraphDestroy)(graph), 0);
        assert_eq!((CUDA.cuGraphDestroy)(graph), 1);
    } else if status != 908 {
        assert_eq!((graph, capturing(stream)), (0, 0));
    }
    status
}

fn capturing(stream: u64) -> i32 {
    made(|status| (CUDA.cuStreamIsCapturing)(stream, status))
}

/// Runs `body` in another thread, with the same context.
fn elsewhere<T: Send>(device: &Device, body: impl FnOnce() -> T + Send) -> T {
    let context = device.context;
    let inside = move || {
        assert_eq!((CUDA.cuCtxPushCurrent_v2)(context), 0);
        body()
    };
    thread::scope(|scope| scope.spawn(inside).join().unwrap())
}

fn exchange(mut mode: i32) -> i32 {
    assert_eq!((CUDA.cuThreadExchangeStreamCaptureMode)(&mut mode), 0);
    mode
}

#[test]
fn captured_work_is_not_executed() {
    let device = Device::new();
    let stream = device.stream();
    let (address, pinned) = (device.memory(64, 1), device.pinned(64, 3));
    begin(stream, GLOBAL);
    assert_eq!((CUDA.cuStreamBeginCapture_v2)(stream, GLOBAL), 401);
    assert_eq!(capturing(stream), 1);
    assert_eq!((CUDA.cuMemsetD8Async)(address, 2, 64, stream), 0);
    assert_eq!(
        (CUDA.cuMemcpyDtoHAsync_v2)(pinned.pointer, address, 64, stream),
        0
    );
    assert_eq!(end(stream), 0);
    assert_eq!(end_of_none(stream), 401);
    assert_eq!(capturing(stream), 0);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    assert_eq!(pinned.read(&device), [3; 64]);
    assert_eq!(device.control.journal().len(), 0);
    assert_eq!(device.control.leaks().graphs, 0);
}

fn end_of_none(stream: u64) -> i32 {
    (CUDA.cuStreamEndCapture)(stream, &mut 0)
}

/// A call that returns a code.
type Call = Box<dyn Fn() -> i32 + Send>;

/// Calls that a capture cannot record, with their arguments.
fn unsafe_calls(device: &Device) -> Vec<(&'static str, Call)> {
    let (stream, event) = (device.stream(), device.record(device.stream()));
    let address = device.memory(8, 0);
    let pinned = device.pinned(8, 0).address();
    let pages = device.pinned(8, 0).address();
    vec![
        (
            "cuMemAlloc_v2",
            Box::new(|| (CUDA.cuMemAlloc_v2)(&mut 0, 8)),
        ),
        (
            "cuMemHostAlloc",
            Box::new(|| (CUDA.cuMemHostAlloc)(&mut std::ptr::null_mut(), 8, 0)),
        ),
        (
            "cuMemHostRegister_v2",
            Box::new(|| (CUDA.cuMemHostRegister_v2)(8 as *mut u8, 8, 0)),
        ),
        (
            "cuMemHostUnregister",
            Box::new(move || (CUDA.cuMemHostUnregister)(pages as *mut u8)),
        ),
        (
            "cuMemFree_v2",
            Box::new(move || (CUDA.cuMemFree_v2)(address)),
        ),
        (
            "cuMemFreeHost",
            Box::new(move || (CUDA.cuMemFreeHost)(pinned as *mut u8)),
        ),
        ("cuEventQuery", Box::new(move || (CUDA.cuEventQuery)(event))),
        (
            "cuEventSynchronize",
            Box::new(move || (CUDA.cuEventSynchronize)(event)),
        ),
        (
            "cuStreamQuery",
            Box::new(move || (CUDA.cuStreamQuery)(stream)),
        ),
        (
            "cuStreamSynchronize",
            Box::new(move || (CUDA.cuStreamSynchronize)(stream)),
        ),
        (
            "cuMemcpyDtoH_v2",
            Box::new(move || (CUDA.cuMemcpyDtoH_v2)(pinned as *mut u8, address, 8)),
        ),
    ]
}

#[test]
fn a_global_capture_refuses_unsafe_calls_of_any_thread() {
    let device = Device::new();
    let captured = device.stream();
    for (name, call) in unsafe_calls(&device) {
        begin(captured, GLOBAL);
        assert_eq!(elsewhere(&device, call), 900, "{name}");
        assert_eq!(capturing(captured), 2, "{name}");
        assert_eq!((CUDA.cuMemsetD8Async)(1, 0, 1, captured), 1);
        assert_eq!(end(captured), 901, "{name}");
    }
}

#[test]
fn a_relaxed_thread_may_call_anything() {
    let device = Device::new();
    let captured = device.stream();
    begin(captured, GLOBAL);
    elsewhere(&device, || {
        assert_eq!(exchange(RELAXED), GLOBAL);
        let address = made(|address| (CUDA.cuMemAlloc_v2)(address, 8));
        let event = made(|event| (CUDA.cuEventCreate)(event, 3));
        let stream = made(|stream| (CUDA.cuStreamCreate)(stream, 1));
        assert_eq!((CUDA.cuMemsetD8Async)(address, 1, 8, stream), 0);
        assert_eq!((CUDA.cuEventRecord)(event, stream), 0);
        assert_eq!((CUDA.cuEventSynchronize)(event), 0);
        assert_eq!((CUDA.cuMemFree_v2)(address), 0);
        assert_eq!(exchange(GLOBAL), RELAXED);
    });
    assert_eq!(end(captured), 0);
}

#[test]
fn a_capture_of_one_thread_concerns_no_other() {
    let device = Device::new();
    let captured = device.stream();
    for mode in [THREAD_LOCAL, RELAXED] {
        begin(captured, mode);
        assert_eq!(elsewhere(&device, || (CUDA.cuMemAlloc_v2)(&mut 0, 8)), 0);
        let own = if mode == RELAXED { 0 } else { 900 };
        assert_eq!((CUDA.cuMemAlloc_v2)(&mut 0, 8), own);
        assert_eq!(end(captured), if mode == RELAXED { 0 } else { 901 });
    }
    begin(captured, GLOBAL);
    let foreign = || {
        exchange(THREAD_LOCAL);
        (CUDA.cuMemAlloc_v2)(&mut 0, 8)
    };
    assert_eq!(elsewhere(&device, foreign), 0);
    assert_eq!(elsewhere(&device, move || end_of_none(captured)), 908);
    assert_eq!(end(captured), 0);
}

#[test]
fn a_captured_event_pulls_a_stream_in_until_it_is_joined() {
    let device = Device::new();
    let (origin, fork) = (device.stream(), device.stream());
    let address = device.memory(8, 0);
    let (event, joined) = (device.event(), device.event());
    for is_joined in [true, false] {
        begin(origin, GLOBAL);
        assert_eq!((CUDA.cuEventRecord)(event, origin), 0);
        assert_eq!(capturing(fork), 0);
        assert_eq!((CUDA.cuStreamWaitEvent)(fork, event, 0), 0);
        assert_eq!(capturing(fork), 1);
        assert_eq!((CUDA.cuMemsetD8Async)(address, 1, 8, fork), 0);
        if is_joined {
            assert_eq!((CUDA.cuEventRecord)(joined, fork), 0);
            assert_eq!((CUDA.cuStreamWaitEvent)(origin, joined, 0), 0);
        }
        assert_eq!(end(origin), if is_joined { 0 } else { 904 });
        assert_eq!(capturing(fork), 0);
    }
    assert_eq!(device.control.journal().len(), 0);
}

#[test]
fn a_capture_ends_in_the_stream_that_it_began_in() {
    let device = Device::new();
    let (origin, fork) = (device.stream(), device.stream());
    let event = device.event();
    begin(origin, GLOBAL);
    assert_eq!((CUDA.cuEventRecord)(event, origin), 0);
    assert_eq!((CUDA.cuStreamWaitEvent)(fork, event, 0), 0);
    assert_eq!(end_of_none(fork), 903);
    assert_eq!(end(origin), 901);
}

#[test]
fn captured_and_other_work_do_not_mix() {
    let device = Device::new();
    let (first, second) = (device.stream(), device.stream());
    let (outside, inside) = (device.record(second), device.event());
    begin(first, RELAXED);
    assert_eq!((CUDA.cuStreamWaitEvent)(first, outside, 0), 905);
    assert_eq!(end(first), 901);

    begin(first, RELAXED);
    begin(second, RELAXED);
    assert_eq!((CUDA.cuEventRecord)(inside, first), 0);
    assert_eq!((CUDA.cuStreamWaitEvent)(second, inside, 0), 902);
    assert_eq!((end(first), end(second)), (901, 901));

    begin(first, RELAXED);
    assert_eq!((CUDA.cuEventRecord)(inside, first), 0);
    assert_eq!((CUDA.cuEventQuery)(inside), 907);
    assert_eq!(end(first), 901);
    // The event's position is in a graph, so nothing can wait for it.
    assert_eq!((CUDA.cuEventSynchronize)(inside), 907);
    assert_eq!((CUDA.cuStreamWaitEvent)(second, inside, 0), 907);
}

#[test]
fn a_stream_that_captures_cannot_be_asked() {
    let device = Device::new();
    let stream = device.stream();
    for call in [CUDA.cuStreamQuery, CUDA.cuStreamSynchronize] {
        begin(stream, RELAXED);
        assert_eq!(call(stream), 900);
        assert_eq!(end(stream), 901);
    }
    begin(stream, RELAXED);
    assert_eq!((CUDA.cuCtxSynchronize)(), 900);
    assert_eq!(end(stream), 901);
}

#[test]
fn the_legacy_stream_is_of_no_use_while_a_blocking_stream_captures() {
    let device = Device::new();
    let (blocking, other) = (device.blocking_stream(), device.stream());
    let address = device.memory(8, 0);
    assert_eq!((CUDA.cuStreamBeginCapture_v2)(0, GLOBAL), 900);
    begin(blocking, RELAXED);
    assert_eq!((CUDA.cuStreamIsCapturing)(0, &mut 0), 906);
    assert_eq!(capturing(blocking), 1);
    assert_eq!((CUDA.cuMemsetD8Async)(address, 1, 8, 0), 906);
    assert_eq!(end(blocking), 901);
    let event = device.event();
    begin(other, RELAXED);
    assert_eq!((CUDA.cuEventRecord)(event, other), 0);
    assert_eq!((CUDA.cuStreamWaitEvent)(0, event, 0), 906);
    assert_eq!(end(other), 901);
    begin(other, RELAXED);
    assert_eq!(capturing(0), 0);
    assert_eq!((CUDA.cuMemsetD8Async)(address, 1, 8, 0), 0);
    assert_eq!(end(other), 0);
}

#[test]
fn a_stream_that_is_destroyed_takes_its_capture_with_it() {
    let device = Device::new();
    let stream = device.stream();
    begin(stream, GLOBAL);
    assert_eq!((CUDA.cuStreamDestroy_v2)(stream), 0);
    device.memory(8, 0);
}
