//! The functions of a driver, looked up by name in its library.
//!
//! Each becomes a method that returns an error in place of a code. Newer functions may be missing.
#![allow(unsafe_code)]
// The functions and their arguments are the driver's.
#![allow(clippy::too_many_arguments)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::{Error, Result};
#[cfg(feature = "conformance")]
use crate::raw::Graph;
use crate::raw::{
    Address, Code, Context, Copy2D, CopyAttributes, EventHandle, FunctionHandle, ModuleHandle,
    Ordinal, SUCCESS, StreamHandle,
};

macro_rules! table {
    (
        always { $($name:ident = $symbol:literal ($($arg:ident: $kind:ty),*);)* }
        newer { $($(#[$note:meta])* $new:ident = $new_symbol:literal ($($new_arg:ident: $new_kind:ty),*);)* }
    ) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($kind),*) -> Code,)*
            $($(#[$note])* $new: Option<unsafe extern "C" fn($($new_kind),*) -> Code>,)*
        }

        impl Functions {
            fn find(library: &Library, path: &Path) -> Result<Functions> {
                Ok(Functions {
                    // SAFETY: the type is that of `cuda.h` for the function of this name.
                    $($name: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }
                        .map_err(|_| Error::Incomplete { path: path.to_owned(), symbol: $symbol })?,)*
                    // SAFETY: as above.
                    $($(#[$note])* $new: unsafe { library.get(concat!($new_symbol, "\0").as_bytes()) }
                        .ok().map(|found| *found),)*
                })
            }
        }

        impl Table {
            $(
                /// # Safety
                /// As the driver's function requires.
                pub(crate) unsafe fn $name(&self, $($arg: $kind),*) -> Result<()> {
                    // SAFETY: this is the driver's own function, and its requirements are the
                    // caller's.
                    self.check($symbol, unsafe { (self.functions.$name)($($arg),*) })
                }
            )*
            $(
                $(#[$note])*
                /// `None` where the driver is older.
                ///
                /// # Safety
                /// As the driver's function requires.
                pub(crate) unsafe fn $new(&self, $($new_arg: $new_kind),*) -> Option<Result<()>> {
                    let function = self.functions.$new?;
                    // SAFETY: this is the driver's own function, and its requirements are the
                    // caller's.
                    Some(self.check($new_symbol, unsafe { function($($new_arg),*) }))
                }
            )*
        }
    };
}

table! {
    always {
        init = "cuInit"(flags: c_uint);
        driver_version = "cuDriverGetVersion"(version: *mut c_int);
        device_count = "cuDeviceGetCount"(count: *mut c_int);
        device_get = "cuDeviceGet"(device: *mut Ordinal, ordinal: c_int);
        device_name = "cuDeviceGetName"(name: *mut c_char, len: c_int, device: Ordinal);
        device_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: Ordinal);
        device_pci_bus_id = "cuDeviceGetPCIBusId"(id: *mut c_char, len: c_int, device: Ordinal);
        primary_context_retain = "cuDevicePrimaryCtxRetain"(context: *mut Context, device: Ordinal);
        primary_context_release = "cuDevicePrimaryCtxRelease_v2"(device: Ordinal);
        context_push = "cuCtxPushCurrent_v2"(context: Context);
        context_pop = "cuCtxPopCurrent_v2"(context: *mut Context);
        capture_mode_exchange = "cuThreadExchangeStreamCaptureMode"(mode: *mut c_int);
        stream_create = "cuStreamCreate"(stream: *mut StreamHandle, flags: c_uint);
        stream_destroy = "cuStreamDestroy_v2"(stream: StreamHandle);
        stream_synchronize = "cuStreamSynchronize"(stream: StreamHandle);
        stream_wait_event = "cuStreamWaitEvent"(stream: StreamHandle, event: EventHandle, flags: c_uint);
        stream_is_capturing = "cuStreamIsCapturing"(stream: StreamHandle, status: *mut c_int);
        event_create = "cuEventCreate"(event: *mut EventHandle, flags: c_uint);
        event_destroy = "cuEventDestroy_v2"(event: EventHandle);
        event_record = "cuEventRecord"(event: EventHandle, stream: StreamHandle);
        event_query = "cuEventQuery"(event: EventHandle);
        event_synchronize = "cuEventSynchronize"(event: EventHandle);
        memory_info = "cuMemGetInfo_v2"(free_bytes: *mut usize, total_bytes: *mut usize);
        memory_alloc = "cuMemAlloc_v2"(address: *mut Address, bytes: usize);
        memory_free = "cuMemFree_v2"(address: Address);
        host_alloc = "cuMemHostAlloc"(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        host_free = "cuMemFreeHost"(address: *mut c_void);
        host_register = "cuMemHostRegister_v2"(address: *mut c_void, bytes: usize, flags: c_uint);
        host_unregister = "cuMemHostUnregister"(address: *mut c_void);
        host_device_pointer = "cuMemHostGetDevicePointer_v2"(address: *mut Address, host: *mut c_void, flags: c_uint);
        context_synchronize = "cuCtxSynchronize"();
        module_load = "cuModuleLoadData"(module: *mut ModuleHandle, image: *const c_void);
        module_unload = "cuModuleUnload"(module: ModuleHandle);
        module_function = "cuModuleGetFunction"(function: *mut FunctionHandle, module: ModuleHandle, name: *const c_char);
        launch = "cuLaunchKernel"(
            function: FunctionHandle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
            block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: StreamHandle,
            arguments: *mut *mut c_void, extra: *mut *mut c_void
        );
        copy_to_device = "cuMemcpyHtoDAsync_v2"(to: Address, from: *const c_void, bytes: usize, stream: StreamHandle);
        copy_to_host = "cuMemcpyDtoHAsync_v2"(to: *mut c_void, from: Address, bytes: usize, stream: StreamHandle);
        copy_2d = "cuMemcpy2DAsync_v2"(copy: *const Copy2D, stream: StreamHandle);
    }
    newer {
        copy_batch_12 = "cuMemcpyBatchAsync"(
            to: *mut Address, from: *mut Address, bytes: *mut usize, count: usize,
            attributes: *mut CopyAttributes, attribute_at: *mut usize, attributes_len: usize,
            failed: *mut usize, stream: StreamHandle
        );
        copy_batch = "cuMemcpyBatchAsync_v2"(
            to: *mut Address, from: *mut Address, bytes: *mut usize, count: usize,
            attributes: *mut CopyAttributes, attribute_at: *mut usize, attributes_len: usize,
            stream: StreamHandle
        );
        #[cfg(feature = "conformance")]
        begin_capture = "cuStreamBeginCapture_v2"(stream: StreamHandle, mode: c_int);
        #[cfg(feature = "conformance")]
        end_capture = "cuStreamEndCapture"(stream: StreamHandle, graph: *mut Graph);
        #[cfg(feature = "conformance")]
        destroy_graph = "cuGraphDestroy"(graph: Graph);
    }
}

/// `cuGetErrorName`, `cuGetErrorString`.
type Words = unsafe extern "C" fn(Code, *mut *const c_char) -> Code;

/// The functions, and the library that has them.
pub(crate) struct Table {
    functions: Functions,
    name_of_error: Words,
    text_of_error: Words,
    path: PathBuf,
    /// Never unloaded: a driver has threads of its own, and state in other threads.
    _library: std::mem::ManuallyDrop<Library>,
}

impl Table {
    pub(crate) fn load(path: &Path) -> Result<Table> {
        // SAFETY: the driver runs its own initialisers; the caller names a driver.
        let opened = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = opened.map_err(|error| Error::NotFound {
            path: path.to_owned(),
            reason: reason(&error),
        })?;
        let words = |symbol: &'static str| {
            // SAFETY: both functions have this type.
            let found = unsafe { library.get::<Words>(symbol.as_bytes()) };
            let path = path.to_owned();
            found
                .map(|found| *found)
                .map_err(|_| Error::Incomplete { path, symbol })
        };
        Ok(Table {
            functions: Functions::find(&library, path)?,
            name_of_error: words("cuGetErrorName")?,
            text_of_error: words("cuGetErrorString")?,
            path: path.to_owned(),
            _library: std::mem::ManuallyDrop::new(library),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn check(&self, call: &'static str, code: Code) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(Error::Call {
            call,
            code,
            name: words(self.name_of_error, code),
            text: words(self.text_of_error, code),
        })
    }
}

fn words(ask: Words, code: Code) -> String {
    let mut words: *const c_char = ptr::null();
    // SAFETY: it writes one pointer, to a constant text or null.
    let answer = unsafe { ask(code, &raw mut words) };
    if answer != SUCCESS || words.is_null() {
        return format!("error {code}");
    }
    // SAFETY: the text ends with a zero and is never freed.
    let words = unsafe { CStr::from_ptr(words) };
    words.to_string_lossy().into_owned()
}

/// The loader's message, without the path, which the error already has.
pub(crate) fn reason(error: &libloading::Error) -> String {
    let mut error: &dyn std::error::Error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
