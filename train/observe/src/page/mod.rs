//! An HTTP server with one page, a small JSON interface and `/metrics` for Prometheus.
//!
//! Files are read and processes are asked at most once a second, and only while a client requests data.
//! No request changes a run unless the server was started to accept orders. The page draws with uPlot.

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
