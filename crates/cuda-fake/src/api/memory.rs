//! Device memory, and the attributes of pointers.

use std::ffi::c_void;

use super::{Out, put, wanted};
use crate::driver::{Needs, call};
use crate::memory::Home;
use crate::status::{Answer, Status};

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(pointer: Out<'_, u64>, bytes: usize) -> i32 {
    call("cuMemAlloc_v2", Needs::Context, |session| {
        session.captures.refuse_unsafe_call()?;
        wanted(&pointer)?;
        if bytes == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let current = session.current;
        let device = session
            .contexts
            .get(&current)
            .ok_or(Status::INVALID_CONTEXT)?
            .device;
        let taken = session.memory.device_bytes(device);
        let available = session.config.memory_bytes.saturating_sub(taken);
        put(
            pointer,
            session
                .memory
                .allocate(device, current, bytes as u64, available)?,
        )
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(pointer: u64) -> i32 {
    call("cuMemFree_v2", Needs::Cleanup, |session| {
        session.captures.refuse_unsafe_call()?;
        if pointer == 0 {
            return Ok(());
        }
        let range = session.memory.space().find(pointer);
        let range = range.filter(|range| range.start == pointer && range.is_device());
        let context = range.ok_or(Status::INVALID_VALUE)?.context;
        let ends = session.streams.ends(context);
        session.wait_until(|state| state.streams.have_reached(&ends));
        session.memory.remove(pointer);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetInfo_v2(free: Out<'_, usize>, total: Out<'_, usize>) -> i32 {
    call("cuMemGetInfo_v2", Needs::Context, |session| {
        let context = session
            .contexts
            .get(&session.current)
            .ok_or(Status::INVALID_CONTEXT)?;
        let taken = session.memory.device_bytes(context.device);
        let bytes = session.config.memory_bytes;
        put(free, bytes.saturating_sub(taken) as usize)?;
        put(total, bytes as usize)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuPointerGetAttribute(data: *mut c_void, attribute: i32, pointer: u64) -> i32 {
    call("cuPointerGetAttribute", Needs::Context, |session| {
        let range = session
            .memory
            .space()
            .find(pointer)
            .ok_or(Status::INVALID_VALUE)?;
        let device = session
            .contexts
            .get(&range.context)
            .map_or(-1, |context| context.device);
        match attribute {
            // CONTEXT.
            1 => write(data, range.context),
            // MEMORY_TYPE: host or device.
            2 => write(data, if range.is_device() { 2_u32 } else { 1 }),
            // DEVICE_POINTER.
            3 if range.is_mapped() => write(data, pointer),
            // HOST_POINTER.
            4 if !range.is_device() => write(data, pointer),
            // BUFFER_ID: device addresses are never reused.
            7 => write(data, range.start),
            // IS_MANAGED.
            8 => write(data, 0_u32),
            // DEVICE_ORDINAL.
            9 => write(
                data,
                if let Home::Device(device) = range.home {
                    device
                } else {
                    device
                },
            ),
            // RANGE_START_ADDR.
            11 => write(data, range.start),
            // RANGE_SIZE.
            12 => write(data, range.bytes as usize),
            // MAPPED.
            13 => write(data, u32::from(range.is_mapped())),
            _ => Err(Status::INVALID_VALUE),
        }
    })
}

fn write<T>(data: *mut c_void, value: T) -> Answer {
    if data.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: the caller has room there for the type of the attribute, aligned or not.
    unsafe { data.cast::<T>().write_unaligned(value) };
    Ok(())
}
