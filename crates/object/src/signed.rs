//! Requests that the client library has no call for, signed and sent by what it offers.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue, IF_MATCH};
use http::{Method, Request, StatusCode};
use object_store::client::{HttpClient, HttpRequestBody};
use object_store::path::Path as Key;
use object_store::signer::{SignedUrlOptions, Signer};

use crate::refusal::Refusal;
use crate::tries::Tries;

/// How long a signature is good for: the clocks may differ by some minutes.
const SIGNATURE_MAX: Duration = Duration::from_secs(15 * 60);

/// How long an answer may take that needs no work.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// What a line carries at least: below that it counts as broken. Of a connection whose other end is
/// gone the system knows after 30 seconds (`TCP_USER_TIMEOUT`).
const BYTES_PER_SECOND_MIN: u64 = 64 << 10;

/// One request, which may be sent several times.
#[derive(Clone, Debug)]
pub(crate) struct Ask<'a> {
    method: Method,
    key: &'a Key,
    query: Vec<(&'static str, String)>,
    headers: HeaderMap,
    body: Bytes,
    time_max: Duration,
}

impl<'a> Ask<'a> {
    pub(crate) fn new(method: Method, key: &'a Key) -> Ask<'a> {
        Ask {
            method,
            key,
            query: Vec::new(),
            headers: HeaderMap::new(),
            body: Bytes::new(),
            time_max: ANSWER_MAX,
        }
    }

    pub(crate) fn query(mut self, name: &'static str, value: impl Into<String>) -> Ask<'a> {
        self.query.push((name, value.into()));
        self
    }

    pub(crate) fn header(mut self, name: HeaderName, value: HeaderValue) -> Ask<'a> {
        self.headers.insert(name, value);
        self
    }

    /// What is sent, in whose time the line may be slow.
    pub(crate) fn body(mut self, body: Bytes) -> Ask<'a> {
        self.time_max += Duration::from_secs(body.len() as u64 / BYTES_PER_SECOND_MIN);
        self.body = body;
        self
    }

    pub(crate) fn body_bytes(&self) -> u64 {
        self.body.len() as u64
    }

    /// What the store has to do besides.
    pub(crate) fn work(mut self, time: Duration) -> Ask<'a> {
        self.time_max += time;
        self
    }
}

/// An answer that does not refuse.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn header(&self, name: &HeaderName) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// Sends signed requests to S3.
#[derive(Clone)]
pub(crate) struct Signed {
    client: HttpClient,
    signer: Arc<dyn Signer>,
    patience: Duration,
}

impl Signed {
    /// One whose client has no time limit of its own, as that would count the sending too.
    pub(crate) fn new(signer: Arc<dyn Signer>, client: HttpClient, patience: Duration) -> Signed {
        Signed {
            client,
            signer,
            patience,
        }
    }

    /// The tries of one request.
    pub(crate) fn tries(&self) -> Tries {
        Tries::new(self.patience)
    }

    /// Removes an object. The client library asks for that in bulk, where some stores call it an error
    /// without a status that there is none.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] where a store tells that there is none.
    pub(crate) async fn delete(&self, key: &Key) -> io::Result<()> {
        Ok(self.ask(&Ask::new(Method::DELETE, key)).await.map(drop)?)
    }

    /// Removes an object if it is still the one with this tag.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] where there is none, or another one. A request whose answer was lost is
    /// sent again, and refused so if it was carried out.
    pub(crate) async fn delete_if(&self, key: &Key, tag: &str) -> io::Result<()> {
        let tag = HeaderValue::from_str(tag).map_err(io::Error::other)?;
        let ask = Ask::new(Method::DELETE, key).header(IF_MATCH, tag);
        let mut tries = self.tries();
        loop {
            let refused = match self.send(&ask).await {
                Ok((status, answer)) => match status {
                    StatusCode::NOT_FOUND
                    | StatusCode::CONFLICT
                    | StatusCode::PRECONDITION_FAILED => {
                        return Err(io::ErrorKind::NotFound.into());
                    }
                    _ => accept(status, answer),
                },
                Err(refusal) => Err(refusal),
            };
            match refused {
                Ok(_) => return Ok(()),
                Err(refusal) => tries.again(refusal).await?,
            }
        }
    }

    /// Has a request answered, sending it again where that may help, and signing it anew each time.
    pub(crate) async fn ask(&self, ask: &Ask<'_>) -> Result<Answer, Refusal> {
        let mut tries = self.tries();
        loop {
            match self.ask_once(ask).await {
                Ok(answer) => return Ok(answer),
                Err(refusal) => tries.again(refusal).await?,
            }
        }
    }

    pub(crate) async fn ask_once(&self, ask: &Ask<'_>) -> Result<Answer, Refusal> {
        let (status, answer) = self.send(ask).await?;
        accept(status, answer)
    }

    async fn send(&self, ask: &Ask<'_>) -> Result<(StatusCode, Answer), Refusal> {
        let sent = tokio::time::timeout(ask.time_max, self.send_unbounded(ask));
        sent.await.unwrap_or_else(|_| Err(Refusal::silent()))
    }

    async fn send_unbounded(&self, ask: &Ask<'_>) -> Result<(StatusCode, Answer), Refusal> {
        let query = ask.query.iter().cloned();
        let mut options = SignedUrlOptions::new().with_query(query);
        options.signed_headers = ask.headers.clone();
        let url = self
            .signer
            .signed_url_opts(ask.method.clone(), ask.key, SIGNATURE_MAX, &options);
        let url = url.await.map_err(|error| Refusal::of_store(&error))?;
        let body = HttpRequestBody::from(ask.body.clone());
        let request = Request::builder()
            .method(ask.method.clone())
            .uri(url.as_str());
        let mut request = request
            .body(body)
            .map_err(|error| Refusal::new(io::ErrorKind::InvalidInput, error.to_string()))?;
        request.headers_mut().extend(ask.headers.clone());
        let answer = self.client.execute(request).await;
        let (parts, body) = answer
            .map_err(|error| Refusal::of_transport(&error))?
            .into_parts();
        let body = body.bytes().await;
        let answer = Answer {
            headers: parts.headers,
            body: body.map_err(|error| Refusal::of_transport(&error))?,
        };
        Ok((parts.status, answer))
    }
}

fn accept(status: StatusCode, answer: Answer) -> Result<Answer, Refusal> {
    match status.is_success() {
        true => Ok(answer),
        false => Err(Refusal::of_answer(status, &answer.headers, &answer.body)),
    }
}
