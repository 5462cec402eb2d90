//! One process per rank, connected by TCP.
//!
//! * Joining a world: `options`, `join`, `bind`, `ports`.
//! * Authentication: `listener`, `unauthenticated`, `frame`, `handshake`, `refused`. Protection: `channel`, `seal`.
//! * The rendezvous on rank 0, which diagnoses failures: `registry`, `rendezvous`, `inquiry`. A rank's side: `control`,
//!   `stall`.
//! * Connections between ranks: `pending`, `mesh`, `peer_memory`, `wire`, `transfer`. The backend: `backend`.

mod backend;
mod bind;
mod channel;
mod control;
mod frame;
mod handshake;
mod inquiry;
mod join;
mod listener;
mod mesh;
mod message;
mod options;
mod peer_memory;
mod pending;
mod ports;
mod refused;
mod registry;
mod rendezvous;
mod seal;
mod stall;
mod transfer;
mod unauthenticated;
mod waker;
mod warnings;
mod wire;

pub use backend::{TcpBackend, TcpCommunicator};
pub use join::loopback;
pub use options::{Arrivals, JoinError, JoinOptions, Ring, Seal, Secret};
pub use ports::Ports;
