//! Errors of serving a page.

use std::io;
use std::net::SocketAddr;

/// The reason why a page cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// The address is taken, or does not belong to this machine.
    #[error("cannot serve the page at http://{address}: {source}; name another one with --http ADDRESS:PORT")]
    Bind {
        /// The requested address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// Anyone who can reach the machine could see the runs.
    #[error("a page at {address} is reachable from other machines, so it needs a token")]
    TokenNeeded {
        /// The requested address.
        address: SocketAddr,
    },
    /// Anyone who opens the address could end runs.
    #[error("a page that can change runs needs a token")]
    TokenNeededForOrders,
    /// The token can be guessed, or cannot be part of an address.
    #[error("a token needs at least 16 characters: letters, digits, - and _")]
    WeakToken,
    /// The system has no threads, event queues or random bytes left.
    #[error("cannot serve the page: {0}")]
    System(#[from] io::Error),
}
