//! The server: its connections, and the faults on them.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::header::CONTENT_LENGTH;
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioTimer;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};

use crate::bucket::{Bucket, Buckets, Outcome};
use crate::fault::Fault;
use crate::google;
use crate::line::Line;
use crate::refused::Refused;
use crate::request::{Asked, Behind, Dialect, Received};
use crate::service::{Keys, Protocol};

/// The key id, or the token's client, of the observer: its requests have no faults, wait for no
/// turn and are not counted.
pub const OBSERVER: &str = "observer";

/// How long the end of a server waits for requests in progress.
const END_MAX: Duration = Duration::from_secs(1);

/// A server on a local port. It ends when it is dropped.
pub struct Server {
    runtime: Option<Runtime>,
    address: SocketAddr,
    front: Front,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.endpoint())
    }
}

impl Server {
    /// Starts a server that speaks S3's protocol: its requests are signed, each by the key of its
    /// client and [`SECRET`](crate::SECRET).
    pub fn start() -> io::Result<Server> {
        Server::speaking(Dialect::S3)
    }

    /// Starts a server that speaks the XML API of Google Cloud Storage: its requests have a
    /// [`token`](crate::token).
    pub fn google() -> io::Result<Server> {
        Server::speaking(Dialect::Google)
    }

    fn speaking(dialect: Dialect) -> io::Result<Server> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("object-server")
            .enable_all()
            .build()?;
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
        let address = listener.local_addr()?;
        let front = Front::new(dialect);
        let accepting = front.clone();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(accepting.clone().serve(stream));
            }
        });
        Ok(Server {
            runtime: Some(runtime),
            address,
            front,
        })
    }

    /// The URL of the server.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Makes a bucket, replacing any of that name.
    pub fn make_bucket(&self, name: &str) -> Arc<Bucket> {
        self.front.buckets.insert(name)
    }

    /// Removes a bucket.
    pub fn remove_bucket(&self, name: &str) {
        self.front.buckets.remove(name);
    }

    /// Applies all late requests to a bucket.
    pub fn apply_late(&self, bucket: &Arc<Bucket>) {
        let runtime = self.runtime.as_ref().expect("it runs until it is dropped");
        for request in bucket.arrived(true) {
            runtime.block_on(self.front.apply(&request));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(END_MAX);
        }
    }
}

type Answer = Response<BoxBody<Bytes, io::Error>>;

/// The layer before the protocol, which loses, repeats and delays requests.
#[derive(Clone)]
struct Front {
    dialect: Dialect,
    buckets: Arc<Buckets>,
    protocol: S3Service,
}

impl Front {
    fn new(dialect: Dialect) -> Front {
        let buckets = Arc::new(Buckets::default());
        let mut protocol = S3ServiceBuilder::new(Protocol::new(&buckets, dialect));
        // Without keys the protocol accepts every request: tokens are checked before.
        if dialect == Dialect::S3 {
            protocol.set_auth(Keys);
        }
        Front {
            dialect,
            buckets,
            protocol: protocol.build(),
        }
    }

