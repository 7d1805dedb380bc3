//! cuFile: NVIDIA's library for transfers between files and devices, loaded on first use.
//!
//! It bypasses host memory where the machine allows that (by `nvidia-fs`, or peer-to-peer
//! transfers), and otherwise uses host memory, in its compat mode. [`CuFile::counts`] reports which
//! of them it was.
#![allow(unsafe_code)]

use std::env;
use std::ffi::{c_char, c_int, c_long, c_void};
use std::fmt;
use std::io;
use std::mem::{self, ManuallyDrop};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Arc, OnceLock};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::DeviceMemory;

/// The environment variable for a library other than the system's.
pub const CUFILE_VARIABLE: &str = "PENSTOCK_CUFILE";

/// The system's library, by its name for the loader.
const DEFAULT: &str = "libcufile.so.0";

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Status {
    code: c_int,
    driver_code: c_int,
}

/// `CUfileDescr_t` of a file descriptor.
#[repr(C)]
struct Description {
    kind: c_int,
    fd: u64,
    operations: *const c_void,
}

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
const KIND_FD: c_int = 1;
/// `CU_FILE_CUDA_DRIVER_ERROR`.
const DRIVER_FAILED: c_int = 5011;

type Handle = *mut c_void;

struct Functions {
    driver_open: unsafe extern "C" fn() -> Status,
    register: unsafe extern "C" fn(*mut Handle, *mut Description) -> Status,
    deregister: unsafe extern "C" fn(Handle),
    read: unsafe extern "C" fn(Handle, *mut c_void, usize, c_long, c_long) -> isize,
    write: unsafe extern "C" fn(Handle, *const c_void, usize, c_long, c_long) -> isize,
}

/// Counters, from cuFile 1.15 on.
struct Counters {
    set_level: unsafe extern "C" fn(c_int) -> Status,
    start: unsafe extern "C" fn() -> Status,
    get: unsafe extern "C" fn(*mut Statistics) -> Status,
}

/// `CUfilePerGpuStats_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GpuStatistics {
    uuid: [c_char; 16],
    /// For reads: bytes, rate, utilization, duration, total, by peers, by `nvidia-fs`, by neither,
    /// and five more.
    reads: [u64; 13],
    /// For writes: the same and three more.
    writes: [u64; 11],
    buffers: [u64; 5],
}

/// `CUfileStatsLevel3_t`, with room for more devices than the library's structure has.
#[repr(C)]
struct Statistics {
    /// `CUfileStatsLevel2_t`.
    level_2: [u64; 128],
    gpus: u32,
    of_gpus: [GpuStatistics; 64],
}

/// Devices in `CUfileStatsLevel3_t`.
const GPUS_MAX: usize = 16;
/// Index of the first count by path among the numbers of reads and of writes.
const WAYS_AT: usize = 5;

const _: () = assert!(size_of::<Description>() == 24, "as `cufile.h` has it");
const _: () = assert!(size_of::<GpuStatistics>() == 248, "as `cufile.h` has it");
const _: () = assert!(
    mem::offset_of!(Statistics, of_gpus) == 1032,
    "as `cufile.h` has it"
);

/// The number of requests by path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CuFileCounts {
    /// Peer to peer, bypassing host memory.
    pub by_peers: u64,
    /// By the kernel module `nvidia-fs`, bypassing host memory.
    pub by_module: u64,
    /// Through host memory.
    pub by_host: u64,
}

/// The loaded and initialised library.
pub struct CuFile {
    functions: Functions,
    counters: Option<Counters>,
    path: PathBuf,
    /// Never unloaded, as it has threads of its own.
    _library: ManuallyDrop<Library>,
}

