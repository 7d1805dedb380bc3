//! States to save, and ways to save them.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file uses its own part of this module"
)]

use std::path::Path;

use penstock_io::buffer::HostRegion;
use penstock_io::engine::EngineChoice;
use penstock_io::file::Direct;
use penstock_store::checkpoint::Loaded;
use penstock_store::options::Options;
use penstock_store::part::Alias;
use penstock_store::plan::read::Placement;
use penstock_store::plan::write::TensorSpec;
use penstock_store::report::SaveReport;
use penstock_store::save::{State, Target, save};
use penstock_store::{Progress, Result};
use serde_json::value::RawValue;

/// A state whose bytes are known.
pub struct Sample {
    pub specs: Vec<TensorSpec>,
    pub bytes: Vec<Vec<u8>>,
    pub aliases: Vec<Alias>,
}

impl Sample {
    /// One `uint8` tensor of each size.
    pub fn of_sizes(sizes: &[usize]) -> Sample {
        let specs = sizes
            .iter()
            .enumerate()
            .map(|(index, &bytes)| TensorSpec {
                name: format!("t{index}"),
                dtype: "uint8".into(),
                shape: vec![bytes as u64],
                item_bytes: 1,
            })
            .collect();
        let bytes = (0u64..)
            .zip(sizes)
            .map(|(seed, &bytes)| noise(seed, bytes))
            .collect();
        Sample {
            specs,
            bytes,
            aliases: Vec::new(),
        }
    }

    /// Sizes around every boundary there is: pages, chunks, extents.
    pub fn mixed() -> Sample {
        let mib = 1 << 20;
        Sample::of_sizes(&[
            0,
            1,
            17,
            4095,
            4096,
            4097,
            65_535,
            mib - 4096,
            mib,
            mib + 1,
            5 * mib,
            9 * mib + 12_345,
            64,
            640,
            0,
        ])
    }

    pub fn state(&self) -> State {
        let sources = self.bytes.iter().cloned().map(HostRegion::from).collect();
        State {
            tensors: self.specs.clone(),
            sources,
            aliases: self.aliases.clone(),
            tree: RawValue::from_string("{\"a\":1}".into()).unwrap(),
        }
    }

    pub fn save(&self, path: &Path, options: &Options) -> Result<SaveReport> {
        save(&self.state(), &target(path), options, &Progress::default())
    }
}

pub fn target(path: &Path) -> Target {
    Target {
        path: path.to_owned(),
        step: None,
        metadata: RawValue::from_string("{}".into()).unwrap(),
        overwrite: false,
    }
}

/// Bytes that repeat nowhere near, by xorshift from a seed.
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut noise: Vec<u8> = (0..bytes.div_ceil(8)).flat_map(|_| next()).collect();
    noise.truncate(bytes);
    noise
}

/// The bytes of the tensor that was asked for at this place.
pub fn bytes_of(loaded: &Loaded, place: usize, bytes: usize) -> &[u8] {
    match loaded.placements[place] {
        Placement::Segment { segment, offset } => {
            &loaded.segments[segment].as_slice()[offset as usize..offset as usize + bytes]
        }
        Placement::Empty => &[],
        Placement::Target => panic!("no target was given"),
    }
}

/// Both engines, direct and buffered, one worker and several, small extents and large.
pub fn options_matrix() -> Vec<(String, Options)> {
    let mut matrix = Vec::new();
    let engines: &[EngineChoice] = if cfg!(feature = "uring") {
        &[EngineChoice::Uring, EngineChoice::Threads]
    } else {
        &[EngineChoice::Threads]
    };
    for &engine in engines {
        for direct in [Direct::Auto, Direct::Off] {
            for (io_threads, queue_depth, extent_bytes) in [(1, 16, 4 << 20), (3, 1, 1 << 20)] {
                matrix.push((
                    format!("{engine:?} {direct:?} {io_threads} threads"),
                    Options {
                        engine,
                        direct,
                        io_threads: Some(io_threads),
                        queue_depth: Some(queue_depth),
                        extent_bytes: Some(extent_bytes),
                        ..Options::default()
                    },
                ));
            }
        }
    }
    matrix
}
