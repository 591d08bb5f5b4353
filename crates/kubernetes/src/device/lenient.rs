//! Lets clients in that name the path of a socket as the authority of their requests.
//!
//! A kubelet that looks for plugins dials their sockets by path, and its gRPC library sends the path,
//! percent-encoded, as `:authority`. The HTTP library here takes that for a broken request and resets the
//! stream. Nobody reads the field on a unix socket, so it is replaced by `localhost` before anybody
//! judges it: frames are told apart, and in a block of headers the value of that one field is changed.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::Connected;

/// What a client says first.
const PREFACE: usize = 24;
/// The head of a frame.
const HEAD: usize = 9;
const HEADERS: u8 = 1;
const PADDED: u8 = 8;
const PRIORITY: u8 = 32;
/// The number of `:authority` in the static table.
const AUTHORITY: usize = 1;
const INSTEAD: &[u8] = b"localhost";

/// A connection whose requests have an authority that can be read.
#[derive(Debug)]
pub(super) struct Lenient {
    stream: UnixStream,
    filter: Filter,
    /// Read and filtered already.
    waiting: Vec<u8>,
}

impl Lenient {
    pub(super) fn new(stream: UnixStream) -> Self {
        Lenient { stream, filter: Filter::default(), waiting: Vec::new() }
    }
}

