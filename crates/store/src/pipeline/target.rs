//! The memory that a load fills: handed out to the pieces of a plan from front to back, so that
//! workers fill it side by side.

use std::ops::Range;
use std::sync::Arc;

use penstock_io::buffer::{
    DeviceFills, DeviceScatter, HostRegionMut, IoBuf, Lane, RegionMut, Scatter,
};

/// The memory that a request fills.
pub(crate) enum Target {
    /// Fresh memory, of a segment of the plan.
    Fresh,
    /// The caller's, in one piece.
    Plain(HostRegionMut),
    /// The caller's, in places that lie apart or that only a device reaches.
    Scattered(Vec<Sink>),
}

impl Target {
    /// The caller's memory for what a file has from byte `start` on.
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

    /// The device that has some of it, if one has.
    pub(crate) fn lane(&self) -> Option<&Arc<Lane>> {
        let Target::Scattered(sinks) = self else {
            return None;
        };
        sinks.iter().find_map(|sink| match &sink.places {
            Places::Host(_) => None,
            Places::Device(scatter) => Some(scatter.lane()),
        })
    }
}

/// Items of the caller's memory that a run of a file holds.
pub(crate) struct Sink {
    /// Where in the file the run starts.
    pub(crate) start: u64,
    pub(crate) places: Places,
}

/// Where the items of a sink go.
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
    /// The bytes of the file that it takes.
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

/// Sinks that are handed out to pieces from front to back.
pub(super) struct Sinks {
    /// By where they start, the last first.
    waiting: Vec<Sink>,
    /// Those that earlier pieces have begun to fill.
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

    /// What takes the bytes `range` of the file; windows are asked for in order.
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

/// The memory of a request, as far as it is not handed out.
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

/// Bytes of a staging buffer: its number, and where in it they begin.
pub(super) type Staged = (usize, usize);

impl Window {
    /// Takes in the bytes of the piece, `staged` for devices; returns how many the host found a place for.
    /// What is a device's is left to `fills`, and the window is empty then.
    pub(super) fn fill(
        &mut self,
        range: &Range<u64>,
        bytes: &[u8],
        (buf, first): Staged,
        fills: &mut DeviceFills,
    ) -> u64 {
        let sinks = match self {
            Window::Plain(window) => {
                window.as_mut_slice().copy_from_slice(bytes);
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

/// Final memory that is handed out to pieces from front to back.
pub(super) struct Region {
    /// The file offset that the first byte of `rest` stands for. A target's first piece starts
    /// where the target does, and sets it.
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

    /// The window for bytes `range` of the file; windows are asked for in order.
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
