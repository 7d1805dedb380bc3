//! Tests behaviour that clients of Google Cloud Storage rely on, or must not rely on.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryStreamExt;
use http::Method;
use object_store::gcp::{GoogleCloudStorage, GoogleCloudStorageBuilder};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{
    Error, GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutResult,
    RetryConfig, UpdateVersion,
};
use penstock_object_server::{Bucket, Call, Fault, OBSERVER, Server, token};
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
        let server = Server::google().unwrap();
        World {
            bucket: server.make_bucket("a-bucket"),
            server,
            runtime: Runtime::new().unwrap(),
        }
    }

    /// A client that makes no retries.
    fn client(&self, token: &str) -> GoogleCloudStorage {
        let retry = RetryConfig {
            max_retries: 0,
            ..RetryConfig::default()
        };
        GoogleCloudStorageBuilder::new()
            .with_base_url(&self.server.endpoint())
            .with_bucket_name("a-bucket")
            .with_bearer_token(token)
            .with_client_options(common::options())
            .with_retry(retry)
            .build()
            .unwrap()
    }

    /// Sends a request as given, to the server's address; `None` without a whole answer.
    fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Option<Answer> {
        let uri = format!("{}{path}", self.server.endpoint());
        let request = common::request(method, &uri, headers, body);
        common::send(&self.runtime, request)
    }

    /// Sends a request with the first token of a client.
    fn ask(
        &self,
        client: &str,
        method: Method,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Option<Answer> {
        let bearer = format!("Bearer {}", token(client, 0));
        let length = body.len().to_string();
        let mut all = vec![("authorization", bearer.as_str())];
        // The HTTP client sends no length for an empty body.
        if matches!(method, Method::POST | Method::PUT) {
            all.push(("content-length", &length));
        }
        let headers = [&all, headers].concat();
        self.send(method, &format!("/a-bucket{target}"), &headers, body)
    }

    fn get(&self, target: &str) -> Answer {
        self.ask("a", Method::GET, target, &[], b"").unwrap()
    }

    fn put(&self, target: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        self.ask("a", Method::PUT, target, headers, body).unwrap()
    }

    fn delete(&self, target: &str, headers: &[(&str, &str)]) -> Answer {
        self.ask("a", Method::DELETE, target, headers, b"").unwrap()
    }

    /// The bytes of an object, without a request.
    fn there(&self, key: &str) -> Option<Bytes> {
        let object = self.bucket.objects().remove(key);
        object.map(|object| object.bytes)
    }

    fn begin_upload(&self, key: &str) -> String {
        let target = format!("/{key}?uploads");
        let begun = self.ask("a", Method::POST, &target, &[], b"").unwrap();
        begun.element("UploadId").to_owned()
    }

    fn complete(&self, key: &str, id: &str, tag: &str, headers: &[(&str, &str)]) -> Answer {
        let text = format!(
            "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>{tag}</ETag></Part>\
             </CompleteMultipartUpload>"
        );
        let target = format!("/{key}?uploadId={id}");
        let answer = self.ask("a", Method::POST, &target, headers, text.as_bytes());
        answer.unwrap()
    }
}

/// An answer's status, and the code of its error.
fn said(answer: &Answer) -> (u16, &str) {
    let code = match answer.text.contains("<Code>") {
        true => answer.element("Code"),
        false => "",
    };
    (answer.status, code)
}

/// The checksums in an answer, in their order.
fn hashes(answer: &Answer) -> Vec<&str> {
    let values = answer.headers.get_all(HASH).iter();
    values.map(|value| value.to_str().unwrap()).collect()
}

/// The CRC-32C of the digits, in the catalogue of parametrised CRC algorithms: E3 06 92 83.
const DIGITS_CRC: &str = "crc32c=4waSgw==";

/// Their MD5.
const DIGITS_MD5: &str = "md5=JfnnlDI7RTiF9RgfG2JNCw==";

const HASH: &str = "x-goog-hash";

const GENERATION: &str = "x-goog-generation";

const IF_GENERATION: &str = "x-goog-if-generation-match";

const CREATE: &[(&str, &str)] = &[(IF_GENERATION, "0")];

fn options_of(put: &PutResult) -> PutOptions {
    PutOptions::from(PutMode::Update(UpdateVersion {
        e_tag: put.e_tag.clone(),
        version: put.version.clone(),
    }))
}

