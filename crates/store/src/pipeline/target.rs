//! The memory that a load fills: divided among the pieces of a plan from front to back, so that
//! workers can fill it concurrently.

use std::ops::Range;
use std::sync::Arc;

use penstock_io::buffer::{
    DeviceFills, DeviceScatter, DeviceStreams, HostRegionMut, IoBuf, RegionMut, Scatter,
    stream_copy,
};

/// The memory that a request fills.
pub(crate) enum Target {
    /// New memory in a segment of the plan.
    Fresh,
    /// The caller's memory, contiguous.
    Plain(HostRegionMut),
    /// The caller's memory, scattered or reachable by a device only.
    Scattered(Vec<Sink>),
}

impl Target {
    /// The caller's memory for the bytes of a file from `start` on.
    pub(crate) fn of(memory: RegionMut, start: u64) -> Target {
        match memory {
            RegionMut::Host(memory) => Target::Plain(memory),
            RegionMut::Device(array) if array.is_empty() => Target::Scattered(Vec::new()),
            RegionMut::Device(array) => {
                let places = Places::Device(array.into_content());
                Target::Scattered(vec![Sink { start, places }])
            }
        }
    }

    /// The device stream of the memory, if some of it is on a device.
    pub(crate) fn device_streams(&self) -> Option<&Arc<DeviceStreams>> {
        let Target::Scattered(sinks) = self else {
            return None;
        };
        sinks.iter().find_map(|sink| match &sink.places {
            Places::Host(_) => None,
            Places::Device(scatter) => Some(scatter.device_streams()),
        })
    }
}

/// The part of the caller's memory that one run of a file fills.
pub(crate) struct Sink {
    /// Offset of the run in the file.
    pub(crate) start: u64,
    pub(crate) places: Places,
}

/// The destinations of a sink's items.
pub(crate) enum Places {
    Host(Scatter),
    Device(DeviceScatter),
}

impl Places {
    fn range(&self) -> Range<u64> {
        match self {
            Places::Host(scatter) => scatter.range(),
            Places::Device(scatter) => scatter.range(),
        }
    }

    fn split_off(&mut self, at: u64) -> Places {
        match self {
            Places::Host(scatter) => Places::Host(scatter.split_off(at)),
            Places::Device(scatter) => Places::Device(scatter.split_off(at)),
        }
    }
}

impl Sink {
    /// The byte range of the file that it receives.
    pub(crate) fn range(&self) -> Range<u64> {
        let range = self.places.range();
        self.start + range.start..self.start + range.end
    }

    fn split_off(&mut self, at: u64) -> Sink {
        Sink {
            start: self.start,
            places: self.places.split_off(at - self.start),
        }
    }
}

/// Sinks that are assigned to pieces from front to back.
pub(super) struct Sinks {
    /// Ordered by start, the last one first.
    waiting: Vec<Sink>,
    /// Sinks that earlier pieces have begun to fill.
    begun: Vec<Sink>,
}

impl Sinks {
    fn new(mut sinks: Vec<Sink>) -> Sinks {
        sinks.sort_unstable_by_key(|sink| std::cmp::Reverse(sink.range().start));
        Sinks {
            waiting: sinks,
            begun: Vec::new(),
        }
    }

    /// The sinks for the bytes `range` of the file; windows must be requested in order.
    fn window(&mut self, range: &Range<u64>) -> Vec<Sink> {
        let is_due = |sink: &mut Sink| sink.range().start < range.end;
        while let Some(sink) = self.waiting.pop_if(is_due) {
            self.begun.push(sink);
        }
        let mut window = std::mem::take(&mut self.begun);
        for sink in &mut window {
            if sink.range().end > range.end {
                self.begun.push(sink.split_off(range.end));
            }
        }
        window
    }
}

/// The memory of a request that is not assigned yet.
pub(super) enum Rest {
    Fresh,
    Plain(Region),
    Scattered(Sinks),
}

