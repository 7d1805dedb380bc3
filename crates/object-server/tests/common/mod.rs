//! Requests as the tests write them, and their answers.

use bytes::Bytes;
use http::{HeaderMap, Method, Request};
use object_store::ClientOptions;
use object_store::client::{HttpClient, HttpConnector, HttpRequestBody, ReqwestConnector};
use tokio::runtime::Runtime;

pub(crate) const MIB: usize = 1 << 20;

/// The usual input of published check values of checksums.
pub(crate) const DIGITS: &[u8] = b"123456789";

/// An answer, as far as it was received.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers[name].to_str().unwrap()
    }

    /// The text of the first element of a name.
    pub(crate) fn element(&self, name: &str) -> &str {
        let (_, rest) = self.text.split_once(&format!("<{name}>")).unwrap();
        rest.split_once("</").unwrap().0
    }
}

pub(crate) fn options() -> ClientOptions {
    ClientOptions::new().with_allow_http(true)
}

pub(crate) fn request(
    method: Method,
    uri: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Request<HttpRequestBody> {
    let mut request = Request::builder().method(method).uri(uri);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = HttpRequestBody::from(Bytes::copy_from_slice(body));
    request.body(body).unwrap()
}

/// Sends a request; `None` where the connection ends before the whole answer.
pub(crate) fn send(runtime: &Runtime, request: Request<HttpRequestBody>) -> Option<Answer> {
    runtime.block_on(async {
        let http: HttpClient = ReqwestConnector::default().connect(&options()).unwrap();
        let answer = http.execute(request).await.ok()?;
        let (parts, body) = answer.into_parts();
        Some(Answer {
            status: parts.status.as_u16(),
            headers: parts.headers,
            text: String::from_utf8(body.bytes().await.ok()?.to_vec()).unwrap(),
        })
    })
}