#[test]
fn a_client_that_is_used_has_all_it_needs() {
    let world = World::new();
    let store = world.client(&token("a", 0));
    world.runtime.block_on(async {
        let key = Key::parse("run-1/a b+c=ä").unwrap();
        let create = PutOptions::from(PutMode::Create);
        let first = store.put_opts(&key, DIGITS.into(), create.clone()).await;
        let first = first.unwrap();
        let again = store.put_opts(&key, "x".into(), create).await;
        assert!(matches!(again, Err(Error::AlreadyExists { .. })));
        let second = store.put_opts(&key, DIGITS.into(), options_of(&first));
        let second = second.await.unwrap();
        assert_ne!(first.version, second.version);
        let late = store.put_opts(&key, "x".into(), options_of(&first)).await;
        assert!(matches!(late, Err(Error::Precondition { .. })), "{late:?}");
        let head = store.head(&key).await.unwrap();
        assert_eq!((head.size, head.version), (9, second.version.clone()));
        assert_eq!(head.e_tag, second.e_tag);
        let options = |version: &Option<String>| GetOptions {
            range: Some(GetRange::Bounded(2..5)),
            if_match: second.e_tag.clone(),
            version: version.clone(),
            ..GetOptions::default()
        };
        let part = store.get_opts(&key, options(&second.version)).await;
        assert_eq!(part.unwrap().bytes().await.unwrap(), &DIGITS[2..5]);
        let gone = store.get_opts(&key, options(&first.version)).await;
        assert!(matches!(gone, Err(Error::NotFound { .. })));
        let copy = Key::from("run-1/b");
        store.copy_if_not_exists(&key, &copy).await.unwrap();
        let again = store.copy_if_not_exists(&key, &copy).await;
        assert!(matches!(again, Err(Error::AlreadyExists { .. })));
        let large = Key::from("run-1/d/large");
        let upload = store.create_multipart(&large).await.unwrap();
        let mut parts = Vec::new();
        for (index, bytes) in [5 * MIB, 3].into_iter().enumerate() {
            let part = vec![index as u8; bytes].into();
            parts.push(store.put_part(&large, &upload, index, part).await.unwrap());
        }
        let put = store.complete_multipart(&large, &upload, parts).await;
        let head = store.head(&large).await.unwrap();
        assert_eq!(head.size, 5 * MIB as u64 + 3);
        assert_eq!(head.version, put.unwrap().version);
        let upload = store.create_multipart(&large).await.unwrap();
        store.abort_multipart(&large, &upload).await.unwrap();
        let later: Vec<_> = store
            .list_with_offset(None, &copy)
            .try_collect()
            .await
            .unwrap();
        assert_eq!(later[0].location, large);
        let all: Vec<_> = store
            .list(Some(&Key::from("run-1")))
            .try_collect()
            .await
            .unwrap();
        assert_eq!(all.len(), 3);
        let below = store
            .list_with_delimiter(Some(&Key::from("run-1")))
            .await
            .unwrap();
        assert_eq!(below.objects.len(), 2);
        assert_eq!(below.common_prefixes, [Key::from("run-1/d")]);
        store.delete(&key).await.unwrap();
        let again = store.delete(&key).await;
        assert!(matches!(again, Err(Error::NotFound { .. })));
    });
    assert_eq!(world.bucket.uploads().len(), 0);
    let journal = world.bucket.journal();
    assert_eq!(journal[0].key, "run-1/a b+c=ä");
    assert!(journal.iter().all(|entry| entry.client == "a"));
}

#[test]
fn who_has_no_token_of_its_is_refused() {
    let world = World::new();
    world.bucket.expire(&token("a", 0));
    world.bucket.plan("a", 1, Fault::Refused(401));
    let refused = (401, "AuthenticationRequired");
    let expired = format!("Bearer {}", token("a", 0));
    let renewed = format!("Bearer {}", token("a", 1));
    for (authorization, wanted) in [
        (None, (403, "AccessDenied")),
        (Some("Bearer wrong.0.a"), refused),
        (Some("Bearer secret"), refused),
        (Some("Basic secret.0.a"), refused),
        (Some(expired.as_str()), refused),
        (Some(renewed.as_str()), refused),
        (Some(renewed.as_str()), (200, "")),
    ] {
        let headers: Vec<_> = authorization
            .map(|value| ("authorization", value))
            .into_iter()
            .collect();
        assert_eq!(world.bucket.objects().len(), 0);
        let answer = world.send(Method::PUT, "/a-bucket/k", &headers, b"x");
        assert_eq!(said(&answer.unwrap()), wanted, "{authorization:?}");
    }
    let clients = world.bucket.journal().into_iter();
    let clients: Vec<String> = clients.map(|entry| entry.client).collect();
    assert_eq!(clients, ["", "", "", "", "a", "a", "a"]);
    // Other buckets still accept the token.
    world.server.make_bucket("other");
    let headers = [("authorization", expired.as_str())];
    let answer = world.send(Method::PUT, "/other/k", &headers, b"x").unwrap();
    assert_eq!(answer.status, 200);
}

