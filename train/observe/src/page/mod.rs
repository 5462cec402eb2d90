//! Runs in a browser, and for Prometheus: an HTTP server with one page, a small JSON interface and
//! `/metrics`.
//!
//! [`serve`] starts it in separate threads and returns at once. Nothing that a client does reaches a run:
//! files are read and processes are asked at most once a second, however many clients there are, and only
//! while someone looks. No request changes a run, unless the server was started to accept orders.
//!
//! From the ground up:
//!
//! - `error.rs`, `token.rs`, `guard.rs`: who gets an answer;
//! - `refresh.rs`, `watched.rs`: the runs, at most a second old;
//! - `reduce.rs`, `answers/`: answers about the runs, as JSON and in Prometheus' text format;
//! - `document.rs`, `assets/`: the page. It draws with uPlot, whose licence is next to it;
//! - `kept.rs`, `routes.rs`, `server.rs`: cached answers, requests and orders, connections and their limits.
//!
//! `snapshot.rs` is the same page as a file, with the answers in it, for reports.

mod answers;
mod document;
mod error;
mod guard;
mod kept;
mod reduce;
mod refresh;
mod routes;
mod server;
mod snapshot;
mod token;
mod watched;

pub use error::PageError;
pub use routes::Tell;
pub use server::{ServeOptions, Server, serve};
pub(crate) use snapshot::{Snapshot, page_of_strategies};
pub use token::AccessToken;
pub use watched::TimelinesAt;
