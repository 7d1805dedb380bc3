//! The message of a refused request: the reason and the remedy.

use std::io;
use std::io::ErrorKind::{InvalidInput, PermissionDenied, ResourceBusy, StorageFull, Unsupported};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::common::fake::{Fake, Reply};
use crate::common::server::Server;
use crate::common::{self, PART_BYTES, at, bytes, download, objects, source, upload};
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem};
use penstock_object::{Address, Credentials, Keys, Objects, Remote};

fn impatient() -> Remote {
    Remote {
        patience: Some(Duration::ZERO),
        ..Remote::default()
    }
}

/// Puts a small object, without parts.
fn put(objects: &Objects) -> io::Result<()> {
    let file: Arc<File> = Arc::new(objects.create(&at("text"), Direct::Off).unwrap());
    let write = objects.change(Change::Write(&file, b"text"));
    write.map_err(source)?;
    objects.change(Change::SyncData(&file)).map_err(source)
}

/// The error for a response, which is the same for every request.
fn said(answer: &Reply) -> (io::ErrorKind, String) {
    let reply = answer.clone();
    let fake = Fake::start(move |_| reply.clone());
    let objects = objects(&fake.endpoint, impatient());
    let errors = [
        put(&objects).unwrap_err(),
        upload(&objects, &at("object"), &bytes(PART_BYTES)).unwrap_err(),
        objects.files().list(&at("run")).unwrap_err(),
        objects.files().read_range(&at("text"), 0..10).unwrap_err(),
        objects.open_uploads(&at("run")).unwrap_err(),
    ];
    for error in &errors[1..] {
        assert_eq!(error.to_string(), errors[0].to_string());
        assert_eq!(error.kind(), errors[0].kind());
    }
    (errors[0].kind(), errors[0].to_string())
}