#[test]
fn what_sends_a_body_says_its_length() {
    let world = World::new();
    let headers = [("authorization", &*format!("Bearer {}", token("a", 0)))];
    for (method, target) in [
        (Method::POST, "/a-bucket/k?uploads"),
        (Method::PUT, "/a-bucket/k"),
    ] {
        let answer = world.send(method, target, &headers, b"").unwrap();
        assert_eq!(said(&answer), (411, "MissingContentLength"));
    }
    assert!(world.bucket.uploads().is_empty() && world.bucket.objects().is_empty());
}

#[test]
fn what_is_not_there_is_reported() {
    let world = World::new();
    let headers = [("authorization", &*format!("Bearer {}", token("a", 0)))];
    let answer = world
        .send(Method::GET, "/nowhere/k", &headers, b"")
        .unwrap();
    assert_eq!(said(&answer), (404, "NoSuchBucket"));
    assert_eq!(said(&world.get("/k")), (404, "NoSuchKey"));
    assert_eq!(said(&world.delete("/k", &[])), (404, "NoSuchKey"));
    assert_eq!(said(&world.delete("/k", CREATE)), (404, "NoSuchKey"));
    let upload = world.get("/k?uploadId=upload-0");
    assert_eq!(said(&upload), (404, "NoSuchUpload"));
    let many = b"<Delete><Object><Key>k</Key></Object></Delete>";
    let answer = world.ask("a", Method::POST, "/?delete", &[], many).unwrap();
    assert_eq!(said(&answer), (501, "NotImplemented"));
}

#[test]
fn conditions_are_on_the_generation_and_on_no_tag() {
    let world = World::new();
    let failed = (412, "PreconditionFailed");
    assert_eq!(
        said(&world.put("/k", &[(IF_GENERATION, "7")], b"0")),
        failed
    );
    let first = world.put("/k", CREATE, b"1");
    assert_eq!(said(&first), (200, ""));
    let generation = first.header(GENERATION);
    assert_eq!(said(&world.put("/k", CREATE, b"2")), failed);
    let second = world.put("/k", &[(IF_GENERATION, generation)], b"1");
    assert_eq!(second.header("etag"), first.header("etag"));
    assert!(second.header(GENERATION) > generation);
    let late = [(IF_GENERATION, generation)];
    assert_eq!(said(&world.put("/k", &late, b"3")), failed);
    assert_eq!(said(&world.delete("/k", &late)), failed);
    let answer = world.ask("a", Method::GET, "/k", &late, b"").unwrap();
    assert_eq!(said(&answer), failed);
    assert_eq!(world.there("k").unwrap(), &b"1"[..]);
    let right = [(IF_GENERATION, second.header(GENERATION))];
    let answer = world.ask("a", Method::GET, "/k", &right, b"").unwrap();
    assert_eq!(answer.text, "1");
    let wrong = [(IF_GENERATION, "*")];
    assert_eq!(
        said(&world.put("/k", &wrong, b"3")),
        (400, "InvalidArgument")
    );
    // S3's conditions apply to reads.
    let other = [("if-match", "\"other\"")];
    let answer = world.ask("a", Method::GET, "/k", &other, b"").unwrap();
    assert_eq!(said(&answer), failed);
    assert_eq!(
        said(&world.put("/k", &[("if-none-match", "*")], b"4")),
        (200, "")
    );
    assert_eq!(said(&world.put("/k", &other, b"5")), (200, ""));
    assert_eq!(said(&world.delete("/k", &other)), (204, ""));
    // An object made anew has a new generation.
    let third = world.put("/k", CREATE, b"1");
    assert!(third.header(GENERATION) > second.header(GENERATION));
    let right = [(IF_GENERATION, third.header(GENERATION))];
    assert_eq!(said(&world.delete("/k", &right)), (204, ""));
    let journal = world.bucket.journal();
    let is_conditional = journal.iter().map(|entry| entry.is_conditional);
    let unconditional = is_conditional.filter(|is_conditional| !is_conditional);
    assert_eq!(unconditional.count(), 3);
}

