//! Which requests are retried, and the outcome of requests whose responses are lost.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use crate::common::fake::{Fake, Reply, Request};
use crate::common::{PART_BYTES, at, bytes, download, objects, upload};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use penstock_object::{Objects, Remote};

/// A full part and a short one.
const BYTES: usize = PART_BYTES + 12_345;

const OBJECT_BYTES: usize = 300_000;

fn patient(endpoint: &str) -> Objects {
    objects(endpoint, Remote::default())
}

/// A client that does not retry.
fn once(endpoint: &str) -> Objects {
    let remote = Remote {
        patience: Some(Duration::ZERO),
        ..Remote::default()
    };
    objects(endpoint, remote)
}

/// S3's responses to the requests of an upload.
fn uploaded(request: &Request) -> Reply {
    const BEGUN: &str = "<InitiateMultipartUploadResult><UploadId>id&amp;1</UploadId>\
                         </InitiateMultipartUploadResult>";
    const DONE: &str = "<CompleteMultipartUploadResult><ETag>tag</ETag>\
                        </CompleteMultipartUploadResult>";
    match request.method.as_str() {
        "POST" if request.target.contains("uploads=") => Reply::new(200, BEGUN)
            .header("x-amz-checksum-algorithm", "CRC64NVME")
            .header("x-amz-checksum-type", "FULL_OBJECT"),
        "POST" => Reply::new(200, DONE),
        "PUT" => Reply::new(200, "").header("etag", "\"part\""),
        "DELETE" => Reply::new(204, ""),
        method => panic!("{method} is no request of an upload"),
    }
}

/// An upload whose requests of one kind first get other responses.
fn upload_with(
    objects: impl Fn(&str) -> Objects,
    method: &'static str,
    words: &'static str,
    first: Vec<Reply>,
) -> (io::Result<()>, Fake) {
    let mut first = VecDeque::from(first);
    let fake = Fake::start(move |request| match request.is(method, words) {
        true => first.pop_front().unwrap_or_else(|| uploaded(request)),
        false => uploaded(request),
    });
    let objects = objects(&fake.endpoint);
    (upload(&objects, &at("object"), &bytes(BYTES)), fake)
}

/// Responses after which a retry may succeed.
fn passing() -> Vec<Reply> {
    vec![
        Reply::request_error(503, "SlowDown", "Please reduce your request rate."),
        Reply::new(502, "<html>Bad gateway</html>"),
        Reply::request_error(500, "InternalError", "We encountered an internal error."),
        Reply::new(429, ""),
        Reply::request_error(
            400,
            "RequestTimeout",
            "Your socket connection was not read from.",
        ),
        Reply::lost(),
        Reply::new(200, "<Init")
            .header("content-length", 1000)
            .cut(5),
    ]
}

const STEPS: [(&str, &str); 3] = [
    ("POST", "uploads="),
    ("PUT", "partNumber=1"),
    ("POST", "uploadId="),
];

#[test]
fn what_may_pass_is_sent_again() {
    for (method, words) in STEPS {
        for answer in passing() {
            let (done, fake) = upload_with(patient, method, words, vec![answer]);
            done.unwrap();
            assert_eq!(fake.count(method, words), 2, "{words}");
        }
    }
}

#[test]
fn patience_ends() {
    for (method, words) in STEPS {
        let busy = Reply::request_error(503, "SlowDown", "Please reduce your request rate.");
        let (done, fake) = upload_with(once, method, words, vec![busy]);
        assert_eq!(
            done.unwrap_err().to_string(),
            "the store has too much to do (503 SlowDown)"
        );
        assert_eq!(fake.count(method, words), 1);
    }
}

#[test]
fn what_is_refused_is_not_sent_again() {
    for (method, words) in STEPS {
        let request_error = Reply::request_error(400, "InvalidRequest", "no");
        let (done, fake) = upload_with(patient, method, words, vec![request_error]);
        assert_eq!(
            done.unwrap_err().to_string(),
            "the store refused it (400 InvalidRequest: no)"
        );
        assert_eq!(fake.count(method, words), 1);
    }
}

#[test]
fn a_success_may_hold_an_error() {
    let passing = Reply::request_error(200, "InternalError", "Please try again.");
    let (done, fake) = upload_with(patient, "POST", "uploadId=", vec![passing]);
    done.unwrap();
    assert_eq!(fake.count("POST", "uploadId="), 2);
    let (done, fake) = upload_with(patient, "POST", "uploadId=", vec![Reply::new(200, "")]);
    done.unwrap();
    assert_eq!(fake.count("POST", "uploadId="), 2);
    let lasting = Reply::request_error(200, "InvalidPart", "One of the parts could not be found.");
    let (done, fake) = upload_with(patient, "POST", "uploadId=", vec![lasting]);
    assert!(done.unwrap_err().to_string().contains("InvalidPart"));
    assert_eq!(fake.count("POST", "uploadId="), 1);
}

