//! The functions of cuFile that exist here. Reads and writes end before the call returns; requests
//! are counted by their way: direct, or through host memory.

use std::ffi::{c_long, c_void};
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Needs, Session, call};
use crate::status::Status;

/// `CUfileError_t`.
#[repr(C)]
struct FileStatus {
    code: i32,
    driver_code: i32,
}

impl FileStatus {
    fn of(driver_code: i32) -> FileStatus {
        // `CU_FILE_CUDA_DRIVER_ERROR`.
        let code = if driver_code == 0 { 0 } else { 5011 };
        FileStatus { code, driver_code }
    }
}

/// `CUfileDescr_t`.
#[repr(C)]
struct Description {
    kind: i32,
    fd: u64,
    operations: *const c_void,
}

/// Requests that bypass host memory, and those that use it; reads first.
static COUNTS: [[AtomicU64; 2]; 2] = [const { [const { AtomicU64::new(0) }; 2] }; 2];

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverOpen() -> FileStatus {
    FileStatus::of(call("cuFileDriverOpen", Needs::Nothing, |_| Ok(())))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileHandleRegister(
    handle: Option<&mut u64>,
    description: Option<&Description>,
) -> FileStatus {
    FileStatus::of(call("cuFileHandleRegister", Needs::Context, |_| {
        let (Some(handle), Some(description)) = (handle, description) else {
            return Err(Status::INVALID_VALUE);
        };
        if description.kind != 1 {
            return Err(Status::INVALID_VALUE);
        }
        // Zero is not a valid handle.
        *handle = description.fd + 1;
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileHandleDeregister(_handle: u64) {
    call("cuFileHandleDeregister", Needs::Nothing, |_| Ok(()));
}

#[unsafe(no_mangle)]
extern "C" fn cuFileRead(
    handle: u64,
    base: u64,
    bytes: usize,
    file_offset: c_long,
    offset: c_long,
) -> isize {
    transfer(
        "cuFileRead",
        handle,
        base + offset as u64,
        bytes,
        |file, memory| file.read_at(memory, file_offset as u64),
    )
}

#[unsafe(no_mangle)]
extern "C" fn cuFileWrite(
    handle: u64,
    base: u64,
    bytes: usize,
    file_offset: c_long,
    offset: c_long,
) -> isize {
    transfer(
        "cuFileWrite",
        handle,
        base + offset as u64,
        bytes,
        |file, memory| file.write_at(memory, file_offset as u64),
    )
}

/// Moves bytes, counts the request, and returns cuFile's result.
fn transfer(
    function: &'static str,
    handle: u64,
    address: u64,
    bytes: usize,
    body: impl FnOnce(&File, &mut [u8]) -> std::io::Result<usize>,
) -> isize {
    let mut moved = 0;
    let status = call(function, Needs::Context, |session| {
        let to = session.memory.space().reach(address, bytes as u64);
        let to = to.ok_or(Status::INVALID_VALUE)?;
        let mut memory = vec![0_u8; bytes.next_multiple_of(4096) + 4096];
        // Direct I/O needs aligned memory.
        let skipped = memory.as_ptr().align_offset(4096);
        let memory = &mut memory[skipped..skipped + bytes];
        // SAFETY: the device memory has these bytes, and the driver's lock keeps it allocated.
        unsafe { memory.as_mut_ptr().copy_from_nonoverlapping(to, bytes) };
        // SAFETY: the caller keeps the file open; it is not closed here.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd((handle - 1) as i32) });
        moved = body(&file, memory).map_err(|_| Status::OPERATING_SYSTEM)?;
        // SAFETY: as above, the other way.
        unsafe { to.copy_from_nonoverlapping(memory.as_ptr(), bytes) };
        count(session, function == "cuFileWrite");
        Ok(())
    });
    match status {
        0 => moved as isize,
        // Error codes of cuFile start at 5000.
        code => -(5000 + code as isize),
    }
}

fn count(session: &Session, is_write: bool) {
    let way = usize::from(!session.config.cufile_is_direct);
    COUNTS[usize::from(is_write)][way].fetch_add(1, Ordering::Relaxed);
}

#[unsafe(no_mangle)]
extern "C" fn cuFileSetStatsLevel(level: i32) -> FileStatus {
    FileStatus::of(i32::from(!(0..=3).contains(&level)))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileStatsStart() -> FileStatus {
    FileStatus::of(0)
}

/// Fills in the counts by path of one device in a `CUfileStatsLevel3_t`.
#[unsafe(no_mangle)]
extern "C" fn cuFileGetStatsL3(statistics: *mut u8) -> FileStatus {
    /// Offset after level 2; devices begin eight bytes later, each with a name of 16 bytes.
    const GPUS_AT: usize = 1024;
    const NUMBERS_AT: usize = GPUS_AT + 8 + 16;
    let put = |at: usize, value: u64| {
        let to = statistics.wrapping_add(at).cast::<u64>();
        // SAFETY: the caller has room for the whole structure.
        unsafe { to.write_unaligned(value) };
    };
    put(GPUS_AT, 1);
    for (kind, counts) in COUNTS.iter().enumerate() {
        // Thirteen numbers of reads, then those of writes; the sixth counts peers, the eighth the
        // host.
        let numbers = NUMBERS_AT + kind * 13 * 8;
        for (way, place) in [(0, 5), (1, 7)] {
            put(numbers + place * 8, counts[way].load(Ordering::Relaxed));
        }
    }
    FileStatus::of(0)
}
