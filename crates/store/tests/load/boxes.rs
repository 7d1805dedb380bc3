//! Sharded tensors: whatever boxes of a tensor the ranks stored, any other box of it is loaded
//! exactly, and only the bytes needed to verify it are read.

#![allow(unsafe_code)]

use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::common::{self, forge, noise, options_matrix, publication, read_engines};
use penstock_io::buffer::{ArrayMut, Bounds, HostArrayMut, HostRegion};
use penstock_io::file::Direct;
use penstock_store::care::verify::verify;
use penstock_store::format::part::TensorBox;
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::load::fill::{Fill, Whole};
use penstock_store::options::Options;
use penstock_store::plan::write::TensorSpec;
use penstock_store::report::LoadReport;
use penstock_store::save::{Attempt, Linked, SaveState, commit, write_rank};
use penstock_store::{Error, Progress, Result};
use proptest::prelude::*;
use serde_json::json;
use serde_json::value::RawValue;

/// A global tensor with all of its bytes, in row-major order.
#[derive(Clone, Debug)]
struct Global {
    name: String,
    dtype: &'static str,
    item_bytes: usize,
    shape: Vec<u64>,
    bytes: Arc<Vec<u8>>,
}

impl Global {
    fn new(name: &str, (dtype, item_bytes): (&'static str, usize), shape: &[u64]) -> Global {
        let bytes = shape.iter().product::<u64>() as usize * item_bytes;
        Global {
            name: name.to_owned(),
            dtype,
            item_bytes,
            shape: shape.to_vec(),
            bytes: Arc::new(noise(bytes as u64 + 1, bytes)),
        }
    }

    /// The bytes of a box, in row-major order.
    fn content(&self, bounds: &Bounds) -> Vec<u8> {
        let mut content = Vec::new();
        for_each_index(&bounds.shape, |index| {
            let mut at = 0;
            for (dim, index) in index.iter().enumerate() {
                at = at * self.shape[dim] + bounds.start[dim] + index;
            }
            let at = at as usize * self.item_bytes;
            content.extend_from_slice(&self.bytes[at..at + self.item_bytes]);
        });
        content
    }

    fn spec(&self, name: &str, bounds: &Bounds) -> TensorSpec {
        TensorSpec {
            name: name.to_owned(),
            dtype: self.dtype.to_owned(),
            shape: bounds.shape.clone(),
            item_bytes: self.item_bytes,
            region: Some(TensorBox {
                tensor: self.name.clone(),
                shape: self.shape.clone(),
                start: bounds.start.clone(),
            }),
            group: None,
        }
    }
}

fn for_each_index(shape: &[u64], mut visit: impl FnMut(&[u64])) {
    let mut index = vec![0; shape.len()];
    for _ in 0..shape.iter().product::<u64>() {
        visit(&index);
        for dim in (0..shape.len()).rev() {
            index[dim] += 1;
            if index[dim] < shape[dim] {
                break;
            }
            index[dim] = 0;
        }
    }
}

fn bounds(start: &[u64], shape: &[u64]) -> Bounds {
    Bounds {
        start: start.to_vec(),
        shape: shape.to_vec(),
    }
}

/// Cuts a shape into boxes at positions along each dimension.
fn grid(shape: &[u64], cuts: &[Vec<u64>]) -> Vec<Bounds> {
    let mut boxes = vec![bounds(&[], &[])];
    for (size, cuts) in shape.iter().zip(cuts) {
        let mut edges: Vec<u64> = cuts.iter().map(|cut| cut % (size + 1)).collect();
        edges.extend([0, *size]);
        edges.sort_unstable();
        let along = |part: Bounds| {
            let pairs: Vec<_> = edges.windows(2).map(|pair| (pair[0], pair[1])).collect();
            pairs.into_iter().map(move |(start, end)| {
                let mut part = part.clone();
                part.start.push(start);
                part.shape.push(end - start);
                part
            })
        };
        boxes = boxes.into_iter().flat_map(along).collect();
    }
    boxes
}

/// Saves each rank's boxes of some tensors, and a tensor of its own.
fn save(path: &Path, ranks: &[Vec<(&Global, Bounds)>]) {
    let (options, progress) = (Options::default(), Progress::default());
    let files = &options.file_system;
    let mut first = Attempt::begin(path, false, files, &progress).unwrap();
    let id = first.id().to_owned();
    let mut parts = Vec::new();
    for (rank, held) in (0..).zip(ranks) {
        let mut tensors = vec![TensorSpec {
            name: "own".to_owned(),
            dtype: "uint8".to_owned(),
            shape: vec![1000],
            item_bytes: 1,
            region: None,
            group: None,
        }];
        let mut sources = vec![HostRegion::from(noise(rank + 1, 1000)).into()];
        for (number, (global, part)) in held.iter().enumerate() {
            tensors.push(global.spec(&format!("{}.{number}", global.name), part));
            sources.push(HostRegion::from(global.content(part)).into());
        }
        let state = SaveState {
            tensors,
            sources,
            linked: Linked::default(),
            aliases: Vec::new(),
            tree: RawValue::from_string(format!("{{\"rank\":{rank}}}")).unwrap(),
        };
        let rank = rank as u32;
        let written = if rank == 0 {
            write_rank(&mut first, rank, state, &options, &progress)
        } else {
            let mut joined = Attempt::join(path, &id, files, &progress).unwrap();
            write_rank(&mut joined, rank, state, &options, &progress)
        };
        parts.push(written.unwrap().part);
    }
    commit(first, &publication(path), parts).unwrap();
}

/// Memory for a box, with bytes around every item that must stay unchanged.
struct Memory {
    bytes: Vec<u8>,
    first: usize,
    strides: Vec<isize>,
}

const UNTOUCHED: u8 = 0xee;

impl Memory {
    /// Dimensions in the order of `order`, outermost first, `steps` apart, some backwards.
    fn new(item_bytes: usize, shape: &[u64], order: &[usize], steps: &[(usize, bool)]) -> Memory {
        let mut strides = vec![0; shape.len()];
        let (mut stride, mut first) = (item_bytes, 0);
        for &dim in order.iter().rev() {
            let (step, backwards) = steps[dim];
            stride *= step;
            strides[dim] = stride as isize;
            if backwards {
                strides[dim] = -strides[dim];
                first += stride * (shape[dim] as usize).saturating_sub(1);
            }
            stride *= (shape[dim] as usize).max(1);
        }
        Memory {
            bytes: vec![UNTOUCHED; stride],
            first,
            strides,
        }
    }

