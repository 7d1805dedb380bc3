//! An unintelligible response is retried like a lost one, for every provider.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::common::fake::{Fake, Reply, Request};
use crate::common::{PART_BYTES, bytes, finish, send, source, transfer};
use penstock_io::buffer::Memory;
use penstock_io::engine::OpKind;
use penstock_io::file::Direct;
use penstock_io::file_system::{Change, FileSystem, Files};
use penstock_object::{Address, Credentials, Keys, Objects, Remote};

const TEXT: &[u8] = b"a text";

const SCHEMES: [&str; 3] = ["s3", "gs", "az"];

/// A bucket behind a server that answers correctly except for its first responses to some
/// requests.
struct Place {
    scheme: &'static str,
    objects: Objects,
    fake: Fake,
}

impl Place {
    fn new(
        scheme: &'static str,
        patience: Option<Duration>,
        is_it: impl Fn(&Request) -> bool + Send + 'static,
        first: Vec<Reply>,
    ) -> Place {
        let mut first = VecDeque::from(first);
        let fake = Fake::start(move |request| match is_it(request) {
            true => first.pop_front().unwrap_or_else(|| right(scheme, request)),
            false => right(scheme, request),
        });
        let (secret, token) = match scheme {
            "gs" => ("", Some("token".to_owned())),
            _ => ("c2VjcmV0", None),
        };
        let remote = Remote {
            endpoint: Some(fake.endpoint.clone()),
            region: (scheme == "s3").then(|| "us-east-1".to_owned()),
            credentials: Some(Credentials::Given(Keys {
                id: if scheme == "gs" { "" } else { "somebody" }.to_owned(),
                secret: secret.to_owned(),
                token,
                expires: None,
            })),
            part_bytes: Some(PART_BYTES),
            patience,
            ..Remote::default()
        };
        let root = PathBuf::from(format!("{scheme}://bucket"));
        let address = Address::of(&root).unwrap().unwrap();
        let objects = Objects::open(address, &remote).unwrap();
        Place {
            scheme,
            objects,
            fake,
        }
    }

    fn at(&self, key: &str) -> PathBuf {
        Path::new(&format!("{}://bucket", self.scheme)).join(key)
    }

    fn put(&self) -> io::Result<()> {
        let file = self.objects.create(&self.at("run/text"), Direct::Off);
        let file = file.map_err(source)?;
        self.objects
            .change(Change::Write(&file, TEXT))
            .map_err(source)?;
        finish(&self.objects, &file)
    }

    /// Reads through the engine an object whose size is known.
    fn read(&self) -> io::Result<Vec<u8>> {
        let bytes = TEXT.len() as u64;
        let file = self
            .objects
            .open_known(&self.at("run/text"), Direct::Off, bytes);
        let read = OpKind::Read {
            offset: 0,
            buf: Memory::allocate(TEXT.len()).unwrap().share().1,
        };
        let read = transfer(&self.objects, &Arc::new(file.unwrap()), vec![read]).pop();
        let read = read.unwrap();
        read.result.map(|_| read.buf.unwrap().as_slice().to_vec())
    }

    fn upload(&self) -> io::Result<()> {
        let file = self.objects.create(&self.at("run/large"), Direct::Off);
        let file = Arc::new(file.unwrap());
        send(&self.objects, &file, &bytes(PART_BYTES + 1), [0, 1])?;
        finish(&self.objects, &file)
    }
}

