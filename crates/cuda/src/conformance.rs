//! Checks that every driver has to pass, a real one and the fake one for tests.
//!
//! Each check is independent, panics on failure, and frees everything it allocates.
#![allow(unsafe_code)]

use std::alloc::{self, Layout};
use std::ffi::CStr;
use std::sync::Arc;
use std::thread;

use crate::raw;
use crate::{
    Device, DeviceMemory, Direction, Driver, Error, Foreign, HostMemory, Module, PitchedCopy,
    Registration, Stream,
};

/// The kernels of `penstock-io`, as they are built into that crate.
const KERNELS: &CStr = match CStr::from_bytes_with_nul(
    concat!(include_str!("../../io/kernels/gather.ptx"), "\0").as_bytes(),
) {
    Ok(text) => text,
    Err(_) => panic!("the text has no zero"),
};

/// A check with its name.
pub type Check = (&'static str, fn(&Driver));

/// All checks.
pub const CHECKS: &[Check] = &[
    ("devices say what they are", devices_say_what_they_are),
    (
        "there is no device beyond the last",
        no_device_beyond_the_last,
    ),
    ("bytes come back as they went", bytes_come_back),
    ("memory that is not pinned will do", plain_memory_will_do),
    ("rows are copied by their pitches", rows_by_their_pitches),
    ("many pieces are copied by one call", many_pieces),
    (
        "a stream waits for another's event",
        one_stream_waits_for_another,
    ),
    (
        "an event is of the work before it",
        events_are_of_the_work_before_them,
    ),
    ("the default stream can be waited for", the_default_stream),
    ("memory is pinned once", memory_is_pinned_once),
    ("kernels reach memory of the host", kernels_reach_the_host),
    (
        "a kernel that there is not is refused",
        no_kernel_of_another_name,
    ),
    (
        "memory that the driver allocates is pinned",
        memory_of_the_driver,
    ),
    ("too much memory is an error", too_much_memory),
    ("threads share a device", threads_share_a_device),
    ("what is dropped early is done all the same", dropped_early),
    ("a stream under capture is refused", capture_is_refused),
    (
        "another thread's capture is left alone",
        capture_is_left_alone,
    ),
];

/// Runs all checks on a driver.
pub fn run(driver: &Driver) {
    for (name, check) in CHECKS {
        eprintln!("  {name}");
        check(driver);
    }
}

/// Pages of host memory, pinned or not.
struct Host {
    address: *mut u8,
    layout: Layout,
    pinned: Option<Registration>,
}

// SAFETY: the value owns its bytes.
unsafe impl Send for Host {}

impl Host {
    fn plain(bytes: usize) -> Host {
        let layout = Layout::from_size_align(bytes.next_multiple_of(1 << 12), 1 << 12).unwrap();
        // SAFETY: the layout is not empty.
        let address = unsafe { alloc::alloc_zeroed(layout) };
        assert!(!address.is_null());
        Host {
            address,
            layout,
            pinned: None,
        }
    }

    fn pinned(device: &Arc<Device>, bytes: usize) -> Host {
        let mut host = Host::plain(bytes);
        // SAFETY: the pages stay until the drop, which drops the registration first.
        let pinned = unsafe { Registration::new(device, host.address(), host.layout.size()) };
        host.pinned = Some(pinned.unwrap());
        host
    }

    fn filled(mut self, seed: u64) -> Host {
        let mut state = seed | 1;
        for byte in self.bytes_mut() {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            *byte = (state >> 56) as u8;
        }
        self
    }

    fn address(&self) -> usize {
        self.address.expose_provenance()
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the memory has this many bytes; the copies to it have ended before they are read.
        unsafe { std::slice::from_raw_parts(self.address, self.layout.size()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.layout.size()) }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.pinned = None;
        // SAFETY: it was allocated with this layout.
        unsafe { alloc::dealloc(self.address, self.layout) };
    }
}

fn copy(stream: &Stream, direction: Direction, pieces: &[PitchedCopy]) {
    // SAFETY: the checks keep both sides until the stream is done.
    unsafe { stream.copy(direction, pieces) }.unwrap();
}

/// Copies from the host to the device and back.
fn round_trip(stream: &Stream, from: &Host, to: &Host, bytes: usize) {
    let there = DeviceMemory::allocate(stream.device(), bytes).unwrap();
    let piece = |host: &Host| PitchedCopy::run(host.address(), there.address(), bytes);
    copy(stream, Direction::ToDevice, &[piece(from)]);
    copy(stream, Direction::ToHost, &[piece(to)]);
    stream.record().unwrap().wait().unwrap();
    assert!(from.bytes()[..bytes] == to.bytes()[..bytes]);
}

fn first(driver: &Driver) -> Arc<Device> {
    driver.device(0).unwrap()
}

fn devices_say_what_they_are(driver: &Driver) {
    for ordinal in 0..driver.devices() {
        let device = driver.device(ordinal).unwrap();
        assert_eq!(device.ordinal(), ordinal);
        assert!(!device.name().unwrap().is_empty());
        assert!(device.pci_bus_id().unwrap().contains(':'));
        let (free, total) = device.memory_bytes().unwrap();
        assert!(free <= total && total > 0);
    }
}

fn no_device_beyond_the_last(driver: &Driver) {
    let (ordinal, count) = (driver.devices(), driver.devices());
    let refused = driver.device(ordinal).unwrap_err();
    assert_eq!(refused, Error::NoSuchDevice { ordinal, count });
}

fn bytes_come_back(driver: &Driver) {
    let device = first(driver);
    let stream = Stream::new(&device).unwrap();
    for bytes in [1, 255, 4096, (1 << 20) + 1, 8 << 20] {
        let from = Host::pinned(&device, bytes).filled(bytes as u64);
        round_trip(&stream, &from, &Host::pinned(&device, bytes), bytes);
    }
}

fn plain_memory_will_do(driver: &Driver) {
    let stream = Stream::new(&first(driver)).unwrap();
    for bytes in [1, 100_000, 1 << 20] {
        let from = Host::plain(bytes).filled(bytes as u64);
        round_trip(&stream, &from, &Host::plain(bytes), bytes);
    }
}

fn rows_by_their_pitches(driver: &Driver) {
    const ROWS: usize = 37;
    const ROW_BYTES: usize = 1000;
    const WIDE: usize = 1536;
    let device = first(driver);
    let stream = Stream::new(&device).unwrap();
    let there = DeviceMemory::allocate(&device, ROWS * WIDE).unwrap();
    let from = Host::pinned(&device, ROWS * WIDE).filled(1);
    let to = Host::pinned(&device, ROWS * ROW_BYTES);
    let whole = PitchedCopy::run(from.address(), there.address(), ROWS * WIDE);
    copy(&stream, Direction::ToDevice, &[whole]);
    // From column 100 on of each row, contiguous on the host.
    let narrow = PitchedCopy {
        host: to.address(),
        device: there.address() + 100,
        row_bytes: ROW_BYTES,
        rows: ROWS,
        host_pitch: ROW_BYTES,
        device_pitch: WIDE,
    };
    copy(&stream, Direction::ToHost, &[narrow]);
    stream.synchronize().unwrap();
    for row in 0..ROWS {
        let expected = &from.bytes()[row * WIDE + 100..][..ROW_BYTES];
        assert!(&to.bytes()[row * ROW_BYTES..][..ROW_BYTES] == expected);
    }
    // And back, to every second row.
    let back = PitchedCopy {
        device: there.address(),
        ..narrow
    };
    copy(&stream, Direction::ToDevice, &[back]);
    let again = Host::pinned(&device, ROWS * WIDE);
    let whole = PitchedCopy::run(again.address(), there.address(), ROWS * WIDE);
    copy(&stream, Direction::ToHost, &[whole]);
    stream.synchronize().unwrap();
    for row in 0..ROWS {
        let (found, before) = (&again.bytes()[row * WIDE..], &from.bytes()[row * WIDE..]);
        assert!(found[..ROW_BYTES] == before[100..][..ROW_BYTES]);
        assert!(found[ROW_BYTES..WIDE] == before[ROW_BYTES..WIDE]);
    }
}

fn many_pieces(driver: &Driver) {
    const PIECES: usize = 500;
    let device = first(driver);
    let stream = Stream::new(&device).unwrap();
    let bytes_of = |index: usize| 1 + index * 7 % 300;
    let starts: Vec<usize> = (0..=PIECES)
        .map(|index| (0..index).map(bytes_of).sum())
        .collect();
    let there = DeviceMemory::allocate(&device, PIECES * 512).unwrap();
    let from = Host::pinned(&device, starts[PIECES]).filled(2);
    let to = Host::pinned(&device, starts[PIECES]);
    let pieces = |host: &Host| -> Vec<PitchedCopy> {
        let piece = |index: usize| {
            let device = there.address() + (index * 512) as u64;
            PitchedCopy::run(host.address() + starts[index], device, bytes_of(index))
        };
        (0..PIECES)
            .map(piece)
            .chain([PitchedCopy::run(0, 0, 0)])
            .collect()
    };
    copy(&stream, Direction::ToDevice, &pieces(&from));
    copy(&stream, Direction::ToHost, &pieces(&to));
    stream.synchronize().unwrap();
    assert!(from.bytes()[..starts[PIECES]] == to.bytes()[..starts[PIECES]]);
}

fn one_stream_waits_for_another(driver: &Driver) {
    const BYTES: usize = 2 << 20;
    let device = first(driver);
    let (there, back) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let memory = DeviceMemory::allocate(&device, BYTES).unwrap();
    let to = Host::pinned(&device, BYTES);
    for seed in 0..10 {
        let from = Host::pinned(&device, BYTES).filled(seed);
        let piece = |host: &Host| PitchedCopy::run(host.address(), memory.address(), BYTES);
        copy(&there, Direction::ToDevice, &[piece(&from)]);
        back.wait_for(&there.record().unwrap()).unwrap();
        copy(&back, Direction::ToHost, &[piece(&to)]);
        let done = back.record().unwrap();
        // Later work of the first stream must not overtake.
        there.wait_for(&done).unwrap();
        done.wait().unwrap();
        assert!(from.bytes() == to.bytes());
        there.synchronize().unwrap();
    }
}

fn events_are_of_the_work_before_them(driver: &Driver) {
    const BYTES: usize = 4 << 20;
    let device = first(driver);
    let stream = Stream::new(&device).unwrap();
    let nothing = stream.record().unwrap();
    nothing.wait().unwrap();
    assert!(nothing.is_done().unwrap());
    let memory = DeviceMemory::allocate(&device, BYTES).unwrap();
    let host = Host::pinned(&device, BYTES).filled(3);
    let piece = PitchedCopy::run(host.address(), memory.address(), BYTES);
    copy(&stream, Direction::ToDevice, &[piece]);
    let done = stream.record().unwrap();
    while !done.is_done().unwrap() {
        thread::yield_now();
    }
    done.wait().unwrap();
    assert!(nothing.is_done().unwrap());
}

fn the_default_stream(driver: &Driver) {
    let device = first(driver);
    let stream = Stream::new(&device).unwrap();
    // SAFETY: the default stream always exists.
    let default = unsafe { Foreign::new(&device, 0) };
    stream.wait_for(&default.record().unwrap()).unwrap();
    default.wait_for(&stream.record().unwrap()).unwrap();
    default.record().unwrap().wait().unwrap();
}

fn memory_is_pinned_once(driver: &Driver) {
    let device = first(driver);
    let host = Host::pinned(&device, 1 << 20);
    // SAFETY: the pages stay as long as this lives.
    let pin = || unsafe { Registration::new(&device, host.address(), 1 << 20) };
    assert_eq!(pin().unwrap_err().code(), Some(712));
    let mut host = host;
    host.pinned = None;
    // SAFETY: as above.
    drop(unsafe { Registration::new(&device, host.address(), 1 << 20) }.unwrap());
    // SAFETY: as above.
    drop(unsafe { Registration::new(&device, host.address(), 1 << 20) }.unwrap());
}

/// Copies rows of a table on the host, by ids on the device, with a kernel, and copies them back.
fn kernels_reach_the_host(driver: &Driver) {
    const ROWS: usize = 100;
    const ROW_BYTES: usize = 48;
    let device = first(driver);
    let stream = Stream::new(&device).unwrap();
    let mut table = Host::plain(ROWS * ROW_BYTES).filled(3);
    // SAFETY: the pages stay until the drop, which drops the registration first.
    let mapped =
        unsafe { Registration::mapped(&device, table.address(), table.layout.size()) }.unwrap();
    let at = mapped.device_address().unwrap();
    table.pinned = Some(mapped);
    let wanted = [7_u64, 0, 99, 7];
    let ids = DeviceMemory::allocate(&device, size_of_val(&wanted)).unwrap();
    let address = wanted.as_ptr().expose_provenance();
    let piece = PitchedCopy::run(address, ids.address(), ids.len());
    copy(&stream, Direction::ToDevice, &[piece]);
    let out = DeviceMemory::allocate(&device, wanted.len() * ROW_BYTES).unwrap();
    let kernel = Module::load(&device, KERNELS).unwrap();
    let kernel = kernel.kernel(c"penstock_pack").unwrap();
    let count = wanted.len() as u64;
    let arguments = [out.address(), at, ids.address(), count, ROW_BYTES as u64];
    // SAFETY: the stream lives as long as this is used.
    let foreign = unsafe { Foreign::new(&device, stream.raw()) };
    // SAFETY: the memory stays until the stream is synchronized.
    unsafe { kernel.launch(&foreign, 2, 64, arguments) }.unwrap();
    let back = Host::pinned(&device, out.len());
    let piece = PitchedCopy::run(back.address(), out.address(), out.len());
    copy(&stream, Direction::ToHost, &[piece]);
    stream.synchronize().unwrap();
    for (row, &id) in back.bytes().chunks(ROW_BYTES).zip(&wanted) {
        assert!(row == &table.bytes()[id as usize * ROW_BYTES..][..ROW_BYTES]);
    }
}

fn no_kernel_of_another_name(driver: &Driver) {
    let device = first(driver);
    let module = Module::load(&device, KERNELS).unwrap();
    let error = module.kernel(c"penstock_other").unwrap_err();
    assert_eq!(error.code(), Some(500));
    assert!(Module::load(&device, c"no kernels").is_err());
}

fn memory_of_the_driver(driver: &Driver) {
    const BYTES: usize = 1 << 20;
    let device = first(driver);
    let stream = Stream::new(&device).unwrap();
    let there = DeviceMemory::allocate(&device, BYTES).unwrap();
    let from = Host::pinned(&device, BYTES).filled(7);
    let to = HostMemory::allocate(&device, BYTES).unwrap();
    copy(
        &stream,
        Direction::ToDevice,
        &[PitchedCopy::run(from.address(), there.address(), BYTES)],
    );
    copy(
        &stream,
        Direction::ToHost,
        &[PitchedCopy::run(to.address(), there.address(), to.len())],
    );
    stream.synchronize().unwrap();
    // SAFETY: the memory has this many bytes, and the copy to it has ended.
    let found = unsafe {
        std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(to.address()), BYTES)
    };
    assert!(from.bytes() == found);
}

