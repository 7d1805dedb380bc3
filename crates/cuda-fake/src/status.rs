//! Results of driver calls: the codes of `cuda.h` that this driver returns, with their names.

use std::ffi::CStr;

/// A code of `CUresult` other than success.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Status(pub(crate) i32);

/// The result of a call.
pub(crate) type Answer<T = ()> = Result<T, Status>;

impl Status {
    pub(crate) const INVALID_VALUE: Status = Status(1);
    pub(crate) const OUT_OF_MEMORY: Status = Status(2);
    pub(crate) const NOT_INITIALIZED: Status = Status(3);
    pub(crate) const NO_DEVICE: Status = Status(100);
    pub(crate) const INVALID_DEVICE: Status = Status(101);
    pub(crate) const INVALID_CONTEXT: Status = Status(201);
    pub(crate) const NO_BINARY_FOR_GPU: Status = Status(209);
    pub(crate) const INVALID_PTX: Status = Status(218);
    pub(crate) const OPERATING_SYSTEM: Status = Status(304);
    pub(crate) const INVALID_HANDLE: Status = Status(400);
    pub(crate) const ILLEGAL_STATE: Status = Status(401);
    pub(crate) const NOT_FOUND: Status = Status(500);
    pub(crate) const NOT_READY: Status = Status(600);
    pub(crate) const ILLEGAL_ADDRESS: Status = Status(700);
    pub(crate) const CONTEXT_IS_DESTROYED: Status = Status(709);
    pub(crate) const ALREADY_REGISTERED: Status = Status(712);
    pub(crate) const NOT_REGISTERED: Status = Status(713);
    pub(crate) const NOT_PERMITTED: Status = Status(800);
    pub(crate) const NOT_SUPPORTED: Status = Status(801);
    pub(crate) const CAPTURE_UNSUPPORTED: Status = Status(900);
    pub(crate) const CAPTURE_INVALIDATED: Status = Status(901);
    pub(crate) const CAPTURE_MERGE: Status = Status(902);
    pub(crate) const CAPTURE_UNMATCHED: Status = Status(903);
    pub(crate) const CAPTURE_UNJOINED: Status = Status(904);
    pub(crate) const CAPTURE_ISOLATION: Status = Status(905);
    pub(crate) const CAPTURE_IMPLICIT: Status = Status(906);
    pub(crate) const CAPTURED_EVENT: Status = Status(907);
    pub(crate) const CAPTURE_WRONG_THREAD: Status = Status(908);
}

/// The name and text of a code; `None` for an unknown one.
pub(crate) fn described(code: i32) -> Option<(&'static CStr, &'static CStr)> {
    CODES
        .iter()
        .find(|(known, ..)| *known == code)
        .map(|&(_, name, text)| (name, text))
}

/// Codes that this driver returns by itself, and those that tests inject.
const CODES: &[(i32, &CStr, &CStr)] = &[
    (0, c"CUDA_SUCCESS", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (4, c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (
        34,
        c"CUDA_ERROR_STUB_LIBRARY",
        c"CUDA driver is a stub library",
    ),
    (
        46,
        c"CUDA_ERROR_DEVICE_UNAVAILABLE",
        c"CUDA-capable device(s) is/are busy or unavailable",
    ),
    (
        100,
        c"CUDA_ERROR_NO_DEVICE",
        c"no CUDA-capable device is detected",
    ),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (
        200,
        c"CUDA_ERROR_INVALID_IMAGE",
        c"device kernel image is invalid",
    ),
    (
        201,
        c"CUDA_ERROR_INVALID_CONTEXT",
        c"invalid device context",
    ),
    (
        209,
        c"CUDA_ERROR_NO_BINARY_FOR_GPU",
        c"no kernel image is available for execution on the device",
    ),
    (
        214,
        c"CUDA_ERROR_ECC_UNCORRECTABLE",
        c"uncorrectable ECC error encountered",
    ),
    (
        218,
        c"CUDA_ERROR_INVALID_PTX",
        c"a PTX JIT compilation failed",
    ),
    (
        304,
        c"CUDA_ERROR_OPERATING_SYSTEM",
        c"OS call failed or operation not supported on this OS",
    ),
    (
        400,
        c"CUDA_ERROR_INVALID_HANDLE",
        c"invalid resource handle",
    ),
    (
        401,
        c"CUDA_ERROR_ILLEGAL_STATE",
        c"the operation cannot be performed in the present state",
    ),
    (500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (600, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (
        700,
        c"CUDA_ERROR_ILLEGAL_ADDRESS",
        c"an illegal memory access was encountered",
    ),
    (
        702,
        c"CUDA_ERROR_LAUNCH_TIMEOUT",
        c"the launch timed out and was terminated",
    ),
    (
        709,
        c"CUDA_ERROR_CONTEXT_IS_DESTROYED",
        c"context is destroyed",
    ),
    (
        712,
        c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        c"part or all of the requested memory range is already mapped",
    ),
    (
        713,
        c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        c"pointer does not correspond to a registered memory region",
    ),
    (
        719,
        c"CUDA_ERROR_LAUNCH_FAILED",
        c"unspecified launch failure",
    ),
    (800, c"CUDA_ERROR_NOT_PERMITTED", c"operation not permitted"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (
        802,
        c"CUDA_ERROR_SYSTEM_NOT_READY",
        c"system not yet initialized",
    ),
    (
        803,
        c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        c"system has unsupported display driver / cuda driver combination",
    ),
    (
        900,
        c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        c"operation not permitted when stream is capturing",
    ),
    (
        901,
        c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"operation failed due to a previous error during capture",
    ),
    (
        902,
        c"CUDA_ERROR_STREAM_CAPTURE_MERGE",
        c"operation would result in a merge of separate capture sequences",
    ),
    (
        903,
        c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
        c"capture was not ended in the same stream as it began",
    ),
    (
        904,
        c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
        c"capturing stream has unjoined work",
    ),
    (
        905,
        c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        c"dependency created on uncaptured work in another stream",
    ),
    (
        906,
        c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        c"operation would make the legacy stream depend on a capturing blocking stream",
    ),
    (
        907,
        c"CUDA_ERROR_CAPTURED_EVENT",
        c"operation not permitted on an event last recorded in a capturing stream",
    ),
    (
        908,
        c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        c"attempt to terminate a thread-local capture sequence from another thread",
    ),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];
