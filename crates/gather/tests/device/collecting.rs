//! Rows gathered by a kernel, from the cache's own slots and from staged rows.

use penstock_gather::DeviceReader;
use penstock_io::faulty::Faults;

use crate::machine::machine;
use crate::{HANG, ROWS, WIDTH, assert_has, assert_returned, byte, ids_of, lent, world};

const LAUNCH: &str = "cuLaunchKernel";

fn every() -> Vec<u64> {
    (0..ROWS).collect()
}

#[test]
fn what_a_cache_has_is_collected_and_what_it_has_not_is_read_beside() {
    let machine = machine();
    for (seed, slots) in [(20, 4000), (21, 700), (22, 1)] {
        let world = world(seed, Some(slots), Faults::new(1));
        let device = DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
        let before = machine.control.calls(LAUNCH);
        for turn in 0..4 {
            let ids = ids_of(5000, turn);
            let memory = lent(&machine, ids.len());
            let batch = device
                .gather(ids.clone(), memory.target(), &memory.foreign(), None)
                .unwrap();
            assert!(batch.wait(Some(HANG)).unwrap());
            batch.hold(&memory.foreign()).unwrap();
            assert_has(&memory, seed, &ids);
        }
        assert!(machine.control.calls(LAUNCH) >= before + 4);
    }
    // Without a cache the kernel has nothing to gather.
    let world = world(23, None, Faults::new(1));
    let device = DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
    let before = machine.control.calls(LAUNCH);
    let (ids, memory) = (ids_of(100, 1), lent(&machine, 100));
    let batch = device
        .gather(ids.clone(), memory.target(), &memory.foreign(), None)
        .unwrap();
    assert!(batch.wait(Some(HANG)).unwrap());
    batch.hold(&memory.foreign()).unwrap();
    assert_has(&memory, 23, &ids);
    assert_eq!(machine.control.calls(LAUNCH), before);
}

/// Other batches that want these slots meanwhile proceed without them.
#[test]
fn rows_stay_where_a_kernel_reads_them() {
    const KEPT: usize = 200;
    let machine = machine();
    let world = world(24, Some(KEPT as u32), Faults::new(1));
    let device = DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
    let kept: Vec<u64> = every()[..KEPT].to_vec();
    let first = lent(&machine, KEPT);
    for _ in 0..2 {
        let batch = device
            .gather(kept.clone(), first.target(), &first.foreign(), None)
            .unwrap();
        assert!(batch.wait(Some(HANG)).unwrap());
    }
    assert_returned(&first);
    let memory = lent(&machine, KEPT);
    drop(memory.content());
    let held = machine.control.hold();
    let batch = device
        .gather(kept.clone(), memory.target(), &memory.foreign(), None)
        .unwrap();
    assert!(batch.wait(Some(HANG)).unwrap());
    batch.hold(&memory.foreign()).unwrap();
    for seed in 0..5 {
        let others: Vec<u64> = ids_of(1000, seed)
            .into_iter()
            .map(|id| KEPT as u64 + id % (ROWS - KEPT as u64))
            .collect();
        let (handle, out) = penstock_io::buffer::Memory::allocate(1000 * WIDTH as usize)
            .unwrap()
            .share();
        world
            .reader
            .gather(&others, out)
            .unwrap()
            .wait(None)
            .unwrap();
        drop(handle);
    }
    drop(held);
    assert_has(&memory, 24, &kept);
    assert_returned(&memory);
    // The rows are evicted once the kernel has read them.
    let others: Vec<u64> = every()[KEPT..2 * KEPT].to_vec();
    for _ in 0..3 {
        let batch = device
            .gather(others.clone(), memory.target(), &memory.foreign(), None)
            .unwrap();
        assert!(batch.wait(Some(HANG)).unwrap());
        batch.hold(&memory.foreign()).unwrap();
        assert_has(&memory, 24, &others);
    }
}

#[test]
fn rows_of_a_result_may_lie_apart() {
    let machine = machine();
    let world = world(25, Some(4000), Faults::new(1));
    let device = DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
    let width = WIDTH as usize;
    for turn in 0..2 {
        let ids = ids_of(300, turn);
        let memory = lent(&machine, 2 * ids.len());
        let before = machine.control.calls(LAUNCH);
        let every_other = memory.array(width, 1, &[300, width], &[2 * width as isize, 1]);
        let batch = device
            .gather(ids.clone(), every_other, &memory.foreign(), None)
            .unwrap();
        assert!(batch.wait(Some(HANG)).unwrap());
        batch.hold(&memory.foreign()).unwrap();
        let content = memory.content().unwrap();
        for (two, &id) in content.chunks(2 * width).zip(&ids) {
            assert!(two[..width].iter().all(|&one| one == 0xee));
            let mut row = two[width..].iter().zip(0..);
            assert!(row.all(|(&found, at)| found == byte(25, id, at)));
        }
        assert_eq!(machine.control.calls(LAUNCH), before + 1);
        // A kernel cannot write rows that are not contiguous.
        let scattered = memory.array(0, 1, &[300, width], &[2 * width as isize, 2]);
        let batch = device
            .gather(ids.clone(), scattered, &memory.foreign(), None)
            .unwrap();
        assert!(batch.wait(Some(HANG)).unwrap());
        batch.hold(&memory.foreign()).unwrap();
        let content = memory.content().unwrap();
        for (two, &id) in content.chunks(2 * width).zip(&ids) {
            let mut row = two.iter().step_by(2).zip(0..);
            assert!(row.all(|(&found, at)| found == byte(25, id, at)));
        }
        assert_eq!(machine.control.calls(LAUNCH), before + 1);
    }
}

/// Freeing device memory would wait for all of the device's work.
#[test]
fn who_closes_a_table_does_not_wait_for_a_device() {
    let machine = machine();
    let world = world(26, Some(4000), Faults::new(1));
    let device = DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
    let memory = lent(&machine, 100);
    let before = machine.control.calls(LAUNCH);
    let batch = device
        .gather(ids_of(100, 1), memory.target(), &memory.foreign(), None)
        .unwrap();
    assert!(batch.wait(Some(HANG)).unwrap());
    assert_eq!(machine.control.calls(LAUNCH), before + 1);
    device.finish();
    assert_returned(&memory);
    let held = machine.control.hold();
    // Queues some other work.
    machine
        .device_streams
        .fill_after(&memory.foreign())
        .unwrap();
    drop((batch, device, world));
    drop(held);
}
