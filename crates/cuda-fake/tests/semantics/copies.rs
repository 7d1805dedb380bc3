//! Copies: when they read, the content of a destination meanwhile, and refused copies.

use crate::device::{Device, NOT_READY, made};
use crate::raw::{Attributes, CUDA, Copy2D};

#[test]
fn a_source_is_read_when_the_copy_executes() {
    let device = Device::new();
    let stream = device.stream();
    let (address, pinned) = (device.memory(64, 1), device.pinned(64, 0));
    let hold = device.control.hold();
    assert_eq!(
        (CUDA.cuMemcpyDtoHAsync_v2)(pinned.pointer, address, 64, stream),
        0
    );
    device.control.poke(address, &[2; 64]);
    assert_eq!((CUDA.cuStreamQuery)(stream), NOT_READY);
    assert_eq!(pinned.read(&device), [0xA5; 64]);
    drop(hold);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    assert_eq!(pinned.read(&device), [2; 64]);
}

#[test]
fn a_destination_is_not_spoiled_while_something_queued_uses_it() {
    let device = Device::new();
    let (up, down) = (device.stream(), device.stream());
    let (first, second) = (device.memory(64, 1), device.memory(64, 2));
    let pinned = device.pinned(64, 3);
    let hold = device.control.hold();
    assert_eq!(
        (CUDA.cuMemcpyHtoDAsync_v2)(first, pinned.pointer, 64, up),
        0
    );
    let sent = device.record(up);
    assert_eq!((CUDA.cuStreamWaitEvent)(down, sent, 0), 0);
    assert_eq!(
        (CUDA.cuMemcpyDtoHAsync_v2)(pinned.pointer, second, 64, down),
        0
    );
    assert_eq!(pinned.read(&device), [3; 64]);
    drop(hold);
    assert_eq!((CUDA.cuCtxSynchronize)(), 0);
    assert_eq!(device.peek(first, 64), [3; 64]);
    assert_eq!(pinned.read(&device), [2; 64]);
}

#[test]
fn a_pageable_source_is_taken_during_the_call_and_a_pinned_one_is_not() {
    let device = Device::new();
    let stream = device.stream();
    let (first, second) = (device.memory(64, 0), device.memory(64, 0));
    let mut pageable = [1_u8; 64];
    let pinned = device.pinned(64, 1);
    let hold = device.control.hold();
    assert_eq!(
        (CUDA.cuMemcpyHtoDAsync_v2)(first, pageable.as_ptr(), 64, stream),
        0
    );
    assert_eq!(
        (CUDA.cuMemcpyHtoDAsync_v2)(second, pinned.pointer, 64, stream),
        0
    );
    pageable.fill(2);
    device.control.poke(pinned.address(), &[2; 64]);
    drop(hold);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    assert_eq!(device.peek(first, 64), [1; 64]);
    assert_eq!(device.peek(second, 64), [2; 64]);
}

#[test]
fn a_pageable_destination_is_written_when_the_call_returns() {
    let device = Device::new();
    device.control.set_delay_us_max(5_000);
    let stream = device.stream();
    let address = device.memory(64, 7);
    let mut pageable = vec![0_u8; 64];
    for _ in 0..8 {
        pageable.fill(0);
        assert_eq!(
            (CUDA.cuMemcpyDtoHAsync_v2)(pageable.as_mut_ptr(), address, 64, stream),
            0
        );
        assert_eq!(pageable, [7; 64]);
    }
}

#[test]
fn copies_go_every_way() {
    let device = Device::new();
    let stream = device.stream();
    let (first, second) = (device.memory(64, 0), device.memory(64, 0));
    let sent: Vec<u8> = (0..64).collect();
    let mut received = vec![0_u8; 64];
    assert_eq!((CUDA.cuMemcpyHtoD_v2)(first, sent.as_ptr(), 64), 0);
    assert_eq!(
        (CUDA.cuMemcpyDtoDAsync_v2)(second + 1, first, 63, stream),
        0
    );
    assert_eq!((CUDA.cuMemsetD8Async)(second, 9, 1, stream), 0);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    assert_eq!((CUDA.cuMemcpyDtoH_v2)(received.as_mut_ptr(), second, 64), 0);
    assert_eq!(received[0], 9);
    assert_eq!(received[1..], sent[..63]);
}

#[test]
fn what_no_device_has_cannot_be_copied() {
    let device = Device::new();
    let stream = device.stream();
    let (address, freed) = (device.memory(64, 0), device.memory(64, 0));
    let pinned = device.pinned(64, 0);
    assert_eq!((CUDA.cuMemFree_v2)(freed), 0);
    let from = |source, bytes| (CUDA.cuMemcpyDtoHAsync_v2)(pinned.pointer, source, bytes, stream);
    assert_eq!(from(freed, 64), 1);
    assert_eq!(from(address, 65), 1);
    assert_eq!(from(address + 1, 64), 1);
    assert_eq!(from(0x10, 8), 1);
    assert_eq!(from(address, 0), 0);
    // Beyond the end of a pinned range.
    assert_eq!(
        (CUDA.cuMemcpyHtoDAsync_v2)(address, pinned.pointer.wrapping_add(32), 64, stream),
        1
    );
    assert_eq!((CUDA.cuMemsetD8Async)(freed, 1, 1, stream), 1);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    assert_eq!(device.control.journal().len(), 0);
}

