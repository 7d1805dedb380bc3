//! Traces of an engine's work. A process has one trace at a time, so the tests take turns.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use penstock_io::Error;
use penstock_io::buffer::Pool;
use penstock_io::engine::{Engine, EngineConfig, Op, OpKind, open};
use penstock_io::file::{Direct, File};
use penstock_io::trace::{self, Process, Role};
use penstock_io::transfer::WholeTransfers;
use serde_json::{Value, json};

const REQUESTS: u64 = 20;
const BYTES: usize = 1 << 16;

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn process() -> Process {
    Process {
        id: 7,
        order: 0,
        name: "a test".to_owned(),
        about: json!({ "version": 1 }),
    }
}

/// Writes to a new file in a directory, a few requests at a time.
fn write(directory: &Path) {
    let file = Arc::new(File::create(&directory.join("data.bin"), Direct::Off).unwrap());
    let mut engine = WholeTransfers::new(open(&EngineConfig::default()).unwrap().engine);
    let pool = Pool::new(BYTES, 4 * BYTES);
    let mut completed = Vec::new();
    for token in 0..REQUESTS {
        let buf = loop {
            match pool.try_take().unwrap() {
                Some(buf) => break buf,
                None => engine.poll(1, None, &mut completed).unwrap(),
            }
            completed.clear();
        };
        let offset = token * BYTES as u64;
        let op = Op {
            token,
            file: Arc::clone(&file),
            kind: OpKind::Write { offset, buf },
        };
        engine.submit(op).unwrap();
    }
    while engine.in_flight() > 0 {
        engine.poll(1, None, &mut completed).unwrap();
    }
}

fn events(path: &Path) -> Vec<Value> {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn of_kind<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["ph"] == kind).collect()
}

#[test]
fn every_request_is_there_with_its_times_and_its_place() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.json");
    trace::start(&path, process(), false).unwrap();
    write(directory.path());
    trace::stop().unwrap();
    let events = events(&path);
    assert_eq!(events[0]["name"], "penstock");
    assert!(events.iter().all(|event| event["pid"] == 7));

    let mut begun: HashMap<&str, f64> = HashMap::new();
    let mut offsets = Vec::new();
    for event in &events {
        let id = || event["id2"]["local"].as_str().unwrap();
        let at = || event["ts"].as_f64().unwrap();
        match event["ph"].as_str().unwrap() {
            "b" => {
                assert_eq!(event["name"], "write");
                assert_eq!(event["args"]["file"], "data.bin");
                assert_eq!(event["args"]["bytes"], BYTES);
                assert_eq!(event["args"]["aligned"], true);
                offsets.push(event["args"]["offset"].as_u64().unwrap());
                let before = begun.insert(id(), at());
                assert_eq!(before, None, "no two requests at a time have one id");
            }
            "e" => assert!(begun.remove(id()).unwrap() <= at()),
            _ => {}
        }
    }
    assert!(begun.is_empty());
    offsets.sort_unstable();
    let expected: Vec<u64> = (0..REQUESTS).map(|n| n * BYTES as u64).collect();
    assert_eq!(offsets, expected);

    let submits = of_kind(&events, "X");
    let submits = submits.iter().filter(|span| span["name"] == "submit");
    assert_eq!(submits.count() as u64, REQUESTS);
    let level = |name: &'static str| {
        let levels = of_kind(&events, "C").into_iter();
        let of_name = levels.filter(move |event| event["name"] == name);
        let value = |event: &Value| event["args"].as_object().unwrap().values().next().cloned();
        of_name.map(move |event| value(event).unwrap().as_f64().unwrap())
    };
    let moved = level("completed").sum::<f64>() * 0.01 * f64::from(1 << 30);
    assert!(
        (moved - (REQUESTS * BYTES as u64) as f64).abs() < 1.0,
        "{moved}"
    );
    let depth = level("in flight").fold(0.0, f64::max);
    assert!((1.0..=4.0).contains(&depth), "{depth}");
    let pool_bytes = level("pool").fold(0.0, f64::max);
    assert!(
        (1.0..=4.0).contains(&(pool_bytes / BYTES as f64)),
        "{pool_bytes}"
    );
}

#[test]
fn rows_are_named_by_what_threads_do_and_used_again() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.json");
    trace::start(&path, process(), false).unwrap();
    for _ in 0..3 {
        let work = || {
            let _row = trace::enter(Role::Writer);
            let _outer = trace::span("outer");
            drop(trace::span("inner"));
        };
        thread::spawn(work).join().unwrap();
    }
    // Two concurrent activities in one row without a thread would overlap.
    let begun = trace::now_ns();
    trace::span_overlapping(
        Role::Background,
        "one".to_owned(),
        begun..trace::now_ns(),
        None,
    );
    trace::span_overlapping(
        Role::Background,
        "two".to_owned(),
        begun..trace::now_ns(),
        Some("\"x\"".to_owned()),
    );
    trace::stop().unwrap();
    let events = events(&path);
    let rows = events.iter().filter(|event| event["name"] == "thread_name");
    let mut rows: Vec<_> = rows
        .map(|event| event["args"]["name"].as_str().unwrap())
        .collect();
    rows.sort_unstable();
    assert_eq!(rows, ["background", "background 2", "writer"]);
    let spans = of_kind(&events, "X");
    let names: Vec<_> = spans
        .iter()
        .map(|span| span["name"].as_str().unwrap())
        .collect();
    assert_eq!(names.iter().filter(|&&name| name == "inner").count(), 3);
    // The outer span first, as viewers need it.
    assert_eq!(names[..2], ["outer", "inner"]);
    let two = spans.iter().find(|span| span["name"] == "two").unwrap();
    assert_eq!(two["args"]["of"], "\"x\"");
}

