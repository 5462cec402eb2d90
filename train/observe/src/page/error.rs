//! Errors of serving a page.

use std::io;
use std::net::SocketAddr;

/// The reason why a page cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// The address is in use, or does not belong to this machine.
    #[error("cannot serve the page at http://{address}: {source}; name another one with --http ADDRESS:PORT")]
    Bind {
        /// The requested address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// Other machines can reach the address, so a token is required.
    #[error("a page at {address} is reachable from other machines, so it needs a token")]
    TokenNeeded {
        /// The requested address.
        address: SocketAddr,
    },
    /// A server that accepts orders requires a token.
    #[error("a page that can change runs needs a token")]
    TokenNeededForOrders,
    /// The token is too short, or has characters that URLs do not allow.
    #[error("a token needs at least 16 characters: letters, digits, - and _")]
    WeakToken,
    /// The system has no threads, event queues or random bytes left.
    #[error("cannot serve the page: {0}")]
    System(#[from] io::Error),
}
