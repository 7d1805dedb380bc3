//! The functions that the tests call, loaded by path as code under test does, and no others.

use std::ffi::{c_char, c_void};
use std::sync::LazyLock;

use libloading::Library;
use penstock_cuda_fake::library;

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        #[allow(non_snake_case)]
        pub(crate) struct Raw {
            $(pub(crate) $name: extern "C" fn($($argument),*) -> i32,)*
        }

        impl Raw {
            fn load(library: &Library) -> Raw {
                Raw {
                    // SAFETY: these are the types of `cuda.h`.
                    $($name: *unsafe { library.get(stringify!($name)) }.unwrap(),)*
                }
            }
        }
    };
}

functions! {
    cuInit(u32);
    cuDriverGetVersion(&mut i32);
    cuGetErrorName(i32, &mut *const c_char);
    cuGetErrorString(i32, &mut *const c_char);
    cuDeviceGetCount(&mut i32);
    cuDeviceGet(&mut i32, i32);
    cuDeviceGetName(*mut c_char, i32, i32);
    cuDeviceGetUuid_v2(&mut [u8; 16], i32);
    cuDeviceGetPCIBusId(*mut c_char, i32, i32);
    cuDeviceGetAttribute(&mut i32, i32, i32);
    cuDeviceTotalMem_v2(&mut usize, i32);
    cuDevicePrimaryCtxRetain(&mut u64, i32);
    cuDevicePrimaryCtxRelease_v2(i32);
    cuDevicePrimaryCtxGetState(i32, &mut u32, &mut i32);
    cuCtxPushCurrent_v2(u64);
    cuCtxPopCurrent_v2(&mut u64);
    cuCtxGetCurrent(&mut u64);
    cuCtxSetCurrent(u64);
    cuCtxGetDevice(&mut i32);
    cuCtxSynchronize();
    cuStreamCreate(&mut u64, u32);
    cuStreamCreateWithPriority(&mut u64, u32, i32);
    cuStreamDestroy_v2(u64);
    cuStreamSynchronize(u64);
    cuStreamQuery(u64);
    cuStreamWaitEvent(u64, u64, u32);
    cuStreamIsCapturing(u64, &mut i32);
    cuStreamBeginCapture_v2(u64, i32);
    cuStreamEndCapture(u64, &mut u64);
    cuGraphDestroy(u64);
    cuThreadExchangeStreamCaptureMode(&mut i32);
    cuLaunchHostFunc(u64, extern "C" fn(*mut c_void), *mut c_void);
    cuEventCreate(&mut u64, u32);
    cuEventDestroy_v2(u64);
    cuEventRecord(u64, u64);
    cuEventQuery(u64);
    cuEventSynchronize(u64);
    cuEventElapsedTime(&mut f32, u64, u64);
    cuEventElapsedTime_v2(&mut f32, u64, u64);
    cuMemAlloc_v2(&mut u64, usize);
    cuMemFree_v2(u64);
    cuMemGetInfo_v2(&mut usize, &mut usize);
    cuMemAllocHost_v2(&mut *mut u8, usize);
    cuMemHostAlloc(&mut *mut u8, usize, u32);
    cuMemFreeHost(*mut u8);
    cuMemHostRegister_v2(*mut u8, usize, u32);
    cuMemHostUnregister(*mut u8);
    cuMemHostGetDevicePointer_v2(&mut u64, *mut u8, u32);
    cuMemHostGetFlags(&mut u32, *mut u8);
    cuMemcpyHtoDAsync_v2(u64, *const u8, usize, u64);
    cuMemcpyDtoHAsync_v2(*mut u8, u64, usize, u64);
    cuMemcpyDtoDAsync_v2(u64, u64, usize, u64);
    cuMemcpyHtoD_v2(u64, *const u8, usize);
    cuMemcpyDtoH_v2(*mut u8, u64, usize);
    cuMemcpy2DAsync_v2(&Copy2D, u64);
    cuMemcpyBatchAsync(
        *const u64, *const u64, *const usize, usize, *const Attributes, *const usize, usize,
        &mut usize, u64
    );
    cuMemcpyBatchAsync_v2(
        *const u64, *const u64, *const usize, usize, *const Attributes, *const usize, usize, u64
    );
    cuMemsetD8Async(u64, u8, usize, u64);
    cuPointerGetAttribute(*mut c_void, i32, u64);
    cuModuleLoadData(&mut u64, *const c_char);
    cuModuleUnload(u64);
    cuModuleGetFunction(&mut u64, u64, *const c_char);
    cuLaunchKernel(
        u64, u32, u32, u32, u32, u32, u32, u32, u64, *const *const c_void, *const *const c_void
    );
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Copy2D {
    pub(crate) source_x_bytes: usize,
    pub(crate) source_y: usize,
    pub(crate) source_type: u32,
    pub(crate) source_host: u64,
    pub(crate) source_device: u64,
    pub(crate) source_array: u64,
    pub(crate) source_pitch: usize,
    pub(crate) destination_x_bytes: usize,
    pub(crate) destination_y: usize,
    pub(crate) destination_type: u32,
    pub(crate) destination_host: u64,
    pub(crate) destination_device: u64,
    pub(crate) destination_array: u64,
    pub(crate) destination_pitch: usize,
    pub(crate) width_bytes: usize,
    pub(crate) height: usize,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Attributes {
    pub(crate) source_access_order: u32,
    pub(crate) hints: [i32; 4],
    pub(crate) flags: u32,
}

/// The functions; the library stays loaded.
pub(crate) static CUDA: LazyLock<Raw> = LazyLock::new(|| {
    // SAFETY: loading this library runs only Rust's own set-up.
    let library = unsafe { Library::new(library()) }.unwrap();
    let raw = Raw::load(&library);
    std::mem::forget(library);
    raw
});
