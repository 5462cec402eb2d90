//! Streams that are asynchronous: each has a queue and a thread, which executes one operation after the other, late
//! and at random; and who may use which memory when is checked.
//!
//! | module | what it has |
//! |---|---|
//! | `clock`, `operation` | what comes before an operation; its name and what it uses |
//! | `order`, `problem` | who used which bytes last, and what is wrong with who uses them next |
//! | `state` | what streams are given, their queues, and what each of them waits for |
//! | `worker` | how operations are issued, and how the threads of streams execute them |
//! | `device` | streams, events, and what the host waits for |
//!
//! The order of operations is that of the calls that issue them. An operation comes behind those that its stream has,
//! behind events that its stream waits for, and behind all that any thread of the host has seen done: threads of the
//! host are not told apart, because how they wait for each other is not seen. So a race that a host hides by having
//! looked at an event in time is not found, and one that is found is one.

pub(crate) mod clock;
mod device;
pub(crate) mod operation;
mod order;
mod problem;
mod state;
mod worker;

pub use device::Device;
pub use operation::{Access, Use};
pub use state::{Event, Failed, Settings, Submitted};
