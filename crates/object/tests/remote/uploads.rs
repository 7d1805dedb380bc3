//! Uploads arrive unchanged or are refused; open uploads are listed, aborted and resumed.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::proxy::{Fate, Pace, Proxy};
use crate::common::server::Server;
use crate::common::{
    self, PART_BYTES, at, bytes, download, finish, objects, send, source, upload, write_of,
};
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem, OpenUpload};
use penstock_object::Remote;

/// Two full parts and a short one.
const BYTES: usize = 2 * PART_BYTES + 12_345;

#[test]
fn parts_and_objects_have_checksums() {
    let Some(server) = Server::start("parts_and_objects_have_checksums") else {
        return;
    };
    let proxy = Proxy::watch(&server.address);
    let objects = objects(&proxy.endpoint(), Remote::default());
    let bytes = bytes(BYTES);
    upload(&objects, &at("object"), &bytes).unwrap();
    assert_eq!(fs::read(server.file("object")).unwrap(), bytes);
    let heads = proxy.take_heads();
    let of = |method: &str, what: &str| -> Vec<&String> {
        let is_one = |head: &&String| head.starts_with(method) && head.contains(what);
        heads.iter().filter(is_one).collect()
    };
    let parts = of("PUT", "partNumber=");
    assert_eq!(parts.len(), 3);
    let is_checked = |head: &&String| head.contains("x-amz-checksum-crc64nvme: ");
    assert!(parts.iter().all(is_checked), "{parts:#?}");
    let ends = of("POST", "uploadId=");
    assert_eq!(ends.len(), 1);
    assert!(is_checked(&ends[0]), "{ends:#?}");
    assert!(ends[0].contains("x-amz-checksum-type: FULL_OBJECT"));
    assert!(ends[0].contains(&format!("x-amz-mp-object-size: {BYTES}")));
    assert_eq!(heads.len(), 5, "{heads:#?}");
}

/// A proxy that changes a byte of each of the first `times` uploads.
fn tamperer(server: &Server, times: usize) -> (Proxy, Arc<AtomicUsize>) {
    let done = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&done);
    let proxy = Proxy::start(&server.address, Pace::default(), move |is_up, bytes| {
        // Heads are shorter, so this is within a body.
        if is_up && bytes.len() > 32 << 10 && count.load(Ordering::SeqCst) < times {
            count.fetch_add(1, Ordering::SeqCst);
            *bytes.last_mut().unwrap() ^= 1;
        }
        Fate::Pass
    });
    (proxy, done)
}

#[test]
fn what_changes_on_the_way_is_sent_again() {
    let Some(server) = Server::start("what_changes_on_the_way_is_sent_again") else {
        return;
    };
    let (proxy, done) = tamperer(&server, 2);
    let objects = objects(&proxy.endpoint(), Remote::default());
    let bytes = bytes(BYTES);
    upload(&objects, &at("object"), &bytes).unwrap();
    assert_eq!(done.load(Ordering::SeqCst), 2);
    assert_eq!(fs::read(server.file("object")).unwrap(), bytes);
}

