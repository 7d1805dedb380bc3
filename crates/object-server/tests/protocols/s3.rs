//! Tests behaviour that clients of S3 rely on, and planned faults.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryStreamExt;
use http::Method;
use object_store::aws::{AmazonS3, AmazonS3Builder, AwsAuthorizer, AwsCredential, Checksum};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{
    Error, GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutOptions, RetryConfig,
};
use penstock_object_server::{Bucket, Call, Fault, OBSERVER, SECRET, Server};
use tokio::runtime::Runtime;

use crate::common::{self, Answer, DIGITS, MIB};

/// A server with one bucket.
struct World {
    server: Server,
    bucket: Arc<Bucket>,
    runtime: Runtime,
}

impl World {
    fn new() -> World {
        let server = Server::start().unwrap();
        World {
            bucket: server.make_bucket("bucket"),
            server,
            runtime: Runtime::new().unwrap(),
        }
    }

    /// A client that makes no retries.
    fn client(&self, name: &str) -> AmazonS3 {
        let retry = RetryConfig {
            max_retries: 0,
            ..RetryConfig::default()
        };
        AmazonS3Builder::new()
            .with_endpoint(self.server.endpoint())
            .with_bucket_name("bucket")
            .with_access_key_id(name)
            .with_secret_access_key(SECRET)
            .with_unsigned_payload(true)
            .with_checksum_algorithm(Checksum::CRC64NVME)
            .with_client_options(common::options())
            .with_retry(retry)
            .build()
            .unwrap()
    }