#[test]
fn what_began_before_the_trace_begins_with_it() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.json");
    let long_ago = trace::now_ns();
    thread::sleep(Duration::from_millis(20));
    let _row = trace::enter(Role::Writer);
    trace::start(&path, process(), false).unwrap();
    let since = trace::now_ns();
    trace::span_since("long", long_ago, None);
    trace::stop().unwrap();
    let events = events(&path);
    let spans = of_kind(&events, "X");
    let [long] = spans.as_slice() else {
        panic!("{spans:?}");
    };
    assert_eq!(long["ts"], 0.0);
    let microseconds = long["dur"].as_f64().unwrap();
    assert!(
        microseconds <= (trace::now_ns() - since) as f64 / 1e3 + 1e3,
        "{long}"
    );
    let row = events.iter().find(|event| event["name"] == "thread_name");
    assert_eq!(row.unwrap()["args"]["name"], "writer");
}

#[test]
fn a_row_that_is_free_again_takes_no_span_that_began_before() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.json");
    trace::start(&path, process(), false).unwrap();
    let first = trace::span("first");
    let step = Arc::new(Barrier::new(2));
    let other = Arc::clone(&step);
    let second = thread::spawn(move || {
        other.wait();
        let span = trace::span("second");
        other.wait();
        other.wait();
        drop(span);
    });
    let ends = thread::spawn(move || {
        let span = trace::span("ends");
        step.wait();
        step.wait();
        drop(span);
        step
    });
    // The thread is gone, and its row is free, before the other span is recorded.
    let step = ends.join().unwrap();
    step.wait();
    second.join().unwrap();
    drop(first);
    trace::stop().unwrap();
    let events = events(&path);
    let mut rows: Vec<_> = of_kind(&events, "X")
        .into_iter()
        .map(|span| span["tid"].as_u64())
        .collect();
    rows.sort_unstable();
    rows.dedup();
    assert_eq!(rows.len(), 3);
}

#[test]
fn requests_that_are_given_up_are_not_in_flight_for_ever() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.json");
    trace::start(&path, process(), false).unwrap();
    let file = File::create(&directory.path().join("data.bin"), Direct::Off).unwrap();
    let file = Arc::new(file);
    let mut engine = WholeTransfers::new(open(&EngineConfig::default()).unwrap().engine);
    let pool = Pool::new(BYTES, 8 * BYTES);
    for token in 0..8 {
        let buf = pool.take().unwrap();
        let offset = token * BYTES as u64;
        let op = Op {
            token,
            file: Arc::clone(&file),
            kind: OpKind::Write { offset, buf },
        };
        engine.submit(op).unwrap();
    }
    drop(engine);
    trace::stop().unwrap();
    let events = events(&path);
    let mut levels = of_kind(&events, "C").into_iter().rev();
    let last = levels.find(|event| event["name"] == "in flight").unwrap();
    assert_eq!(last["args"]["requests"], 0.0);
}

#[test]
fn a_file_that_others_were_given_too_is_kept() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.json");
    for _ in 0..3 {
        trace::start(&path, process(), true).unwrap();
        drop(trace::span("something"));
        trace::stop().unwrap();
    }
    let files: Vec<_> = fs::read_dir(directory.path()).unwrap().collect();
    assert_eq!(files.len(), 3);
    for file in files {
        assert_eq!(of_kind(&events(&file.unwrap().path()), "X").len(), 1);
    }
    trace::start(&path, process(), false).unwrap();
    trace::stop().unwrap();
    assert_eq!(of_kind(&events(&path), "X").len(), 0);
}

#[test]
fn without_a_trace_nothing_is_kept() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    write(directory.path());
    drop(trace::span("before"));
    let path = directory.path().join("trace.json");
    trace::start(&path, process(), false).unwrap();
    trace::stop().unwrap();
    let events = events(&path);
    let is_kept = |event: &Value| event["ph"] == "X" || event["ph"] == "b";
    assert!(!events.iter().any(is_kept), "{events:?}");
    trace::stop().unwrap();
}

#[test]
fn a_trace_that_waits_makes_no_file_for_nothing() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.json");
    trace::start(&path, process(), true).unwrap();
    trace::stop().unwrap();
    assert!(!path.exists());
    trace::start(&path, process(), true).unwrap();
    drop(trace::span("something"));
    trace::stop().unwrap();
    assert_eq!(of_kind(&events(&path), "X").len(), 1);
}

#[test]
fn what_cannot_be_written_ends_the_trace_and_nothing_else() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let refused = trace::start(&directory.path().join("not/there"), process(), false);
    assert!(matches!(refused, Err(Error::Storage { .. })), "{refused:?}");
    assert!(!trace::is_on());

    trace::start(Path::new("/dev/full"), process(), true).unwrap();
    write(directory.path());
    let stopped = trace::stop();
    assert!(matches!(stopped, Err(Error::Storage { .. })), "{stopped:?}");
    assert!(!trace::is_on());

    let path = directory.path().join("trace.json");
    trace::start(&path, process(), false).unwrap();
    let second = trace::start(&path, process(), false);
    assert!(matches!(second, Err(Error::Storage { .. })), "{second:?}");
    trace::stop().unwrap();
}
