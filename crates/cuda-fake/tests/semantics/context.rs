//! Calls before `cuInit`, without a context, and after its end; attributes of devices.

use std::ffi::CStr;
use std::ptr;
use std::thread;

use penstock_cuda_fake::{Control, Leaks};

use crate::device::{Device, made};
use crate::raw::CUDA;

#[test]
fn calls_before_initialisation_are_refused() {
    let _control = Control::new();
    assert_eq!((CUDA.cuDeviceGetCount)(&mut 0), 3);
    assert_eq!((CUDA.cuDevicePrimaryCtxRetain)(&mut 0, 0), 3);
    assert_eq!((CUDA.cuMemAlloc_v2)(&mut 0, 8), 3);
    assert_eq!(made(|version| (CUDA.cuDriverGetVersion)(version)), 13_020);
    assert_eq!((CUDA.cuInit)(1), 1);
    assert_eq!((CUDA.cuInit)(0), 0);
    assert_eq!(made(|count| (CUDA.cuDeviceGetCount)(count)), 1);
}

#[test]
fn a_machine_without_devices_says_so() {
    let control = Control::new();
    control.set_devices(0);
    assert_eq!((CUDA.cuInit)(0), 100);
    assert_eq!((CUDA.cuDeviceGetCount)(&mut 0), 3);
}

#[test]
fn devices_describe_themselves() {
    let control = Control::new();
    control.set_devices(2);
    control.set_memory_bytes(1 << 20);
    control.set_attribute(1, 41, 0);
    assert_eq!((CUDA.cuInit)(0), 0);
    assert_eq!(made(|device| (CUDA.cuDeviceGet)(device, 1)), 1);
    assert_eq!((CUDA.cuDeviceGet)(&mut 0, 2), 101);
    assert_eq!(made(|bytes| (CUDA.cuDeviceTotalMem_v2)(bytes, 1)), 1 << 20);
    assert_eq!(made(|value| (CUDA.cuDeviceGetAttribute)(value, 41, 0)), 1);
    assert_eq!(made(|value| (CUDA.cuDeviceGetAttribute)(value, 41, 1)), 0);
    assert_eq!((CUDA.cuDeviceGetAttribute)(&mut 0, 0, 0), 1);
    let mut bus = [0; 16];
    assert_eq!((CUDA.cuDeviceGetPCIBusId)(bus.as_mut_ptr(), 16, 1), 0);
    assert_eq!(text(bus.as_ptr()), "0000:02:00.0");
    let mut name = [1; 8];
    assert_eq!((CUDA.cuDeviceGetName)(name.as_mut_ptr(), 8, 0), 0);
    assert_eq!(text(name.as_ptr()), "Penstoc");
    let uuids = [0, 1].map(|device| made(|uuid| (CUDA.cuDeviceGetUuid_v2)(uuid, device)));
    assert_ne!(uuids[0], uuids[1]);
}

#[test]
fn codes_have_names() {
    let mut name = ptr::null();
    assert_eq!((CUDA.cuGetErrorName)(900, &mut name), 0);
    assert_eq!(text(name), "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED");
    assert_eq!((CUDA.cuGetErrorString)(2, &mut name), 0);
    assert_eq!(text(name), "out of memory");
    assert_eq!((CUDA.cuGetErrorName)(12_345, &mut name), 1);
    assert!(name.is_null());
}

#[test]
fn a_context_is_current_in_the_thread_that_pushed_it() {
    let device = Device::new();
    assert_eq!(
        made(|context| (CUDA.cuCtxGetCurrent)(context)),
        device.context
    );
    assert_eq!(made(|number| (CUDA.cuCtxGetDevice)(number)), 0);
    thread::spawn(|| {
        assert_eq!(made(|context| (CUDA.cuCtxGetCurrent)(context)), 0);
        assert_eq!((CUDA.cuMemAlloc_v2)(&mut 0, 8), 201);
        assert_eq!((CUDA.cuStreamCreate)(&mut 0, 1), 201);
        assert_eq!((CUDA.cuCtxPopCurrent_v2)(&mut 0), 201);
    })
    .join()
    .unwrap();
    assert_eq!(
        made(|context| (CUDA.cuCtxPopCurrent_v2)(context)),
        device.context
    );
    assert_eq!((CUDA.cuCtxSynchronize)(), 201);
    assert_eq!((CUDA.cuCtxSetCurrent)(device.context), 0);
    assert_eq!((CUDA.cuCtxSynchronize)(), 0);
}

#[test]
fn what_a_context_made_dies_with_its_last_release() {
    let device = Device::new();
    assert_eq!(
        made(|context| (CUDA.cuDevicePrimaryCtxRetain)(context, 0)),
        device.context
    );
    let (stream, event) = (device.stream(), device.event());
    device.memory(4096, 1);
    device.pinned(4096, 1);
    assert_eq!((CUDA.cuDevicePrimaryCtxRelease_v2)(0), 0);
    let before = device.control.leaks();
    assert_eq!(
        (before.streams, before.events, before.allocations),
        (1, 1, 1)
    );
    assert_eq!((before.pinned_allocations, before.retained), (1, 1));
    assert_eq!((CUDA.cuEventRecord)(event, stream), 0);

    assert_eq!((CUDA.cuDevicePrimaryCtxRelease_v2)(0), 0);
    assert_eq!(device.control.leaks(), Leaks::default());
    assert_eq!((CUDA.cuDevicePrimaryCtxRelease_v2)(0), 201);
    let (mut flags, mut is_active) = (9, 9);
    assert_eq!(
        (CUDA.cuDevicePrimaryCtxGetState)(0, &mut flags, &mut is_active),
        0
    );
    assert_eq!((flags, is_active), (0, 0));
    assert_eq!((CUDA.cuStreamQuery)(stream), 709);
    assert_eq!((CUDA.cuCtxPushCurrent_v2)(device.context), 201);

    let new = made(|context| (CUDA.cuDevicePrimaryCtxRetain)(context, 0));
    assert_eq!((CUDA.cuCtxSetCurrent)(new), 0);
    assert_eq!((CUDA.cuStreamQuery)(stream), 400);
    assert_eq!((CUDA.cuEventQuery)(event), 400);
}

#[test]
fn a_reset_leaves_nothing() {
    let device = Device::new();
    let stream = device.stream();
    device.memory(64, 1);
    device.control.reset();
    assert_eq!(device.control.leaks(), Leaks::default());
    assert_eq!(device.control.calls("cuInit"), 0);
    assert_eq!((CUDA.cuStreamQuery)(stream), 3);
    assert_eq!((CUDA.cuInit)(0), 0);
    assert_eq!((CUDA.cuStreamQuery)(stream), 201);
}

fn text(pointer: *const std::ffi::c_char) -> String {
    // SAFETY: the driver returns texts that end with a zero.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().unwrap().to_owned()
}