    fn plain(item_bytes: usize, shape: &[u64]) -> Memory {
        let order: Vec<usize> = (0..shape.len()).collect();
        Memory::new(item_bytes, shape, &order, &vec![(1, false); shape.len()])
    }

    fn array(&mut self, item_bytes: usize, shape: &[u64]) -> ArrayMut {
        let shape: Vec<usize> = shape.iter().map(|&size| size as usize).collect();
        let address = self.bytes.as_mut_ptr().expose_provenance() + self.first;
        let strides = Some(self.strides.as_slice());
        // SAFETY: the strides keep every item inside `bytes`, which nothing else accesses before
        // the fill that this is for has ended.
        let array =
            unsafe { HostArrayMut::new(address, item_bytes, &shape, strides, Box::new(())) };
        array.expect("the items lie apart").into()
    }

    /// The items in row-major order; all other bytes must be unchanged.
    fn content(&self, item_bytes: usize, shape: &[u64]) -> Vec<u8> {
        let mut content = Vec::new();
        let mut is_item = vec![false; self.bytes.len()];
        for_each_index(shape, |index| {
            let steps = index.iter().zip(&self.strides);
            let at = steps.fold(self.first as isize, |at, (&i, &s)| at + i as isize * s) as usize;
            content.extend_from_slice(&self.bytes[at..at + item_bytes]);
            is_item[at..at + item_bytes].fill(true);
        });
        let others = self
            .bytes
            .iter()
            .zip(&is_item)
            .filter(|(_, is_item)| !**is_item);
        assert!(others.map(|(byte, _)| byte).all(|&byte| byte == UNTOUCHED));
        content
    }
}

fn fill_one(
    checkpoint: &Checkpoint,
    global: &Global,
    wanted: &Bounds,
    memory: &mut Memory,
    options: &Options,
) -> Result<LoadReport> {
    let fill = Fill {
        of: Whole::Tensor(global.name.clone()),
        start: wanted.start.clone(),
        into: memory.array(global.item_bytes, &wanted.shape),
    };
    checkpoint.fill(vec![fill], options, &Progress::default())
}

/// Fills plain memory and compares.
#[track_caller]
fn assert_box(checkpoint: &Checkpoint, global: &Global, wanted: &Bounds) -> LoadReport {
    let mut memory = Memory::plain(global.item_bytes, &wanted.shape);
    let report = fill_one(checkpoint, global, wanted, &mut memory, &Options::default()).unwrap();
    assert_eq!(memory.bytes, global.content(wanted));
    report
}

#[test]
fn rows_come_back_as_columns_and_the_other_way_round() {
    let root = tempfile::tempdir().unwrap();
    let global = Global::new("w", ("float32", 4), &[1024, 3000]);
    let rows = grid(&global.shape, &[vec![256, 512, 768], vec![]]);
    let columns = grid(&global.shape, &[vec![], vec![700, 1500]]);
    for (stored, wanted) in [(&rows, &columns), (&columns, &rows)] {
        let path = root.path().join(stored.len().to_string());
        let ranks: Vec<_> = stored
            .iter()
            .map(|part| vec![(&global, part.clone())])
            .collect();
        save(&path, &ranks);
        for (name, options) in options_matrix() {
            let checkpoint = Checkpoint::open(&path).unwrap();
            for wanted in wanted {
                let mut memory = Memory::plain(4, &wanted.shape);
                fill_one(&checkpoint, &global, wanted, &mut memory, &options).unwrap();
                assert!(memory.bytes == global.content(wanted), "{name} {wanted:?}");
            }
        }
        assert!(
            verify(&path, &Options::default(), &Progress::default())
                .unwrap()
                .problems
                .is_empty()
        );
    }
}

#[test]
fn a_quarter_of_the_rows_costs_a_quarter_of_the_reading() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let global = Global::new("w", ("bfloat16", 2), &[8192, 1024]);
    let halves = grid(&global.shape, &[vec![4096], vec![]]);
    save(
        &path,
        &halves
            .iter()
            .map(|part| vec![(&global, part.clone())])
            .collect::<Vec<_>>(),
    );
    let checkpoint = Checkpoint::open(&path).unwrap();
    for quarter in grid(&global.shape, &[vec![2048, 4096, 6144], vec![]]) {
        let report = assert_box(&checkpoint, &global, &quarter);
        assert_eq!(report.bytes, 4 << 20);
        assert!(
            report.bytes_read <= 6 << 20,
            "{} bytes read",
            report.bytes_read
        );
        assert_eq!((report.tensors, report.files), (1, 1));
    }
}

