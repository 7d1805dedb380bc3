//! Events: the position that they represent, and the contexts that may use them.

use crate::device::{Device, EVENT, NOT_READY, made};
use crate::raw::CUDA;

#[test]
fn an_event_that_was_never_recorded_has_happened() {
    let device = Device::new();
    let (event, stream) = (device.event(), device.stream());
    assert_eq!((CUDA.cuEventQuery)(event), 0);
    assert_eq!((CUDA.cuEventSynchronize)(event), 0);
    let _hold = device.control.hold();
    assert_eq!((CUDA.cuStreamWaitEvent)(stream, event, 0), 0);
    assert_eq!((CUDA.cuStreamQuery)(stream), 0);
}

#[test]
fn an_event_stands_for_what_was_queued_when_it_was_recorded() {
    let device = Device::new();
    let stream = device.stream();
    let address = device.memory(64, 0);
    let hold = device.control.hold();
    assert_eq!((CUDA.cuMemsetD8Async)(address, 1, 64, stream), 0);
    let event = device.record(stream);
    assert_eq!((CUDA.cuMemsetD8Async)(address, 2, 64, stream), 0);
    assert_eq!((CUDA.cuEventQuery)(event), NOT_READY);
    hold.step(stream, 1);
    assert_eq!((CUDA.cuEventQuery)(event), NOT_READY);
    hold.step(stream, 1);
    assert_eq!((CUDA.cuEventQuery)(event), 0);
    assert_eq!(device.peek(address, 64), [1; 64]);

    assert_eq!((CUDA.cuEventRecord)(event, stream), 0);
    assert_eq!((CUDA.cuEventQuery)(event), NOT_READY);
    hold.step(stream, 1);
    assert_eq!((CUDA.cuEventQuery)(event), NOT_READY);
    drop(hold);
    assert_eq!((CUDA.cuEventSynchronize)(event), 0);
}

#[test]
fn a_wait_is_for_the_moment_that_was_recorded_when_it_was_queued() {
    let device = Device::new();
    let (first, second) = (device.stream(), device.stream());
    let address = device.memory(64, 0);
    let hold = device.control.hold_stream(first);
    assert_eq!((CUDA.cuMemsetD8Async)(address, 1, 64, first), 0);
    let event = device.record(first);
    assert_eq!((CUDA.cuStreamWaitEvent)(second, event, 0), 0);
    let pinned = device.pinned(64, 0);
    assert_eq!(
        (CUDA.cuMemcpyDtoHAsync_v2)(pinned.pointer, address, 64, second),
        0
    );
    // A later record, and even the event's destruction, do not affect streams that already wait.
    assert_eq!((CUDA.cuMemsetD8Async)(address, 2, 64, first), 0);
    assert_eq!((CUDA.cuEventRecord)(event, first), 0);
    assert_eq!((CUDA.cuEventDestroy_v2)(event), 0);
    assert_eq!((CUDA.cuStreamQuery)(second), NOT_READY);
    hold.step(first, 2);
    assert_eq!((CUDA.cuStreamSynchronize)(second), 0);
    assert_eq!(pinned.read(&device), [1; 64]);
    assert_eq!((CUDA.cuStreamQuery)(first), NOT_READY);
}

#[test]
fn an_event_that_was_destroyed_is_refused() {
    let device = Device::new();
    let (stream, event) = (device.stream(), device.event());
    assert_eq!((CUDA.cuEventDestroy_v2)(event), 0);
    assert_eq!((CUDA.cuEventDestroy_v2)(event), 400);
    assert_eq!((CUDA.cuEventRecord)(event, stream), 400);
    assert_eq!((CUDA.cuEventQuery)(event), 400);
    assert_eq!((CUDA.cuEventSynchronize)(event), 400);
    assert_eq!((CUDA.cuStreamWaitEvent)(stream, event, 0), 400);
    assert_eq!(device.control.leaks().events, 0);
}

#[test]
fn an_event_is_recorded_in_its_context_and_awaited_in_any() {
    let device = Device::new();
    device.control.set_devices(2);
    let (event, stream) = (device.event(), device.stream());
    let hold = device.control.hold();
    let address = device.memory(8, 0);
    assert_eq!((CUDA.cuMemsetD8Async)(address, 1, 8, stream), 0);
    assert_eq!((CUDA.cuEventRecord)(event, stream), 0);
    let other = made(|context| (CUDA.cuDevicePrimaryCtxRetain)(context, 1));
    assert_eq!((CUDA.cuCtxPushCurrent_v2)(other), 0);
    let elsewhere = device.stream();
    assert_eq!((CUDA.cuEventRecord)(event, elsewhere), 400);
    assert_eq!((CUDA.cuStreamWaitEvent)(elsewhere, event, 0), 0);
    assert_eq!((CUDA.cuStreamQuery)(elsewhere), NOT_READY);
    drop(hold);
    assert_eq!((CUDA.cuStreamSynchronize)(elsewhere), 0);
    assert_eq!((CUDA.cuEventQuery)(event), 0);
}

#[test]
fn timed_events_tell_the_time_between_them() {
    let device = Device::new();
    let stream = device.stream();
    let [start, end, never] = [(); 3].map(|()| made(|event| (CUDA.cuEventCreate)(event, 0)));
    let untimed = device.record(stream);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    let hold = device.control.hold();
    assert_eq!((CUDA.cuEventRecord)(start, stream), 0);
    assert_eq!((CUDA.cuEventRecord)(end, stream), 0);
    let mut elapsed = -1.0;
    assert_eq!(
        (CUDA.cuEventElapsedTime)(&mut elapsed, start, end),
        NOT_READY
    );
    assert_eq!((CUDA.cuEventElapsedTime)(&mut elapsed, start, never), 400);
    assert_eq!((CUDA.cuEventElapsedTime)(&mut elapsed, untimed, end), 400);
    assert_eq!((CUDA.cuEventRecord)(end, stream), 0);
    hold.step(stream, 2);
    // The first record was reached, but not the last.
    assert_eq!(
        (CUDA.cuEventElapsedTime)(&mut elapsed, start, end),
        NOT_READY
    );
    drop(hold);
    assert_eq!((CUDA.cuEventSynchronize)(end), 0);
    assert_eq!((CUDA.cuEventElapsedTime_v2)(&mut elapsed, start, end), 0);
    assert!(elapsed >= 0.0);
}

#[test]
fn events_are_made_with_known_flags() {
    let _device = Device::new();
    assert_eq!((CUDA.cuEventCreate)(&mut 0, 8), 1);
    // Interprocess events may not have timing.
    assert_eq!((CUDA.cuEventCreate)(&mut 0, 4), 1);
    assert_eq!((CUDA.cuEventCreate)(&mut 0, EVENT | 4), 0);
}
