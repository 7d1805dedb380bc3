//! Device memory: its amount, access to it, and the attributes of pointers.

use std::collections::HashSet;
use std::fs;

use crate::device::{Device, made};
use crate::raw::CUDA;

#[test]
fn memory_ends() {
    let device = Device::new();
    device.control.set_memory_bytes(3 << 20);
    let first = device.memory(2 << 20, 0);
    assert_eq!((CUDA.cuMemAlloc_v2)(&mut 0, (1 << 20) + 1), 2);
    assert_eq!((CUDA.cuMemAlloc_v2)(&mut 0, 0), 1);
    let (mut free, mut total) = (0, 0);
    assert_eq!((CUDA.cuMemGetInfo_v2)(&mut free, &mut total), 0);
    assert_eq!((free, total), (1 << 20, 3 << 20));
    assert_eq!((CUDA.cuMemFree_v2)(first), 0);
    device.memory(3 << 20, 0);
}

#[test]
fn nobody_can_follow_a_device_address() {
    let device = Device::new();
    let address = device.memory(8192, 7);
    assert_eq!(address % 256, 0);
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let of_address = |line: &&str| {
        let (range, _) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        (start..end).contains(&address)
    };
    let line = maps.lines().find(of_address).unwrap();
    assert_eq!(line.split(' ').nth(1).unwrap(), "---p");
}

#[test]
fn addresses_outlast_resets() {
    let mut given = HashSet::new();
    for _ in 0..3_000 {
        assert!(given.insert(Device::new().memory(64, 1)));
    }
}

#[test]
fn memory_that_no_machine_has_is_refused() {
    let device = Device::new();
    device.control.set_memory_bytes(u64::MAX);
    assert_eq!((CUDA.cuMemAlloc_v2)(&mut 0, usize::MAX), 2);
    assert_eq!((CUDA.cuMemAlloc_v2)(&mut 0, usize::MAX / 2), 2);
}

#[test]
fn fresh_memory_is_not_zero() {
    let device = Device::new();
    let address = made(|address| (CUDA.cuMemAlloc_v2)(address, 64));
    assert_eq!(device.peek(address, 64), [0xC5; 64]);
}

#[test]
fn memory_is_freed_once_and_from_its_beginning() {
    let device = Device::new();
    let address = device.memory(64, 7);
    assert_eq!((CUDA.cuMemFree_v2)(address + 8), 1);
    assert_eq!((CUDA.cuMemFree_v2)(address), 0);
    assert_eq!((CUDA.cuMemFree_v2)(address), 1);
    assert_eq!((CUDA.cuMemFree_v2)(0), 0);
    assert_ne!(device.memory(64, 7), address);
}

#[test]
fn memory_is_freed_after_what_is_queued() {
    let device = Device::new();
    device.control.set_delay_us_max(20_000);
    let stream = device.stream();
    let (address, pinned) = (device.memory(64, 7), device.pinned(64, 0));
    for _ in 0..5 {
        assert_eq!(
            (CUDA.cuMemcpyDtoHAsync_v2)(pinned.pointer, address, 64, stream),
            0
        );
    }
    assert_eq!((CUDA.cuMemFree_v2)(address), 0);
    assert_eq!((CUDA.cuStreamQuery)(stream), 0);
    assert_eq!(pinned.read(&device), [7; 64]);
}

#[test]
fn pointers_say_what_they_are() {
    let device = Device::new();
    let (address, pinned) = (device.memory(64, 7), device.pinned(64, 0));
    let attribute = |attribute, pointer| {
        made(|value: &mut u64| {
            (CUDA.cuPointerGetAttribute)((&raw mut *value).cast(), attribute, pointer)
        })
    };
    assert_eq!(attribute(1, address + 5), device.context);
    assert_eq!(attribute(2, address), 2);
    assert_eq!(attribute(2, pinned.address()), 1);
    assert_eq!(attribute(9, address), 0);
    assert_eq!(attribute(11, address + 5), address);
    assert_eq!(attribute(12, address + 5), 64);
    let mut value = 0_u64;
    let own = (&raw mut value).cast();
    assert_eq!((CUDA.cuPointerGetAttribute)(own, 2, own as u64), 1);
}
