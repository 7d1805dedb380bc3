//! Uploads and downloads one object through the engine; prints throughput, CPU time and peak
//! memory.
//!
//! `transfers ENDPOINT BYTES PART_BYTES UP_CONNECTIONS DOWN_CONNECTIONS [paced]` uses the
//! bucket "bucket" and the key pair "key", "secret". With `paced` each connection passes a proxy
//! in this process that imitates a connection to S3: 20 MB/s up, 90 MB/s down, 30 ms to the first
//! byte.

#[path = "../tests/common/proxy.rs"]
#[allow(dead_code, reason = "it is of the tests")]
mod proxy;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_io::buffer::{IoBuf, Memory};
use penstock_io::engine::{Op, OpKind};
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem};
use penstock_object::{Address, Credentials, Keys, Objects, Remote};
use proxy::{Fate, Pace, Proxy};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [endpoint, bytes, part_bytes, up, down, rest @ ..] = &arguments[..] else {
        panic!("ENDPOINT BYTES PART_BYTES UP_CONNECTIONS DOWN_CONNECTIONS [paced]");
    };
    let number = |text: &String| text.parse::<usize>().expect("a number");
    let pace = Pace {
        up: 20_000_000,
        down: 90_000_000,
        latency: Duration::from_millis(30),
    };
    let proxy = (!rest.is_empty()).then(|| {
        let address = endpoint.trim_start_matches("http://");
        Proxy::start(address, pace, |_, _| Fate::Pass)
    });
    let endpoint = proxy.as_ref().map_or(endpoint.clone(), Proxy::endpoint);
    let path = Path::new("s3://bucket/transfers");
    let remote = Remote {
        endpoint: Some(endpoint),
        region: Some("us-east-1".into()),
        credentials: Some(Credentials::Given(Keys {
            id: "key".into(),
            secret: "secret".into(),
            token: None,
            expires: None,
        })),
        part_bytes: Some(number(part_bytes)),
        connections: Some(number(up).max(number(down))),
        ..Remote::default()
    };
    let objects = Objects::open(Address::of(path).unwrap().unwrap(), &remote).unwrap();
    let bytes = number(bytes);
    let part_bytes = objects.part_bytes();
    let file = Arc::new(objects.create(path, Direct::Off).unwrap());
    report("upload", bytes, || {
        transfer(&objects, &file, bytes, part_bytes, number(up), true);
        objects.change(Change::SyncData(&file)).unwrap();
    });
    let file = Arc::new(objects.files().open(path, Direct::Off).unwrap());
    report("download", bytes, || {
        transfer(&objects, &file, bytes, part_bytes, number(down), false);
    });
}

/// Transfers a whole file with `at_a_time` requests in flight.
fn transfer(
    objects: &Objects,
    file: &Arc<File>,
    bytes: usize,
    part_bytes: usize,
    at_a_time: usize,
    is_write: bool,
) {
    let mut engine = objects.engine(at_a_time).unwrap().engine;
    let mut buffers: Vec<IoBuf> = (0..at_a_time.min(bytes.div_ceil(part_bytes)))
        .map(|_| Memory::allocate(part_bytes).unwrap().share().1)
        .collect();
    for (buffer, byte) in buffers.iter_mut().zip(1..) {
        buffer.as_mut_slice().fill(byte);
    }
    let mut offsets = (0..bytes).step_by(part_bytes);
    let mut completed = Vec::new();
    loop {
        while let Some(mut buf) = buffers.pop() {
            let Some(offset) = offsets.next() else { break };
            buf.set_len(part_bytes.min(bytes - offset));
            let offset = offset as u64;
            let kind = match is_write {
                true => OpKind::Write { offset, buf },
                false => OpKind::Read { offset, buf },
            };
            let (token, file) = (0, Arc::clone(file));
            engine.submit(Op { token, file, kind }).unwrap();
        }
        if engine.in_flight() == 0 {
            return;
        }
        engine.poll(1, None, &mut completed).unwrap();
        for completion in completed.drain(..) {
            completion.result.unwrap();
            buffers.extend(completion.buf);
        }
    }
}

fn report(what: &str, bytes: usize, work: impl FnOnce()) {
    let (begun, ticks) = (Instant::now(), cpu_seconds());
    work();
    let seconds = begun.elapsed().as_secs_f64();
    let [user, system] = cpu_seconds();
    let gigabytes = bytes as f64 / 1e9;
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{what}: {:.0} MB/s, CPU per GB {:.2} s user, {:.2} s system, peak {} MB",
        bytes as f64 / 1e6 / seconds,
        (user - ticks[0]) / gigabytes,
        (system - ticks[1]) / gigabytes,
        peak_bytes() / 1_000_000,
    )
    .unwrap();
}

/// User and system time of this process.
fn cpu_seconds() -> [f64; 2] {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    let fields: Vec<&str> = fields.split(' ').collect();
    // A clock tick is 10 ms on every Linux that shows one here.
    [11, 12].map(|field: usize| fields[field].parse::<f64>().unwrap() / 100.0)
}

fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kilobytes = line.unwrap().split_whitespace().nth(1).unwrap();
    kilobytes.parse::<u64>().unwrap() * 1024
}