#[test]
fn far_apart_rows_are_read_alone() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let global = Global::new("w", ("uint8", 1), &[3, 8 << 20]);
    save(&path, &[vec![(&global, Bounds::whole(&global.shape))]]);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let report = assert_box(&checkpoint, &global, &bounds(&[0, 3 << 20], &[3, 1000]));
    assert!(
        report.bytes_read <= 6 << 20,
        "{} bytes read",
        report.bytes_read
    );
    let column = bounds(&[0, 3 << 20], &[3, 2 << 20]);
    let report = assert_box(&checkpoint, &global, &column);
    assert!(
        report.bytes_read <= 9 << 20,
        "{} bytes read",
        report.bytes_read
    );
}

/// The random choices of one case.
#[derive(Clone, Debug)]
struct Case {
    type_index: usize,
    shape: Vec<u64>,
    cuts: Vec<Vec<u64>>,
    ranks: usize,
    wanted: Vec<Want>,
}

/// A requested box, and the layout of its memory.
#[derive(Clone, Debug)]
struct Want {
    place: Vec<(prop::sample::Index, prop::sample::Index)>,
    order: Vec<usize>,
    steps: Vec<(usize, bool)>,
}

const TYPES: [(&str, usize); 6] = [
    ("uint8", 1),
    ("bfloat16", 2),
    ("float32", 4),
    ("complex128", 16),
    ("numpy:<U3", 12),
    ("float64", 8),
];

fn want(dims: usize) -> impl Strategy<Value = Want> {
    let index = any::<prop::sample::Index>;
    let order = Just((0..dims).collect::<Vec<_>>()).prop_shuffle();
    // Most memory is that of plain tensors or of slices of them.
    let order = prop_oneof![2 => Just((0..dims).collect::<Vec<_>>()), 1 => order];
    let step = prop_oneof![4 => Just((1, false)), 1 => (1..4_usize, any::<bool>())];
    let place = prop::collection::vec((index(), index()), dims);
    (place, order, prop::collection::vec(step, dims)).prop_map(|(place, order, steps)| Want {
        place,
        order,
        steps,
    })
}