/// The response of a store that works.
fn right(scheme: &str, request: &Request) -> Reply {
    let dated = |reply: Reply| {
        let reply = reply.header("etag", "\"1\"").header("x-goog-generation", 1);
        reply.header("last-modified", "Wed, 25 Nov 2026 00:00:00 GMT")
    };
    let is_listing = ["list-type=2", "comp=list", "prefix="].iter();
    let is_listing = is_listing.clone().any(|words| request.is("GET", words));
    match request.method.as_str() {
        "GET" if request.target.contains("uploads") => Reply::new(
            200,
            "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>",
        ),
        "GET" if is_listing => Reply::new(200, listing(scheme, "run/text")),
        "GET" if request.header("range").is_some() => {
            let range = format!("bytes 0-{}/{}", TEXT.len() - 1, TEXT.len());
            dated(Reply::new(206, TEXT).header("content-range", range))
        }
        "GET" => dated(Reply::new(200, TEXT)),
        "HEAD" if request.target.contains("large") => {
            Reply::new(200, "").header("content-length", PART_BYTES + 1)
        }
        "HEAD" => dated(Reply::new(200, "").header("content-length", TEXT.len())),
        "PUT" => dated(Reply::new(201, "")),
        "POST" if request.target.contains("uploads=") => Reply::new(
            200,
            "<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>",
        ),
        "POST" => Reply::new(
            200,
            "<CompleteMultipartUploadResult><ETag>tag</ETag></CompleteMultipartUploadResult>",
        ),
        _ => Reply::new(204, ""),
    }
}

fn listing(scheme: &str, key: &str) -> String {
    const DATE: &str = "2026-11-25T00:00:00.000Z";
    match scheme {
        "az" => format!(
            "<EnumerationResults><Blobs><Blob><Name>{key}</Name><Properties>\
             <Last-Modified>Wed, 25 Nov 2026 00:00:00 GMT</Last-Modified><Etag>0x2</Etag>\
             <Content-Length>6</Content-Length><Content-Type>x</Content-Type></Properties></Blob>\
             </Blobs><NextMarker/></EnumerationResults>"
        ),
        _ => format!(
            "<ListBucketResult><Contents><Key>{key}</Key><Size>6</Size><ETag>1</ETag>\
             <LastModified>{DATE}</LastModified></Contents></ListBucketResult>"
        ),
    }
}

fn is_listing(request: &Request) -> bool {
    request.method == "GET" && request.target.contains("delimiter=")
}

#[test]
fn a_garbled_status_line_is_asked_past() {
    for scheme in SCHEMES {
        for method in ["GET", "HEAD", "PUT"] {
            let garbled = vec![Reply::new(200, "").garbled()];
            let is_it = move |request: &Request| request.method == method;
            let place = Place::new(scheme, None, is_it, garbled);
            let text = place.at("run/text");
            match method {
                "GET" => assert_eq!(place.objects.read(&text).unwrap(), TEXT),
                "HEAD" => assert_eq!(place.objects.stat_file(&text).unwrap().bytes, 6),
                _ => place.put().unwrap(),
            }
            assert_eq!(place.fake.count(method, ""), 2, "{scheme}");
        }
        let garbled = vec![Reply::new(200, "").garbled()];
        let place = Place::new(scheme, None, is_listing, garbled);
        assert_eq!(place.objects.list(&place.at("run")).unwrap().len(), 1);
        let garbled = vec![Reply::new(200, "").garbled()];
        let place = Place::new(scheme, None, |_| true, garbled);
        place.upload().unwrap();
    }
}

#[test]
fn a_listing_that_makes_no_sense_is_asked_for_again() {
    for scheme in SCHEMES {
        let flipped = listing(scheme, "run/text").replace("</", "<.");
        for nonsense in [
            Reply::new(200, flipped.as_str()),
            // No object has this name: a flipped bit has turned a letter into a slash.
            Reply::new(200, listing(scheme, "run//ext")),
            // Truncated, with a length that shows it or without.
            Reply::new(200, &flipped.as_bytes()[..20]),
            Reply::new(200, flipped.as_str()).cut(20),
            // An empty prefix gives an empty listing, not 404.
            Reply::request_error(404, "NoSuchKey", "The specified key does not exist."),
            Reply::new(404, "<html>Not found</html>"),
        ] {
            let place = Place::new(scheme, None, is_listing, vec![nonsense]);
            let listed = place.objects.list(&place.at("run")).unwrap();
            assert_eq!(listed.len(), 1);
            assert_eq!(listed[0].name, "text");
            assert_eq!(place.fake.count("GET", "delimiter="), 2, "{scheme}");
        }
    }
}

