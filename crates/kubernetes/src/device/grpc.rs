//! gRPC over a unix socket for messages that are written by hand: what a code generator would emit
//! for each service, once.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::Stream;
use futures::future::BoxFuture;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::http::{Request as HttpRequest, Response as HttpResponse};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use super::lenient::Lenient;

/// Answers requests by their path.
pub trait Routes: Send + Sync + 'static {
    /// Answers one; `None` for a path that is not served.
    fn route(self: Arc<Self>, request: HttpRequest<Body>)
    -> BoxFuture<'static, HttpResponse<Body>>;

    /// Whether somebody listens, where answers are streams that never end.
    fn has_listener(&self) -> bool {
        true
    }
}

/// Serves on a socket that is made anew, until `stop`. Returns once the socket can be connected to;
/// the task goes on.
pub fn serve(
    socket: &Path,
    routes: Arc<impl Routes>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<tokio::task::JoinHandle<Result<(), tonic::transport::Error>>> {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = tokio::net::UnixListener::bind(socket)?;
    let connections = futures::stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(stream, _)| Lenient::new(stream));
        Some((accepted, listener))
    });
    let server =
        Server::builder().serve_with_incoming_shutdown(Front(routes), Box::pin(connections), stop);
    Ok(tokio::spawn(server))
}

struct Front<R>(Arc<R>);

impl<R> Clone for Front<R> {
    fn clone(&self) -> Self {
        Front(Arc::clone(&self.0))
    }
}

impl<R: Routes> Service<HttpRequest<Body>> for Front<R> {
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<HttpResponse<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<Body>) -> Self::Future {
        let answer = Arc::clone(&self.0).route(request);
        Box::pin(async move { Ok(answer.await) })
    }
}

/// A closure that answers one kind of request.
struct Call<F>(F);

impl<F, Q, A, Fut> Service<Request<Q>> for Call<F>
where
    F: FnMut(Q) -> Fut,
    Fut: Future<Output = Result<Response<A>, Status>>,
{
    type Response = Response<A>;
    type Error = Status;
    type Future = Fut;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Q>) -> Fut {
        (self.0)(request.into_inner())
    }
}

/// Answers a request with one message.
pub async fn unary<Q, A, Fut>(
    request: HttpRequest<Body>,
    answer: impl FnMut(Q) -> Fut,
) -> HttpResponse<Body>
where
    Q: prost::Message + Default + Send + 'static,
    A: prost::Message + Send + 'static,
    Fut: Future<Output = Result<Response<A>, Status>>,
{
    tonic::server::Grpc::new(ProstCodec::<A, Q>::default()).unary(Call(answer), request).await
}

/// Messages that come one after the other.
pub type Messages<A> = Pin<Box<dyn Stream<Item = Result<A, Status>> + Send>>;

/// Answers a request with a stream of messages.
pub async fn streaming<Q, A>(
    request: HttpRequest<Body>,
    mut answer: impl FnMut(Q) -> Messages<A>,
) -> HttpResponse<Body>
where
    Q: prost::Message + Default + Send + 'static,
    A: prost::Message + Send + 'static,
{
    let call = Call(move |message: Q| -> Ready<Result<Response<Messages<A>>, Status>> {
        ready(Ok(Response::new(answer(message))))
    });
    tonic::server::Grpc::new(ProstCodec::<A, Q>::default()).server_streaming(call, request).await
}

/// The answer to a path that nobody serves.
pub fn unknown(path: &str) -> HttpResponse<Body> {
    Status::unimplemented(format!("there is no {path} here")).into_http()
}

/// Connects to a socket.
pub async fn connect(socket: &Path) -> Result<Channel, tonic::transport::Error> {
    Endpoint::from_shared(format!("unix://{}", socket.display()))?.connect().await
}

/// Asks for one message.
pub async fn ask<Q, A>(channel: &Channel, path: &'static str, message: Q) -> Result<A, Status>
where
    Q: prost::Message + Send + Sync + 'static,
    A: prost::Message + Default + Send + 'static,
{
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let codec = ProstCodec::<Q, A>::default();
    let answer = client.unary(Request::new(message), PathAndQuery::from_static(path), codec);
    answer.await.map(Response::into_inner)
}

/// Asks for a stream of messages.
pub async fn listen<Q, A>(
    channel: &Channel,
    path: &'static str,
    message: Q,
) -> Result<Streaming<A>, Status>
where
    Q: prost::Message + Send + Sync + 'static,
    A: prost::Message + Default + Send + 'static,
{
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let (path, codec) = (PathAndQuery::from_static(path), ProstCodec::<Q, A>::default());
    let answer = client.server_streaming(Request::new(message), path, codec);
    answer.await.map(Response::into_inner)
}