fn case() -> impl Strategy<Value = Case> {
    let shape = prop_oneof![
        3 => prop::collection::vec(0..14_u64, 0..5),
        // Large enough for several chunks.
        1 => (200..900_u64, 2000..4000_u64).prop_map(|(rows, columns)| vec![rows, columns]),
        1 => (2..4_u64, 300_000..700_000_u64, 1..4_u64).prop_map(|(a, b, c)| vec![a, b, c]),
    ];
    shape.prop_flat_map(|shape| {
        let dims = shape.len();
        let cuts = prop::collection::vec(prop::collection::vec(any::<u64>(), 0..3), dims);
        let wanted = prop::collection::vec(want(dims), 1..5);
        (0..TYPES.len(), Just(shape), cuts, 1..7_usize, wanted).prop_map(
            |(type_index, shape, cuts, ranks, wanted)| Case {
                type_index,
                shape,
                cuts,
                ranks,
                wanted,
            },
        )
    })
}

impl Want {
    fn bounds(&self, shape: &[u64]) -> Bounds {
        let mut wanted = bounds(&[], &[]);
        for (&size, (one, other)) in shape.iter().zip(&self.place) {
            let one = one.index(size as usize + 1) as u64;
            let other = other.index(size as usize + 1) as u64;
            wanted.start.push(one.min(other));
            wanted.shape.push(one.abs_diff(other));
        }
        wanted
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(60)
    })]

    #[test]
    fn any_box_out_of_any_boxes(case in case(), choice in any::<prop::sample::Index>()) {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let global = Global::new("w", TYPES[case.type_index], &case.shape);
        let mut ranks = vec![Vec::new(); case.ranks];
        for (number, part) in grid(&case.shape, &case.cuts).into_iter().enumerate() {
            ranks[number % case.ranks].push((&global, part));
        }
        save(&path, &ranks);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let matrix = options_matrix();
        let (name, options) = &matrix[choice.index(matrix.len())];
        let item_bytes = global.item_bytes;
        let mut memories = Vec::new();
        for want in &case.wanted {
            let wanted = want.bounds(&case.shape);
            let memory = Memory::new(item_bytes, &wanted.shape, &want.order, &want.steps);
            memories.push((wanted, memory));
        }
        let fill = |(wanted, memory): &mut (Bounds, Memory)| Fill {
            of: Whole::Tensor("w".to_owned()),
            start: wanted.start.clone(),
            into: memory.array(item_bytes, &wanted.shape),
        };
        let fills = memories.iter_mut().map(fill).collect();
        let report = checkpoint.fill(fills, options, &Progress::default()).unwrap();
        let mut bytes = 0;
        for (wanted, memory) in &memories {
            let content = global.content(wanted);
            bytes += content.len() as u64;
            prop_assert!(memory.content(item_bytes, &wanted.shape) == content, "{} {:?}", name, wanted);
        }
        prop_assert_eq!(report.bytes, bytes);
        let all: u64 = checkpoint.part().files.iter().map(|f| f.bytes.next_multiple_of(4096)).sum();
        // Runs of a file that are read in place include the rest of their pages: a page each.
        prop_assert!(report.bytes_read <= all + all / 8, "{} of {}", report.bytes_read, all);
        let verified = verify(&path, options, &Progress::default()).unwrap();
        prop_assert!(verified.problems.is_empty());
    }
}

#[test]
fn entries_are_boxes_by_index_and_ranks_keep_their_trees() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let global = Global::new("w", ("float32", 4), &[10, 20]);
    let halves = grid(&global.shape, &[vec![4], vec![]]);
    save(
        &path,
        &halves
            .iter()
            .map(|part| vec![(&global, part.clone())])
            .collect::<Vec<_>>(),
    );
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.offsets(), [(0, 0), (2, 0)]);
    let trees = [0, 1].map(|rank| checkpoint.tree(rank).get());
    assert_eq!(trees, ["{\"rank\":0}", "{\"rank\":1}"]);

    let own = noise(2, 1000);
    let wanted = bounds(&[2, 5], &[3, 7]);
    let (mut of_own, mut of_box) = (Memory::plain(1, &[100]), Memory::plain(4, &[3, 7]));
    let fills = vec![
        Fill {
            of: Whole::Entry(2),
            start: vec![300],
            into: of_own.array(1, &[100]),
        },
        Fill {
            of: Whole::Entry(3),
            start: vec![2, 5],
            into: of_box.array(4, &[3, 7]),
        },
    ];
    checkpoint
        .fill(fills, &Options::default(), &Progress::default())
        .unwrap();
    assert_eq!(of_own.bytes, own[300..400]);
    assert_eq!(
        of_box.bytes,
        global.content(&bounds(&[6, 5], &wanted.shape))
    );
}

