//! Pinned host memory: allocated, or registered.

use std::ffi::c_void;

use super::{Out, put, wanted};
use crate::driver::{Needs, Session, call};
use crate::memory::Home;
use crate::status::{Answer, Status};

/// `PORTABLE`, `DEVICEMAP` and `WRITECOMBINED`.
const ALLOCATE_FLAGS: u32 = 7;
/// `PORTABLE`, `DEVICEMAP` and `READ_ONLY`; there is no I/O memory.
const REGISTER_FLAGS: u32 = 1 | 2 | 8;

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocHost_v2(pointer: Out<'_, u64>, bytes: usize) -> i32 {
    call("cuMemAllocHost_v2", Needs::Context, |session| {
        allocate(session, pointer, bytes, 0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostAlloc(pointer: Out<'_, u64>, bytes: usize, flags: u32) -> i32 {
    call("cuMemHostAlloc", Needs::Context, |session| {
        allocate(session, pointer, bytes, flags)
    })
}

fn allocate(session: &mut Session, pointer: Out<'_, u64>, bytes: usize, flags: u32) -> Answer {
    session.captures.refuse_unsafe_call()?;
    wanted(&pointer)?;
    if bytes == 0 || flags & !ALLOCATE_FLAGS != 0 {
        return Err(Status::INVALID_VALUE);
    }
    may_pin(session, bytes as u64)?;
    let current = session.current;
    put(
        pointer,
        session.memory.allocate_host(current, bytes as u64, flags)?,
    )
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(pointer: u64) -> i32 {
    call("cuMemFreeHost", Needs::Cleanup, |session| {
        session.captures.refuse_unsafe_call()?;
        let range = session.memory.space().find(pointer);
        let range = range.filter(|range| range.start == pointer);
        let range = range.filter(|range| matches!(range.home, Home::Pinned { .. }));
        range.ok_or(Status::INVALID_VALUE)?;
        // Any context may be using it.
        let contexts = session.contexts.keys();
        let ends: Vec<_> = contexts
            .flat_map(|context| session.streams.ends(*context))
            .collect();
        session.wait_until(|state| state.streams.have_reached(&ends));
        session.memory.remove(pointer);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(pointer: u64, bytes: usize, flags: u32) -> i32 {
    call("cuMemHostRegister_v2", Needs::Context, |session| {
        session.captures.refuse_unsafe_call()?;
        if pointer == 0 || bytes == 0 || flags & !REGISTER_FLAGS != 0 {
            return Err(Status::INVALID_VALUE);
        }
        may_pin(session, bytes as u64)?;
        let current = session.current;
        session
            .memory
            .register(current, pointer, bytes as u64, flags)
    })
}

fn may_pin(session: &Session, bytes: u64) -> Answer {
    if !session.config.pinning_permitted {
        return Err(Status::NOT_PERMITTED);
    }
    let pinned = session.memory.pinned_bytes().saturating_add(bytes);
    let is_within = pinned <= session.config.pinned_bytes_max;
    is_within.then_some(()).ok_or(Status::OUT_OF_MEMORY)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(pointer: u64) -> i32 {
    call("cuMemHostUnregister", Needs::Cleanup, |session| {
        session.captures.refuse_unsafe_call()?;
        let range = session.memory.space().find(pointer);
        let range = range.filter(|range| range.start == pointer);
        let range = range.filter(|range| matches!(range.home, Home::Registered { .. }));
        let end = range.ok_or(Status::NOT_REGISTERED)?.end();
        session.memory.remove(pointer);
        // Running operations may still use the memory; those that begin later fail.
        session.wait_until(|state| !state.streams.run_on_host(pointer, end));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostGetDevicePointer_v2(
    device_pointer: Out<'_, u64>,
    pointer: u64,
    flags: u32,
) -> i32 {
    call("cuMemHostGetDevicePointer_v2", Needs::Context, |session| {
        let range = session.memory.space().find(pointer);
        let range = range.filter(|range| !range.is_device() && range.is_mapped());
        range.filter(|_| flags == 0).ok_or(Status::INVALID_VALUE)?;
        put(device_pointer, pointer)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostGetFlags(flags: Option<&mut u32>, pointer: *const c_void) -> i32 {
    call("cuMemHostGetFlags", Needs::Context, |session| {
        let flags = flags.ok_or(Status::INVALID_VALUE)?;
        match session
            .memory
            .space()
            .find(pointer as u64)
            .map(|range| range.home)
        {
            Some(Home::Pinned { flags: known } | Home::Registered { flags: known }) => {
                *flags = known;
                Ok(())
            }
            Some(Home::Device(_)) | None => Err(Status::INVALID_VALUE),
        }
    })
}