#[test]
fn checksums_are_checked_and_told() {
    let world = World::new();
    let both = format!("{DIGITS_CRC},{DIGITS_MD5}");
    let put = world.put("/k", &[(HASH, both.as_str())], DIGITS);
    let wrong = "crc32c=AAAAAA==";
    let wrong_md5 = "AAAAAAAAAAAAAAAAAAAAAA==";
    let bad = (400, "BadDigest");
    for (headers, wanted) in [
        (vec![(HASH, wrong)], bad),
        (vec![(HASH, DIGITS_MD5), (HASH, wrong)], bad),
        (vec![("content-md5", wrong_md5)], bad),
        (vec![(HASH, "crc32c=AAAA")], (400, "InvalidDigest")),
        (vec![(HASH, "sha1=AAAA")], (400, "InvalidDigest")),
    ] {
        assert_eq!(
            said(&world.put("/k", &headers, DIGITS)),
            wanted,
            "{headers:?}"
        );
    }
    assert_eq!(world.bucket.changes(), 1);
    let range = [("range", "bytes=0-1")];
    let some = world.ask("a", Method::GET, "/k", &range, b"").unwrap();
    assert_eq!((some.status, some.text.as_str()), (206, "12"));
    let mode = [("x-amz-checksum-mode", "ENABLED")];
    let head = world.ask("a", Method::HEAD, "/k", &mode, b"").unwrap();
    for answer in [&put, &some, &head] {
        assert_eq!(hashes(answer), [DIGITS_CRC, DIGITS_MD5]);
        assert_eq!(answer.header("x-goog-stored-content-length"), "9");
        assert_eq!(answer.header("x-goog-metageneration"), "1");
        assert_eq!(answer.header(GENERATION), put.header(GENERATION));
        assert_eq!(answer.header("etag"), put.header("etag"));
        let mut names = answer.headers.keys();
        assert!(!names.any(|name| name.as_str().starts_with("x-amz-")));
    }
    assert!(head.headers.contains_key("last-modified"));
}

#[test]
fn an_upload_becomes_an_object_without_conditions() {
    let world = World::new();
    let id = world.begin_upload("run/k");
    let target = format!("/run/k?partNumber=1&uploadId={id}");
    let wrong = world.put(&target, &[(HASH, DIGITS_CRC)], b"x");
    assert_eq!(said(&wrong), (400, "BadDigest"));
    let part = world.put(&target, &[(HASH, DIGITS_CRC)], DIGITS);
    assert_eq!(hashes(&part), [DIGITS_CRC, DIGITS_MD5]);
    assert!(!part.headers.contains_key(GENERATION));
    let uploads = world.get("/?uploads&prefix=run%2F");
    assert_eq!(uploads.element("Key"), "run/k");
    assert_eq!(uploads.element("UploadId"), id);
    let parts = world.get(&format!("/run/k?uploadId={id}"));
    assert_eq!(
        (parts.element("PartNumber"), parts.element("Size")),
        ("1", "9")
    );
    assert!(!parts.text.contains("CRC64NVME"), "{}", parts.text);
    let tag = part.header("etag").to_owned();
    // Google refuses conditions here rather than ignore them.
    let refused = (400, "NotImplemented");
    assert_eq!(said(&world.complete("run/k", &id, &tag, CREATE)), refused);
    assert_eq!(said(&world.put(&target, CREATE, DIGITS)), refused);
    let begun = world.ask("a", Method::POST, "/run/k?uploads", CREATE, b"");
    assert_eq!(said(&begun.unwrap()), refused);
    world.bucket.put("run/k", "somebody else's");
    let absent = [("if-none-match", "*")];
    let completed = world.complete("run/k", &id, &tag, &absent);
    assert_eq!(completed.status, 200);
    assert_eq!(hashes(&completed), [DIGITS_CRC]);
    assert!(!completed.text.contains("CRC64NVME"), "{}", completed.text);
    assert_eq!(world.there("run/k").unwrap(), DIGITS);
    let head = world.ask("a", Method::HEAD, "/run/k", &[], b"").unwrap();
    assert_eq!(head.header(GENERATION), completed.header(GENERATION));
    assert_eq!(hashes(&head), [DIGITS_CRC]);
    // A client that lost the answer asks again, which changes nothing.
    let again = world.complete("run/k", &id, &tag, &[]);
    assert_eq!(again.header(GENERATION), completed.header(GENERATION));
    assert_eq!(world.bucket.changes(), 2);
    assert_eq!(
        said(&world.put(&target, &[], DIGITS)),
        (404, "NoSuchUpload")
    );
}

