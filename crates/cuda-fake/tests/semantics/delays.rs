//! Delays from a seed: they reveal wrong orders, and do not affect right ones.

use std::env;
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::device::Device;
use crate::raw::CUDA;

#[test]
fn work_in_the_right_order_comes_out_right_under_every_seed() {
    for seed in 0..30 {
        let device = Device::new();
        device.control.set_seed(seed);
        device.control.set_delay_us_max(300);
        let (compute, copies) = (device.stream(), device.stream());
        let (address, pinned) = (device.memory(64, 0), device.pinned(64, 0));
        for byte in 1..6 {
            assert_eq!((CUDA.cuMemsetD8Async)(address, byte, 64, compute), 0);
            let filled = device.record(compute);
            assert_eq!((CUDA.cuStreamWaitEvent)(copies, filled, 0), 0);
            assert_eq!(
                (CUDA.cuMemcpyDtoHAsync_v2)(pinned.pointer, address, 64, copies),
                0
            );
            let copied = device.record(copies);
            assert_eq!((CUDA.cuStreamWaitEvent)(compute, copied, 0), 0);
            assert_eq!((CUDA.cuEventSynchronize)(copied), 0);
            assert_eq!(pinned.read(&device), [byte; 64], "seed {seed}");
        }
    }
}

/// The number of seeds under which a copy without its wait is detected.
fn shown(is_awaited: bool) -> usize {
    let shows = |seed: &u64| {
        let device = Device::new();
        device.control.set_seed(*seed);
        device.control.set_delay_us_max(2_000);
        let (compute, copies) = (device.stream(), device.stream());
        let (address, pinned) = (device.memory(64, 0), device.pinned(64, 0));
        assert_eq!((CUDA.cuMemsetD8Async)(address, 1, 64, compute), 0);
        let filled = device.record(compute);
        if is_awaited {
            assert_eq!((CUDA.cuStreamWaitEvent)(copies, filled, 0), 0);
        }
        assert_eq!(
            (CUDA.cuMemcpyDtoHAsync_v2)(pinned.pointer, address, 64, copies),
            0
        );
        assert_eq!((CUDA.cuStreamSynchronize)(copies), 0);
        pinned.read(&device) != [1; 64]
    };
    (0..30).filter(shows).count()
}

#[test]
fn a_missing_wait_shows() {
    assert!(shown(false) > 0);
    assert_eq!(shown(true), 0);
}

#[test]
fn a_source_that_is_changed_too_early_shows() {
    let shows = |seed: u64| {
        let device = Device::new();
        device.control.set_seed(seed);
        device.control.set_delay_us_max(5_000);
        let (stream, address) = (device.stream(), device.memory(64, 0));
        let pinned = device.pinned(64, 1);
        assert_eq!(
            (CUDA.cuMemcpyHtoDAsync_v2)(address, pinned.pointer, 64, stream),
            0
        );
        thread::sleep(Duration::from_micros(500));
        device.control.poke(pinned.address(), &[2; 64]);
        assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
        device.peek(address, 64) == [2; 64]
    };
    assert!((0..20).any(shows));
}

#[test]
fn the_environment_sets_what_a_program_in_another_language_needs() {
    if env::var_os("PENSTOCK_FAKE_DEVICES").is_some() {
        let _control = penstock_cuda_fake::Control::new();
        assert_eq!((CUDA.cuInit)(0), 0);
        let mut count = 0;
        assert_eq!((CUDA.cuDeviceGetCount)(&mut count), 0);
        let mut bytes = 0;
        assert_eq!((CUDA.cuDeviceTotalMem_v2)(&mut bytes, 2), 0);
        assert_eq!((count, bytes), (3, 12_345));
        return;
    }
    let mut again = Command::new(env::current_exe().unwrap());
    again.args([
        "--exact",
        "delays::the_environment_sets_what_a_program_in_another_language_needs",
    ]);
    again
        .env("PENSTOCK_FAKE_DEVICES", "3")
        .env("PENSTOCK_FAKE_MEMORY_BYTES", "12345");
    assert!(again.status().unwrap().success());
}
