//! Forks and exits: a child may make no calls, and no process waits for its streams.

use std::env;
use std::process::{self, Command};

use crate::device::Device;
use crate::raw::CUDA;

#[test]
fn a_forked_child_is_refused() {
    let device = Device::new();
    let stream = device.stream();
    // SAFETY: the child makes calls that only read a number before they return, and exits at once.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = [
            (CUDA.cuInit)(0),
            (CUDA.cuDeviceGetCount)(&mut 0),
            (CUDA.cuStreamQuery)(stream),
            (CUDA.cuMemAlloc_v2)(&mut 0, 8),
            (CUDA.cuCtxSynchronize)(),
        ];
        let code = i32::from(refused != [3; 5]);
        // SAFETY: this ends the child, without running the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    let mut status = -1;
    // SAFETY: the child is this process's, and `status` has room for its status.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!((CUDA.cuStreamQuery)(stream), 0);
}

#[test]
fn a_process_ends_with_work_queued() {
    if env::var_os("FAKE_TEST_EXITS").is_some() {
        let device = Device::new();
        let (stream, address) = (device.stream(), device.memory(64, 0));
        let pinned = device.pinned(64, 0);
        std::mem::forget(device.control.hold_stream(stream));
        device.control.set_delay_us_max(60_000_000);
        for stream in [stream, device.stream()] {
            for _ in 0..9 {
                assert_eq!(
                    (CUDA.cuMemcpyDtoHAsync_v2)(pinned.pointer, address, 64, stream),
                    0
                );
            }
        }
        process::exit(7);
    }
    let mut again = Command::new(env::current_exe().unwrap());
    again.args(["--exact", "fork::a_process_ends_with_work_queued"]);
    assert_eq!(
        again.env("FAKE_TEST_EXITS", "1").status().unwrap().code(),
        Some(7)
    );
}