#[test]
fn an_upload_is_given_up_as_often_as_it_is_reported() {
    let world = World::new();
    let id = world.begin_upload("k");
    let target = format!("/k?uploadId={id}");
    assert_eq!(said(&world.delete(&target, &[])), (204, ""));
    assert_eq!(said(&world.delete(&target, &[])), (204, ""));
    assert_eq!(said(&world.get(&target)), (404, "NoSuchUpload"));
    let completed = world.complete("k", &id, "\"x\"", &[]);
    assert_eq!(said(&completed), (404, "NoSuchUpload"));
    let unknown = world.delete("/k?uploadId=upload-0", &[]);
    assert_eq!(said(&unknown), (404, "NoSuchUpload"));
}

#[test]
fn each_fault_is_what_it_says() {
    // Whether a create is applied, and its client's answer.
    let cases = [
        (Fault::Refused(429), false, Some(429)),
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
        world.bucket.plan("a", 0, fault);
        let answer = world.ask("a", Method::PUT, "/k", CREATE, b"1");
        assert_eq!(answer.map(|answer| answer.status), reported, "{fault:?}");
        assert_eq!(world.there("k").is_some(), is_applied, "{fault:?}");
        let journal = world.bucket.journal();
        assert_eq!(journal.len(), 1);
        let entry = &journal[0];
        assert_eq!((entry.call, entry.key.as_str()), (Call::Put, "k"));
        assert_eq!((entry.client.as_str(), entry.fault), ("a", Some(fault)));
        assert_eq!((entry.applied > 0, entry.status), (is_applied, reported));
        assert!(entry.is_conditional);
        let is_dead = matches!(fault, Fault::Killed | Fault::KilledAfter);
        let next = if is_dead { 403 } else { 200 };
        assert_eq!(world.put("/next", &[], b"2").status, next, "{fault:?}");
        let other = world.ask("b", Method::PUT, "/other", &[], b"3").unwrap();
        assert_eq!(other.status, 200);
        // The late request arrives with all its headers.
        world.server.apply_late(&world.bucket);
        let is_late = matches!(fault, Fault::Late(_));
        assert_eq!(world.there("k").is_some(), is_applied || is_late);
    }
}

#[test]
fn a_late_create_is_too_late() {
    let world = World::new();
    world.bucket.plan("a", 0, Fault::Late(2));
    assert!(world.ask("a", Method::PUT, "/k", CREATE, b"late").is_none());
    assert_eq!(world.put("/k", CREATE, b"next").status, 200);
    assert_eq!(world.get("/k").text, "next");
}

#[test]
fn who_looks_on_is_not_counted() {
    let world = World::new();
    world.bucket.put("k", DIGITS);
    world.bucket.plan(OBSERVER, 0, Fault::Dropped);
    let answer = world.ask(OBSERVER, Method::GET, "/k", &[], b"").unwrap();
    assert_eq!(answer.text.as_bytes(), DIGITS);
    assert_eq!(world.bucket.requests(), 0);
}

#[test]
fn changes_of_one_key_have_a_limit_where_a_test_says_so() {
    let world = World::new();
    let slow = (429, "SlowDown");
    assert_eq!(world.put("/k", &[], b"1").status, 200);
    assert_eq!(world.put("/k", &[], b"2").status, 200);
    world.bucket.limit_changes();
    assert_eq!(said(&world.put("/k", &[], b"3")), slow);
    assert_eq!(said(&world.put("/k", CREATE, b"3")), slow);
    assert_eq!(said(&world.delete("/k", &[])), slow);
    let copy = [("x-goog-copy-source", "a-bucket/k")];
    assert_eq!(said(&world.put("/k", &copy, b"")), slow);
    let id = world.begin_upload("k");
    let part = world.put(&format!("/k?partNumber=1&uploadId={id}"), &[], b"4");
    let tag = part.header("etag");
    assert_eq!(said(&world.complete("k", &id, tag, &[])), slow);
    assert_eq!(world.there("k").unwrap(), &b"2"[..]);
    assert_eq!(world.put("/other", &copy, b"").status, 200);
    world.bucket.pass(Duration::from_secs(1));
    assert_eq!(world.complete("k", &id, tag, &[]).status, 200);
    // A repeated answer is not a change.
    assert_eq!(world.complete("k", &id, tag, &[]).status, 200);
    assert_eq!(said(&world.delete("/k", &[])), slow);
    world.bucket.pass(Duration::from_secs(1));
    assert_eq!(world.delete("/k", &[]).status, 204);
}