/// An upload whose first completion was carried out but not answered, by a store that no longer
/// knows the upload.
fn ended_before(size: usize, checksum: Option<&'static str>) -> io::Result<()> {
    let mut is_ended = false;
    let fake = Fake::start(move |request| match request.method.as_str() {
        "HEAD" => {
            assert_eq!(request.header("x-amz-checksum-mode"), Some("ENABLED"));
            let head = Reply::new(200, "").header("content-length", size);
            match checksum {
                Some(checksum) => head.header("x-amz-checksum-crc64nvme", checksum),
                None => head,
            }
        }
        "POST" if request.target.contains("uploadId=") => {
            match std::mem::replace(&mut is_ended, true) {
                false => Reply::lost(),
                true => Reply::request_error(404, "NoSuchUpload", "The upload does not exist."),
            }
        }
        _ => uploaded(request),
    });
    let objects = patient(&fake.endpoint);
    upload(&objects, &at("object"), &bytes(BYTES))
}

#[test]
fn an_end_whose_answer_was_lost_is_found_by_what_is_there() {
    ended_before(BYTES, None).unwrap();
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &bytes(BYTES));
    let right = BASE64_STANDARD.encode(crc.to_be_bytes());
    ended_before(BYTES, Some(right.leak())).unwrap();
    for gone in [
        ended_before(BYTES - 1, None),
        ended_before(BYTES, Some("AAAAAAAAAAA=")),
    ] {
        let error = gone.unwrap_err().to_string();
        assert!(error.starts_with("the upload is gone"), "{error}");
    }
}

#[test]
fn a_store_that_does_not_know_checksums_gets_none() {
    let refuse = |request: &Request| {
        let header = request.header("x-amz-checksum-algorithm")?;
        let message = format!("Unsupported header 'x-amz-checksum-algorithm' ({header})");
        Some(Reply::request_error(400, "InvalidArgument", &message))
    };
    let ignore = |request: &Request| {
        let is_first = request.is("POST", "uploads=");
        is_first.then(|| {
            let body = "<InitiateMultipartUploadResult><UploadId>1</UploadId>\
                        </InitiateMultipartUploadResult>";
            Reply::new(200, body)
        })
    };
    let answers: [fn(&Request) -> Option<Reply>; 2] = [refuse, ignore];
    for answer in answers {
        let fake = Fake::start(move |request| answer(request).unwrap_or_else(|| uploaded(request)));
        let objects = patient(&fake.endpoint);
        upload(&objects, &at("object"), &bytes(BYTES)).unwrap();
        for request in fake.seen() {
            let is_first = request.is("POST", "uploads=");
            let has_checksum = request.head.contains("x-amz-checksum-crc64nvme:");
            assert!(is_first || !has_checksum, "{}", request.head);
        }
    }
}

/// Reads an object as one range; `cuts` is how many bytes each of the first responses contains.
/// Also returns where each request began.
fn read_with(cuts: &[usize]) -> (io::Result<Vec<u8>>, Vec<u64>) {
    let object = bytes(OBJECT_BYTES);
    let mut cuts = VecDeque::from(cuts.to_vec());
    let fake = Fake::start(move |request| {
        let size = object.len();
        if request.method == "HEAD" {
            return Reply::new(200, "")
                .header("content-length", size)
                .header("etag", "\"first\"");
        }
        assert_eq!(request.header("if-match"), Some("\"first\""));
        let (start, end) = range_of(request);
        let body = &object[start as usize..=end as usize];
        let reply = Reply::new(206, body)
            .header("etag", "\"first\"")
            .header("content-range", format!("bytes {start}-{end}/{size}"));
        match cuts.pop_front() {
            Some(bytes) => reply.cut(bytes),
            None => reply,
        }
    });
    let read = download(&patient(&fake.endpoint), &at("object"));
    let gets = fake.seen();
    let gets = gets.iter().filter(|request| request.method == "GET");
    (read, gets.map(|request| range_of(request).0).collect())
}

fn range_of(request: &Request) -> (u64, u64) {
    let range = request.header("range").expect("a range").trim();
    let (start, end) = range
        .strip_prefix("bytes=")
        .and_then(|range| range.split_once('-'))
        .expect("two numbers");
    (start.parse().unwrap(), end.parse().unwrap())
}

#[test]
fn a_read_goes_on_at_the_byte_where_the_answer_broke() {
    let (read, starts) = read_with(&[0, 100_000, 7]);
    assert_eq!(read.unwrap(), bytes(OBJECT_BYTES));
    assert_eq!(starts, [0, 0, 100_000, 100_007]);
}

#[test]
fn another_object_in_its_place_is_reported() {
    let fake = Fake::start(|request| match request.method.as_str() {
        "HEAD" => Reply::new(200, "")
            .header("content-length", 10)
            .header("etag", "\"first\""),
        _ => Reply::request_error(412, "PreconditionFailed", "At least one did not hold"),
    });
    let error = download(&patient(&fake.endpoint), &at("object")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    assert_eq!(fake.count("GET", ""), 1);
}
