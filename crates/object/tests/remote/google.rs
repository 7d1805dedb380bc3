//! Google Cloud Storage by its XML API, on a server in memory, because no emulator supports
//! uploads.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use crate::common::contract::{BYTES, Place};
use crate::common::{PART_BYTES, bytes, download, send, upload};
use penstock_io::file::Direct;
use penstock_io::file_system::{Change, FileSystem, Files};
use penstock_object::{Address, Credentials, Keys, Objects, Remote};
use penstock_object_server::{Bucket, Call, Fault, Server, token};

const ROOT: &str = "gs://a-bucket";

/// A server with one bucket.
struct World {
    server: Server,
    bucket: Arc<Bucket>,
}

impl World {
    fn new() -> World {
        let server = Server::google().unwrap();
        let bucket = server.make_bucket("a-bucket");
        World { server, bucket }
    }

    fn place(&self, remote: Remote) -> Place {
        let remote = Remote {
            endpoint: Some(self.server.endpoint()),
            credentials: remote.credentials.or_else(|| Some(bearer(token("me", 0)))),
            part_bytes: remote.part_bytes.or(Some(PART_BYTES)),
            ..remote
        };
        let address = Address::of(Path::new(ROOT)).unwrap().unwrap();
        let objects = Objects::open(address, &remote).unwrap();
        let root = ROOT;
        Place { objects, root }
    }
}

fn bearer(token: String) -> Credentials {
    Credentials::Given(keys(token, None))
}

fn keys(token: String, expires: Option<SystemTime>) -> Keys {
    Keys {
        id: String::new(),
        secret: String::new(),
        token: Some(token),
        expires,
    }
}

#[test]
fn parts_and_objects_are_what_was_sent() {
    let world = World::new();
    let place = world.place(Remote::default());
    place.uploads_and_removes();
    assert!(world.bucket.uploads().is_empty());
    let path = place.at("object");
    upload(&place.objects, &path, &bytes(BYTES)).unwrap();
    // Begin, three parts, completion, and a HEAD request for the object that the store made.
    let calls = world.bucket.journal().into_iter().rev().take(2);
    let calls: Vec<Call> = calls.map(|entry| entry.call).collect();
    assert_eq!(calls, [Call::Head, Call::Complete]);
}

#[test]
fn what_is_not_what_was_digested_is_refused() {
    let remote = Remote {
        patience: Some(Duration::ZERO),
        ..Remote::default()
    };
    World::new().place(remote).refuses_other_bytes();
}

#[test]
fn parts_of_an_earlier_process_are_gone_on_with() {
    let world = World::new();
    // The store does not report the checksums of parts, which it has verified.
    let place = world.place(Remote::default());
    place.goes_on(|part| part.crc64nvme.is_none());
    assert!(world.bucket.uploads().len() == 1);
}

#[test]
fn conditions_hold_and_nothing_is_left_of_the_probe() {
    let world = World::new();
    world.place(Remote::default()).has_conditions();
    assert!(world.bucket.objects().is_empty());
}

#[test]
fn a_name_may_be_written_once_a_second() {
    let world = World::new();
    world.bucket.limit_changes();
    let inside = Arc::downgrade(&world.bucket);
    world.bucket.between(move || {
        if let Some(bucket) = inside.upgrade() {
            bucket.pass(Duration::from_millis(300));
        }
    });
    world.place(Remote::default()).has_conditions();
}

#[test]
fn a_token_that_ends_is_had_anew_in_the_middle_of_an_upload() {
    let world = World::new();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let ask = move || {
        let nth = count.fetch_add(1, Ordering::SeqCst);
        // Each key expires within the time of early renewal, so the next request asks for a new
        // one.
        let ends = SystemTime::now() + Duration::from_secs(60);
        Ok(keys(token("me", nth), Some(ends)))
    };
    let place = world.place(Remote {
        credentials: Some(Credentials::Asked(Arc::new(ask))),
        ..Remote::default()
    });
    let (objects, path, bytes) = (&place.objects, place.at("object"), bytes(BYTES));
    let file = Arc::new(objects.create(&path, Direct::Off).unwrap());
    send(objects, &file, &bytes, [0]).unwrap();
    let before = asked.load(Ordering::SeqCst);
    for nth in 0..before {
        world.bucket.expire(&token("me", nth));
    }
    send(objects, &file, &bytes, [1, 2]).unwrap();
    objects.change(Change::SyncData(&file)).unwrap();
    assert_eq!(download(objects, &path).unwrap(), bytes);
    assert!(asked.load(Ordering::SeqCst) > before);
}

#[test]
fn an_end_whose_answer_is_lost_is_found_by_what_is_there() {
    let world = World::new();
    let place = world.place(Remote::default());
    world.bucket.forget_uploads();
    // Begin, three parts, completion.
    world.bucket.plan("me", 4, Fault::Unanswered);
    upload(&place.objects, &place.at("object"), &bytes(BYTES)).unwrap();
    let read = download(&place.objects, &place.at("object")).unwrap();
    assert_eq!(read, bytes(BYTES));
}

#[test]
fn what_google_refuses_is_said_with_its_remedy() {
    let world = World::new();
    let asked = |remote: Remote, root: &str| {
        let remote = Remote {
            endpoint: Some(world.server.endpoint()),
            patience: Some(Duration::ZERO),
            ..remote
        };
        let root = Path::new(root);
        let address = Address::of(root).unwrap().unwrap();
        let objects = Objects::open(address, &remote)?;
        objects.list(&root.join("run")).map(drop)
    };
    let with = |credentials| Remote {
        credentials: Some(credentials),
        ..Remote::default()
    };
    let mine = || with(bearer(token("me", 0)));
    let empty = asked(mine(), ROOT).unwrap_err();
    assert_eq!(empty.kind(), ErrorKind::NotFound);
    let foreign = asked(with(bearer("nobody's".to_owned())), ROOT).unwrap_err();
    assert_eq!(foreign.kind(), ErrorKind::PermissionDenied);
    assert!(
        foreign
            .to_string()
            .contains("GOOGLE_APPLICATION_CREDENTIALS")
    );
    let missing = asked(mine(), "gs://nowhere").unwrap_err();
    assert_eq!(
        missing.to_string(),
        "there is no such bucket: create it, or correct its name"
    );
    let of_s3 = Keys {
        id: "key".to_owned(),
        secret: "secret".to_owned(),
        token: None,
        expires: None,
    };
    let keys = asked(with(Credentials::Given(of_s3)), ROOT).unwrap_err();
    assert!(keys.to_string().contains("penstock.Token"), "{keys}");
    let region = Remote {
        region: Some("eu-west-1".to_owned()),
        ..mine()
    };
    let region = asked(region, ROOT).unwrap_err();
    assert_eq!(region.to_string(), "gs:// has no regions: leave it out");
}
