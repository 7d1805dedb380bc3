//! Modules, and kernels by name.

use std::ffi::c_void;
use std::ptr;

use crate::device::{Device, made};
use crate::raw::CUDA;

const TEXT: &std::ffi::CStr = c".version 8.0\n.visible .entry penstock_pack(\n.param .u64 a)\n{}";

fn launch(function: u64, threads: u32, arguments: &[u64], stream: u64) -> i32 {
    let pointers: Vec<*const c_void> = arguments
        .iter()
        .map(|argument| ptr::from_ref(argument).cast())
        .collect();
    let none = ptr::null();
    (CUDA.cuLaunchKernel)(
        function,
        1,
        1,
        1,
        threads,
        1,
        1,
        0,
        stream,
        pointers.as_ptr(),
        none,
    )
}

fn pack(device: &Device) -> (u64, u64) {
    let module = made(|module| (CUDA.cuModuleLoadData)(module, TEXT.as_ptr()));
    let name = c"penstock_pack".as_ptr();
    let function = made(|function| (CUDA.cuModuleGetFunction)(function, module, name));
    assert_eq!(device.control.leaks().modules, 1);
    (module, function)
}

#[test]
fn rows_are_packed_by_their_ids() {
    let device = Device::new();
    let stream = device.stream();
    let (_, function) = pack(&device);
    let (packed, table) = (device.memory(12, 0), device.memory(64, 0));
    device.control.poke(table, &(0..64).collect::<Vec<u8>>());
    // Kernels access pinned memory too.
    let ids = device.pinned(24, 0);
    device.control.poke(
        ids.address(),
        &[3_u64, 0, 15].map(u64::to_le_bytes).concat(),
    );
    let arguments = [packed, table, ids.address(), 3, 4];
    assert_eq!(launch(function, 32, &arguments, stream), 0);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 0);
    assert_eq!(
        device.peek(packed, 12),
        [12, 13, 14, 15, 0, 1, 2, 3, 60, 61, 62, 63]
    );
}

#[test]
fn a_kernel_that_leaves_its_memory_takes_the_context_with_it() {
    let device = Device::new();
    let stream = device.stream();
    let (_, function) = pack(&device);
    let table = device.memory(64, 0);
    let ids = device.pinned(8, 16);
    let arguments = [table, table, ids.address(), 1, 4];
    assert_eq!(launch(function, 32, &arguments, stream), 0);
    assert_eq!((CUDA.cuStreamSynchronize)(stream), 700);
    assert_eq!((CUDA.cuMemAlloc_v2)(&mut 0, 8), 700);
}

#[test]
fn a_launch_that_cannot_be_is_refused() {
    let device = Device::new();
    device.control.set_devices(2);
    let stream = device.stream();
    let (module, function) = pack(&device);
    let arguments = [0; 5];
    assert_eq!(launch(function, 0, &arguments, stream), 1);
    assert_eq!(launch(function, 1025, &arguments, stream), 1);
    assert_eq!(launch(function + 1, 32, &arguments, stream), 400);
    let other = made(|context| (CUDA.cuDevicePrimaryCtxRetain)(context, 1));
    assert_eq!((CUDA.cuCtxPushCurrent_v2)(other), 0);
    assert_eq!(launch(function, 32, &arguments, stream), 400);
    assert_eq!((CUDA.cuModuleUnload)(module), 0);
    assert_eq!((CUDA.cuModuleUnload)(module), 400);
    assert_eq!(launch(function, 32, &arguments, stream), 400);
}

#[test]
fn what_is_no_text_of_kernels_is_refused() {
    let device = Device::new();
    assert_eq!((CUDA.cuModuleLoadData)(&mut 0, c"nothing".as_ptr()), 218);
    assert_eq!((CUDA.cuModuleLoadData)(&mut 0, c"\x7fELF".as_ptr()), 209);
    let (module, _) = pack(&device);
    assert_eq!(
        (CUDA.cuModuleGetFunction)(&mut 0, module, c"other".as_ptr()),
        500
    );
    assert_eq!(
        (CUDA.cuModuleGetFunction)(&mut 0, module + 1, c"penstock_pack".as_ptr()),
        400
    );
}
