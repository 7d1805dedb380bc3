//! No input makes a reader panic, access files outside its directory, or allocate far more memory
//! than the input's size: checkpoints by an attacker, with correct digests and false numbers.

use std::fs;
use std::path::Path;

use crate::common::forge::{self, ATTEMPT};
use crate::common::{self, Rng, Sample, load, noise, read_engines};
use penstock_io::file::Direct;
use penstock_store::care::verify::verify;
use penstock_store::format::digest::Digest;
use penstock_store::format::header::{header_end, parse_header};
use penstock_store::format::shard::encode_header;
use penstock_store::options::Options;
use penstock_store::{Error, Progress};
use serde_json::{Value, json};

/// A valid checkpoint of three small tensors to be falsified.
fn honest(path: &Path) {
    Sample::of_sizes(&[8192, 100, 28])
        .save(path, &Options::default())
        .unwrap();
}

/// Expects damage in the file whose name starts with `prefix`, from `load` and from `verify`.
#[track_caller]
fn expect_refused(what: &str, path: &Path, prefix: &str) {
    match load(path, &Options::default()) {
        Err(Error::Corrupt { file, .. } | Error::Malformed { file, .. }) => {
            let file = file.unwrap_or_default();
            assert!(file.starts_with(prefix), "{what}: {file}");
        }
        // Input that a newer version may have written is reported as such by all readers.
        Err(Error::Unknown { .. } | Error::Version { .. }) => {
            let report = verify(path, &Options::default(), &Progress::default());
            assert!(report.is_err(), "{what}");
            return;
        }
        other => panic!("{what}: {:?}", other.map(drop)),
    }
    let report = verify(path, &Options::default(), &Progress::default());
    let report = report.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(!report.problems.is_empty(), "{what}");
    for problem in &report.problems {
        assert!(problem.file.starts_with(prefix), "{what}: {problem:?}");
    }
}

/// Sets the value at a JSON pointer, or with `/-` at its end appends to the array there.
fn put(document: &mut Value, pointer: &str, value: Value) {
    if let Some(array) = pointer.strip_suffix("/-") {
        let array = document.pointer_mut(array).unwrap();
        array.as_array_mut().unwrap().push(value);
    } else {
        *document.pointer_mut(pointer).unwrap() = value;
    }
}

fn lies_about_a_manifest() -> Vec<(&'static str, Value)> {
    let outside = [
        "../../etc/passwd",
        "/etc/passwd",
        "..",
        ".",
        "",
        "manifest.json",
        "part-00000.\u{0}.json",
        "part-00000.../../../etc.json",
    ];
    let mut lies: Vec<(&str, Value)> = outside
        .iter()
        .map(|&name| ("/parts/0/file", name.into()))
        .collect();
    lies.extend([
        ("/parts/0/bytes", json!(1_000_000_000u64)),
        ("/parts/0/bytes", json!(u64::MAX)),
        ("/parts/0/bytes", json!(-1)),
        ("/parts/0/bytes", json!(1.5)),
        ("/parts/0/bytes", json!(1e300)),
        ("/parts/0/digest", json!("crc64nvme:0000000000000000")),
        ("/parts/0/digest", json!("md5:0")),
        ("/parts/0/rank", json!(4_294_967_295u32)),
        ("/parts", json!([])),
        ("/parts", json!({})),
        ("/world_size", json!(0)),
        ("/world_size", json!(4_294_967_295u32)),
        ("/world_size", json!(1_000_000_000_000u64)),
        ("/id", json!("../../../../../../../../../tmp/abc")),
        ("/id", json!("0123456789ABCDEF0123456789ABCDEF")),
        ("/step", json!(-1)),
        ("/step", json!("1")),
        ("/metadata", json!([])),
        ("/metadata", json!(null)),
        ("/format", json!("penstock-part")),
        ("/version", json!(0)),
        ("/version", json!("1")),
        ("", json!({})),
    ]);
    lies
}

#[test]
fn manifests_that_lie_are_refused() {
    for (pointer, value) in lies_about_a_manifest() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        honest(&path);
        let what = format!("manifest {pointer} = {value}");
        forge::edit_manifest(&path, |manifest| put(manifest, pointer, value));
        // A part of another size is the part's fault; everything else is the manifest's.
        let is_about_the_part = matches!(pointer, "/parts/0/bytes" | "/parts/0/digest");
        let prefix = if is_about_the_part { "" } else { "manifest" };
        expect_refused(&what, &path, prefix);
    }
}

