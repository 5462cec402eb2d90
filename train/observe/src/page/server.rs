//! Accepts connections, and limits the cost of clients.

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

/// Maximum number of connections. A new connection replaces the oldest.
const MOST_CONNECTIONS: usize = 256;

/// Maximum bytes of a request's first line and headers, and maximum number of headers.
const MOST_HEAD: usize = 16 << 10;
const MOST_HEADERS: usize = 64;

/// Time for a request's headers to arrive, including idle time.
const HEAD: Duration = Duration::from_secs(10);

/// A connection accepts requests for this time, and closes after the same time again.
const LIFE: Duration = Duration::from_secs(30);

/// Minimum pause between reads of folders, and between questions to processes.
const PAUSE: Duration = Duration::from_millis(800);

/// One thread reads folders, one asks processes, and two compute answers.
const WORKERS: usize = 4;

/// Options of a server.
pub struct ServeOptions {
    /// Address to listen on. The system chooses the port if it is 0.
    pub address: SocketAddr,
    /// Run folders, and folders of run folders, which may not exist yet.
    pub paths: Vec<PathBuf>,
    /// Token that clients must present. Required for an address that other machines can reach.
    pub token: Option<AccessToken>,
    /// Additional names of this machine that clients use, such as that of a load balancer.
    pub names: Vec<String>,
    /// Reads the state of a run.
    pub look_at: LookAt,
    /// Reads the last step of every rank of a run.
    pub timelines_at: Option<TimelinesAt>,
    /// Sends orders to a run, for clients that have the token. If `None`, no request changes a run.
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
    /// Returns the bound address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the URL to open in a browser, with the token.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Closes all connections and frees the address, without waiting for processes that are being asked.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
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
        // Browsers cannot open 0.0.0.0.
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
        let _ = runtime.block_on(stopped);
        runtime.shutdown_background();
    })?;
    Ok(Server { address, url, stop: Some(stop), thread: Some(thread) })
}

async fn accept(listener: tokio::net::TcpListener, site: Arc<Site>) {
    let mut connections: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // No file descriptors are left until a connection ends.
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

async fn attend(stream: TcpStream, site: Arc<Site>) {
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
    if time::timeout(LIFE, connection.as_mut()).await.is_err() {
        connection.as_mut().graceful_shutdown();
        let _ = time::timeout(LIFE, connection).await;
    }
}
