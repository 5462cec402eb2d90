//! Why a page cannot be served.

use std::io;
use std::net::SocketAddr;

/// A page that cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// The address is taken, or is none of this machine.
    #[error("cannot serve the page at http://{address}: {source}; name another one with --http ADDRESS:PORT")]
    Bind {
        /// The address that was asked for.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Whoever reaches the machine would see the runs.
    #[error("{address} can be reached from other machines, and needs a token")]
    TokenNeeded {
        /// The address that was asked for.
        address: SocketAddr,
    },
    /// Whoever opens the address would end runs.
    #[error("a page that takes orders needs a token")]
    TokenNeededForOrders,
    /// Whoever guesses would see the runs, or the token cannot be part of an address.
    #[error("a token has 16 or more letters, digits, - and _")]
    WeakToken,
    /// The system has no thread, no event queue or no random bytes left.
    #[error("cannot serve the page: {0}")]
    System(#[from] io::Error),
}