fn lies_about_files() -> Vec<(&'static str, Value)> {
    let shard = |rank: u32, index: &str| format!("shard-{rank:05}-{index}.{ATTEMPT}.safetensors");
    vec![
        ("/files/0/name", json!("../../etc/passwd")),
        ("/files/0/name", json!("/etc/passwd")),
        ("/files/0/name", json!("\u{0}")),
        ("/files/0/name", json!("manifest.json")),
        ("/files/0/name", json!(shard(0, "00"))),
        ("/files/0/name", json!(shard(0, "../00"))),
        ("/files/0/bytes", json!(1_000_000_000u64)),
        ("/files/0/bytes", json!(u64::MAX)),
        ("/files/0/bytes", json!(0)),
        ("/files/0/chunk_bytes", json!(0)),
        ("/files/0/chunk_bytes", json!(1)),
        ("/files/0/chunk_bytes", json!(u64::MAX)),
        ("/files/0/chunks", json!([])),
        ("/files/0/chunks/-", json!("0000000000000000")),
        ("/files/0/chunks/0", json!("0000000000000000")),
        ("/files/0/chunks/0", json!(7)),
        ("/files", json!([])),
    ]
}

fn lies_about_tensors() -> Vec<(&'static str, Value)> {
    vec![
        ("/tensors/0/file", json!(1)),
        ("/tensors/0/file", json!(u64::MAX)),
        ("/tensors/0/file", json!(-1)),
        ("/tensors/0/range", json!([0, u64::MAX])),
        ("/tensors/0/range", json!([u64::MAX, 0])),
        ("/tensors/0/range", json!([4096, 4096])),
        ("/tensors/0/range", json!([4096])),
        ("/tensors/0/range", json!([0.0, 8192.0])),
        ("/tensors/1/range", json!([4096, 4196])),
        ("/tensors/2/range", json!([12_288, 12_316])),
        ("/tensors/0/shape", json!([1_000_000_000u64])),
        ("/tensors/0/shape", json!([u64::MAX, u64::MAX])),
        ("/tensors/0/shape", json!([0, u64::MAX, u64::MAX])),
        ("/tensors/0/shape", json!([-8192])),
        ("/tensors/0/shape", json!([8192, [[[1]]]])),
        ("/tensors/0/dtype", json!("float64")),
        ("/tensors/0/dtype", json!("object")),
        ("/tensors/0/dtype", json!("numpy:|O")),
    ]
}

fn lies_about_the_rest() -> Vec<(&'static str, Value)> {
    vec![
        ("/aliases/-", json!({"name": "a", "tensor": 3})),
        ("/aliases/-", json!({"name": "a", "tensor": u64::MAX})),
        (
            "/aliases/-",
            json!({"name": "a", "tensor": 0,
            "view": {"shape": [2], "strides": [8192], "offset": 0}}),
        ),
        (
            "/aliases/-",
            json!({"name": "a", "tensor": 0,
            "view": {"shape": [2], "strides": [i64::MIN], "offset": u64::MAX}}),
        ),
        (
            "/aliases/-",
            json!({"name": "a", "tensor": 0,
            "view": {"shape": [u64::MAX, u64::MAX], "strides": [1, 1], "offset": 0}}),
        ),
        (
            "/aliases/-",
            json!({"name": "a", "tensor": 0,
            "view": {"shape": [1], "strides": [], "offset": 0}}),
        ),
        ("/id", json!(ATTEMPT)),
        ("/rank", json!(1)),
        ("/version", json!(2)),
        ("/format", json!("penstock-checkpoint")),
        ("", json!(null)),
    ]
}

#[test]
fn parts_that_lie_are_refused() {
    let lies = [
        lies_about_files(),
        lies_about_tensors(),
        lies_about_the_rest(),
    ];
    for (pointer, value) in lies.into_iter().flatten() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        honest(&path);
        let what = format!("part {pointer} = {value}");
        forge::edit_part(&path, |part| put(part, pointer, value));
        expect_refused(&what, &path, "part-");
    }
}

/// A file listed repeatedly would let a small input claim its bytes many times over, and a repeated
/// name would be ambiguous.
#[test]
fn one_thing_listed_twice_is_refused() {
    type Edit = fn(&mut Value);
    let edits: [(&str, Edit); 4] = [
        ("a file", |part| {
            let file = part["files"][0].clone();
            put(part, "/files/-", file);
        }),
        ("a tensor", |part| {
            part["tensors"][1]["name"] = part["tensors"][0]["name"].clone();
        }),
        ("an alias", |part| {
            let alias = json!({"name": "a", "tensor": 0});
            put(part, "/aliases/-", alias.clone());
            put(part, "/aliases/-", alias);
        }),
        ("an alias of a tensor's name", |part| {
            let name = part["tensors"][0]["name"].clone();
            put(part, "/aliases/-", json!({"name": name, "tensor": 1}));
        }),
    ];
    for (what, edit) in edits {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        honest(&path);
        forge::edit_part(&path, edit);
        expect_refused(what, &path, "part-");
    }
}