fn too_much_memory(driver: &Driver) {
    let device = first(driver);
    let (_, total) = device.memory_bytes().unwrap();
    let refused = DeviceMemory::allocate(&device, total + (1 << 30)).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
    // The failure does not last.
    DeviceMemory::allocate(&device, 1 << 20).unwrap();
}

fn threads_share_a_device(driver: &Driver) {
    let device = first(driver);
    let shared = Stream::new(&device).unwrap();
    thread::scope(|scope| {
        for seed in 0..4 {
            let (device, shared) = (&device, &shared);
            scope.spawn(move || {
                let own = Stream::new(device).unwrap();
                for stream in [&own, shared] {
                    for round in 0..5 {
                        let bytes = 100_000 + seed * 1000 + round;
                        let from = Host::pinned(device, bytes).filled((seed * 8 + round) as u64);
                        round_trip(stream, &from, &Host::pinned(device, bytes), bytes);
                    }
                }
            });
        }
    });
}

fn dropped_early(driver: &Driver) {
    const BYTES: usize = 2 << 20;
    let device = first(driver);
    let (from, to) = (
        Host::pinned(&device, BYTES).filled(4),
        Host::pinned(&device, BYTES),
    );
    let memory = DeviceMemory::allocate(&device, BYTES).unwrap();
    let stream = Stream::new(&device).unwrap();
    let piece = |host: &Host| PitchedCopy::run(host.address(), memory.address(), BYTES);
    copy(&stream, Direction::ToDevice, &[piece(&from)]);
    copy(&stream, Direction::ToHost, &[piece(&to)]);
    let done = stream.record().unwrap();
    drop(stream);
    drop(device);
    done.wait().unwrap();
    assert!(from.bytes() == to.bytes());
}