#[test]
fn rows_are_copied_by_their_pitches() {
    let device = Device::new();
    let stream = device.stream();
    let address = device.memory(64, 0);
    device.control.poke(address, &(0..64).collect::<Vec<u8>>());
    let pinned = device.pinned(24, 1);
    let mut copied = Copy2D {
        source_x_bytes: 2,
        source_y: 1,
        source_type: 2,
        source_device: address,
        source_pitch: 16,
        destination_type: 1,
        destination_host: pinned.address(),
        destination_pitch: 8,
        width_bytes: 4,
        height: 3,
        ..Copy2D::default()
    };
    let hold = device.control.hold();
    assert_eq!((CUDA.cuMemcpy2DAsync_v2)(&copied, stream), 0);
    let spoiled = [0xA5, 0xA5, 0xA5, 0xA5, 1, 1, 1, 1].repeat(3);
    assert_eq!(pinned.read(&device), spoiled);
    drop(hold);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    let row = |first: u8| [first, first + 1, first + 2, first + 3, 1, 1, 1, 1];
    assert_eq!(pinned.read(&device), [row(18), row(34), row(50)].concat());
    copied.height = 4;
    assert_eq!((CUDA.cuMemcpy2DAsync_v2)(&copied, stream), 1);
    copied.height = 3;
    copied.destination_pitch = 3;
    assert_eq!((CUDA.cuMemcpy2DAsync_v2)(&copied, stream), 1);
}

#[test]
fn a_batch_is_one_operation() {
    let device = Device::new();
    let stream = device.stream();
    let (first, second) = (device.memory(64, 1), device.memory(64, 2));
    let pinned = device.pinned(128, 0);
    let destinations = [pinned.address() + 64, pinned.address()];
    let (sources, sizes) = ([first, second], [64_usize, 32]);
    let in_order = Attributes {
        source_access_order: 1,
        ..Attributes::default()
    };
    let batch = |count, stream| {
        (CUDA.cuMemcpyBatchAsync_v2)(
            destinations.as_ptr(),
            sources.as_ptr(),
            sizes.as_ptr(),
            count,
            &raw const in_order,
            &raw const FROM_FIRST,
            1,
            stream,
        )
    };
    assert_eq!(batch(2, 0), 1);
    assert_eq!(batch(0, stream), 1);
    assert_eq!(batch(2, stream), 0);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    let expected = [vec![2; 32], vec![0; 32], vec![1; 64]].concat();
    assert_eq!(pinned.read(&device), expected);
    assert_eq!(device.control.journal().len(), 1);
    assert_eq!(device.control.journal()[0].bytes, 96);
    device.control.set_driver_version(12_090);
    assert_eq!(batch(2, stream), 801);
}

/// All copies of a batch use the first attributes.
static FROM_FIRST: usize = 0;

#[test]
fn a_batch_names_the_copy_that_is_wrong_and_does_none() {
    let device = Device::new();
    let stream = device.stream();
    let address = device.memory(64, 1);
    let pinned = device.pinned(64, 0);
    let destinations = [pinned.address(); 2];
    let (sources, sizes) = ([address, address + 60], [8_usize, 8]);
    let mut attribute = Attributes {
        source_access_order: 1,
        ..Attributes::default()
    };
    let mut failed = 77;
    let mut batch = |attribute: &Attributes| {
        let status = (CUDA.cuMemcpyBatchAsync)(
            destinations.as_ptr(),
            sources.as_ptr(),
            sizes.as_ptr(),
            2,
            attribute,
            &raw const FROM_FIRST,
            1,
            &mut failed,
            stream,
        );
        (status, failed)
    };
    assert_eq!(batch(&attribute), (1, 1));
    attribute.source_access_order = 0;
    assert_eq!(batch(&attribute), (1, usize::MAX));
    assert_eq!(device.control.pending(stream), 0);
    assert_eq!(pinned.read(&device), [0; 64]);
    device.control.set_driver_version(12_070);
    assert_eq!(batch(&attribute).0, 801);
}

#[test]
fn a_batch_may_take_its_sources_during_the_call() {
    let device = Device::new();
    let stream = device.stream();
    let (first, second) = (device.memory(8, 0), device.memory(8, 0));
    let pinned = device.pinned(8, 1);
    let (destinations, sources) = ([first, second], [pinned.address(); 2]);
    let orders = [1, 2].map(|source_access_order| Attributes {
        source_access_order,
        ..Attributes::default()
    });
    let hold = device.control.hold();
    assert_eq!(
        (CUDA.cuMemcpyBatchAsync_v2)(
            destinations.as_ptr(),
            sources.as_ptr(),
            [8_usize; 2].as_ptr(),
            2,
            orders.as_ptr(),
            [0_usize, 1].as_ptr(),
            2,
            stream,
        ),
        0
    );
    device.control.poke(pinned.address(), &[2; 8]);
    drop(hold);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    assert_eq!(device.peek(first, 8), [2; 8]);
    assert_eq!(device.peek(second, 8), [1; 8]);
}

#[test]
fn a_copy_on_a_stream_of_another_device_is_made() {
    let device = Device::new();
    device.control.set_devices(2);
    let stream = device.stream();
    let address = device.memory(64, 7);
    let other = made(|context| (CUDA.cuDevicePrimaryCtxRetain)(context, 1));
    assert_eq!((CUDA.cuCtxPushCurrent_v2)(other), 0);
    let elsewhere = device.memory(64, 0);
    assert_eq!(
        (CUDA.cuMemcpyDtoDAsync_v2)(elsewhere, address, 64, stream),
        0
    );
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    assert_eq!(device.peek(elsewhere, 64), [7; 64]);
}
