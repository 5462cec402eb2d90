//! What every communicator promises, checked once for all backends.
//!
//! The checks take any set of communicators that form one world, one per rank. They run on
//! the local backend with and without random delays, and, where they make sense for a world
//! without peers, on the fake backend.

#[path = "conformance/accounting.rs"]
mod accounting;
#[path = "conformance/failures.rs"]
mod failures;
#[path = "conformance/groups.rs"]
mod groups;
#[path = "conformance/lifetime.rs"]
mod lifetime;
#[path = "conformance/results.rs"]
mod results;
#[path = "conformance/support.rs"]
mod support;
