//! Single copies and fills.

use super::rows::{End, Rows, copy, end_at, finish};
use super::stream::context_of;
use crate::driver::{Needs, Session, call};
use crate::executor::submit;
use crate::operation::{Kind, Operation, Work};
use crate::status::{Answer, Status};

/// `CU_STREAM_LEGACY` by the older of its names.
pub(super) const NULL: u64 = 0;

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) -> i32 {
    call("cuMemcpyHtoDAsync_v2", Needs::Context, |session| {
        let rows = Rows::line(bytes);
        copy(session, (End::Host, from), (End::Device, to), &rows, stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) -> i32 {
    call("cuMemcpyDtoHAsync_v2", Needs::Context, |session| {
        let rows = Rows::line(bytes);
        copy(session, (End::Device, from), (End::Host, to), &rows, stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) -> i32 {
    call("cuMemcpyDtoDAsync_v2", Needs::Context, |session| {
        let rows = Rows::line(bytes);
        copy(
            session,
            (End::Device, from),
            (End::Device, to),
            &rows,
            stream,
        )
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize) -> i32 {
    call("cuMemcpyHtoD_v2", Needs::Context, |session| {
        copy_now(session, (End::Host, from), (End::Device, to), bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize) -> i32 {
    call("cuMemcpyDtoH_v2", Needs::Context, |session| {
        copy_now(session, (End::Device, from), (End::Host, to), bytes)
    })
}

/// Copies bytes in the null stream, and waits for it.
fn copy_now(
    session: &mut Session,
    source: (End, u64),
    destination: (End, u64),
    bytes: usize,
) -> Answer {
    session.captures.refuse_unsafe_call()?;
    copy(session, source, destination, &Rows::line(bytes), NULL)?;
    finish(session, NULL)
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
struct Copy2D {
    source_x_bytes: usize,
    source_y: usize,
    source_type: u32,
    source_host: u64,
    source_device: u64,
    source_array: u64,
    source_pitch: usize,
    destination_x_bytes: usize,
    destination_y: usize,
    destination_type: u32,
    destination_host: u64,
    destination_device: u64,
    destination_array: u64,
    destination_pitch: usize,
    width_bytes: usize,
    height: usize,
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpy2DAsync_v2(copied: Option<&Copy2D>, stream: u64) -> i32 {
    call("cuMemcpy2DAsync_v2", Needs::Context, |session| {
        let copied = copied.ok_or(Status::INVALID_VALUE)?;
        let rows = Rows {
            width: copied.width_bytes as u64,
            count: copied.height as u64,
            source_pitch: copied.source_pitch as u64,
            destination_pitch: copied.destination_pitch as u64,
        };
        let source = corner(
            session,
            copied.source_type,
            [copied.source_host, copied.source_device],
            [copied.source_x_bytes, copied.source_y, copied.source_pitch],
        )?;
        let destination = corner(
            session,
            copied.destination_type,
            [copied.destination_host, copied.destination_device],
            [
                copied.destination_x_bytes,
                copied.destination_y,
                copied.destination_pitch,
            ],
        )?;
        copy(session, source, destination, &rows, stream)
    })
}

/// The first byte of the rows on one side of a copy.
fn corner(
    session: &Session,
    memory_type: u32,
    [host, device]: [u64; 2],
    [x_bytes, y, pitch]: [usize; 3],
) -> Answer<(End, u64)> {
    let (end, base) = match memory_type {
        1 => (End::Host, host),
        2 => (End::Device, device),
        // With unified addressing, the device pointer holds host addresses as well.
        4 => (end_at(session, device), device),
        3 => return Err(Status::NOT_SUPPORTED),
        _ => return Err(Status::INVALID_VALUE),
    };
    let skipped = y
        .checked_mul(pitch)
        .and_then(|bytes| bytes.checked_add(x_bytes));
    let first = skipped.and_then(|bytes| base.checked_add(bytes as u64));
    Ok((end, first.ok_or(Status::INVALID_VALUE)?))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: u64) -> i32 {
    call("cuMemsetD8Async", Needs::Context, |session| {
        let id = session.stream(stream)?;
        let context = context_of(session, id)?;
        if bytes == 0 {
            return Ok(());
        }
        let bytes = bytes as u64;
        session
            .memory
            .space()
            .reach(to, bytes)
            .ok_or(Status::INVALID_VALUE)?;
        let work = Work::Set {
            address: to,
            value,
            bytes,
        };
        submit(session, id, Operation::new(Kind::Memset, work, context)).map(|_| ())
    })
}
