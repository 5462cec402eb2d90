//! Runs in a browser, and for Prometheus: an HTTP server with one page, a small JSON interface and
//! `/metrics`.
//!
//! [`serve`] starts it in separate threads and returns at once. Clients cannot slow a run down: files are read and
//! processes are asked at most once a second, however many clients there are, and only while someone looks. No request
//! changes a run, unless the server was started to accept orders.
//!
//! From the ground up:
//!
//! - `guard.rs`: who gets an answer;
//! - `watched.rs`, `refresh.rs`: the runs, at most a second old;
//! - `reduce.rs`, `summary.rs`, `details.rs`, `comparison.rs`, `timeline.rs`, `prometheus.rs`: answers about the
//!   runs, as JSON and in Prometheus' text format;
//! - `document.rs`, `assets/`: the page. It draws with uPlot, whose licence is next to it;
//! - `routes.rs`, `server.rs`: requests and orders; connections and their limits.

mod comparison;
mod details;
mod document;
mod error;
mod guard;
mod prometheus;
mod reduce;
mod refresh;
mod routes;
mod server;
mod summary;
mod timeline;
mod watched;

pub(crate) use document::{Snapshot, page_of_strategies};
pub use error::PageError;
pub use guard::AccessToken;
pub(crate) use reduce::reduce;
pub use routes::Tell;
pub use server::{ServeOptions, Server, serve};
pub(crate) use summary::Progress;
pub use watched::TimelinesAt;
