//! Speed of a device's copy engine, in each direction and in both.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_io::Result;
use penstock_io::buffer::{Cut, DeviceBlock, DeviceStreams, IoBuf, Moving, Pool};
use serde::{Deserialize, Serialize};

/// Buffers of a window: one is queued while the other is copied, so that the link is never idle.
const HALVES: usize = 2;

/// Direction of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// From the host to the device.
    ToDevice,
    /// From the device to the host.
    ToHost,
    /// Both at once, with as many bytes each.
    Both,
}

/// Parameters of a link measurement.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkJob {
    /// Sizes of copies, in bytes.
    pub block_bytes: Vec<usize>,
    /// Directions.
    pub ways: Vec<Way>,
    /// Whether copies are queued by one call for many, or by a call for each.
    pub is_batched: Vec<bool>,
    /// Memory on either side of each direction that is copied repeatedly, in bytes.
    pub window_bytes: usize,
    /// Seconds for each figure.
    pub seconds: f64,
    /// Measurements of each figure.
    pub rounds: usize,
}

impl LinkJob {
    /// Checks that the job can run.
    ///
    /// # Errors
    /// A sentence about the first setting that is out of bounds.
    pub fn check(&self) -> std::result::Result<(), String> {
        let half = self.window_bytes / HALVES;
        let checks = [
            (
                half > 0 && self.window_bytes <= 1 << 40,
                "window_bytes must be between 2 and 2^40",
            ),
            (
                self.block_bytes.iter().all(|&bytes| bytes > 0),
                "block_bytes must be positive",
            ),
            (
                self.seconds > 0.0 && self.seconds <= 3600.0,
                "seconds must be between 0 and 3600",
            ),
            (self.rounds > 0, "rounds must be positive"),
        ];
        match checks.into_iter().find(|(holds, _)| !holds) {
            Some((_, problem)) => Err(problem.to_owned()),
            None => Ok(()),
        }
    }
}

/// Speed of copies of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct Rate {
    /// Direction.
    pub way: Way,
    /// Bytes of a copy.
    pub block_bytes: usize,
    /// Whether one call queued many copies.
    pub is_batched: bool,
    /// GB/s in each round, summed over both directions.
    pub gb_per_second: Vec<f64>,
}

/// Results of a link measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Link {
    /// One figure per kind of copy; each round measures every figure once.
    pub rates: Vec<Rate>,
    /// Why host memory could not be pinned, if so: the rates are then those of pageable memory.
    pub unpinned: Option<String>,
}

/// Measures a link, with host memory pinned as for saves and loads.
///
/// # Errors
/// [`Error::Cuda`](penstock_io::Error::Cuda), and
/// [`Error::OutOfMemory`](penstock_io::Error::OutOfMemory).
///
/// # Panics
/// If the job does not pass [`LinkJob::check`].
pub fn link(device_streams: &Arc<DeviceStreams>, job: &LinkJob) -> Result<Link> {
    if let Err(problem) = job.check() {
        panic!("{problem}");
    }
    let half = job.window_bytes / HALVES;
    // Each direction has a window of its own.
    let pool = Pool::pinned(half, 2 * HALVES * half, device_streams.device());
    let mut sides = [
        Side::open(device_streams, &pool, half, Way::ToDevice)?,
        Side::open(device_streams, &pool, half, Way::ToHost)?,
    ];
    let mut rates = Vec::new();
    for &way in &job.ways {
        for &block_bytes in &job.block_bytes {
            for &is_batched in &job.is_batched {
                rates.push(Rate {
                    way,
                    block_bytes,
                    is_batched,
                    gb_per_second: Vec::with_capacity(job.rounds),
                });
            }
        }
    }
    let unpinned = pool.unpinned();
    for _ in 0..job.rounds {
        for rate in &mut rates {
            let cut = Cut {
                piece_bytes: rate.block_bytes,
                is_batched: rate.is_batched,
            };
            let sides = match rate.way {
                Way::ToDevice => &mut sides[..1],
                Way::ToHost => &mut sides[1..],
                Way::Both => &mut sides[..],
            };
            let bytes_per_second = sample(sides, cut, Duration::from_secs_f64(job.seconds))?;
            rate.gb_per_second.push(bytes_per_second / 1e9);
        }
    }
    Ok(Link { rates, unpinned })
}

/// A direction, with its memory.
struct Side {
    way: Way,
    block: DeviceBlock,
    half_bytes: usize,
    /// Buffers that are not being copied, by number.
    idle: Vec<(usize, IoBuf)>,
    /// Buffers that are being copied, in order.
    moving: VecDeque<(usize, Moving)>,
}

impl Side {
    fn open(
        device_streams: &Arc<DeviceStreams>,
        pool: &Pool,
        half_bytes: usize,
        way: Way,
    ) -> Result<Side> {
        let block = DeviceBlock::allocate(device_streams, HALVES * half_bytes)?;
        let mut idle = Vec::with_capacity(HALVES);
        for number in 0..HALVES {
            let mut buf = pool.take()?;
            buf.as_mut_slice().fill(0x5a);
            idle.push((number, buf));
        }
        Ok(Side {
            way,
            block,
            half_bytes,
            idle,
            moving: VecDeque::with_capacity(HALVES),
        })
    }

    fn begin(&mut self, cut: Cut) -> Result<()> {
        for (number, buf) in self.idle.drain(..) {
            let offset = number * self.half_bytes;
            let moving = match self.way {
                Way::ToDevice => self.block.fill(offset, buf, cut)?,
                Way::ToHost | Way::Both => self.block.read(offset, buf, cut)?,
            };
            self.moving.push_back((number, moving));
        }
        Ok(())
    }

    /// Waits for the buffer that was queued first; returns its size in bytes.
    fn wait(&mut self) -> Result<usize> {
        let Some((number, moving)) = self.moving.pop_front() else {
            return Ok(0);
        };
        self.idle.push((number, moving.wait()?));
        Ok(self.half_bytes)
    }
}

/// Bytes a second.
fn sample(sides: &mut [Side], cut: Cut, time: Duration) -> Result<f64> {
    let begun = Instant::now();
    let mut moved = 0;
    loop {
        if begun.elapsed() < time || moved == 0 {
            for side in &mut *sides {
                side.begin(cut)?;
            }
        }
        for side in &mut *sides {
            moved += side.wait()?;
        }
        if sides.iter().all(|side| side.moving.is_empty()) {
            return Ok(moved as f64 / begun.elapsed().as_secs_f64());
        }
    }
}
