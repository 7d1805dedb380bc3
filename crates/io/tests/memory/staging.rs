//! Transfers between files and devices: when the end of a transfer is reported, all bytes are in
//! place and none of its memory is used any more, whatever the order in which a driver does its
//! work.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_cuda::{Device, Driver, Stream};
use penstock_cuda_fake::Control;
use penstock_io::Error;
use penstock_io::buffer::{DeviceStreams, Memory, Pool};
use penstock_io::executor::{
    Executor, ExecutorConfig, Kind, Landing, Request, Share, Source, Target, Transfer,
};
use penstock_io::faulty::LentDevice;
use penstock_io::file::{Direct, File};
use penstock_io::staging::{
    DeviceCopyJob, DeviceKind, DeviceMoved, DeviceRequest, DeviceTransfer, StagingPipeline,
};

/// Far more than any test takes: a test that needs it hangs.
const HANG: Duration = Duration::from_secs(120);
const PIECE_BYTES: usize = 256 << 10;

/// The fake driver, its device, and a stream on it like a training's.
struct Machine {
    control: Control,
    device: Arc<Device>,
    device_streams: Arc<DeviceStreams>,
    theirs: Arc<Stream>,
}

/// One driver serves all tests, one at a time.
fn machine() -> MutexGuard<'static, Machine> {
    static MACHINE: LazyLock<Mutex<Machine>> = LazyLock::new(|| {
        let control = Control::new();
        let driver = Driver::open(&penstock_cuda_fake::library()).unwrap();
        let device = driver.device(0).unwrap();
        Mutex::new(Machine {
            control,
            device_streams: Arc::new(DeviceStreams::new(&device).unwrap()),
            theirs: Arc::new(Stream::new(&device).unwrap()),
            device,
        })
    });
    let mut machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    machine.control.clear_faults();
    machine.draw(1, 0);
    machine
}

impl Machine {
    fn draw(&mut self, seed: u64, delay_us_max: u64) {
        self.control.set_seed(seed);
        self.control.set_delay_us_max(delay_us_max);
        self.device_streams = Arc::new(DeviceStreams::new(&self.device).unwrap());
        self.theirs = Arc::new(Stream::new(&self.device).unwrap());
    }

    fn lent(&self, content: &[u8]) -> LentDevice {
        LentDevice::new(&self.device_streams, &self.theirs, content).unwrap()
    }

    fn pipeline(&self) -> StagingPipeline<DeviceCopyJob> {
        let pool = Pool::pinned_and_kept(PIECE_BYTES, 3 * PIECE_BYTES, &self.device);
        StagingPipeline::start(pool).unwrap()
    }
}

/// Workers, and a file.
struct World {
    _executor: Executor,
    share: Arc<Share>,
    _directory: tempfile::TempDir,
    path: PathBuf,
}

fn world(content: &[u8]) -> World {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("file");
    fs::write(&path, content).unwrap();
    let config = ExecutorConfig {
        block_bytes: 64 << 10,
        staging_bytes: 1 << 20,
        ..ExecutorConfig::default()
    };
    let executor = Executor::open(&config).unwrap();
    World {
        share: Arc::new(executor.share(1).unwrap()),
        _executor: executor,
        _directory: directory,
        path,
    }
}

impl World {
    fn to_read(&self) -> Target {
        Target {
            file: Arc::new(File::open(&self.path, Direct::Auto).unwrap()),
            edges: None,
        }
    }

    fn to_write(&self) -> Target {
        let file = File::reach_to_write(&self.path, Direct::Auto).unwrap();
        let edges = file.is_direct().then(|| file.again(Direct::Off).unwrap());
        Target {
            file: Arc::new(file),
            edges: edges.map(Arc::new),
        }
    }
}

fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as u8
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

/// Begins a transfer that follows the stream of the memory's owner.
fn begin(
    (machine, world, pipeline): (&Machine, &World, &StagingPipeline<DeviceCopyJob>),
    requests: Vec<DeviceRequest>,
    stream: &LentDevice,
    host_transfer: Option<Transfer>,
    syncs: Vec<Arc<File>>,
) -> Result<DeviceTransfer, Error> {
    let moment = (
        Arc::clone(&machine.device_streams),
        stream.foreign().record()?,
    );
    let moments = vec![moment];
    DeviceCopyJob::new(
        &world.share,
        requests,
        PIECE_BYTES,
        moments,
        host_transfer,
        syncs,
    )
    .begin(pipeline)
}

fn end(transfer: &DeviceTransfer) -> DeviceMoved {
    transfer.wait(Some(HANG)).unwrap().expect("it hangs")
}

/// Offsets and lengths of requests.
const PLACES: [(u64, usize); 9] = [
    (0, 4096),
    (4096, 1),
    (5000, 3000),
    (12_288, 0),
    (12_288, 700_000),
    (720_000, 2),
    (800_001, 900_001),
    (2_000_000, 256 << 10),
    (2_400_000, 12_345),
];