    /// Sends a signed request as given; `None` where the connection ends before the whole answer.
    fn ask(
        &self,
        client: &str,
        method: Method,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Option<Answer> {
        let uri = format!("{}/bucket{target}", self.server.endpoint());
        let mut request = common::request(method, &uri, headers, body);
        let credential = AwsCredential {
            key_id: client.to_owned(),
            secret_key: SECRET.to_owned(),
            token: None,
        };
        AwsAuthorizer::new(&credential, "s3", "us-east-1")
            .with_sign_payload(false)
            .try_authorize(&mut request, None)
            .unwrap();
        common::send(&self.runtime, request)
    }

    fn get(&self, target: &str) -> Answer {
        self.ask("a", Method::GET, target, &[], b"").unwrap()
    }

    fn put(
        &self,
        client: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Option<u16> {
        let answer = self.ask(client, Method::PUT, target, headers, body);
        answer.map(|answer| answer.status)
    }

    /// The bytes of an object, without a request.
    fn there(&self, key: &str) -> Option<Bytes> {
        let object = self.bucket.objects().remove(key);
        object.map(|object| object.bytes)
    }
}

/// The CRC-64/NVME of the digits, in the catalogue of parametrised CRC algorithms.
const DIGITS_CRC: &str = "rosUhgp5mIg=";

const CRC: &str = "x-amz-checksum-crc64nvme";

const CREATE: &[(&str, &str)] = &[("if-none-match", "*")];

#[test]
fn a_client_that_is_used_has_all_it_needs() {
    let world = World::new();
    let store = world.client("a");
    world.runtime.block_on(async {
        let key = Key::from("run/a");
        store.put(&key, DIGITS.into()).await.unwrap();
        assert_eq!(store.head(&key).await.unwrap().size, 9);
        let options = GetOptions {
            range: Some(GetRange::Bounded(2..5)),
            ..GetOptions::default()
        };
        let part = store.get_opts(&key, options).await.unwrap();
        assert_eq!(part.bytes().await.unwrap(), &DIGITS[2..5]);
        let create = PutOptions::from(PutMode::Create);
        let again = store.put_opts(&key, "x".into(), create).await;
        assert!(matches!(again, Err(Error::AlreadyExists { .. })));
        let large = Key::from("run/large");
        let upload = store.create_multipart(&large).await.unwrap();
        let mut parts = Vec::new();
        for (index, bytes) in [5 * MIB, 3].into_iter().enumerate() {
            let part = vec![index as u8; bytes].into();
            parts.push(store.put_part(&large, &upload, index, part).await.unwrap());
        }
        store
            .complete_multipart(&large, &upload, parts)
            .await
            .unwrap();
        assert_eq!(store.head(&large).await.unwrap().size, 5 * MIB as u64 + 3);
        let listed: Vec<_> = store.list(None).try_collect().await.unwrap();
        assert_eq!(listed.len(), 2);
        store.delete(&key).await.unwrap();
        assert!(matches!(
            store.head(&key).await,
            Err(Error::NotFound { .. })
        ));
    });
    assert_eq!(world.bucket.uploads().len(), 0);
}

#[test]
fn a_wrong_signature_is_refused() {
    let world = World::new();
    let stranger = AmazonS3Builder::new()
        .with_endpoint(world.server.endpoint())
        .with_bucket_name("bucket")
        .with_access_key_id("a")
        .with_secret_access_key("wrong")
        .with_client_options(common::options())
        .build()
        .unwrap();
    let put = world
        .runtime
        .block_on(stranger.put(&Key::from("a"), "x".into()));
    assert!(
        matches!(put, Err(Error::PermissionDenied { .. })),
        "{put:?}"
    );
    assert_eq!(world.bucket.objects().len(), 0);
}

#[test]
fn conditions_hold_for_what_is_there() {
    let world = World::new();
    let put = |headers: &[(&str, &str)], body: &[u8]| world.put("a", "/k", headers, body).unwrap();
    assert_eq!(put(&[("if-match", "\"x\"")], b"0"), 404);
    assert_eq!(put(CREATE, b"1"), 200);
    assert_eq!(put(CREATE, b"2"), 412);
    let tag = world.get("/k").header("etag").to_owned();
    assert_eq!(put(&[("if-match", "\"other\"")], b"3"), 412);
    assert_eq!(put(&[("if-match", &tag)], b"4"), 200);
    assert_eq!(world.there("k").unwrap(), &b"4"[..]);
    let delete = |condition: &[(&str, &str)]| {
        let answer = world.ask("a", Method::DELETE, "/k", condition, b"");
        answer.unwrap().status
    };
    assert_eq!(delete(&[("if-match", &tag)]), 412);
    assert_eq!(delete(&[]), 204);
    assert_eq!(delete(&[]), 204);
    assert_eq!(delete(&[("if-match", &tag)]), 404);
    let changed = [("range", "bytes=0-0"), ("if-match", tag.as_str())];
    world.bucket.put("k", "other");
    let answer = world.ask("a", Method::GET, "/k", &changed, b"").unwrap();
    assert_eq!(answer.status, 412);
}

#[test]
fn checksums_are_checked_and_told() {
    let world = World::new();
    assert_eq!(
        world.put("a", "/k", &[(CRC, DIGITS_CRC)], DIGITS),
        Some(200)
    );
    assert_eq!(
        world.put("a", "/k", &[(CRC, DIGITS_CRC)], b"123456780"),
        Some(400)
    );
    assert_eq!(world.there("k").unwrap(), DIGITS);
    let mode = [("x-amz-checksum-mode", "ENABLED")];
    let head = world.ask("a", Method::HEAD, "/k", &mode, b"").unwrap();
    assert_eq!(head.header(CRC), DIGITS_CRC);
    assert_eq!(head.header("x-amz-checksum-type"), "FULL_OBJECT");
}

#[test]
fn an_upload_becomes_what_was_asserted_or_nothing() {
    let world = World::new();
    let begun = world
        .ask("a", Method::POST, "/k?uploads", &[], b"")
        .unwrap();
    let id = begun.element("UploadId").to_owned();
    assert_eq!(world.bucket.uploads()[&id].key, "k");
    let target = format!("/k?partNumber=1&uploadId={id}");
    assert_eq!(
        world.put("a", &target, &[(CRC, DIGITS_CRC)], b"x"),
        Some(400)
    );
    let part = world.ask("a", Method::PUT, &target, &[(CRC, DIGITS_CRC)], DIGITS);
    let tag = part.unwrap().header("etag").to_owned();
    let complete = |tag: &str, headers: &[(&str, &str)]| {
        let text = format!(
            "<CompleteMultipartUpload><Part><ETag>{tag}</ETag><PartNumber>1</PartNumber></Part>\
             </CompleteMultipartUpload>"
        );
        let target = format!("/k?uploadId={id}");
        world
            .ask("a", Method::POST, &target, headers, text.as_bytes())
            .unwrap()
            .status
    };
    let size = "x-amz-mp-object-size";
    assert_eq!(complete("\"other\"", &[]), 400);
    assert_eq!(complete(&tag, &[(size, "8")]), 400);
    assert_eq!(complete(&tag, &[(CRC, "AAAAAAAAAAA=")]), 400);
    world.bucket.put("k", "somebody else's");
    assert_eq!(complete(&tag, CREATE), 412);
    world.bucket.remove("k");
    let right = [(size, "9"), (CRC, DIGITS_CRC), CREATE[0]];
    assert_eq!(complete(&tag, &right), 200);
    assert_eq!(world.there("k").unwrap(), DIGITS);
    assert_eq!(world.bucket.uploads().len(), 0);
    // A client that lost the answer asks again.
    assert_eq!(complete(&tag, &right), 200);
    world.bucket.forget_uploads();
    assert_eq!(complete(&tag, &right), 404);
}

#[test]
fn parts_but_for_the_last_have_a_smallest_size() {
    let world = World::new();
    let store = world.client("a");
    let key = Key::from("k");
    for (first, is_right) in [(5 * MIB, true), (5 * MIB - 1, false)] {
        let completed = world.runtime.block_on(async {
            let upload = store.create_multipart(&key).await.unwrap();
            let mut parts = Vec::new();
            for (index, bytes) in [first, 1].into_iter().enumerate() {
                let part = vec![0; bytes].into();
                parts.push(store.put_part(&key, &upload, index, part).await.unwrap());
            }
            store.complete_multipart(&key, &upload, parts).await
        });
        assert_eq!(completed.is_ok(), is_right, "{completed:?}");
    }
}

#[test]
fn listings_have_pages_and_prefixes() {
    let world = World::new();
    for key in ["a", "d/1", "d/2", "d/e/3", "f", "x"] {
        world.bucket.put(key, "");
    }
    let mut keys = Vec::new();
    let mut target = "/?list-type=2&delimiter=%2F&max-keys=2".to_owned();
    for _ in 0..3 {
        let page = world.get(&target);
        for (tag, name) in [("Key", "Key"), ("CommonPrefixes", "Prefix")] {
            let tag = format!("<{tag}>");
            keys.extend(page.text.split(&tag).skip(1).map(|rest| {
                let rest = rest.trim_start_matches(&format!("<{name}>"));
                rest.split('<').next().unwrap().to_owned()
            }));
        }
        if page.element("IsTruncated") == "false" {
            break;
        }
        let next = page.element("NextContinuationToken").replace('/', "%2F");
        target = format!("/?list-type=2&delimiter=%2F&max-keys=2&continuation-token={next}");
    }
    keys.sort();
    assert_eq!(keys, ["a", "d/", "f", "x"]);
    let below = world.get("/?list-type=2&delimiter=%2F&prefix=d%2F");
    assert_eq!(below.text.matches("<Key>").count(), 2);
    assert!(below.text.contains("<Prefix>d/e/</Prefix>"));
}

#[test]
fn open_uploads_and_their_parts_are_listed_by_the_clock() {
    let world = World::new();
    for key in ["run/a", "run/b", "other"] {
        let target = format!("/{key}?uploads");
        world.ask("a", Method::POST, &target, &[], b"").unwrap();
        world.bucket.pass(Duration::from_secs(3600));
    }
    let first = world.get("/?uploads&prefix=run%2F&max-uploads=1");
    assert_eq!(first.element("Key"), "run/a");
    assert_eq!(first.element("Initiated"), "2026-01-01T00:00:00.000Z");
    assert_eq!(first.element("IsTruncated"), "true");
    let (key, id) = (first.element("NextKeyMarker"), first.element("UploadId"));
    let key = key.replace('/', "%2F");
    let target = format!("/?uploads&prefix=run%2F&key-marker={key}&upload-id-marker={id}");
    let second = world.get(&target);
    assert_eq!(second.element("Key"), "run/b");
    assert_eq!(second.element("Initiated"), "2026-01-01T01:00:00.000Z");
    assert_eq!(second.element("IsTruncated"), "false");
    for number in [1, 2] {
        let target = format!("/run/a?partNumber={number}&uploadId={id}");
        assert_eq!(world.put("a", &target, &[], b"x"), Some(200));
    }
    let parts = world.get(&format!("/run/a?uploadId={id}&max-parts=1"));
    assert_eq!(parts.element("PartNumber"), "1");
    assert_eq!(parts.element("NextPartNumberMarker"), "1");
    let rest = world.get(&format!("/run/a?uploadId={id}&part-number-marker=1"));
    assert_eq!(rest.element("PartNumber"), "2");
    let target = format!("/run/a?uploadId={id}");
    let aborted = world.ask("a", Method::DELETE, &target, &[], b"").unwrap();
    assert_eq!(aborted.status, 204);
    assert_eq!(world.bucket.uploads().len(), 2);
}

#[test]
fn each_fault_is_what_it_says() {
    // Whether a create is applied, and its client's answer.
    let cases = [
        (Fault::Refused(500), false, Some(500)),
        (Fault::Refused(200), false, Some(200)),
        (Fault::Disowned(503), true, Some(503)),
        (Fault::Dropped, false, None),
        (Fault::Unanswered, true, None),
        (Fault::Late(5), false, None),
        // The second time the object exists.
        (Fault::Doubled, true, Some(412)),
        // The answer has no body to cut.
        (Fault::Cut, true, None),
        (Fault::Held(1), true, Some(200)),
        (Fault::Killed, false, None),
        (Fault::KilledAfter, true, None),
    ];
    for (fault, is_applied, reported) in cases {
        let world = World::new();
        world.bucket.plan("a", 1, fault);
        assert_eq!(world.put("a", "/first", CREATE, b"1"), Some(200));
        assert_eq!(
            world.put("a", "/second", CREATE, b"2"),
            reported,
            "{fault:?}"
        );
        assert_eq!(world.there("second").is_some(), is_applied, "{fault:?}");
        let journal = world.bucket.journal();
        assert_eq!(journal.len(), 2);
        let entry = &journal[1];
        assert_eq!((entry.call, entry.key.as_str()), (Call::Put, "second"));
        assert_eq!((entry.nth, entry.fault), (1, Some(fault)));
        assert_eq!((entry.applied > 0, entry.status), (is_applied, reported));
        assert!(entry.is_conditional);
        // Later requests are unaffected; a dead client's are refused.
        let is_dead = matches!(fault, Fault::Killed | Fault::KilledAfter);
        let next = if is_dead { Some(403) } else { Some(200) };
        assert_eq!(world.put("a", "/third", &[], b"3"), next, "{fault:?}");
        assert_eq!(world.put("b", "/fourth", &[], b"4"), Some(200));
        assert_eq!(world.there("third").is_some(), !is_dead);
    }
}

#[test]
fn an_answer_is_cut_in_its_middle() {
    let world = World::new();
    world.bucket.put("k", DIGITS);
    world.bucket.plan("a", 0, Fault::Cut);
    assert!(world.ask("a", Method::GET, "/k", &[], b"").is_none());
    assert_eq!(world.get("/k").text.as_bytes(), DIGITS);
}

#[test]
fn an_answer_is_garbled_or_has_another_bit() {
    let world = World::new();
    world.bucket.put("k", DIGITS);
    world.bucket.plan("a", 0, Fault::Garbled);
    assert!(world.ask("a", Method::GET, "/k", &[], b"").is_none());
    assert_eq!(world.get("/k").text.as_bytes(), DIGITS);
    // The lowest bit of the second byte, directly and counted modulo the length.
    for (nth, bit) in [(2, 8), (3, 8 + 72)] {
        world.bucket.plan("a", nth, Fault::Flipped(bit));
        assert_eq!(world.get("/k").text, "133456789");
    }
    assert_eq!(world.get("/k").text.as_bytes(), DIGITS);
}

#[test]
fn a_listing_is_behind_what_was_done() {
    let world = World::new();
    let keys = || {
        let listed = world.get("?list-type=2").text;
        ["a", "b", "c"].map(|key| listed.contains(&format!("<Key>{key}</Key>")))
    };
    world.bucket.put("a", DIGITS);
    world.bucket.put("b", DIGITS);
    world.bucket.remove("a");
    world.bucket.put("c", DIGITS);
    assert_eq!(keys(), [false, true, true]);
    let behind = [
        (1, [false, true, false]),
        (2, [true, true, false]),
        (3, [true, false, false]),
        (9, [false, false, false]),
    ];
    for (nth, (changes, expected)) in (1..).zip(behind) {
        world.bucket.plan("a", nth, Fault::Stale(changes));
        assert_eq!(keys(), expected);
    }
    assert_eq!(keys(), [false, true, true]);
}

#[test]
fn what_is_late_comes_before_the_request_that_it_is_told_to() {
    let world = World::new();
    world.bucket.plan("a", 0, Fault::Late(2));
    assert_eq!(world.put("a", "/late", &[], b"late"), None);
    assert_eq!(world.put("a", "/late", &[], b"next"), Some(200));
    assert_eq!(world.there("late").unwrap(), &b"next"[..]);
    assert_eq!(world.get("/late").text, "late");
    world.bucket.plan("a", 3, Fault::Late(9));
    assert_eq!(world.put("a", "/end", &[], b"x"), None);
    world.bucket.kill("a");
    assert_eq!(world.there("end"), None);
    world.server.apply_late(&world.bucket);
    assert!(world.there("end").is_some());
}

#[test]
fn who_looks_on_is_neither_counted_nor_looked_at() {
    let world = Arc::new(World::new());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (inside, looks) = (Arc::downgrade(&world), Arc::clone(&seen));
    world.bucket.between(move || {
        let world = inside.upgrade().unwrap();
        let target = "/?list-type=2";
        let answer = world.ask(OBSERVER, Method::GET, target, &[], b"").unwrap();
        looks
            .lock()
            .unwrap()
            .push(answer.text.matches("<Key>").count());
    });
    for key in ["/1", "/2", "/3"] {
        assert_eq!(world.put("a", key, &[], b"x"), Some(200));
    }
    assert_eq!(*seen.lock().unwrap(), [0, 1, 2]);
    assert_eq!(world.bucket.journal().len(), 3);
}

/// The clients whose requests were answered, in order; two clients make eight each.
fn order_of_two(world: &World) -> String {
    std::thread::scope(|scope| {
        for client in ["a", "b"] {
            scope.spawn(move || {
                let store = world.client(client);
                let runtime = Runtime::new().unwrap();
                for _ in 0..8 {
                    let key = Key::from("k");
                    runtime.block_on(store.put(&key, client.into())).unwrap();
                }
                world.bucket.ended(client);
            });
        }
    });
    let journal = world.bucket.journal().into_iter();
    journal.map(|entry| entry.client).collect()
}

#[test]
fn a_seed_says_whose_request_is_next() {
    let orders = [1, 1, 2, 3].map(|seed| {
        let world = World::new();
        world.bucket.interleave(&["a", "b"], seed);
        order_of_two(&world)
    });
    assert_eq!(orders[0], orders[1]);
    assert!(orders[2] != orders[0] || orders[3] != orders[0]);
}

#[test]
fn an_order_that_is_written_down_is_kept() {
    let world = World::new();
    world.bucket.interleave(&["a", "b"], 1);
    // Clients that are absent, or have ended, are skipped.
    let stages = [("a", 2), ("c", 1), ("b", 3), ("a", usize::MAX), ("a", 1)];
    world.bucket.direct(&stages);
    assert_eq!(order_of_two(&world), "aabbbaaaaaabbbbb");
    assert_eq!(world.bucket.requests(), 16);
}
