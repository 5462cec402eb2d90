//! Asynchronous streams. Each stream has a queue and a thread, which executes one operation after another
//! with random delays. The accesses of operations to memory are checked.
//!
//! | module | contents |
//! |---|---|
//! | `clock`, `operation` | the operations before an operation; its name and its accesses |
//! | `order`, `problem` | the last users of bytes, and conflicts with the next ones |
//! | `state` | the operations of streams, their queues, and their waits |
//! | `worker` | issuing operations, and executing them on the threads of streams |
//! | `device` | streams, events, and waits of the host |
//!
//! Operations are ordered by the calls that issue them. An operation comes after the earlier ones of its
//! stream, after the events that its stream waits for, and after everything that any thread of the host has
//! seen done. Threads of the host are not distinguished, because their waits for each other are not visible.
//! So a race is missed if the host hides it by querying an event at the right time, but every reported race
//! is real.

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
