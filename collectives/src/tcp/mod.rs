//! One process per rank, connected by TCP.
//!
//! Read in this order:
//!
//! * joining a world: `options`, `join`, `bind`, `ports`;
//! * authentication of incoming connections: `listener`, `unauthenticated`, `frame`, `handshake`, `refused`;
//! * protection of authenticated connections: `channel`, `seal`;
//! * the rendezvous, hosted by rank 0, which knows which ranks have arrived and diagnoses failures:
//!   `registry`, `rendezvous`, `inquiry`;
//! * a rank's side of the rendezvous: `control`, `stall`;
//! * connections between ranks, and the data on them: `pending`, `mesh`, `peer_memory`, `wire`, `transfer`;
//! * the backend: `backend`.

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
