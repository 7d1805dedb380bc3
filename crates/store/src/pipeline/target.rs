//! The memory that a load fills: handed out to the pieces of a plan from front to back, so that
//! workers fill it side by side.

use std::ops::Range;

use penstock_io::buffer::{HostRegionMut, IoBuf, Scatter};

/// The memory that a request fills.
pub(crate) enum Target {
    /// Fresh memory, of a segment of the plan.
    Fresh,
    /// The caller's, in one piece.
    Plain(HostRegionMut),
    /// The caller's, in places that lie apart.
    Scattered(Vec<Sink>),
}

/// Items of the caller's memory that a run of a file holds.
pub(crate) struct Sink {
    /// Where in the file the run starts.
    pub(crate) start: u64,
    pub(crate) scatter: Scatter,
}

impl Sink {
    /// The bytes of the file that it takes.
    pub(crate) fn range(&self) -> Range<u64> {
        let range = self.scatter.range();
        self.start + range.start..self.start + range.end
    }

    fn split_off(&mut self, at: u64) -> Sink {
        Sink {
            start: self.start,
            scatter: self.scatter.split_off(at - self.start),
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

impl Window {
    /// Takes in the bytes of the piece; returns how many found a place.
    pub(super) fn fill(&mut self, range: &Range<u64>, bytes: &[u8]) -> u64 {
        match self {
            Window::Plain(buf) => {
                buf.as_mut_slice().copy_from_slice(bytes);
                bytes.len() as u64
            }
            Window::Scattered(sinks) => sinks
                .iter_mut()
                .map(|sink| {
                    let taken = sink.range();
                    let first = (taken.start - range.start) as usize;
                    let bytes = &bytes[first..first + (taken.end - taken.start) as usize];
                    sink.scatter.fill(taken.start - sink.start, bytes)
                })
                .sum(),
        }
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