#[test]
fn what_always_changes_on_the_way_becomes_no_object() {
    let Some(server) = Server::start("what_always_changes_on_the_way") else {
        return;
    };
    let (proxy, _) = tamperer(&server, usize::MAX);
    let remote = Remote {
        patience: Some(std::time::Duration::ZERO),
        ..Remote::default()
    };
    let objects = objects(&proxy.endpoint(), remote);
    let error = upload(&objects, &at("object"), &bytes(BYTES)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
    assert_eq!(
        error.to_string(),
        "the bytes changed on their way to the store"
    );
    assert!(!server.file("object").exists());
}

#[test]
fn what_is_not_what_was_digested_is_refused() {
    let Some(server) = Server::start("what_is_not_what_was_digested_is_refused") else {
        return;
    };
    let remote = Remote {
        patience: Some(std::time::Duration::ZERO),
        ..Remote::default()
    };
    let objects = objects(&server.endpoint(), remote);
    let file = Arc::new(objects.create(&at("object"), Direct::Off).unwrap());
    let bytes = bytes(PART_BYTES);
    file.expect(0, || 1);
    let error = send(&objects, &file, &bytes, [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
    // The checksum of an undigested part is computed.
    send(&objects, &file, &bytes, [0]).unwrap();
    finish(&objects, &file).unwrap();
    assert_eq!(fs::read(server.file("object")).unwrap(), bytes);
}

#[test]
fn a_store_may_do_without_checksums() {
    let Some(server) = Server::start("a_store_may_do_without_checksums") else {
        return;
    };
    let proxy = Proxy::watch(&server.address);
    let remote = Remote {
        checksums: Some(false),
        ..Remote::default()
    };
    let objects = objects(&proxy.endpoint(), remote);
    let bytes = bytes(BYTES);
    upload(&objects, &at("object"), &bytes).unwrap();
    assert_eq!(download(&objects, &at("object")).unwrap(), bytes);
    for head in proxy.take_heads() {
        assert!(!head.contains("x-amz-checksum"), "{head}");
    }
}

#[test]
fn open_uploads_are_found_and_ended() {
    let Some(server) = Server::start("open_uploads_are_found_and_ended") else {
        return;
    };
    let objects = objects(&server.endpoint(), Remote::default());
    let keys = ["run/a", "run/b", "runs/c", "d"];
    for key in keys {
        let begun = objects.resume_upload(&at(key), |_| true).unwrap();
        send(&objects, &Arc::new(begun.file), b"some", [0]).unwrap();
    }
    let open = |key: &str| {
        let mut open = FileSystem::open_uploads(&objects, &at(key)).unwrap();
        open.sort_by(|a, b| a.path.cmp(&b.path));
        open
    };
    let paths_of =
        |open: Vec<OpenUpload>| -> Vec<PathBuf> { open.into_iter().map(|one| one.path).collect() };
    let run = open("run");
    assert!(run[0].begun.elapsed().unwrap().as_secs() < 3600);
    objects.abandon(&run[0]).unwrap();
    // Aborting an upload that is gone succeeds.
    objects.abandon(&run[0]).unwrap();
    assert_eq!(paths_of(open("run")), [at("run/b")]);
    assert_eq!(paths_of(open("")), [at("d"), at("run/b"), at("runs/c")]);
    assert_eq!(open("none"), []);
}

#[test]
fn an_upload_that_is_dropped_is_given_up() {
    let Some(server) = Server::start("an_upload_that_is_dropped_is_given_up") else {
        return;
    };
    let objects = objects(&server.endpoint(), Remote::default());
    let file = Arc::new(objects.create(&at("object"), Direct::Off).unwrap());
    send(&objects, &file, &bytes(PART_BYTES), [0]).unwrap();
    assert_eq!(objects.open_uploads(&at("")).unwrap().len(), 1);
    drop(file);
    // The abort is a request in the background.
    while !objects.open_uploads(&at("")).unwrap().is_empty() {
        std::thread::yield_now();
    }
}

#[test]
fn an_upload_is_continued_by_what_the_store_has_of_it() {
    let Some(server) = Server::start("an_upload_is_continued") else {
        return;
    };
    let objects = objects(&server.endpoint(), Remote::default());
    let (path, bytes) = (at("object"), bytes(BYTES));
    let begun = objects.resume_upload(&path, |_| true).unwrap();
    assert_eq!(begun.parts, []);
    send(&objects, &Arc::new(begun.file), &bytes, [0, 2]).unwrap();
    let resumed = objects.resume_upload(&path, |_| true).unwrap();
    let sizes = resumed.parts.iter().map(|part| (part.number, part.bytes));
    let (part, last) = (PART_BYTES as u64, (BYTES % PART_BYTES) as u64);
    assert_eq!(sizes.collect::<Vec<_>>(), [(1, part), (3, last)]);
    assert_eq!(resumed.file.len().unwrap(), part + last);
    let file = Arc::new(resumed.file);
    // An upload with a missing part makes no object.
    finish(&objects, &file).unwrap_err();
    send(&objects, &file, &bytes, [1]).unwrap();
    finish(&objects, &file).unwrap();
    assert_eq!(fs::read(server.file("object")).unwrap(), bytes);
    assert_eq!(objects.open_uploads(&at("")).unwrap(), []);
}

#[test]
fn an_upload_with_a_part_that_is_not_right_is_given_up_and_begun_anew() {
    let Some(server) = Server::start("an_upload_with_a_part_that_is_not_right") else {
        return;
    };
    let objects = objects(&server.endpoint(), Remote::default());
    let path = at("object");
    let begun = objects.resume_upload(&path, |_| true).unwrap();
    send(&objects, &Arc::new(begun.file), &bytes(BYTES), [0, 1]).unwrap();
    let id = || objects.open_uploads(&at("")).unwrap().remove(0).id;
    let first = id();
    let anew = objects
        .resume_upload(&path, |part| part.number == 1)
        .unwrap();
    assert_eq!(anew.parts, []);
    assert_ne!(id(), first);
    assert_eq!(objects.open_uploads(&at("")).unwrap().len(), 1);
}

#[test]
fn an_object_of_too_many_parts_is_refused_before_any_is_sent() {
    let objects = objects("http://127.0.0.1:1", Remote::default());
    let file = objects.create(&at("object"), Direct::Off).unwrap();
    let bytes = 10_000 * PART_BYTES as u64;
    objects.change(Change::Allocate(&file, bytes)).unwrap();
    let refused = objects.change(Change::Allocate(&file, bytes + 1));
    let refused = source(refused.unwrap_err());
    assert_eq!(refused.kind(), std::io::ErrorKind::FileTooLarge);
    assert!(refused.to_string().contains("part_bytes of at least 6 MiB"));
}

#[test]
fn a_part_begins_where_parts_do() {
    let objects = objects("http://127.0.0.1:1", Remote::default());
    let file = Arc::new(objects.create(&at("object"), Direct::Off).unwrap());
    let completed = common::transfer(&objects, &file, vec![write_of(7, b"some")]);
    assert!(completed[0].result.is_err());
}

/// Reserves the size of a file.
fn reserve(objects: &penstock_object::Objects, file: &File, bytes: usize) {
    let change = Change::Allocate(file, bytes as u64);
    objects.change(change).unwrap();
}

#[test]
fn what_one_part_is_all_of_is_one_request() {
    let Some(server) = Server::start("what_one_part_is_all_of_is_one_request") else {
        return;
    };
    let proxy = Proxy::watch(&server.address);
    let objects = objects(&proxy.endpoint(), Remote::default());
    let bytes = bytes(PART_BYTES / 2);
    let file = Arc::new(objects.create(&at("object"), Direct::Off).unwrap());
    reserve(&objects, &file, bytes.len());
    send(&objects, &file, &bytes, [0]).unwrap();
    finish(&objects, &file).unwrap();
    let heads = proxy.take_heads();
    assert_eq!(heads.len(), 1, "{heads:#?}");
    assert!(
        heads[0].contains("x-amz-checksum-crc64nvme: "),
        "{heads:#?}"
    );
    assert_eq!(fs::read(server.file("object")).unwrap(), bytes);

    // The store verifies the digest, here too.
    let remote = Remote {
        patience: Some(std::time::Duration::ZERO),
        ..Remote::default()
    };
    let objects = common::objects(&server.endpoint(), remote);
    let file = Arc::new(objects.create(&at("other"), Direct::Off).unwrap());
    reserve(&objects, &file, bytes.len());
    file.expect(0, || 1);
    send(&objects, &file, &bytes, [0]).unwrap_err();
    assert!(!server.file("other").exists());
}

#[test]
fn an_upload_whose_size_is_known_ends_with_its_last_part() {
    let Some(server) = Server::start("an_upload_whose_size_is_known_ends") else {
        return;
    };
    let proxy = Proxy::watch(&server.address);
    let objects = objects(&proxy.endpoint(), Remote::default());
    let bytes = bytes(BYTES);
    let file = Arc::new(objects.create(&at("object"), Direct::Off).unwrap());
    reserve(&objects, &file, bytes.len());
    send(&objects, &file, &bytes, [1, 2]).unwrap();
    assert!(!server.file("object").exists());
    send(&objects, &file, &bytes, [0]).unwrap();
    // The upload completes before a sync asks for it.
    while !server.file("object").exists() {
        std::thread::yield_now();
    }
    finish(&objects, &file).unwrap();
    finish(&objects, &file).unwrap();
    assert_eq!(fs::read(server.file("object")).unwrap(), bytes);
    let heads = proxy.take_heads();
    let ends = heads
        .iter()
        .filter(|head| head.starts_with("POST") && head.contains("uploadId="));
    assert_eq!(ends.count(), 1, "{heads:#?}");
}

#[test]
fn an_upload_that_is_dropped_while_it_ends_leaves_no_object() {
    let Some(server) = Server::start("an_upload_that_is_dropped_while_it_ends") else {
        return;
    };
    // Completion is held back until the file is dropped.
    let is_dropped = Arc::new(AtomicUsize::new(0));
    let gate = Arc::clone(&is_dropped);
    let proxy = Proxy::start(&server.address, Pace::default(), move |is_up, bytes| {
        let is_end = is_up && bytes.starts_with(b"POST") && contains(bytes, b"uploadId=");
        while is_end && gate.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        Fate::Pass
    });
    let objects = objects(&proxy.endpoint(), Remote::default());
    let bytes = bytes(BYTES);
    let file = Arc::new(objects.create(&at("object"), Direct::Off).unwrap());
    reserve(&objects, &file, bytes.len());
    send(&objects, &file, &bytes, [0, 1, 2]).unwrap();
    drop(file);
    is_dropped.store(1, Ordering::SeqCst);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    loop {
        let heads = proxy.take_heads();
        if heads.iter().any(|head| head.starts_with("DELETE")) {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "nothing was removed");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    while server.file("object").exists() {
        assert!(std::time::Instant::now() < deadline, "the object stays");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(objects.open_uploads(&at("")).unwrap(), []);
}

fn contains(bytes: &[u8], what: &[u8]) -> bool {
    bytes.windows(what.len()).any(|window| window == what)
}
