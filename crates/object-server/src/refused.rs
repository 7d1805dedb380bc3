//! Errors returned before a request reaches the protocol.

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};

/// An error in the format of S3 and Google.
pub(crate) struct Refused {
    pub(crate) status: StatusCode,
    pub(crate) code: &'static str,
    pub(crate) message: &'static str,
}

impl From<Refused> for Response<Bytes> {
    fn from(refused: Refused) -> Response<Bytes> {
        let Refused {
            status,
            code,
            message,
        } = refused;
        let text = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
             <Error><Code>{code}</Code><Message>{message}</Message></Error>"
        );
        let mut answer = Response::new(Bytes::from(text));
        *answer.status_mut() = status;
        let xml = HeaderValue::from_static("application/xml");
        answer.headers_mut().insert(CONTENT_TYPE, xml);
        answer
    }
}