impl CuFile {
    /// Loads and initialises a library.
    ///
    /// # Errors
    /// [`Error::NoCuFile`], and [`Error::Call`] where it was found but cannot be used.
    pub fn open(path: &Path) -> Result<CuFile> {
        // SAFETY: the library runs its own initialisers; the caller names a cuFile.
        let opened = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = opened.map_err(|error| Error::NoCuFile {
            path: path.to_owned(),
            reason: crate::table::reason(&error),
        })?;
        let functions = Functions {
            driver_open: find(&library, path, "cuFileDriverOpen")?,
            register: find(&library, path, "cuFileHandleRegister")?,
            deregister: find(&library, path, "cuFileHandleDeregister")?,
            read: find(&library, path, "cuFileRead")?,
            write: find(&library, path, "cuFileWrite")?,
        };
        let counters = || -> Result<Counters> {
            Ok(Counters {
                set_level: find(&library, path, "cuFileSetStatsLevel")?,
                start: find(&library, path, "cuFileStatsStart")?,
                get: find(&library, path, "cuFileGetStatsL3")?,
            })
        };
        let counters = counters().ok();
        // SAFETY: the function may be called any number of times.
        check("cuFileDriverOpen", unsafe { (functions.driver_open)() })?;
        let begun = counters.filter(|counters| {
            // SAFETY: levels are 0 to 3.
            let level = unsafe { (counters.set_level)(3) };
            // SAFETY: the level is set.
            level.code == 0 && unsafe { (counters.start)() }.code == 0
        });
        Ok(CuFile {
            functions,
            counters: begun,
            path: path.to_owned(),
            _library: ManuallyDrop::new(library),
        })
    }

    /// The library of this process: the one in [`CUFILE_VARIABLE`], or the system's. It is loaded
    /// once.
    pub fn shared() -> Result<Arc<CuFile>> {
        static SHARED: OnceLock<Result<Arc<CuFile>>> = OnceLock::new();
        let open = || {
            let given = env::var_os(CUFILE_VARIABLE).filter(|given| !given.is_empty());
            let path = given.map_or_else(|| PathBuf::from(DEFAULT), PathBuf::from);
            CuFile::open(&path).map(Arc::new)
        };
        SHARED.get_or_init(open).clone()
    }

    /// Requests so far, by path; `None` where the library does not count them.
    pub fn counts(&self) -> Option<CuFileCounts> {
        let counters = self.counters.as_ref()?;
        // SAFETY: the structure has only numbers, all of which may be zero.
        let mut found: Box<Statistics> = unsafe { Box::new(mem::zeroed()) };
        // SAFETY: it writes its statistics, for which the structure has more than enough room.
        let status = unsafe { (counters.get)(&raw mut *found) };
        if status.code != 0 {
            return None;
        }
        let gpus = &found.of_gpus[..(found.gpus as usize).min(GPUS_MAX)];
        let sum = |way: usize| {
            let of = |gpu: &GpuStatistics| gpu.reads[WAYS_AT + way] + gpu.writes[WAYS_AT + way];
            gpus.iter().map(of).sum()
        };
        Some(CuFileCounts {
            by_peers: sum(0),
            by_module: sum(1),
            by_host: sum(2),
        })
    }
}

impl fmt::Debug for CuFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CuFile")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// A file that is registered with the library.
pub struct CuFileHandle {
    library: Arc<CuFile>,
    device: Arc<Device>,
    handle: Handle,
    /// Kept open while the file is registered.
    _file: Arc<dyn AsFd + Send + Sync>,
}

// SAFETY: all threads of a process may use a handle.
unsafe impl Send for CuFileHandle {}
// SAFETY: as above.
unsafe impl Sync for CuFileHandle {}

impl CuFileHandle {
    /// Registers a file. Transfers bypass host memory only if the file was opened for direct I/O.
    ///
    /// # Errors
    /// [`Error::Call`], notably where there is no path that bypasses host memory and compat mode is
    /// not allowed.
    pub fn new(
        library: &Arc<CuFile>,
        device: &Arc<Device>,
        file: Arc<dyn AsFd + Send + Sync>,
    ) -> Result<CuFileHandle> {
        let _entered = device.enter()?;
        let mut handle = ptr::null_mut();
        let mut description = Description {
            kind: KIND_FD,
            fd: u64::from(file.as_fd().as_raw_fd().cast_unsigned()),
            operations: ptr::null(),
        };
        // SAFETY: it writes one pointer and reads the description; the drop deregisters the handle,
        // and the file is open until then.
        let status = unsafe { (library.functions.register)(&raw mut handle, &raw mut description) };
        check("cuFileHandleRegister", status)?;
        Ok(CuFileHandle {
            library: Arc::clone(library),
            device: Arc::clone(device),
            handle,
            _file: file,
        })
    }