#[test]
fn reads_are_in_their_places() {
    let mut machine = machine();
    let content = noise(1, 3_000_000);
    let world = world(&content);
    let pipeline = machine.pipeline();
    for seed in 0..40 {
        machine.draw(seed, 300 * (seed % 2));
        let lents: Vec<LentDevice> = PLACES
            .iter()
            .map(|&(_, bytes)| machine.lent(&vec![0xee; bytes]))
            .collect();
        let request = |(&(offset, bytes), lent): (&(u64, usize), &LentDevice)| DeviceRequest {
            target: world.to_read(),
            offset,
            kind: DeviceKind::Read(lent.array(0, 1, &[bytes], &[1])),
        };
        let requests: Vec<DeviceRequest> = PLACES.iter().zip(&lents).map(request).collect();
        let (handle, buf) = Memory::allocate(5000).unwrap().share();
        let host_transfer = world.share.submit(vec![Request {
            target: world.to_read(),
            offset: 77,
            kind: Kind::Read(Landing::Window(buf)),
        }]);
        let all = (&*machine, &world, &pipeline);
        let host_transfer = Some(host_transfer.unwrap());
        let transfer = begin(all, requests, &lents[0], host_transfer, Vec::new()).unwrap();
        let moved = end(&transfer);
        let bytes: usize = PLACES.iter().map(|&(_, bytes)| bytes).sum();
        assert_eq!(moved.device_bytes, bytes as u64);
        assert_eq!(moved.moved.bytes, bytes as u64 + 5000);
        // Only small requests, and parts of pages.
        assert!(moved.moved.staged_bytes < 300_000, "{moved:?}");
        let memory = handle.reclaim().expect("all of it has ended");
        assert_eq!(memory.as_slice(), &content[77..5077]);
        // The device's present content: no stream has to wait for anything.
        for (&(offset, bytes), lent) in PLACES.iter().zip(&lents) {
            assert!(lent.is_returned());
            let mut found = vec![0; bytes];
            machine.control.peek(lent.address(), &mut found);
            assert!(found[..] == content[offset as usize..][..bytes], "{offset}");
        }
    }
}

#[test]
fn writes_are_what_the_stream_has_made_of_the_memory() {
    let mut machine = machine();
    for seed in 0..30 {
        machine.draw(seed, 300 * (seed % 2));
        let before = noise(2, 3_000_000);
        let world = world(&before);
        let pipeline = machine.pipeline();
        let mut lents: Vec<LentDevice> = PLACES
            .iter()
            .map(|&(_, bytes)| machine.lent(&vec![0xee; bytes]))
            .collect();
        let contents: Vec<Vec<u8>> = PLACES
            .iter()
            .map(|&(offset, bytes)| noise(seed + offset, bytes))
            .collect();
        for (lent, content) in lents.iter_mut().zip(&contents) {
            lent.change(content).unwrap();
        }
        let target = world.to_write();
        let request = |(&(offset, bytes), lent): (&(u64, usize), &LentDevice)| DeviceRequest {
            target: target.clone(),
            offset,
            kind: DeviceKind::Write(lent.view(0, 1, &[bytes], &[1])),
        };
        let requests: Vec<DeviceRequest> = PLACES.iter().zip(&lents).map(request).collect();
        let (_handle, mut buf) = Memory::allocate(5000).unwrap().share();
        buf.as_mut_slice().fill(3);
        let host_transfer = world.share.submit(vec![Request {
            target: target.clone(),
            offset: 2_900_000,
            kind: Kind::Write(Source::Window(buf)),
        }]);
        let all = (&*machine, &world, &pipeline);
        let syncs = vec![Arc::clone(&target.file)];
        let host_transfer = Some(host_transfer.unwrap());
        let transfer = begin(all, requests, &lents[0], host_transfer, syncs).unwrap();
        let moved = end(&transfer);
        // From here on the owner may change the memory.
        assert!(lents.iter().all(LentDevice::is_returned));
        let mut expected = before;
        for (&(offset, bytes), content) in PLACES.iter().zip(&contents) {
            expected[offset as usize..][..bytes].copy_from_slice(content);
        }
        expected[2_900_000..2_905_000].fill(3);
        assert!(fs::read(&world.path).unwrap() == expected);
        let bytes: usize = PLACES.iter().map(|&(_, bytes)| bytes).sum();
        assert_eq!(moved.device_bytes, bytes as u64);
        assert_eq!(moved.moved.bytes, bytes as u64 + 5000);
        pipeline.finish();
    }
}

#[test]
fn nothing_ends_before_the_device_has_copied() {
    let machine = machine();
    let content = noise(1, 600_000);
    let world = world(&content);
    let pipeline = machine.pipeline();
    let lent = machine.lent(&vec![0xee; 600_000]);
    drop(lent.content());
    let read = |lent: &LentDevice| DeviceRequest {
        target: world.to_read(),
        offset: 0,
        kind: DeviceKind::Read(lent.target()),
    };
    let all = (&*machine, &world, &pipeline);
    let held = machine.control.hold();
    let transfer = begin(all, vec![read(&lent)], &lent, None, Vec::new()).unwrap();
    assert!(
        transfer
            .wait(Some(Duration::from_millis(30)))
            .unwrap()
            .is_none()
    );
    assert!(!transfer.is_done() && !lent.is_returned());
    drop(held);
    end(&transfer);
    assert!(lent.is_returned());
    assert!(lent.content().unwrap() == content);
}

