//! What is said of the runs: JSON for the page, and text for Prometheus.

mod config;
mod live;
mod prometheus;
mod series;
mod summary;
mod texts;
mod timeline;

pub(super) use config::config;
pub(super) use live::look;
pub(super) use prometheus::metrics;
pub(super) use series::{SeriesQuery, keys, series};
pub(super) use summary::runs;
pub(super) use texts::{events, samples};
pub(super) use timeline::timeline;
