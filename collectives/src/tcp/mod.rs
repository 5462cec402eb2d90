//! One process per rank, connected by TCP.
//!
//! Read in this order: `options` and `join` (from options to a world), `listen`, `ports` and `pause` (where, and how
//! long), `doorway`, `unproven`, `frame` and
//! `handshake` (what goes over a connection before it is trusted), `refused` (who is turned away), `channel` and
//! `seal` (what protects it afterwards), `rendezvous` and `inquiry` (kept by rank 0: who is here, and what
//! happened when something goes wrong), `control` and `pulse` (a rank's side of that), `mesh`,
//! `neighbour`, `wire` and `transfer` (connections between ranks, and the data on them), `end` (the backend).

mod channel;
mod control;
mod descriptors;
mod doorway;
mod end;
mod frame;
mod handshake;
mod inquiry;
mod join;
mod keyed;
mod listen;
mod lobby;
mod mesh;
mod message;
mod neighbour;
mod options;
mod pause;
mod ports;
mod pulse;
mod refused;
mod rendezvous;
mod seal;
mod transfer;
mod unproven;
mod waker;
mod warnings;
mod wire;

pub use end::{TcpCommunicator, TcpEnd};
pub use join::loopback;
pub use options::{JoinError, JoinOptions, Ring, Seal, Secret};
pub use ports::Ports;