impl Rest {
    pub(super) fn of(target: Target) -> Rest {
        match target {
            Target::Fresh => Rest::Fresh,
            Target::Plain(memory) => Rest::Plain(Region::new(None, memory.into_buf())),
            Target::Scattered(sinks) => Rest::Scattered(Sinks::new(sinks)),
        }
    }

    pub(super) fn window(&mut self, range: &Range<u64>) -> Window {
        match self {
            Rest::Fresh => unreachable!("the plan saw this target"),
            Rest::Plain(region) => Window::Plain(region.window(range)),
            Rest::Scattered(sinks) => Window::Scattered(sinks.window(range)),
        }
    }
}

/// The memory of a piece.
pub(super) enum Window {
    Plain(IoBuf),
    Scattered(Vec<Sink>),
}

/// Bytes in a staging buffer: the buffer's number, and their offset in it.
pub(super) type Staged = (usize, usize);

impl Window {
    /// Copies the bytes of the piece to host memory and returns how many were copied. Device memory
    /// is added to `fills` instead, with `staged` as the source; the window is empty then.
    pub(super) fn fill(
        &mut self,
        range: &Range<u64>,
        bytes: &[u8],
        (buf, first): Staged,
        fills: &mut DeviceFills,
    ) -> u64 {
        let sinks = match self {
            Window::Plain(window) => {
                // Staged bytes are in a cache since they were digested; the caller's memory is not.
                stream_copy(bytes, window.as_mut_slice());
                return bytes.len() as u64;
            }
            Window::Scattered(sinks) => std::mem::take(sinks),
        };
        let mut copied = 0;
        for sink in sinks {
            let taken = sink.range();
            let (start, at) = (taken.start - range.start, taken.start - sink.start);
            let end = start + taken.end - taken.start;
            let within = start as usize..end as usize;
            match sink.places {
                Places::Host(mut scatter) => copied += scatter.fill(at, &bytes[within]),
                Places::Device(scatter) => {
                    fills.add(scatter, at, buf, first + within.start..first + within.end);
                }
            }
        }
        copied
    }
}

impl Window {
    /// Copies the bytes of the piece as [`fill`](Window::fill) does, except for those in `opened`,
    /// which are in their place.
    ///
    /// # Panics
    /// If the window is scattered.
    pub(super) fn fill_around(
        &mut self,
        range: &Range<u64>,
        opened: &Range<u64>,
        bytes: &[u8],
    ) -> u64 {
        let Window::Plain(window) = self else {
            unreachable!("only a plain window is opened into")
        };
        let window = window.as_mut_slice();
        let (before, after) = (
            (opened.start - range.start) as usize,
            (opened.end - range.start) as usize,
        );
        window[..before].copy_from_slice(&bytes[..before]);
        window[after..].copy_from_slice(&bytes[after..]);
        range.end - range.start
    }
}

/// Final memory that is assigned to pieces from front to back.
pub(super) struct Region {
    /// The file offset of the first byte of `rest`. The first piece starts where the target does,
    /// and sets it.
    start: Option<u64>,
    rest: Option<IoBuf>,
}

impl Region {
    pub(super) fn new(start: Option<u64>, memory: IoBuf) -> Region {
        Region {
            start,
            rest: Some(memory),
        }
    }

    /// The window for bytes `range` of the file; windows must be requested in order.
    pub(super) fn window(&mut self, range: &Range<u64>) -> IoBuf {
        let mut window = self
            .rest
            .take()
            .expect("a region is handed out from front to back");
        let skip = (range.start - self.start.unwrap_or(range.start)) as usize;
        if skip > 0 {
            window = window.split_off(skip);
        }
        let bytes = (range.end - range.start) as usize;
        if bytes < window.len() {
            self.rest = Some(window.split_off(bytes));
            self.start = Some(range.end);
        }
        window
    }
}
