//! Modules, functions and launches.

use std::ffi::{CStr, c_char, c_void};

use super::stream::context_of;
use super::{Out, put, wanted};
use crate::driver::{Needs, call};
use crate::executor::submit;
use crate::handle;
use crate::kernel::{ARGUMENTS, Launch};
use crate::operation::{Kind, Operation, Work};
use crate::status::{Answer, Status};

/// The first bytes of a cubin (ELF) and of a fatbin: both hold device code, which cannot run here.
const BINARIES: [[u8; 4]; 2] = [*b"\x7fELF", [0x50, 0xED, 0x55, 0xBA]];

#[unsafe(no_mangle)]
extern "C" fn cuModuleLoadData(module: Out<'_, u64>, image: *const c_void) -> i32 {
    call("cuModuleLoadData", Needs::Context, |session| {
        session.captures.refuse_unsafe_call()?;
        wanted(&module)?;
        if image.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the caller gives a text that ends with a zero, or a binary, which has more than
        // four bytes; neither kind has a zero among the first four.
        let text = unsafe { CStr::from_ptr(image.cast::<c_char>()) };
        if BINARIES
            .iter()
            .any(|magic| text.to_bytes().starts_with(magic))
        {
            return Err(Status::NO_BINARY_FOR_GPU);
        }
        let text = text.to_str().map_err(|_| Status::INVALID_PTX)?;
        let id = handle::next();
        let current = session.current;
        session.modules.load(id, current, text)?;
        put(module, id)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: u64) -> i32 {
    call("cuModuleUnload", Needs::Cleanup, |session| {
        session.modules.unload(module)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleGetFunction(function: Out<'_, u64>, module: u64, name: *const c_char) -> i32 {
    call("cuModuleGetFunction", Needs::Context, |session| {
        wanted(&function)?;
        if name.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the caller gives a text that ends with a zero.
        let name = unsafe { CStr::from_ptr(name) };
        let name = name.to_str().map_err(|_| Status::NOT_FOUND)?;
        put(
            function,
            session.modules.function(handle::next(), module, name)?,
        )
    })
}

// The signature is that of `cuda.h`.
#[allow(clippy::too_many_arguments)]
#[unsafe(no_mangle)]
extern "C" fn cuLaunchKernel(
    function: u64,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    _shared_bytes: u32,
    stream: u64,
    parameters: *const *const c_void,
    extra: *const *const c_void,
) -> i32 {
    call("cuLaunchKernel", Needs::Context, |session| {
        let found = session.modules.get(function)?;
        let id = session.stream(stream)?;
        let context = context_of(session, id)?;
        if context != session.current || found.context != context {
            return Err(Status::INVALID_HANDLE);
        }
        let threads = [block_x, block_y, block_z]
            .map(u64::from)
            .iter()
            .product::<u64>();
        let is_empty = [grid_x, grid_y, grid_z].contains(&0) || threads == 0;
        if is_empty || threads > 1024 || !extra.is_null() || parameters.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let blocks = [grid_x, grid_y, grid_z]
            .map(u64::from)
            .iter()
            .product::<u64>();
        let launch = Launch {
            kernel: found.kernel,
            arguments: arguments(parameters)?,
            threads: threads * blocks,
        };
        let operation = Operation::new(Kind::Kernel, Work::Kernel(launch), context);
        submit(session, id, operation).map(|_| ())
    })
}

/// Reads the argument values behind the caller's pointers, which are valid during the call only.
fn arguments(parameters: *const *const c_void) -> Answer<[u64; ARGUMENTS]> {
    let mut values = [0; ARGUMENTS];
    for (index, value) in values.iter_mut().enumerate() {
        // SAFETY: the caller gives as many pointers as kernels have arguments.
        let pointer = unsafe { parameters.wrapping_add(index).read() };
        if pointer.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: it points to an argument of eight bytes.
        *value = unsafe { pointer.cast::<u64>().read_unaligned() };
    }
    Ok(values)
}
