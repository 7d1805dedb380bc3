//! Blob Storage of Azure, on its emulator: blocks with checksums, conditions, refusals.

mod common;

use std::io::ErrorKind;
use std::sync::Arc;

use common::azurite::{Azurite, at, key};
use common::proxy::Proxy;
use common::{PART_BYTES, bytes, download, finish, send, source, upload};
use penstock_io::file::Direct;
use penstock_io::file_system::{Change, FileSystem, Files, Kind};
use penstock_object::{Objects, Remote, Verdict, probe};

/// Two parts, and a short one.
const BYTES: usize = 2 * PART_BYTES + 12_345;

/// Gives a text a name.
fn write(objects: &Objects, name: &str, text: &[u8], seen: Option<&[u8]>) -> std::io::Result<()> {
    let from = at("drawn");
    let file = objects.create_temporary(&from).unwrap();
    objects.change(Change::Write(&file, text)).unwrap();
    let to = at(name);
    let change = match seen {
        None => Change::RenameNew {
            from: &from,
            to: &to,
        },
        Some(seen) => Change::Replace {
            from: &from,
            to: &to,
            seen,
        },
    };
    objects.change(change).map_err(source)
}

fn read(objects: &Objects, name: &str) -> Vec<u8> {
    objects.read_range(&at(name), 0..u64::MAX).unwrap()
}

#[test]
fn blocks_have_checksums_and_become_the_object_that_was_sent() {
    let Some(server) = Azurite::start("blocks_have_checksums") else {
        return;
    };
    let proxy = Proxy::watch(&server.address);
    let remote = Remote {
        endpoint: Some(proxy.endpoint() + "/penstock"),
        ..Remote::default()
    };
    let objects = server.objects(remote);
    let bytes = bytes(BYTES);
    upload(&objects, &at("run/object"), &bytes).unwrap();
    let heads = proxy.take_heads();
    let blocks: Vec<_> = heads
        .iter()
        .filter(|head| head.contains("comp=block&"))
        .collect();
    assert_eq!(blocks.len(), 3, "{heads:#?}");
    let is_checked = |head: &&String| head.contains("x-ms-content-crc64: ");
    assert!(blocks.iter().all(is_checked), "{blocks:#?}");
    // Three blocks and their list: nothing is asked to begin.
    assert_eq!(heads.len(), 4, "{heads:#?}");
    assert_eq!(download(&objects, &at("run/object")).unwrap(), bytes);
    let found = objects.look(&at("run")).unwrap();
    assert_eq!(found.kind, Kind::Directory);
    assert_eq!(objects.look(&at("run/object")).unwrap().bytes, BYTES as u64);
    objects
        .change(Change::RemoveFile(&at("run/object")))
        .unwrap();
    let gone = objects.look(&at("run/object")).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound);
}