#[test]
fn a_box_without_a_place_is_refused_before_anything_is_read() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let global = Global::new("w", ("float32", 4), &[10, 20]);
    save(&path, &[vec![(&global, Bounds::whole(&global.shape))]]);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let name = || Whole::Tensor("w".to_owned());
    let cases: Vec<(Whole, &[u64], usize, &[u64])> = vec![
        (Whole::Tensor("v".to_owned()), &[0, 0], 4, &[1, 1]),
        (Whole::Entry(2), &[0, 0], 4, &[1, 1]),
        (name(), &[0], 4, &[1]),
        (name(), &[0, 0], 4, &[1, 21]),
        (name(), &[u64::MAX, 0], 4, &[1, 1]),
        (name(), &[0, 0], 8, &[1, 1]),
        (name(), &[0, 0], 2, &[10, 20]),
        (name(), &[0, 0], 2, &[0, 20]),
        (Whole::Entry(1), &[0, 0], 1, &[10, 20]),
        (name(), &[0, 0, 0], 4, &[1, 1]),
    ];
    for (of, start, item_bytes, shape) in cases {
        let what = format!("{of} {start:?} {shape:?}");
        let mut memory = Memory::plain(item_bytes, shape);
        let (start, into) = (start.to_vec(), memory.array(item_bytes, shape));
        let fills = vec![Fill { of, start, into }];
        let refused = checkpoint.fill(fills, &Options::default(), &Progress::default());
        assert!(
            matches!(refused, Err(Error::Mismatch { .. })),
            "{what}: {refused:?}"
        );
        drop(refused);
        assert!(memory.bytes.iter().all(|&byte| byte == UNTOUCHED), "{what}");
    }
}

#[test]
fn a_hole_is_named() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let global = Global::new("w", ("float32", 4), &[10, 20]);
    let mut parts = grid(&global.shape, &[vec![4], vec![5, 10]]);
    parts.remove(4);
    save(
        &path,
        &parts
            .iter()
            .map(|part| vec![(&global, part.clone())])
            .collect::<Vec<_>>(),
    );
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_box(&checkpoint, &global, &bounds(&[0, 0], &[4, 20]));
    let mut memory = Memory::plain(4, &global.shape);
    let (whole, options) = (Bounds::whole(&global.shape), Options::default());
    let error = fill_one(&checkpoint, &global, &whole, &mut memory, &options).unwrap_err();
    let Error::Malformed { tensor, detail, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(tensor.as_deref(), Some("w"));
    assert!(detail.contains("[4:10, 5:10]"), "{detail}");
}

#[test]
fn damage_in_a_box_is_reported_with_its_rank() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let global = Global::new("w", ("uint8", 1), &[4, 1 << 20]);
    let rows = grid(&global.shape, &[vec![1, 2, 3], vec![]]);
    save(
        &path,
        &rows
            .iter()
            .map(|part| vec![(&global, part.clone())])
            .collect::<Vec<_>>(),
    );
    let names = common::names(&path);
    let shard = names
        .iter()
        .find(|name| name.starts_with("shard-00002-"))
        .unwrap();
    let mut bytes = fs::read(path.join(shard)).unwrap();
    bytes[500_000] ^= 1;
    fs::write(path.join(shard), bytes).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_box(&checkpoint, &global, &bounds(&[0, 0], &[2, 1 << 20]));
    for direct in [Direct::Auto, Direct::Off] {
        for engine in read_engines() {
            let options = Options {
                direct,
                engine,
                ..Options::default()
            };
            let columns = bounds(&[1, 300_000], &[3, 300_000]);
            let mut memory = Memory::plain(1, &columns.shape);
            let error = fill_one(&checkpoint, &global, &columns, &mut memory, &options);
            let problem = common::problem_of(error.unwrap_err());
            assert_eq!((&problem.file, problem.offset), (shard, Some(500_000)));
            assert_eq!(problem.tensor.as_deref(), Some("w.0"));
        }
    }
}