impl Connected for Lenient {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Lenient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.waiting.is_empty() {
            let mut space = [0; 4096];
            let mut raw = ReadBuf::new(&mut space);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut raw))?;
            if raw.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            this.filter.take(raw.filled(), &mut this.waiting);
        }
        let count = buffer.remaining().min(this.waiting.len());
        buffer.put_slice(&this.waiting[..count]);
        this.waiting.drain(..count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Lenient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Tells frames apart in what a client sends.
#[derive(Debug, Default)]
struct Filter {
    begun: bool,
    /// Bytes of a frame that is passed on as it is.
    passing: usize,
    held: Vec<u8>,
}

impl Filter {
    /// Takes what was read; what may be passed on is added to `out`.
    fn take(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        self.held.extend_from_slice(bytes);
        if !self.begun {
            if self.held.len() < PREFACE {
                return;
            }
            self.begun = true;
            self.passing = PREFACE;
        }
        loop {
            let count = self.passing.min(self.held.len());
            out.extend(self.held.drain(..count));
            self.passing -= count;
            if self.held.len() < HEAD {
                return;
            }
            let length = self.held[..3].iter().fold(0, |all, byte| all << 8 | usize::from(*byte));
            if self.held[3] != HEADERS {
                self.passing = HEAD + length;
                continue;
            }
            if self.held.len() < HEAD + length {
                return;
            }
            let frame: Vec<u8> = self.held.drain(..HEAD + length).collect();
            out.extend(renamed(&frame).unwrap_or(frame));
        }
    }
}

/// A frame of headers with another authority; none where there is none, or it is beyond this.
fn renamed(frame: &[u8]) -> Option<Vec<u8>> {
    let (head, payload) = frame.split_at_checked(HEAD)?;
    let flags = head[4];
    let padding = if flags & PADDED == 0 { 0 } else { usize::from(*payload.first()?) };
    let before = usize::from(flags & PADDED != 0) + if flags & PRIORITY == 0 { 0 } else { 5 };
    let end = payload.len().checked_sub(padding)?;
    let block = payload.get(before..end)?;
    let value = authority(block)?;
    let mut text = payload[..before + value.start].to_vec();
    text.push(u8::try_from(INSTEAD.len()).ok()?);
    text.extend_from_slice(INSTEAD);
    text.extend_from_slice(&block[value.end..]);
    text.extend_from_slice(&payload[end..]);
    let length = u32::try_from(text.len()).ok()?.to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend_from_slice(&head[3..]);
    frame.extend(text);
    Some(frame)
}

/// Where in a block of headers the value of the authority is, with its length in front.
fn authority(block: &[u8]) -> Option<std::ops::Range<usize>> {
    let mut at = 0;
    while at < block.len() {
        let first = block[at];
        if first & 0x80 != 0 {
            at = number(block, at, 7)?.1;
            continue;
        }
        if first & 0xe0 == 0x20 {
            at = number(block, at, 5)?.1;
            continue;
        }
        let prefix = if first & 0x40 == 0 { 4 } else { 6 };
        let (name, mut next) = number(block, at, prefix)?;
        if name == 0 {
            next = past_text(block, next)?;
        }
        let end = past_text(block, next)?;
        if name == AUTHORITY {
            return Some(next..end);
        }
        at = end;
    }
    None
}

/// Where a text ends that begins here.
fn past_text(block: &[u8], at: usize) -> Option<usize> {
    let (length, next) = number(block, at, 7)?;
    next.checked_add(length).filter(|end| *end <= block.len())
}

/// A number that begins in the lower bits of a byte, and where it ends.
fn number(block: &[u8], at: usize, bits: u32) -> Option<(usize, usize)> {
    let most = (1_usize << bits) - 1;
    let mut value = usize::from(*block.get(at)?) & most;
    let mut at = at + 1;
    if value == most {
        for shift in (0..28).step_by(7) {
            let byte = usize::from(*block.get(at)?);
            at += 1;
            value += (byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some((value, at));
            }
        }
        return None;
    }
    Some((value, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(text: &str) -> Vec<u8> {
        let mut bytes = vec![u8::try_from(text.len()).unwrap()];
        bytes.extend(text.as_bytes());
        bytes
    }

    /// As a kubelet's library writes the headers of a call, but not compressed.
    fn block(authority: &str) -> Vec<u8> {
        let path = text("/pluginregistration.Registration/GetInfo");
        let parts: [&[u8]; 8] = [
            &[0x83, 0x86, 0x44],
            &path,
            &[0x41],
            &text(authority),
            &[0x5f],
            &text("application/grpc"),
            &[0x40, 2, b't', b'e'],
            &text("trailers"),
        ];
        parts.concat()
    }

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, u8::from(kind != 4)], payload].concat()
    }

    const PATH: &str = "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fmuxflow.dev-reg.sock";

    fn spoken(authority: &str, headers: impl Fn(Vec<u8>) -> (u8, Vec<u8>)) -> Vec<u8> {
        let (flags, payload) = headers(block(authority));
        let settings = frame(4, 0, &[]);
        let headers = frame(HEADERS, 4 | flags, &payload);
        let data = frame(0, 1, &[0; 5]);
        [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &settings, &headers, &data].concat()
    }

    proptest! {
        #[test]
        fn a_path_becomes_a_name_however_the_bytes_come(
            pieces in prop::collection::vec(1_usize..40, 0..40),
            padding in 0_u8..9,
            priority in any::<bool>(),
        ) {
            let dress = |mut block: Vec<u8>| {
                let mut flags = 0;
                if priority {
                    flags |= PRIORITY;
                    block.splice(0..0, [0, 0, 0, 0, 16]);
                }
                if padding > 0 {
                    flags |= PADDED;
                    block.insert(0, padding);
                    block.extend(vec![0; usize::from(padding)]);
                }
                (flags, block)
            };
            let (mut filter, mut out) = (Filter::default(), Vec::new());
            let said = spoken(PATH, dress);
            let mut rest = said.as_slice();
            for piece in pieces {
                let (now, later) = rest.split_at(piece.min(rest.len()));
                filter.take(now, &mut out);
                rest = later;
            }
            filter.take(rest, &mut out);
            prop_assert_eq!(out, spoken("localhost", dress));
        }

        #[test]
        fn other_frames_are_passed_on_as_they_are(
            frames in prop::collection::vec(
                (prop_oneof![Just(0_u8), 2_u8..12], any::<u8>(), prop::collection::vec(any::<u8>(), 0..60)),
                0..9,
            ),
        ) {
            let said: Vec<u8> =
                frames.iter().flat_map(|(kind, flags, payload)| frame(*kind, *flags, payload)).collect();
            let (mut filter, mut out) = (Filter { begun: true, ..Filter::default() }, Vec::new());
            filter.take(&said, &mut out);
            prop_assert_eq!(out, said);
        }

        #[test]
        fn headers_that_are_nonsense_stay_one_whole_frame(
            flags in any::<u8>(),
            payload in prop::collection::vec(any::<u8>(), 0..99),
        ) {
            let (mut filter, mut out) = (Filter { begun: true, ..Filter::default() }, Vec::new());
            filter.take(&frame(HEADERS, flags, &payload), &mut out);
            prop_assert!(filter.held.is_empty());
            prop_assert_eq!(&out[3..HEAD], &frame(HEADERS, flags, &[])[3..]);
            let told = usize::from(out[1]) << 8 | usize::from(out[2]);
            prop_assert_eq!(told, out.len() - HEAD);
        }
    }

    /// A call over a real socket, byte for byte as a kubelet makes it.
    #[tokio::test]
    async fn a_client_that_dials_a_path_is_answered() {
        use crate::device::grpc::{self, Routes};
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        struct Anybody;
        impl Routes for Anybody {
            fn route(
                self: std::sync::Arc<Self>,
                request: tonic::codegen::http::Request<tonic::body::Body>,
            ) -> futures::future::BoxFuture<
                'static,
                tonic::codegen::http::Response<tonic::body::Body>,
            > {
                Box::pin(async move { grpc::unknown(request.uri().path()) })
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s.sock");
        let _server =
            grpc::serve(&socket, std::sync::Arc::new(Anybody), std::future::pending()).unwrap();
        let mut client = UnixStream::connect(&socket).await.unwrap();
        client.write_all(&spoken(PATH, |block| (0, block))).await.unwrap();
        let answered = async {
            loop {
                let mut head = [0; HEAD];
                client.read_exact(&mut head).await.unwrap();
                let length = usize::from(head[1]) << 8 | usize::from(head[2]);
                let mut payload = vec![0; length];
                client.read_exact(&mut payload).await.unwrap();
                // Headers of an answer, or a reset of the stream.
                if matches!(head[3], 1 | 3) {
                    return head[3];
                }
            }
        };
        let within = tokio::time::timeout(std::time::Duration::from_secs(30), answered);
        assert_eq!(within.await.unwrap(), HEADERS, "the request was taken for a broken one");
    }
}
