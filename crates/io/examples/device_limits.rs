//! Measures the limits of the device behind a directory with a bare engine: the figures that
//! docs/performance.md uses.
//!
//! `cargo run --release -p penstock-io --example device_limits -- DIRECTORY [MIB] [ROUNDS]`
//!
//! Each round measures every case once, in turn; the table shows the median and the range.

#![expect(clippy::print_stdout, reason = "the table is what it is for")]

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_io::Result;
use penstock_io::buffer::{IoBuf, Memory, Pool};
use penstock_io::engine::{Engine, EngineChoice, EngineConfig, Op, OpKind, open};
use penstock_io::file::{Direct, File};
use penstock_io::transfer::WholeTransfers;

const MIB: usize = 1 << 20;

/// One way to move a file's bytes.
#[derive(Clone, Copy)]
struct Case {
    request: usize,
    depth: usize,
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    /// Into reused buffers of this many bytes together.
    Read { footprint: usize },
    /// Into fresh memory for every byte, populated before or faulted in by the submission.
    ReadFresh { is_populated: bool },
    /// To a fresh file, synced.
    Write { is_allocated: bool },
}

impl Case {
    fn name(self) -> String {
        let (verb, how) = match self.kind {
            Kind::Read { footprint } => {
                ("read", format!("into {} MiB of buffers", footprint / MIB))
            }
            Kind::ReadFresh { is_populated: true } => ("read", "into populated memory".to_owned()),
            Kind::ReadFresh { .. } => ("read", "into fresh memory, faulted in".to_owned()),
            Kind::Write { is_allocated: true } => ("write", "allocated before".to_owned()),
            Kind::Write { .. } => ("write", "allocated on the way".to_owned()),
        };
        let (request, depth) = (self.request >> 10, self.depth);
        format!("{verb:<5} {request:>4} KiB x {depth:<3} {how}")
    }

    /// Returns seconds, and the completions per wait.
    fn run(self, path: &Path, bytes: usize) -> Result<(f64, f64)> {
        let (request, depth) = (self.request, self.depth);
        match self.kind {
            Kind::Read { footprint } => read(path, bytes, request, depth, footprint, true),
            Kind::ReadFresh { is_populated } => {
                read(path, bytes, request, depth, bytes, is_populated)
            }
            Kind::Write { is_allocated } => write(path, bytes, request, depth, is_allocated),
        }
    }
}

fn cases(bytes: usize) -> Vec<Case> {
    let case = |request, depth, kind| Case {
        request,
        depth,
        kind,
    };
    let sizes = [
        (MIB / 4, 32),
        (MIB, 1),
        (MIB, 4),
        (MIB, 16),
        (4 * MIB, 4),
        (4 * MIB, 16),
    ];
    let footprints = [16 * MIB, 64 * MIB, bytes / 2];
    let again = footprints.map(|footprint| case(MIB, 4, Kind::Read { footprint }));
    let reads = sizes.map(|(request, depth)| {
        let footprint = request * depth;
        case(request, depth, Kind::Read { footprint })
    });
    let fresh = [true, false].map(|is_populated| case(MIB, 16, Kind::ReadFresh { is_populated }));
    let writes = sizes.map(|(request, depth)| {
        let is_allocated = true;
        case(request, depth, Kind::Write { is_allocated })
    });
    let unallocated = case(
        MIB,
        16,
        Kind::Write {
            is_allocated: false,
        },
    );
    let reads = again.into_iter().chain(reads).chain(fresh);
    reads.chain(writes).chain([unallocated]).collect()
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let directory = arguments.get(1).map_or(".", String::as_str);
    let number = |index: usize, default: usize| {
        arguments
            .get(index)
            .and_then(|text| text.parse().ok())
            .unwrap_or(default)
    };
    // Whole requests of every size, and at least one round.
    let (bytes, rounds) = (
        (number(2, 2048) * MIB).next_multiple_of(16 * MIB),
        number(3, 5).max(1),
    );
    let path = Path::new(directory).join("device_limits.tmp");
    let cases = cases(bytes);
    let mut rates = vec![Vec::new(); cases.len()];
    let mut batches = vec![Vec::new(); cases.len()];
    write(&path, bytes, 4 * MIB, 4, true)?;
    for round in 0..rounds {
        for step in 0..cases.len() {
            let index = (step + round) % cases.len();
            rustix::fs::sync();
            std::thread::sleep(Duration::from_millis(200));
            let (seconds, batch) = cases[index].run(&path, bytes)?;
            rates[index].push(bytes as f64 / seconds / 1e9);
            batches[index].push(batch);
        }
    }
    std::fs::remove_file(&path).expect("the file was made here");
    println!("{:58} {:>17}  completions a wait", "", "GB/s");
    for ((case, rates), batches) in cases.iter().zip(&mut rates).zip(&mut batches) {
        let (median, batch) = (median(rates), median(batches));
        let (least, most) = (rates[0], rates[rates.len() - 1]);
        println!(
            "{:58} {median:.2} [{least:.2}, {most:.2}]  {batch:>8.1}",
            case.name()
        );
    }
    Ok(())
}