#[test]
fn repeated_keys_are_refused() {
    for (from, to) in [
        ("\"rank\":0", "\"rank\":0,\"rank\":0"),
        ("\"files\":[", "\"files\":[],\"files\":["),
        ("\"file\":0", "\"file\":0,\"file\":0"),
        ("\"tree\":", "\"tree\":1,\"tree\":"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        honest(&path);
        let text = fs::read_to_string(forge::part_path(&path)).unwrap();
        assert!(text.contains(from), "{from}");
        forge::write_part(&path, text.replacen(from, to, 1).as_bytes());
        expect_refused(to, &path, "part-");
    }
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    honest(&path);
    let manifest = path.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    let text = text.split(",\"digest\":\"crc64nvme:").collect::<Vec<_>>();
    let unstamped = text[..text.len() - 1].join(",\"digest\":\"crc64nvme:");
    let twice = unstamped.replacen("\"world_size\":", "\"world_size\":1,\"world_size\":", 1);
    fs::write(&manifest, forge::stamp(&format!("{twice}}}"))).unwrap();
    expect_refused("world_size twice", &path, "manifest");
}

/// Nesting is limited before it can overflow the stack.
#[test]
fn deep_nesting_does_not_overflow_the_stack() {
    let deep = "[".repeat(1 << 20) + &"]".repeat(1 << 20);
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let survive = |path: &Path| {
        drop(load(path, &Options::default()));
        drop(verify(path, &Options::default(), &Progress::default()));
    };
    honest(&path);
    let part = fs::read_to_string(forge::part_path(&path)).unwrap();
    for (from, to) in [
        ("{\"a\":1}", deep.clone()),
        ("\"rank\":0", format!("\"rank\":0,\"unknown\":{deep}")),
        ("\"shape\":[8192]", format!("\"shape\":{deep}")),
        ("\"aliases\":[]", format!("\"aliases\":{deep}")),
    ] {
        assert!(part.contains(from), "{from} in {part}");
        forge::write_part(&path, part.replacen(from, &to, 1).as_bytes());
        survive(&path);
    }
    let manifest = format!(r#"{{"format":"penstock-checkpoint","version":1,"metadata":{deep}}}"#);
    for text in [forge::stamp(&manifest), manifest.into_bytes()] {
        fs::write(path.join("manifest.json"), text).unwrap();
        survive(&path);
    }
    let mut start = ((deep.len() + 6) as u64).to_le_bytes().to_vec();
    start.extend_from_slice(format!("{{\"a\":{deep}}}").as_bytes());
    parse_header(&start, start.len() as u64).unwrap_err();
}

/// Peak memory of this process, in bytes.
fn peak_rss_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    let kib: u64 = line
        .split_whitespace()
        .nth(1)
        .and_then(|word| word.parse().ok())
        .unwrap();
    kib << 10
}

/// The other tests of this file run concurrently; all of them together use little memory.
#[test]
fn claims_without_bytes_cost_no_memory() {
    const GROWTH_BYTES_MAX: u64 = 256 << 20;
    let root = tempfile::tempdir().unwrap();
    let claim = 8_000_000_000_u64;
    let before = peak_rss_bytes();
    type Edit = fn(&mut Value, u64);
    let edits: [Edit; 4] = [
        |part, claim| part["files"][0]["bytes"] = claim.into(),
        |part, claim| part["tensors"][0]["shape"] = json!([claim]),
        |part, claim| part["tensors"][0]["range"] = json!([4096, claim]),
        |part, claim| {
            // Chunk digests that add up: only the file itself lacks its bytes.
            let chunks = claim.div_ceil(1 << 20) as usize;
            let digests = vec![Digest::EMPTY; chunks];
            part["files"][0]["bytes"] = claim.into();
            part["files"][0]["chunks"] = json!(vec!["0000000000000000"; chunks]);
            part["files"][0]["digest"] = Digest::of_chunks(&digests, claim).to_string().into();
            part["tensors"][0]["shape"] = json!([claim - 12_288]);
            part["tensors"][0]["range"] = json!([12_288, claim]);
        },
    ];
    for (number, edit) in edits.into_iter().enumerate() {
        let path = root.path().join(number.to_string());
        honest(&path);
        forge::edit_part(&path, |part| edit(part, claim));
        expect_refused(&format!("claim {number}"), &path, "");
    }
    for header_bytes in [claim, u64::MAX, u64::MAX - 7, 100_000_000, 99_999_999] {
        let start = header_bytes.to_le_bytes();
        header_end(start, 1000).unwrap_err();
        parse_header(&start, 1000).unwrap_err();
        parse_header(&start, u64::MAX).unwrap_err();
    }
    let growth = peak_rss_bytes() - before;
    assert!(growth < GROWTH_BYTES_MAX, "{growth} bytes for claims alone");
}

/// A shard by another writer: a length, a header, data.
fn shard(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut shard = (header.len() as u64).to_le_bytes().to_vec();
    shard.extend_from_slice(header.as_bytes());
    shard.resize(shard.len() + data_bytes, 7);
    shard
}

fn entry(name: &str, dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
}

/// An attack: its name, the whole file, and a word of the expected error.
type Attack = (&'static str, Vec<u8>, &'static str);

fn object(entries: &[String]) -> String {
    format!("{{{}}}", entries.join(","))
}

/// A header of one tensor.
fn one(shape: &str, offsets: &str) -> String {
    object(&[entry("a", "F32", shape, offsets)])
}

/// A header of two tensors of eight bytes.
fn two(first: &str, second: &str) -> String {
    let first = entry("a", "F32", "[2]", first);
    object(&[first, entry("b", "F32", "[2]", second)])
}

/// Layouts that the safetensors repository keeps under `attacks/`, and their relatives.
fn attacks_on_the_layout() -> Vec<Attack> {
    let reused: Vec<_> = (0..1000)
        .map(|i| entry(&format!("t{i}"), "F32", "[2]", "[0,8]"))
        .collect();
    let zero_over_another = object(&[
        entry("z", "F32", "[0]", "[4,4]"),
        entry("a", "F32", "[2]", "[0,8]"),
    ]);
    let wraps = one("[4611686018427387905,4]", "[0,16]");
    let hole = "leaves a hole";
    vec![
        ("an overlap", shard(&two("[0,8]", "[4,12]"), 12), "overlaps"),
        ("one range reused", shard(&object(&reused), 8), "overlaps"),
        ("a hole", shard(&two("[0,8]", "[16,24]"), 24), hole),
        ("a hole in front", shard(&one("[2]", "[8,16]"), 16), hole),
        ("bytes at the end", shard(&one("[2]", "[0,8]"), 9), "8 of 9"),
        ("a cut file", shard(&one("[2]", "[0,8]"), 4), "8 of 4"),
        ("zero size over bytes", shard(&zero_over_another, 8), "byte"),
        (
            "bytes of nothing",
            shard(&one("[0]", "[0,8]"), 8),
            "take 0 bits",
        ),
        (
            "reversed offsets",
            shard(&one("[2]", "[8,0]"), 8),
            "bytes 8..0",
        ),
        ("a shape that wraps around", shard(&wraps, 16), "too large"),
    ]
}

/// A shard whose first eight bytes claim another length.
fn claiming(header_bytes: u64) -> Vec<u8> {
    let mut file = shard(&one("[2]", "[0,8]"), 8);
    file[..8].copy_from_slice(&header_bytes.to_le_bytes());
    file
}

fn attacks_on_the_text() -> Vec<Attack> {
    let twice = two("[0,8]", "[0,8]").replace("\"b\"", "\"a\"");
    let half = "\"x\":\"\\ud800\",\"dtype\"";
    let unsound = one("[2]", "[0,8]").replace("\"dtype\"", half);
    let huge = one("[2]", "[0,18446744073709551616]");
    let number = "{\"__metadata__\":{\"a\":1}}";
    let float = "floating point";
    vec![
        ("longer than the file", claiming(1000), "header claims"),
        ("oversized", claiming(100_000_001), "header claims"),
        ("endless", claiming(u64::MAX), "header claims"),
        ("a name twice", shard(&twice, 8), "twice"),
        ("negative", shard(&one("[2]", "[-8,0]"), 8), "invalid"),
        ("float offset", shard(&one("[2]", "[0,8.0]"), 8), float),
        ("float dimension", shard(&one("[2.0]", "[0,8]"), 8), float),
        ("beyond 64 bits", shard(&huge, 8), "invalid"),
        (
            "three offsets",
            shard(&one("[2]", "[0,8,8]"), 8),
            "trailing",
        ),
        ("half a character", shard(&unsound, 8), "no JSON"),
        ("metadata that is no text", shard(number, 0), "string"),
        ("not an object", shard("[]", 0), "none of safetensors"),
        ("no JSON", shard("{]", 0), "line"),
        ("an empty header", shard("", 0), "no JSON"),
        ("an empty file", Vec::new(), "header"),
    ]
}

#[test]
fn safetensors_exploits_are_refused_by_name() {
    let attacks = [attacks_on_the_layout(), attacks_on_the_text()];
    for (what, file, expected) in attacks.into_iter().flatten() {
        let error = parse_header(&file, file.len() as u64).expect_err(what);
        let error = error.to_string();
        assert!(error.contains(expected), "{what}: {error}");
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        forge::checkpoint(&path, &file, &json!([]));
        let report = verify(&path, &Options::default(), &Progress::default()).unwrap();
        let named = report
            .problems
            .iter()
            .any(|problem| problem.file.starts_with("shard-") && problem.detail.contains(expected));
        assert!(named, "{what}: {:?}", report.problems);
    }
}

/// Other tools trust the header alone: it must describe each tensor as the part does.
#[test]
fn a_header_that_disagrees_with_the_part_is_named() {
    let header = |dtype: &str, shape: &str| {
        let mut header = format!("{{{}}}", entry("a", dtype, shape, "[0,8]"));
        header.extend(std::iter::repeat_n(' ', 4096 - 8 - header.len()));
        shard(&header, 8)
    };
    let listed = |name: &str| {
        let tensor = json!({"name": name, "dtype": "float32", "shape": [2], "file": 0});
        let mut tensors = json!([tensor]);
        tensors[0]["range"] = json!([4096, 4104]);
        tensors
    };
    let problems = |file: Vec<u8>, tensors: Value| {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        forge::checkpoint(&path, &file, &tensors);
        let report = verify(&path, &Options::default(), &Progress::default()).unwrap();
        report.problems.len()
    };
    assert_eq!(problems(header("F32", "[2]"), listed("a")), 0);
    let called = |name: &str, stored_name: &str| {
        let mut tensors = listed(name);
        tensors[0]["stored_name"] = json!(stored_name);
        tensors
    };
    assert_eq!(problems(header("F32", "[2]"), called("b", "a")), 0);
    // A linked file may contain unlisted tensors.
    assert_eq!(problems(header("F32", "[2]"), json!([])), 0);
    for (what, file, tensors) in [
        ("the name", header("F32", "[2]"), listed("b")),
        ("the type", header("I32", "[2]"), listed("a")),
        ("the shape", header("F32", "[1,2]"), listed("a")),
        ("the stored name", header("F32", "[2]"), called("a", "b")),
        (
            "the number",
            header("F32", "[2]"),
            json!([listed("a")[0], {
                "name": "b", "dtype": "float32", "shape": [0], "file": 0, "range": [4096, 4096],
            }]),
        ),
    ] {
        assert!(problems(file, tensors) > 0, "{what} differs");
    }
}

/// A part may describe tensors anywhere in a shard, with gaps and at odd offsets: unusual, but
/// valid, and read correctly.
#[test]
fn every_layout_that_a_part_may_describe_loads_bit_exact() {
    let mut rng = Rng::new(0x1a_0075);
    for round in 0..12 {
        let mut shard = encode_header(std::iter::empty());
        let mut tensors = Vec::new();
        let mut ranges = Vec::new();
        for index in 0..1 + rng.below(40) {
            let gap_max = [1, 64, 5000, 300_000][rng.below(4) as usize];
            let bytes_max = [2, 5000, 200_000, 3_000_000][rng.below(4) as usize];
            shard.extend(noise(rng.below(1 << 40), rng.below(gap_max) as usize));
            let bytes = rng.below(bytes_max) as usize;
            let begin = shard.len();
            shard.extend(noise(rng.below(1 << 40), bytes));
            ranges.push(begin..shard.len());
            tensors.push(
                json!({"name": format!("t{index}"), "dtype": "uint8", "shape": [bytes],
                "file": 0, "range": [begin, shard.len()]}),
            );
        }
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        forge::checkpoint(&path, &shard, &tensors.into());
        for engine in read_engines() {
            for direct in [Direct::Auto, Direct::Off] {
                let options = Options {
                    engine,
                    direct,
                    extent_bytes: Some(1 << (20 + round % 3)),
                    ..Options::default()
                };
                let loaded = load(&path, &options).unwrap();
                for (place, range) in ranges.iter().enumerate() {
                    let found = common::bytes_of(&loaded, place, range.len());
                    assert!(
                        found == &shard[range.clone()],
                        "round {round} tensor {place}"
                    );
                }
            }
        }
    }
}
