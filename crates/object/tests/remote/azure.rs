//! Blob Storage of Azure, on its emulator: blocks with checksums, conditions, refusals.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use crate::common::azurite::{Azurite, KEY, at, key};
use crate::common::contract::{BYTES, Place};
use crate::common::fake::{Fake, Reply};
use crate::common::proxy::Proxy;
use crate::common::{bytes, source, upload};
use penstock_io::file_system::{Change, FileSystem, Files, Kind, Seen};
use penstock_object::{Address, Objects, Remote};

fn place(server: &Azurite, remote: Remote) -> Place {
    let objects = server.objects(remote);
    let root = "az://bucket";
    Place { objects, root }
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
    let place = place(&server, remote);
    upload(&place.objects, &at("object"), &bytes(BYTES)).unwrap();
    let heads = proxy.take_heads();
    let blocks: Vec<_> = heads
        .iter()
        .filter(|head| head.contains("comp=block&"))
        .collect();
    assert_eq!(blocks.len(), 3, "{heads:#?}");
    let is_checked = |head: &&String| head.contains("x-ms-content-crc64: ");
    assert!(blocks.iter().all(is_checked), "{blocks:#?}");
    // Three blocks and their list: beginning sends no request.
    assert_eq!(heads.len(), 4, "{heads:#?}");
    place.uploads_and_removes();
}

#[test]
fn what_is_not_what_was_digested_is_refused() {
    let Some(server) = Azurite::start("what_is_not_what_was_digested") else {
        return;
    };
    let remote = Remote {
        patience: Some(Duration::ZERO),
        ..Remote::default()
    };
    place(&server, remote).refuses_other_bytes();
}

#[test]
fn blocks_of_an_earlier_process_are_gone_on_with() {
    let Some(server) = Azurite::start("blocks_of_an_earlier_process") else {
        return;
    };
    let place = place(&server, Remote::default());
    place.goes_on(|part| part.crc64nvme.is_some());
    assert!(place.objects.has(&at("object"), BYTES as u64, 0).unwrap());
    assert!(!place.objects.has(&at("object"), 1, 0).unwrap());
}

#[test]
fn conditions_hold_and_nothing_is_left_of_the_probe() {
    let Some(server) = Azurite::start("conditions_hold") else {
        return;
    };
    // With the slash that the portal shows.
    let remote = Remote {
        endpoint: Some(server.endpoint() + "/"),
        ..Remote::default()
    };
    place(&server, remote).has_conditions();
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
        credentials: Some(key(KEY)),
        ..Remote::default()
    };
    let none = Path::new("az://nowhere/run");
    let address = Address::of(none).unwrap().unwrap();
    let objects = Objects::open(address, &elsewhere).unwrap();
    let missing = objects.list(none).unwrap_err();
    assert_eq!(
        missing.to_string(),
        "there is no such container: create it, or correct its name"
    );
    let lost = objects.stat(none).unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::InvalidInput, "{lost}");
    let open = |remote: Remote| {
        let address = Address::of(&at("")).unwrap().unwrap();
        Objects::open(address, &remote).unwrap_err().to_string()
    };
    let region = open(Remote {
        region: Some("eu-west-1".to_owned()),
        ..Remote::default()
    });
    assert_eq!(region, "az:// has no regions: leave it out");
}

/// Azure uses one status for a failed condition and for an operation that is not allowed at all.
#[test]
fn a_lease_is_no_condition_that_did_not_hold() {
    let cases = [
        (412, "LeaseIdMissing", ErrorKind::PermissionDenied, "lease"),
        (
            409,
            "BlobImmutableDueToPolicy",
            ErrorKind::PermissionDenied,
            "policy",
        ),
        (
            409,
            "ContainerBeingDeleted",
            ErrorKind::InvalidInput,
            "deleted",
        ),
        (
            403,
            "AuthenticationFailed",
            ErrorKind::PermissionDenied,
            "AZURE_STORAGE_ACCOUNT_KEY",
        ),
    ];
    for (status, code, kind, words) in cases {
        let reply = Reply::request_error(status, code, "There is one.");
        let fake = Fake::start(move |request| match request.method.as_str() {
            "GET" => Reply::new(200, "first")
                .header("ETag", "\"0x1\"")
                .header("Last-Modified", "Wed, 25 Nov 2026 00:00:00 GMT"),
            _ => reply.clone(),
        });
        let remote = Remote {
            endpoint: Some(fake.endpoint.clone() + "/penstock"),
            credentials: Some(key(KEY)),
            patience: Some(Duration::ZERO),
            ..Remote::default()
        };
        let address = Address::of(&at("")).unwrap().unwrap();
        let objects = Objects::open(address, &remote).unwrap();
        let file = objects.create_temporary(&at("drawn")).unwrap();
        objects.change(Change::Write(&file, b"second")).unwrap();
        let (from, to) = (&*at("drawn"), &*at("text"));
        let seen = &Seen::of(b"first");
        let replaced = objects.change(Change::Replace { from, to, seen });
        let removed = objects.change(Change::RemoveSeen(to, seen));
        for refused in [replaced, removed] {
            let refused = source(refused.unwrap_err());
            assert_eq!(refused.kind(), kind, "{code}: {refused}");
            assert!(refused.to_string().contains(words), "{code}: {refused}");
        }
    }
}

/// Accounts with a hierarchical namespace report a directory as an empty object.
#[test]
fn a_directory_of_such_an_account_is_none_of_our_objects() {
    let fake = Fake::start(|request| match request.method.as_str() {
        "HEAD" => Reply::new(200, "")
            .header("x-ms-meta-hdi_isfolder", "true")
            .header("ETag", "\"0x1\"")
            .header("Last-Modified", "Wed, 25 Nov 2026 00:00:00 GMT"),
        _ => Reply::new(
            200,
            "<EnumerationResults><Blobs><Blob><Name>run/a</Name><Properties>\
             <Last-Modified>Wed, 25 Nov 2026 00:00:00 GMT</Last-Modified><Etag>0x2</Etag>\
             <Content-Length>1</Content-Length><Content-Type>x</Content-Type></Properties></Blob>\
             </Blobs><NextMarker/></EnumerationResults>",
        ),
    });
    let remote = Remote {
        endpoint: Some(fake.endpoint.clone() + "/penstock"),
        credentials: Some(key(KEY)),
        ..Remote::default()
    };
    let address = Address::of(&at("")).unwrap().unwrap();
    let objects = Objects::open(address, &remote).unwrap();
    assert_eq!(objects.stat(&at("run")).unwrap().kind, Kind::Directory);
    let file = objects.stat_file(&at("run")).unwrap_err();
    assert_eq!(file.kind(), ErrorKind::NotFound);
}