#[test]
fn what_is_denied_once_and_known_to_be_there_is_asked_for_again() {
    let nothing = || Reply::request_error(404, "NoSuchKey", "The specified key does not exist.");
    for scheme in SCHEMES {
        let place = Place::new(scheme, None, |_| true, vec![nothing()]);
        assert_eq!(place.read().unwrap(), TEXT);
        let place = Place::new(scheme, None, |_| true, vec![nothing()]);
        let found = place.objects.stat_again(&place.at("run/text")).unwrap();
        assert_eq!(found.bytes, 6);
        // A plain lookup is told at once that the object is missing.
        let place = Place::new(scheme, None, |_| true, vec![nothing()]);
        let found = place.objects.stat_file(&place.at("run/text"));
        assert_eq!(found.unwrap_err().kind(), ErrorKind::NotFound);
    }
}

#[test]
fn a_conflict_over_a_name_of_its_own_is_no_answer() {
    let conflict = || Reply::request_error(409, "ConditionalRequestConflict", "Conflict.");
    let is_put = |request: &Request| matches!(request.method.as_str(), "PUT" | "POST");
    for scheme in SCHEMES {
        let place = Place::new(scheme, None, is_put, vec![conflict()]);
        place.put().unwrap();
        assert_eq!(place.fake.count("PUT", ""), 2);
        let place = Place::new(scheme, None, is_put, vec![conflict(), conflict()]);
        place.upload().unwrap();
    }
}

#[test]
fn a_refusal_without_words_is_no_answer() {
    // As a proxy sends it: a conflict without a code, and 404 for an object to be created.
    for status in [404, 409] {
        let no = || Reply::new(status, "");
        let is_put = |request: &Request| matches!(request.method.as_str(), "PUT" | "POST");
        for scheme in SCHEMES {
            let place = Place::new(scheme, None, is_put, vec![no()]);
            place.put().unwrap();
            assert_eq!(place.fake.count("PUT", ""), 2, "{scheme} {status}");
            let place = Place::new(scheme, None, is_put, vec![no(), no()]);
            place.upload().unwrap();
        }
    }
    for scheme in SCHEMES {
        let is_get = |request: &Request| request.method == "GET";
        let place = Place::new(scheme, None, is_get, vec![Reply::new(409, "")]);
        assert_eq!(place.read().unwrap(), TEXT);
    }
}

#[test]
fn parts_and_uploads_that_make_no_sense_are_asked_for_again() {
    let words = [
        ("POST", "uploads="),
        ("PUT", "partNumber=1"),
        ("POST", "uploadId="),
    ];
    for scheme in ["s3", "gs"] {
        for (method, words) in words {
            let is_it = move |request: &Request| request.is(method, words);
            let place = Place::new(scheme, None, is_it, vec![Reply::new(200, "<Ini")]);
            place.upload().unwrap();
            assert_eq!(place.fake.count(method, words), 2, "{scheme} {words}");
        }
        let is_it = |request: &Request| request.is("GET", "uploads");
        let place = Place::new(scheme, None, is_it, vec![Reply::new(200, "<List")]);
        let open = place.objects.open_uploads(&place.at("run")).unwrap();
        assert_eq!(open, []);
    }
}

#[test]
fn what_stays_so_is_an_error_that_says_it() {
    let short = Some(Duration::from_millis(1));
    for scheme in SCHEMES {
        let nothing =
            || Reply::request_error(404, "NoSuchKey", "The specified key does not exist.");
        let denied: Vec<Reply> = (0..9).map(|_| nothing()).collect();
        let place = Place::new(scheme, short, |_| true, denied.clone());
        let error = place.read().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(
            error
                .to_string()
                .starts_with("there is no such object, 3 times")
        );
        // An error, not an empty listing.
        let place = Place::new(scheme, short, |_| true, denied);
        let error = place.objects.list(&place.at("run")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        let text = error.to_string();
        assert!(
            text.starts_with("the store does not answer as it should"),
            "{text}"
        );
        let garbled = (0..9).map(|_| Reply::new(200, "").garbled()).collect();
        let place = Place::new(scheme, short, |_| true, garbled);
        let error = place.put().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
}