    /// Reads bytes from `offset` of the file on to device memory, from its byte `at` on, and waits;
    /// returns the number of bytes read, which may be smaller.
    ///
    /// # Panics
    /// If the range reaches beyond the memory.
    pub fn read(&self, to: &DeviceMemory, at: usize, bytes: usize, offset: u64) -> Result<usize> {
        let (base, at, offset) = place(to, at, bytes, offset);
        let _entered = self.device.enter()?;
        // SAFETY: the device memory has these bytes, and only copies use it.
        let read = unsafe { (self.library.functions.read)(self.handle, base, bytes, offset, at) };
        moved("cuFileRead", read)
    }

    /// Writes bytes of device memory to a file, and waits; as [`CuFileHandle::read`].
    ///
    /// # Panics
    /// If the range reaches beyond the memory.
    pub fn write(
        &self,
        from: &DeviceMemory,
        at: usize,
        bytes: usize,
        offset: u64,
    ) -> Result<usize> {
        let (base, at, offset) = place(from, at, bytes, offset);
        let _entered = self.device.enter()?;
        // SAFETY: as above.
        let written =
            unsafe { (self.library.functions.write)(self.handle, base, bytes, offset, at) };
        moved("cuFileWrite", written)
    }
}

impl Drop for CuFileHandle {
    fn drop(&mut self) {
        // A fork does not have the registration.
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: this value has registered it.
            unsafe { (self.library.functions.deregister)(self.handle) };
        }
    }
}

impl fmt::Debug for CuFileHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CuFileHandle")
            .field("library", &self.library)
            .finish_non_exhaustive()
    }
}

fn place(
    memory: &DeviceMemory,
    at: usize,
    bytes: usize,
    offset: u64,
) -> (*mut c_void, c_long, c_long) {
    let end = at.checked_add(bytes);
    assert!(
        end.is_some_and(|end| end <= memory.len()),
        "{bytes} bytes from {at} on of {}",
        memory.len()
    );
    let base = ptr::with_exposed_provenance_mut(memory.address() as usize);
    let offset = c_long::try_from(offset).expect("files end before 2^63");
    (base, at.cast_signed() as c_long, offset)
}

fn find<T: Copy>(library: &Library, path: &Path, symbol: &'static str) -> Result<T> {
    // SAFETY: the types are those of `cufile.h` for the functions of these names.
    let found = unsafe { library.get::<T>(symbol.as_bytes()) };
    let path = path.to_owned();
    found.map(|found| *found).map_err(|_| Error::NoCuFile {
        path,
        reason: format!("it has no {symbol}"),
    })
}

fn check(call: &'static str, status: Status) -> Result<()> {
    match status.code {
        0 => Ok(()),
        DRIVER_FAILED => Err(failed(call, status.driver_code, "the CUDA driver failed")),
        code => Err(failed(call, code, words(code))),
    }
}

/// The result of a call that returns bytes, a negated code, or -1 for a system error.
fn moved(call: &'static str, answer: isize) -> Result<usize> {
    match usize::try_from(answer) {
        Ok(bytes) => Ok(bytes),
        Err(_) if answer == -1 => {
            let error = io::Error::last_os_error();
            let code = -error.raw_os_error().unwrap_or(0);
            Err(failed(call, code, &error.to_string()))
        }
        Err(_) => {
            let code = i32::try_from(-answer).unwrap_or(i32::MAX);
            Err(failed(call, code, words(code)))
        }
    }
}

fn failed(call: &'static str, code: i32, text: &str) -> Error {
    Error::Call {
        call,
        code,
        name: format!("cuFile error {code}"),
        text: text.to_owned(),
    }
}

/// Descriptions, after `cufile.h`, of the codes that a machine without GPUDirect Storage returns.
fn words(code: i32) -> &'static str {
    match code {
        5001 => "nvidia-fs is not loaded, and cufile.json does not allow compat mode",
        5004 => "nvidia-fs is of another version",
        5007 => "GPUDirect Storage does not work on this platform",
        5008 => "GPUDirect Storage does not work on this file",
        5009 => "GPUDirect Storage does not work on this GPU",
        _ => "see cufile.h",
    }
}