/// Two ranks with a box each; `edit` changes the entry of the second.
fn edited(edit: impl FnOnce(&mut serde_json::Value)) -> (tempfile::TempDir, String) {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let global = Global::new("w", ("float32", 4), &[10, 20]);
    let halves = grid(&global.shape, &[vec![5], vec![]]);
    save(
        &path,
        &halves
            .iter()
            .map(|part| vec![(&global, part.clone())])
            .collect::<Vec<_>>(),
    );
    let file = forge::edit_rank(&path, 1, |part| edit(&mut part["tensors"][1]));
    (root, file)
}

#[test]
fn boxes_that_do_not_fit_each_other_are_damage_with_names() {
    type Edit = fn(&mut serde_json::Value);
    let cases: [(Edit, &str); 4] = [
        (|entry| entry["box"]["start"] = json!([4, 0]), "overlaps"),
        (
            |entry| entry["box"]["shape"] = json!([10, 21]),
            "others are of one of",
        ),
        (
            |entry| entry["box"]["shape"] = json!([11, 20]),
            "others are of one of",
        ),
        (
            |entry| entry["dtype"] = json!("int32"),
            "others are of one of",
        ),
    ];
    for (edit, expected) in cases {
        let (root, _) = edited(edit);
        let path = root.path().join("ckpt");
        let error = Checkpoint::open(&path).unwrap_err();
        let problem = common::problem_of(error);
        assert!(problem.detail.contains(expected), "{}", problem.detail);
        assert!(
            problem.detail.contains("shard-00000-00."),
            "{}",
            problem.detail
        );
        assert!(
            problem.file.starts_with("shard-00001-00."),
            "{}",
            problem.file
        );
        assert_eq!(problem.tensor.as_deref(), Some("w"));
        let verified = verify(&path, &Options::default(), &Progress::default()).unwrap();
        assert!(
            verified
                .problems
                .iter()
                .any(|found| found.detail.contains(expected))
        );
    }
}

#[test]
fn boxes_with_numbers_that_lie_are_refused() {
    let most = u64::MAX;
    let boxes = [
        json!(null),
        json!([]),
        json!({}),
        json!({"tensor": "w", "shape": [10, 20]}),
        json!({"tensor": "", "shape": [10, 20], "start": [5, 0]}),
        json!({"tensor": "w", "shape": [10, 20], "start": [6, 0]}),
        json!({"tensor": "w", "shape": [10, 20], "start": [5]}),
        json!({"tensor": "w", "shape": [10], "start": [5]}),
        json!({"tensor": "w", "shape": [10, 20], "start": [-1, 0]}),
        json!({"tensor": "w", "shape": [10, 20], "start": [most, 0]}),
        json!({"tensor": "w", "shape": [most, 20], "start": [most - 5, 0]}),
        json!({"tensor": "w", "shape": [most, most], "start": [5, 0]}),
        json!({"tensor": "w", "shape": [1u64 << 62, 20], "start": [5, 0]}),
    ];
    for lie in boxes {
        let (root, file) = edited(|entry| entry["box"] = lie.clone());
        let error = Checkpoint::open(&root.path().join("ckpt")).expect_err(&lie.to_string());
        assert_eq!(common::problem_of(error).file, file, "{lie}");
    }
}

#[test]
fn boxes_that_share_items_are_not_saved() {
    let root = tempfile::tempdir().unwrap();
    let global = Global::new("w", ("float32", 4), &[10, 20]);
    let (one, other) = (bounds(&[0, 0], &[6, 20]), bounds(&[5, 19], &[1, 1]));
    let state = SaveState {
        tensors: vec![global.spec("one", &one), global.spec("other", &other)],
        sources: [&one, &other]
            .map(|part| HostRegion::from(global.content(part)).into())
            .into(),
        linked: Linked::default(),
        aliases: Vec::new(),
        tree: RawValue::from_string("null".to_owned()).unwrap(),
    };
    let path = root.path().join("ckpt");
    let (options, progress) = (Options::default(), Progress::default());
    let refused = penstock_store::save::save(state, &publication(&path), &options, &progress);
    let Err(Error::Unsupported { detail, .. }) = &refused else {
        panic!("{refused:?}")
    };
    assert!(
        detail.contains("\"w\"") && detail.contains("overlaps"),
        "{detail}"
    );
    assert!(!path.exists());
}
