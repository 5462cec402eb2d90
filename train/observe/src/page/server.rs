//! Connections, and the limits that keep clients from being costly.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time;

use super::error::PageError;
use super::guard::{AccessToken, Guard};
use super::refresh::Refresher;
use super::routes::{Site, Tell};
use super::watched::{TimelinesAt, Watched};
use crate::status::LookAt;

/// Maximum number of simultaneous connections. The oldest one makes room for the next.
const MOST_CONNECTIONS: usize = 256;

/// Maximum number of bytes of a request's first line and headers, and of headers.
const MOST_HEAD: usize = 16 << 10;
const MOST_HEADERS: usize = 64;

/// Time for a request's headers to arrive, including the time in which a connection is idle.
const HEAD: Duration = Duration::from_secs(10);

/// A connection accepts no more requests after this time, and is closed after the same time again, whatever
/// the client has read by then.
const LIFE: Duration = Duration::from_secs(30);

/// Minimum pause between reads of folders, and between questions to processes.
const PAUSE: Duration = Duration::from_millis(800);

/// Number of threads that read folders, ask processes, and make answers: one, one, and two.
const WORKERS: usize = 4;

/// Options of a server.
pub struct ServeOptions {
    /// The address to listen on. With port 0 the system chooses one.
    pub address: SocketAddr,
    /// Run folders, and folders of run folders. They may be created later.
    pub paths: Vec<PathBuf>,
    /// The token that clients must present. Required for an address that other machines can reach.
    pub token: Option<AccessToken>,
    /// Names under which clients know this machine, besides its own, such as that of a load balancer.
    pub names: Vec<String>,
    /// Looks at a run.
    pub look_at: LookAt,
    /// Reads the last step of every rank of a run.
    pub timelines_at: Option<TimelinesAt>,
    /// Sends orders to a run, for clients that have the token. Without it, no request changes a run.
    pub tell: Option<Tell>,
}

/// A server that runs until it is stopped or dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    url: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// The address that the server is bound to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL to open in a browser, with the token.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Ends all connections and frees the address. Does not wait for processes that are being asked.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // An error means that the server is already gone.
        let _ = self.stop.take().map(|stop| stop.send(()));
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// Starts a server in separate threads.
///
/// # Errors
///
/// If the address is unavailable, a required token is missing, or the system has no threads.
pub fn serve(options: ServeOptions) -> Result<Server, PageError> {
    let ServeOptions { address, paths, token, mut names, look_at, timelines_at, tell } = options;
    if !address.ip().is_loopback() && token.is_none() {
        return Err(PageError::TokenNeeded { address });
    }
    if tell.is_some() && token.is_none() {
        return Err(PageError::TokenNeededForOrders);
    }
    let bound = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok((listener.local_addr()?, listener))
    });
    let (address, listener) = bound.map_err(|source| PageError::Bind { address, source })?;
    let node = rustix::system::uname().nodename().to_string_lossy().into_owned();
    names.extend(node.split('.').next().map(str::to_owned));
    let query = token.as_ref().map_or_else(String::new, |token| format!("?token={}", token.text()));
    let host = match address.ip().is_unspecified() && !node.is_empty() {
        // 0.0.0.0 cannot be opened.
        true => format!("{node}:{}", address.port()),
        false => address.to_string(),
    };
    let url = format!("http://{host}/{query}");
    names.push(node);

    let watched = Arc::new(Watched::new(paths, look_at, timelines_at));
    let (read, asked) = (watched.clone(), watched.clone());
    let reader = Refresher::new(PAUSE, move || read.read_folders());
    let asker = Refresher::new(PAUSE, move || asked.ask_processes());
    let guard = Guard::new(address, token, &names);
    let site = Arc::new(Site { guard, watched, reader, asker, tell });

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(WORKERS)
        .thread_name("kiln-page-work")
        .build()?;
    let listener = {
        let _runtime = runtime.enter();
        tokio::net::TcpListener::from_std(listener)?
    };
    let (stop, stopped) = oneshot::channel();
    let thread = thread::Builder::new().name("kiln-page".to_owned()).spawn(move || {
        runtime.spawn(accept(listener, site));
        // An error means that the server was dropped, which also stops it.
        let _ = runtime.block_on(stopped);
        runtime.shutdown_background();
    })?;
    Ok(Server { address, url, stop: Some(stop), thread: Some(thread) })
}

/// Accepts connections until it is dropped.
async fn accept(listener: tokio::net::TcpListener, site: Arc<Site>) {
    let mut connections: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // No file descriptors are left: some connection will end.
            time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        if connections.len() >= MOST_CONNECTIONS {
            connections.retain(|connection| !connection.is_finished());
        }
        if connections.len() >= MOST_CONNECTIONS
            && let Some(oldest) = connections.pop_front()
        {
            oldest.abort();
        }
        connections.push_back(tokio::spawn(attend(stream, site.clone())).abort_handle());
    }
}

/// Answers the requests of one connection.
async fn attend(stream: TcpStream, site: Arc<Site>) {
    // Affects only the speed of small answers.
    let _: io::Result<()> = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let site = site.clone();
        async move { Ok::<_, Infallible>(site.answer(request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(MOST_HEAD)
        .max_headers(MOST_HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    // Errors are the client's and concern no one else.
    if time::timeout(LIFE, connection.as_mut()).await.is_err() {
        connection.as_mut().graceful_shutdown();
        let _ = time::timeout(LIFE, connection).await;
    }
}
