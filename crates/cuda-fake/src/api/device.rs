//! The driver itself, and its devices.

use std::ffi::c_char;

use super::{Out, put, put_text};
use crate::driver::{Needs, Session, call, own};
use crate::status::{Answer, Status};

/// Beyond the attributes of `cuda.h` 13.2.
const ATTRIBUTES_END: i32 = 160;

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: u32) -> i32 {
    call("cuInit", Needs::Nothing, |session| {
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        if session.config.devices == 0 {
            return Err(Status::NO_DEVICE);
        }
        session.is_initialized = true;
        own();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDriverGetVersion(version: Out<'_, i32>) -> i32 {
    call("cuDriverGetVersion", Needs::Nothing, |session| {
        put(version, session.config.driver_version)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(count: Out<'_, i32>) -> i32 {
    call("cuDeviceGetCount", Needs::Init, |session| {
        put(count, session.config.devices)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(device: Out<'_, i32>, ordinal: i32) -> i32 {
    call("cuDeviceGet", Needs::Init, |session| {
        put(device, existing(session, ordinal)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetName(name: *mut c_char, length: i32, device: i32) -> i32 {
    call("cuDeviceGetName", Needs::Init, |session| {
        existing(session, device)?;
        put_text(name, length, "Penstock fake device")
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid_v2(uuid: Out<'_, [u8; 16]>, device: i32) -> i32 {
    call("cuDeviceGetUuid_v2", Needs::Init, |session| {
        let mut bytes = *b"penstock-fake-\0\0";
        bytes[15] = existing(session, device)? as u8;
        put(uuid, bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetPCIBusId(id: *mut c_char, length: i32, device: i32) -> i32 {
    call("cuDeviceGetPCIBusId", Needs::Init, |session| {
        let bus = existing(session, device)? + 1;
        put_text(id, length, &format!("0000:{bus:02X}:00.0"))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetAttribute(value: Out<'_, i32>, attribute: i32, device: i32) -> i32 {
    call("cuDeviceGetAttribute", Needs::Init, |session| {
        existing(session, device)?;
        if !(1..ATTRIBUTES_END).contains(&attribute) {
            return Err(Status::INVALID_VALUE);
        }
        put(value, session.config.attribute(device, attribute))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceTotalMem_v2(bytes: Out<'_, usize>, device: i32) -> i32 {
    call("cuDeviceTotalMem_v2", Needs::Init, |session| {
        existing(session, device)?;
        put(bytes, session.config.memory_bytes as usize)
    })
}

pub(super) fn existing(session: &Session, device: i32) -> Answer<i32> {
    let exists = (0..session.config.devices).contains(&device);
    exists.then_some(device).ok_or(Status::INVALID_DEVICE)
}