/// Status, code and message of a response, and the expected error.
type Case = (u16, &'static str, &'static str, io::ErrorKind, &'static str);

const CASES: [Case; 14] = [
    (
        404,
        "NoSuchBucket",
        "The specified bucket does not exist",
        InvalidInput,
        "there is no such bucket: create it, or correct its name",
    ),
    (
        403,
        "InvalidAccessKeyId",
        "It does not exist in our records.",
        PermissionDenied,
        "the store does not know the access key: correct its id (AWS_ACCESS_KEY_ID)",
    ),
    (
        403,
        "SignatureDoesNotMatch",
        "Check your key and signing method.",
        PermissionDenied,
        "the secret is not that of the access key: correct it (AWS_SECRET_ACCESS_KEY)",
    ),
    (
        400,
        "ExpiredToken",
        "The provided token has expired.",
        PermissionDenied,
        "the credentials have expired: renew them (AWS_SESSION_TOKEN)",
    ),
    (
        403,
        "RequestTimeTooSkewed",
        "The difference is too large.",
        PermissionDenied,
        "the clock of this machine is not that of the store: set it",
    ),
    (
        403,
        "AccessDenied",
        "Request has expired",
        PermissionDenied,
        "the clock of this machine is not that of the store: set it",
    ),
    (
        403,
        "AccessDenied",
        "Access Denied",
        PermissionDenied,
        "the store does not allow it (403 AccessDenied): the key has to have s3:GetObject, \
             s3:PutObject, s3:DeleteObject, s3:ListBucket, s3:AbortMultipartUpload and \
             s3:ListBucketMultipartUploads",
    ),
    (
        301,
        "PermanentRedirect",
        "The region is wrong; expecting 'eu-west-1'",
        InvalidInput,
        "the bucket is in another region: set the region to eu-west-1",
    ),
    (
        400,
        "AuthorizationHeaderMalformed",
        "the region 'us-east-1' is wrong; expecting 'eu-west-1'",
        InvalidInput,
        "the bucket is in another region: set the region to eu-west-1",
    ),
    (
        403,
        "AccessDenied",
        "Access Denied because object protected by object lock.",
        PermissionDenied,
        "it is under an object lock or a legal hold: wait for its end, or have it lifted",
    ),
    (
        501,
        "NotImplemented",
        "A header implies what is not implemented",
        Unsupported,
        "the store cannot do it (501 NotImplemented: A header implies what is not implemented)",
    ),
    (
        507,
        "XMinioStorageFull",
        "Storage backend has reached its minimum",
        StorageFull,
        "the store has no room left",
    ),
    (
        503,
        "SlowDown",
        "Please reduce your request rate.",
        ResourceBusy,
        "the store has too much to do (503 SlowDown)",
    ),
    (
        502,
        "",
        "<html><body>Bad Gateway",
        io::ErrorKind::Other,
        "the store failed (502 Bad Gateway)",
    ),
];

#[test]
fn an_answer_that_refuses_is_one_sentence_with_its_remedy() {
    for (status, code, message, kind, text) in CASES {
        let answer = match code {
            "" => Reply::new(status, message),
            _ => Reply::request_error(status, code, message),
        };
        assert_eq!(said(&answer), (kind, text.to_owned()));
    }
}

#[test]
fn the_region_is_told_though_a_head_has_no_body() {
    let fake = Fake::start(|_| Reply::new(400, "").header("x-amz-bucket-region", "eu-west-1"));
    let objects = objects(&fake.endpoint, impatient());
    let error = objects.files().stat(&at("run")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the bucket is in another region: set the region to eu-west-1"
    );
}

#[test]
fn nobody_answers() {
    let endpoint = format!("http://127.0.0.1:{}", common::server::free_port());
    let objects = objects(&endpoint, impatient());
    for error in [
        put(&objects).unwrap_err(),
        upload(&objects, &at("object"), &bytes(7)).unwrap_err(),
        download(&objects, &at("object")).unwrap_err(),
    ] {
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(
            error.to_string(),
            "no connection to the store (Connection refused (os error 111)): check the endpoint, \
             and that it runs"
        );
    }
}

/// A real server's responses give the errors expected above.
#[test]
fn a_server_is_understood() {
    let Some(server) = Server::start("a_server_is_understood") else {
        return;
    };
    let said = |remote: Remote, bucket: &str| {
        let remote = Remote {
            endpoint: Some(server.endpoint()),
            region: remote.region.or(Some("us-east-1".into())),
            credentials: remote.credentials.or_else(|| Some(common::key("secret"))),
            ..remote
        };
        let path = format!("s3://{bucket}/object");
        let address = Address::of(Path::new(&path)).unwrap().unwrap();
        let objects = Objects::open(address, &remote).unwrap();
        let file = Arc::new(objects.create(Path::new(&path), Direct::Off).unwrap());
        let sent = common::send(&objects, &file, b"some", [0]).unwrap_err();
        let open = objects.open_uploads(Path::new(&path)).unwrap_err();
        assert_eq!(sent.to_string(), open.to_string());
        sent.to_string()
    };
    let stranger = Remote {
        credentials: Some(Credentials::Given(Keys {
            id: "wrong".into(),
            secret: "secret".into(),
            token: None,
            expires: None,
        })),
        ..impatient()
    };
    let impostor = Remote {
        credentials: Some(common::key("wrong")),
        ..impatient()
    };
    let lost = Remote {
        region: Some("eu-west-1".into()),
        ..impatient()
    };
    for (remote, bucket, begin) in [
        (stranger, "bucket", "the store does not know the access key"),
        (
            impostor,
            "bucket",
            "the secret is not that of the access key",
        ),
        (impatient(), "none", "there is no such bucket"),
        (
            lost,
            "bucket",
            "the bucket is in another region: set the region to us-east-1",
        ),
    ] {
        let text = said(remote, bucket);
        assert!(text.starts_with(begin), "{text}, not {begin}");
    }
}
