//! The connection to one client, on which the first byte of an answer may be garbled.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// A connection whose next sent bytes can be garbled.
pub(crate) struct Line {
    stream: TokioIo<TcpStream>,
    is_garbled: Arc<AtomicBool>,
}

impl Line {
    /// Wraps a connection; also returns the flag that garbles the next bytes sent.
    pub(crate) fn new(stream: TcpStream) -> (Line, Arc<AtomicBool>) {
        let is_garbled = Arc::new(AtomicBool::new(false));
        let line = Line {
            stream: TokioIo::new(stream),
            is_garbled: Arc::clone(&is_garbled),
        };
        (line, is_garbled)
    }
}

impl Read for Line {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buf)
    }
}

impl Write for Line {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let first = bytes
            .first()
            .filter(|_| self.is_garbled.load(Ordering::Relaxed));
        let Some(first) = first else {
            return Pin::new(&mut self.stream).poll_write(context, bytes);
        };
        let garbled = [first ^ 1];
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, &garbled))?;
        self.is_garbled.store(written == 0, Ordering::Relaxed);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