#[test]
fn what_is_given_up_ends_and_lets_go() {
    let machine = machine();
    let world = world(&noise(1, 10));
    let pipeline = machine.pipeline();
    let mut lent = machine.lent(&vec![7; 4_000_000]);
    drop(lent.content());
    let write = |lent: &LentDevice| DeviceRequest {
        target: world.to_write(),
        offset: 0,
        kind: DeviceKind::Write(lent.region()),
    };
    let held = machine.control.hold();
    lent.change(&vec![8; 4_000_000]).unwrap();
    let all = (&*machine, &world, &pipeline);
    let transfer = begin(all, vec![write(&lent)], &lent, None, Vec::new()).unwrap();
    transfer.cancel().unwrap();
    drop(held);
    for _ in 0..2 {
        assert!(matches!(transfer.wait(Some(HANG)), Err(Error::Cancelled)));
    }
    assert!(lent.is_returned());
    assert!(fs::metadata(&world.path).unwrap().len() < 2_000_000);
    // Dropping the pipeline finishes its transfers.
    let transfer = begin(all, vec![write(&lent)], &lent, None, Vec::new()).unwrap();
    drop(pipeline);
    end(&transfer);
    assert!(fs::read(&world.path).unwrap() == vec![8; 4_000_000]);
}

#[test]
fn whatever_call_fails_the_bytes_are_right_or_it_is_reported() {
    const CALLS: [&str; 8] = [
        "cuStreamIsCapturing",
        "cuEventCreate",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuEventQuery",
        "cuEventSynchronize",
    ];
    let mut machine = machine();
    let content = noise(5, 900_000);
    let world = world(&content);
    for call in CALLS {
        let mut value = 0;
        for nth in 1..16 {
            machine.draw(nth, 50);
            let pipeline = machine.pipeline();
            let into = machine.lent(&vec![0xee; 900_000]);
            let from = machine.lent(&content);
            drop((into.content(), from.content()));
            let out = world.path.with_extension("out");
            fs::write(&out, b"").unwrap();
            let read = DeviceRequest {
                target: world.to_read(),
                offset: 0,
                kind: DeviceKind::Read(into.target()),
            };
            let file = File::reach_to_write(&out, Direct::Off).unwrap();
            let write = DeviceRequest {
                target: Target {
                    file: Arc::new(file),
                    edges: None,
                },
                offset: 0,
                kind: DeviceKind::Write(from.region()),
            };
            let all = (&*machine, &world, &pipeline);
            for (request, lent) in [(read, &into), (write, &from)] {
                machine.control.fail_call(call, nth, 999);
                value += usize::from(!ends_well(all, request, lent));
                machine.control.clear_faults();
                assert!(lent.is_returned(), "{call} {nth}");
            }
            if into.content().unwrap() != content || fs::read(&out).unwrap() != content {
                assert!(value > 0, "{call} {nth}: nobody was told");
            }
            pipeline.finish();
            assert!(into.is_returned() && from.is_returned());
        }
        let is_asked_later = call.starts_with("cuEventQ") || call.starts_with("cuEventS");
        assert!(value > 0 || is_asked_later, "{call}");
    }
}

fn ends_well(
    all: (&Machine, &World, &StagingPipeline<DeviceCopyJob>),
    request: DeviceRequest,
    stream: &LentDevice,
) -> bool {
    let transfer = match begin(all, vec![request], stream, None, Vec::new()) {
        Ok(transfer) => transfer,
        Err(Error::Cuda(error)) => {
            assert_eq!(error.code(), Some(999));
            return false;
        }
        Err(other) => panic!("{other:?}"),
    };
    match transfer.wait(Some(HANG)) {
        Ok(moved) => {
            assert_eq!(moved.expect("it hangs").device_bytes, 900_000);
            true
        }
        Err(Error::Cuda(error)) => {
            assert_eq!(error.code(), Some(999));
            false
        }
        Err(other) => panic!("{other:?}"),
    }
}

#[test]
fn a_file_that_ends_before_is_reported_as_often_as_it_is_asked_for() {
    let machine = machine();
    let world = world(&noise(1, 300_000));
    let pipeline = machine.pipeline();
    let lent = machine.lent(&vec![0xee; 900_000]);
    let request = DeviceRequest {
        target: world.to_read(),
        offset: 0,
        kind: DeviceKind::Read(lent.target()),
    };
    let all = (&*machine, &world, &pipeline);
    let transfer = begin(all, vec![request], &lent, None, Vec::new()).unwrap();
    for _ in 0..2 {
        match transfer.wait(Some(HANG)) {
            Err(Error::Transfer { path, offset, .. }) => {
                // Blocks beyond the end may be read before the one that contains it.
                assert_eq!(path.as_path(), world.path.as_path());
                assert!(*offset >= 300_000);
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(lent.is_returned());
    // A piece that did not arrive whole is not copied.
    assert!(
        lent.content().unwrap()[PIECE_BYTES..]
            .iter()
            .all(|&byte| byte == 0xee)
    );
}