    async fn serve(self, stream: TcpStream) {
        // Answers are small, and a client waits for each.
        let _ = stream.set_nodelay(true);
        let (line, is_garbled) = Line::new(stream);
        let answer = service_fn(move |request| {
            let (front, is_garbled) = (self.clone(), Arc::clone(&is_garbled));
            async move { front.answer(request, &is_garbled).await }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .serve_connection(line, answer);
        // The connection ends with an error where a fault requires it.
        let _ = connection.await;
    }

    /// Answers a request; an error ends the connection.
    async fn answer(
        &self,
        request: Request<Incoming>,
        is_garbled: &AtomicBool,
    ) -> io::Result<Answer> {
        let (parts, body) = request.into_parts();
        // A request whose body was cut off is no request.
        let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
        let asked = Asked::of(&parts, self.dialect);
        let request = Received { parts, body };
        match self.buckets.get(&asked.bucket) {
            Some(bucket) if asked.client != OBSERVER => {
                self.pass(&bucket, asked, request, is_garbled).await
            }
            _ => Ok(whole(self.apply(&request).await)),
        }
    }

    /// Brings a request to its bucket, unless a fault prevents it.
    async fn pass(
        &self,
        bucket: &Arc<Bucket>,
        asked: Asked,
        mut request: Received,
        is_garbled: &AtomicBool,
    ) -> io::Result<Answer> {
        if bucket.is_dead(&asked.client) {
            return Ok(failed(StatusCode::FORBIDDEN));
        }
        let client = asked.client.clone();
        let turn = bucket.turns.wait(&client).await;
        for late in bucket.arrived(false) {
            self.apply(&late).await;
        }
        if let Some(observer) = bucket.observer() {
            let observed = tokio::task::spawn_blocking(move || observer()).await;
            observed.expect("who looks on does not panic");
        }
        let (nth, fault) = bucket.count(&client);
        if fault.is_some_and(Fault::kills) {
            bucket.kill(&client);
        }
        if let Some(Fault::Stale(changes)) = fault {
            request.parts.extensions.insert(Behind(changes));
        }
        let applied = fault.map_or(1, Fault::applications);
        let mut applications = None;
        for _ in 0..applied {
            applications = Some(self.apply(&request).await);
        }
        let is_head = request.parts.method == Method::HEAD;
        let answer = answer_to(fault, applications, is_head);
        let status = answer.as_ref().ok().map(|answer| answer.status().as_u16());
        bucket.record(asked, nth, fault, &Outcome { applied, status });
        drop(turn);
        match fault {
            Some(Fault::Late(after)) => bucket.hold_back(after, request),
            Some(Fault::Garbled) => is_garbled.store(true, Ordering::Relaxed),
            Some(Fault::Held(others)) => {
                let was_live = bucket.turns.leave(&client);
                bucket.others(others).await;
                if was_live {
                    bucket.turns.enter(&client);
                }
            }
            _ => {}
        }
        answer
    }

    /// Applies a request.
    async fn apply(&self, request: &Received) -> Response<Bytes> {
        match self.dialect {
            Dialect::S3 => self.call(request.parts.clone(), &request.body).await,
            Dialect::Google => match google::understood(&self.buckets, request) {
                Ok(parts) => google::with_hashes(self.call(parts, &request.body).await),
                Err(refused) => refused.into(),
            },
        }
    }

    async fn call(&self, parts: Parts, body: &Bytes) -> Response<Bytes> {
        let request = Request::from_parts(parts, s3s::Body::from(body.clone()));
        let answer = self.protocol.call(request).await;
        let (parts, body) = answer.expect("a protocol error has a status").into_parts();
        let body = body.collect().await.expect("bodies are in memory");
        Response::from_parts(parts, body.to_bytes())
    }
}

/// The client's answer; an error where it gets none.
fn answer_to(
    fault: Option<Fault>,
    applied: Option<Response<Bytes>>,
    is_head: bool,
) -> io::Result<Answer> {
    match fault {
        None | Some(Fault::Doubled | Fault::Held(_) | Fault::Garbled | Fault::Stale(_)) => {
            Ok(whole(applied.expect("it was applied")))
        }
        Some(Fault::Flipped(bit)) => Ok(flipped(applied.expect("it was applied"), bit)),
        Some(Fault::Cut) if is_head => Err(lost()),
        Some(Fault::Cut) => cut(applied.expect("it was applied")),
        Some(Fault::Refused(status) | Fault::Disowned(status)) => {
            Ok(failed(StatusCode::from_u16(status).expect("a status")))
        }
        Some(
            Fault::Dropped
            | Fault::Unanswered
            | Fault::Late(_)
            | Fault::Killed
            | Fault::KilledAfter,
        ) => Err(lost()),
    }
}

fn lost() -> io::Error {
    io::ErrorKind::ConnectionReset.into()
}

fn whole(answer: Response<Bytes>) -> Answer {
    answer.map(|bytes| {
        Full::new(bytes)
            .map_err(|never: Infallible| match never {})
            .boxed()
    })
}

/// Flips a bit in the body of an answer, if it has one.
fn flipped(answer: Response<Bytes>, bit: usize) -> Answer {
    whole(answer.map(|bytes| {
        let mut bytes = bytes.to_vec();
        if !bytes.is_empty() {
            let bit = bit % (8 * bytes.len());
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        bytes.into()
    }))
}

/// The first half of an answer whose headers promise all of it.
fn cut(answer: Response<Bytes>) -> io::Result<Answer> {
    let (mut parts, bytes) = answer.into_parts();
    if bytes.is_empty() {
        return Err(lost());
    }
    parts.headers.insert(CONTENT_LENGTH, bytes.len().into());
    let half = bytes.slice(..bytes.len() / 2);
    let frames = stream::iter([Ok(Frame::data(half)), Err(lost())]);
    Ok(Response::from_parts(parts, StreamBody::new(frames).boxed()))
}

/// An answer that reports a failed request.
fn failed(status: StatusCode) -> Answer {
    let code = match status.as_u16() {
        200 | 500 => "InternalError",
        401 => "AuthenticationRequired",
        403 => "AccessDenied",
        404 => "NoSuchKey",
        409 => "ConditionalRequestConflict",
        412 => "PreconditionFailed",
        429 | 503 => "SlowDown",
        _ => "ServiceUnavailable",
    };
    let message = "a fault of the test";
    let refused = Refused {
        status,
        code,
        message,
    };
    whole(refused.into())
}
