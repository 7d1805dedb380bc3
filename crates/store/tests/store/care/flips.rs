//! One flipped bit anywhere in any file is an error that names file, position and tensor; it is
//! never returned as data.
//!
//! Digests cover every byte, so this holds for each of them, and `load` and `verify` agree. `make
//! torture` flips ten thousand single bits; an ordinary run flips five hundred.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::saver::Tally;
use crate::common::{Rng, Sample, engines, load, number, problem_of};
use penstock_io::file::Direct;
use penstock_store::Progress;
use penstock_store::care::verify::verify;
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::report::Problem;

/// The classes of bytes in a checkpoint.
const CLASSES: [&str; 7] = [
    "manifest",
    "part",
    "length",
    "header",
    "padding",
    "data",
    "last byte",
];

/// A run of bytes of one class, in one file.
struct Region {
    class: &'static str,
    file: String,
    range: Range<u64>,
}

/// Alternates direct and buffered I/O, and both engines.
fn options_for(turn: u64) -> Options {
    let turn = turn as usize;
    Options {
        engine: engines()[turn % engines().len()],
        direct: [Direct::Auto, Direct::Off][turn / 2 % 2],
        ..Options::default()
    }
}

/// Finds the runs of bytes of each class.
fn regions(checkpoint: &Checkpoint) -> Vec<Region> {
    let mut regions = Vec::new();
    for (name, bytes) in checkpoint.files() {
        let mut add = |class, range| {
            regions.push(Region {
                class,
                file: name.to_owned(),
                range,
            });
        };
        add("last byte", bytes - 1..bytes);
        if !name.starts_with("shard-") {
            let is_part = name.starts_with("part-");
            add(if is_part { "part" } else { "manifest" }, 0..bytes);
            continue;
        }
        let shard = fs::read(checkpoint.path().join(name)).unwrap();
        let data_start = 8 + u64::from_le_bytes(*shard.first_chunk().unwrap());
        let padding = shard[..data_start as usize]
            .iter()
            .rev()
            .take_while(|&&byte| byte == b' ')
            .count() as u64;
        add("length", 0..8);
        add("header", 8..data_start - padding);
        add("padding", data_start - padding..data_start);
        add("data", data_start..bytes);
    }
    regions
}

/// The tensor that contains a byte, if any.
fn holder(checkpoint: &Checkpoint, file: &str, position: u64) -> Option<String> {
    let part = checkpoint.part();
    let number = part.files.iter().position(|entry| entry.name == file);
    let mut tensors = part.tensors.iter();
    let holder = tensors.find(|tensor| {
        Some(tensor.file) == number && (tensor.range.0..tensor.range.1).contains(&position)
    });
    holder.map(|tensor| tensor.name.clone())
}

/// Changes one byte, checks that `load` and `verify` name it, and restores it.
fn assert_seen(checkpoint: &Checkpoint, region: &Region, position: u64, flip: u8, turn: u64) {
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(checkpoint.path().join(&region.file))
        .unwrap();
    let mut good = [0];
    file.read_exact_at(&mut good, position).unwrap();
    file.write_all_at(&[good[0] ^ flip], position).unwrap();

    let place = format!(
        "{} byte {position} of {} flipped by {flip:#04x}",
        region.class, region.file
    );
    let options = options_for(turn);
    let is_shard = region.file.starts_with("shard-");
    let expected = is_shard.then(|| (position, holder(checkpoint, &region.file, position)));
    let loaded = load(checkpoint.path(), &options);
    let error = loaded.expect_err(&place);
    assert_names(&place, &problem_of(error), &region.file, expected.as_ref());
    let report = verify(checkpoint.path(), &options, &Progress::default()).unwrap();
    let named = report
        .problems
        .iter()
        .find(|problem| problem.offset.is_some() || !is_shard);
    let named = named.unwrap_or_else(|| panic!("{place}: {:?}", report.problems));
    assert_names(&place, named, &region.file, expected.as_ref());
    for problem in &report.problems {
        assert_eq!(problem.file, region.file, "{place}: only this file is bad");
    }
    file.write_all_at(&good, position).unwrap();
}

/// A digest covers a chunk, and still identifies the only byte of it that was changed.
fn assert_names(
    place: &str,
    problem: &Problem,
    file: &str,
    expected: Option<&(u64, Option<String>)>,
) {
    assert_eq!(problem.file, file, "{place}");
    if let Some((position, holder)) = expected {
        assert_eq!(problem.offset, Some(*position), "{place}");
        assert_eq!(&problem.tensor, holder, "{place}");
    }
}

/// A random byte of the class for this turn, in any file that has the class.
fn draw<'a>(rng: &mut Rng, regions: &'a [Region], turn: u64) -> (&'a Region, u64) {
    let class = CLASSES[turn as usize % CLASSES.len()];
    let of_class: Vec<_> = regions
        .iter()
        .filter(|region| region.class == class)
        .collect();
    let region = of_class[rng.below(of_class.len() as u64) as usize];
    let bytes = region.range.end - region.range.start;
    (region, region.range.start + rng.below(bytes))
}

fn save(sample: &Sample, path: &Path, shard_bytes: u64) -> Checkpoint {
    let options = Options {
        shard_bytes: Some(shard_bytes),
        ..Options::default()
    };
    sample.save(path, &options).unwrap();
    Checkpoint::open(path).unwrap()
}

#[test]
fn one_flipped_byte_anywhere_is_named() {
    let mut rng = Rng::new(0x00f1_1b17);
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let mut sample = Sample::of_sizes(&[5 << 20, 4096, 100, 2 << 20, 640, 3, 70_001]);
    // A header longer than a chunk, so that some of its chunks touch no tensor.
    sample.specs[0].name = "long".repeat(150_000);
    sample.specs[1].name = "also".repeat(150_000);
    let checkpoint = save(&sample, &path, 4 << 20);
    let regions = regions(&checkpoint);
    for turn in 0..100 {
        let (region, position) = draw(&mut rng, &regions, turn);
        let flip = 1 + rng.below(255) as u8;
        assert_seen(&checkpoint, region, position, flip, turn);
    }
    sample.assert_at(&path);
}

#[test]
fn one_flipped_bit_anywhere_is_named() {
    let flips = number("PENSTOCK_TORTURE_FLIPS", 500);
    let seed = number("PENSTOCK_TORTURE_SEED", 0x00b1_7f11);
    let mut rng = Rng::new(seed);
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let sample = Sample::of_sizes(&[1 << 20, 300_001, 4096, 640, 3, 0]);
    let checkpoint = save(&sample, &path, 256 << 10);
    let regions = regions(&checkpoint);
    let mut classes = Tally::default();
    for turn in 0..flips {
        let (region, position) = draw(&mut rng, &regions, turn);
        let flip = 1 << rng.below(8);
        assert_seen(&checkpoint, region, position, flip, turn);
        classes.count(region.class);
    }
    sample.assert_at(&path);
    eprintln!("{flips} flipped bits, seed {seed}, all named");
    eprintln!("flipped in {classes}");
}
