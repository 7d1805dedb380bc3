//! Types and constants of the driver's interface, as in `cuda.h`.

use std::ffi::{c_int, c_uint, c_void};

/// `CUresult`.
pub(crate) type Code = c_int;
/// `CUdevice`.
pub(crate) type Ordinal = c_int;
/// `CUcontext`.
pub(crate) type Context = *mut c_void;
/// `CUstream`.
pub(crate) type StreamHandle = *mut c_void;
/// `CUevent`.
pub(crate) type EventHandle = *mut c_void;
/// `CUmodule`.
pub(crate) type ModuleHandle = *mut c_void;
/// `CUfunction`.
pub(crate) type FunctionHandle = *mut c_void;
/// `CUgraph`.
#[cfg(feature = "conformance")]
pub(crate) type Graph = *mut c_void;
/// `CUdeviceptr`.
pub(crate) type Address = u64;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const NOT_PERMITTED: Code = 800;
pub(crate) const NOT_SUPPORTED: Code = 801;
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`.
pub(crate) const CAPTURE_IMPLICIT: Code = 906;

/// `CU_STREAM_NON_BLOCKING`: no waiting between the stream and stream 0.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_BLOCKING_SYNC`: waiting threads sleep.
pub(crate) const EVENT_BLOCKING_SYNC: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for all devices.
pub(crate) const REGISTER_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`: kernels can access it.
pub(crate) const REGISTER_DEVICEMAP: c_uint = 2;
/// `CU_MEMHOSTALLOC_PORTABLE`: the same.
pub(crate) const HOST_ALLOC_PORTABLE: c_uint = 1;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
pub(crate) const CAPTURE_STATUS_NONE: c_int = 0;
/// `CU_STREAM_CAPTURE_MODE_GLOBAL`.
#[cfg(feature = "conformance")]
pub(crate) const CAPTURE_MODE_GLOBAL: c_int = 0;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(crate) const CAPTURE_MODE_RELAXED: c_int = 2;
/// `CU_DEVICE_ATTRIBUTE_MAX_PITCH`.
pub(crate) const ATTRIBUTE_MAX_PITCH: c_int = 11;
/// `CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING`.
pub(crate) const ATTRIBUTE_UNIFIED_ADDRESSING: c_int = 41;

/// `CU_MEMORYTYPE_HOST`, `CU_MEMORYTYPE_DEVICE`.
pub(crate) const MEMORY_HOST: c_uint = 1;
pub(crate) const MEMORY_DEVICE: c_uint = 2;

/// `CUDA_MEMCPY2D`.
#[repr(C)]
pub(crate) struct Copy2D {
    pub(crate) src_x_bytes: usize,
    pub(crate) src_y: usize,
    pub(crate) src_type: c_uint,
    pub(crate) src_host: *const c_void,
    pub(crate) src_device: Address,
    pub(crate) src_array: *mut c_void,
    pub(crate) src_pitch: usize,
    pub(crate) dst_x_bytes: usize,
    pub(crate) dst_y: usize,
    pub(crate) dst_type: c_uint,
    pub(crate) dst_host: *mut c_void,
    pub(crate) dst_device: Address,
    pub(crate) dst_array: *mut c_void,
    pub(crate) dst_pitch: usize,
    pub(crate) width_bytes: usize,
    pub(crate) height: usize,
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CopyAttributes {
    pub(crate) source_access_order: c_int,
    pub(crate) src_location_hint: Location,
    pub(crate) dst_location_hint: Location,
    pub(crate) flags: c_uint,
}

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: a source is read when the copy's turn in the stream has
/// come.
pub(crate) const SOURCE_ACCESS_ORDER_STREAM: c_int = 1;