/// Sorts the values and returns the middle one.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn engine(depth: usize) -> Result<WholeTransfers> {
    let choice = EngineChoice::Auto;
    Ok(WholeTransfers::new(
        open(&EngineConfig {
            choice,
            queue_depth: depth,
        })?
        .engine,
    ))
}

/// Reads the file once; returns seconds, and the completions per wait.
fn read(
    path: &Path,
    bytes: usize,
    request: usize,
    depth: usize,
    footprint: usize,
    is_populated: bool,
) -> Result<(f64, f64)> {
    let file = Arc::new(File::open(path, Direct::On)?);
    let (memory, mut rest) = Memory::allocate(footprint)?.share();
    if is_populated {
        memory.populate(0..footprint);
    }
    let mut buffers: VecDeque<IoBuf> = VecDeque::new();
    while rest.capacity() > 0 {
        let next = rest.split_off(request.min(rest.capacity()));
        buffers.push_back(std::mem::replace(&mut rest, next));
    }
    let mut engine = engine(depth)?;
    let begun = Instant::now();
    let (mut completed, mut waits, mut at) = (Vec::new(), 0, 0);
    while at < bytes || engine.in_flight() > 0 {
        while at < bytes && engine.in_flight() < depth {
            let Some(buf) = buffers.pop_front() else {
                break;
            };
            let kind = OpKind::Read {
                offset: at as u64,
                buf,
            };
            at += request;
            engine
                .submit(Op {
                    token: 0,
                    file: Arc::clone(&file),
                    kind,
                })
                .expect("there is room");
        }
        engine.poll(1, None, &mut completed)?;
        waits += 1;
        for completion in completed.drain(..) {
            completion.result.expect("the file was written just now");
            buffers.extend(completion.buf);
        }
    }
    Ok((
        begun.elapsed().as_secs_f64(),
        (bytes / request) as f64 / f64::from(waits),
    ))
}

/// Writes the file anew; returns seconds with the sync, and the completions per wait.
fn write(
    path: &Path,
    bytes: usize,
    request: usize,
    depth: usize,
    is_allocated: bool,
) -> Result<(f64, f64)> {
    drop(std::fs::remove_file(path));
    let pool = Pool::new(request, request * depth);
    for mut buf in std::iter::from_fn(|| pool.try_take().transpose()).collect::<Result<Vec<_>>>()? {
        buf.as_mut_slice().fill(7);
    }
    let mut engine = engine(depth)?;
    let begun = Instant::now();
    let file = Arc::new(File::create(path, Direct::On)?);
    if is_allocated {
        file.allocate(bytes as u64)?;
    }
    let (mut completed, mut waits, mut at) = (Vec::new(), 0, 0);
    while at < bytes || engine.in_flight() > 0 {
        while at < bytes && engine.in_flight() < depth {
            let kind = OpKind::Write {
                offset: at as u64,
                buf: pool.take()?,
            };
            at += request;
            engine
                .submit(Op {
                    token: 0,
                    file: Arc::clone(&file),
                    kind,
                })
                .expect("there is room");
        }
        engine.poll(1, None, &mut completed)?;
        waits += 1;
        for completion in completed.drain(..) {
            completion.result.expect("the device has room");
        }
    }
    file.sync_data()?;
    Ok((
        begun.elapsed().as_secs_f64(),
        (bytes / request) as f64 / f64::from(waits),
    ))
}