/// A stream of another library that is captured into a graph.
struct Captured<'a> {
    stream: &'a Stream,
}

impl<'a> Captured<'a> {
    fn begin(stream: &'a Stream) -> Captured<'a> {
        let entered = stream.device().enter().unwrap();
        // SAFETY: the stream is alive.
        let begun = unsafe { entered.begin_capture(stream.handle(), raw::CAPTURE_MODE_GLOBAL) };
        begun.expect("every driver that works has it").unwrap();
        Captured { stream }
    }

    fn end(self) {
        let entered = self.stream.device().enter().unwrap();
        let mut graph = std::ptr::null_mut();
        // SAFETY: it writes one pointer.
        let ended = unsafe { entered.end_capture(self.stream.handle(), &raw mut graph) };
        ended
            .expect("as above")
            .expect("the capture was not voided");
        // SAFETY: it was made just now.
        let destroyed = unsafe { entered.destroy_graph(graph) };
        destroyed.expect("as above").unwrap();
    }
}

fn capture_is_refused(driver: &Driver) {
    let device = first(driver);
    let (theirs, ours) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    // SAFETY: the stream lives as long as this is used.
    let foreign = unsafe { Foreign::new(&device, theirs.raw()) };
    let capture = Captured::begin(&theirs);
    assert_eq!(foreign.record().unwrap_err(), Error::Capturing);
    let moment = ours.record().unwrap();
    assert_eq!(foreign.wait_for(&moment).unwrap_err(), Error::Capturing);
    capture.end();
    foreign.record().unwrap().wait().unwrap();
}

fn capture_is_left_alone(driver: &Driver) {
    const BYTES: usize = 1 << 20;
    let device = first(driver);
    let theirs = Stream::new(&device).unwrap();
    let ours = Stream::new(&device).unwrap();
    let capture = Captured::begin(&theirs);
    thread::scope(|scope| {
        let work = scope.spawn(|| {
            let from = Host::pinned(&device, BYTES).filled(5);
            round_trip(&ours, &from, &Host::pinned(&device, BYTES), BYTES);
            let moment = ours.record().unwrap();
            while !moment.is_done().unwrap() {
                thread::yield_now();
            }
        });
        work.join().unwrap();
    });
    // Calls of the capturing thread itself do no harm either.
    round_trip(
        &ours,
        &Host::plain(BYTES).filled(6),
        &Host::plain(BYTES),
        BYTES,
    );
    capture.end();
}
