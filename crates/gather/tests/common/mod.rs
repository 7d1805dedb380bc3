//! Tables of known content, and their readers.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use penstock_gather::{BLOCK_BYTES, Cache, Checks, Merging, Policy, Reader, Segment, Table};
use penstock_io::engine::{self, EngineChoice, EngineConfig};
use penstock_io::executor::{Executor, ExecutorConfig, OpenEngine, Target};
use penstock_io::faulty::{Faults, Faulty};
use penstock_io::file::{Direct, File};

/// Nothing here takes nearly that long, so a test that does hangs.
pub(crate) const HANG: Duration = Duration::from_secs(120);
pub(crate) const EIO: i32 = 5;

pub(crate) const SMALL: ExecutorConfig = ExecutorConfig {
    engine: EngineChoice::Auto,
    workers: 2,
    queue_depth: 4,
    in_flight_bytes: 4 * (32 << 10),
    block_bytes: 32 << 10,
    staging_bytes: 1 << 20,
    queued_max: 8,
};

pub(crate) fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub(crate) fn executor(engine: EngineChoice, faults: Faults) -> Executor {
    let faults = Arc::new(faults);
    let config = EngineConfig {
        choice: engine,
        queue_depth: SMALL.queue_depth,
    };
    let open: OpenEngine = Arc::new(move || {
        let inner = engine::open(&config)?.engine;
        Ok(Box::new(Faulty::new(inner, Arc::clone(&faults))))
    });
    Executor::open_with(&SMALL, &open).unwrap()
}

/// Byte `at` of a row.
pub(crate) fn byte(row: u64, at: u64) -> u8 {
    (row.wrapping_mul(2_654_435_761).wrapping_add(at * 131) >> 5) as u8
}

/// The shape of a table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) rows: u64,
    pub(crate) row_bytes: u64,
    pub(crate) value_bytes: u64,
    pub(crate) offset: u64,
    pub(crate) parts: u64,
    pub(crate) is_checked: bool,
    pub(crate) direct: Direct,
}

impl Shape {
    pub(crate) fn plain(rows: u64, row_bytes: u64) -> Shape {
        Shape {
            rows,
            row_bytes,
            value_bytes: row_bytes,
            offset: 0,
            parts: 1,
            is_checked: false,
            direct: Direct::Auto,
        }
    }
}

pub(crate) fn table(directory: &Path, shape: Shape) -> Table {
    let mut segments = Vec::new();
    let each = shape.rows.div_ceil(shape.parts);
    for part in 0..shape.parts {
        let first = (part * each).min(shape.rows);
        let last = shape.rows.min(first + each);
        let mut content = vec![0xee; shape.offset as usize];
        for row in first..last {
            content.extend((0..shape.row_bytes).map(|at| byte(row, at)));
        }
        let rows = &content[shape.offset as usize..];
        let sums = rows.chunks(BLOCK_BYTES as usize).map(Checks::of);
        let checks = Checks::new(sums);
        let path = directory.join(format!("part-{part}"));
        fs::write(&path, &content).unwrap();
        segments.push(Segment {
            target: Target {
                file: Arc::new(File::open(&path, shape.direct).unwrap()),
                edges: None,
            },
            offset: shape.offset,
            rows: last - first,
            checks: shape.is_checked.then(|| Arc::new(checks)),
            opener: None,
        });
    }
    Table::new(segments, shape.row_bytes, shape.value_bytes)
}

pub(crate) fn reader(
    table: Table,
    executor: &Executor,
    cached: Option<u32>,
    gap_bytes: u64,
) -> Reader {
    let cache = cached.map(|slots| {
        let row_bytes = table.value_bytes() as usize;
        Arc::new(Cache::new(slots, row_bytes, Policy::Sieve).unwrap())
    });
    let merging = Merging {
        gap_bytes,
        run_bytes_max: 16 << 10,
    };
    Reader::new(table, Arc::new(executor.share(1).unwrap()), cache, merging)
}