#[test]
fn what_is_not_what_was_digested_is_refused() {
    let Some(server) = Azurite::start("what_is_not_what_was_digested") else {
        return;
    };
    let remote = Remote {
        patience: Some(std::time::Duration::ZERO),
        ..Remote::default()
    };
    let objects = server.objects(remote);
    for is_whole in [false, true] {
        let file = Arc::new(objects.create(&at("object"), Direct::Off).unwrap());
        let bytes = bytes(PART_BYTES);
        if is_whole {
            let allocated = Change::Allocate(&file, bytes.len() as u64);
            objects.change(allocated).unwrap();
        }
        file.expect(0, || 1);
        let error = send(&objects, &file, &bytes, [0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
        send(&objects, &file, &bytes, [0]).unwrap();
        finish(&objects, &file).unwrap();
        assert_eq!(download(&objects, &at("object")).unwrap(), bytes);
    }
}

#[test]
fn blocks_of_an_earlier_process_are_gone_on_with() {
    let Some(server) = Azurite::start("blocks_of_an_earlier_process") else {
        return;
    };
    let objects = server.objects(Remote::default());
    let (path, bytes) = (at("object"), bytes(BYTES));
    let begun = objects.go_on(&path, |_| true).unwrap();
    assert_eq!(begun.parts, []);
    send(&objects, &Arc::new(begun.file), &bytes, [0, 2]).unwrap();
    // One with a part that is wrong is not gone on with.
    let anew = objects.go_on(&path, |part| part.number == 1).unwrap();
    assert_eq!(anew.parts, []);
    let continued = objects.go_on(&path, |part| part.crc64nvme.is_some());
    let continued = continued.unwrap();
    let sizes = continued.parts.iter().map(|part| (part.number, part.bytes));
    let (part, last) = (PART_BYTES as u64, (BYTES % PART_BYTES) as u64);
    assert_eq!(sizes.collect::<Vec<_>>(), [(1, part), (3, last)]);
    let file = Arc::new(continued.file);
    // What is missing is no object.
    finish(&objects, &file).unwrap_err();
    send(&objects, &file, &bytes, [1]).unwrap();
    finish(&objects, &file).unwrap();
    assert_eq!(download(&objects, &path).unwrap(), bytes);
    assert!(objects.has(&path, BYTES as u64, 0).unwrap());
    assert!(!objects.has(&path, 1, 0).unwrap());
}

#[test]
fn conditions_hold_and_nothing_is_left_of_the_probe() {
    let Some(server) = Azurite::start("conditions_hold") else {
        return;
    };
    let objects = server.objects(Remote::default());
    write(&objects, "run/text", b"first", None).unwrap();
    let taken = write(&objects, "run/text", b"second", None).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::AlreadyExists);
    write(&objects, "run/text", b"second", Some(b"first")).unwrap();
    let stale = write(&objects, "run/text", b"third", Some(b"first")).unwrap_err();
    assert_eq!(stale.kind(), ErrorKind::AlreadyExists);
    assert_eq!(read(&objects, "run/text"), b"second");
    let path = at("run/text");
    let removed = |seen: &[u8]| {
        let removed = objects.change(Change::RemoveSeen(&path, seen));
        removed.map_err(|error| source(error).kind())
    };
    assert_eq!(removed(b"first"), Err(ErrorKind::AlreadyExists));
    assert_eq!(removed(b"second"), Ok(()));
    assert_eq!(removed(b"second"), Err(ErrorKind::NotFound));
    assert!(objects.time_at(&at("run/clock")).unwrap().is_some());
    for finding in probe(&objects, &at("run")).unwrap() {
        assert_eq!(finding.verdict, Verdict::Holds, "{finding}");
    }
    let left = objects.list(&at("run")).unwrap_err();
    assert_eq!(left.kind(), ErrorKind::NotFound);
}

#[test]
fn what_azure_refuses_is_said_with_its_remedy() {
    let Some(server) = Azurite::start("what_azure_refuses") else {
        return;
    };
    let with = |remote: Remote| {
        let objects = server.objects(remote);
        objects.list(&at("run")).unwrap_err()
    };
    let foreign = with(Remote {
        credentials: Some(key("b3RoZXI=")),
        ..Remote::default()
    });
    assert_eq!(foreign.kind(), ErrorKind::PermissionDenied);
    let elsewhere = Remote {
        endpoint: Some(server.endpoint()),
        credentials: Some(key(common::azurite::KEY)),
        ..Remote::default()
    };
    let none = std::path::Path::new("az://nowhere/run");
    let address = penstock_object::Address::of(none).unwrap().unwrap();
    let objects = Objects::open(address, &elsewhere).unwrap();
    let missing = objects.list(none).unwrap_err();
    assert_eq!(
        missing.to_string(),
        "there is no such container: create it, or correct its name"
    );
    let lost = objects.look(none).unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::InvalidInput, "{lost}");
    let open = |remote: Remote| {
        let address = penstock_object::Address::of(&at("")).unwrap().unwrap();
        Objects::open(address, &remote).unwrap_err().to_string()
    };
    let region = open(Remote {
        region: Some("eu-west-1".to_owned()),
        ..Remote::default()
    });
    assert_eq!(region, "az:// has no regions: leave it out");
}
