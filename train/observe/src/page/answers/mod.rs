//! The answers about runs: JSON for the page, and text for Prometheus.

mod comparison;
mod details;
mod prometheus;
mod summary;
mod timeline;

pub(super) use comparison::comparison;
pub(super) use details::{SeriesQuery, all_series, config, events, keys, look, samples, series};
pub(super) use prometheus::metrics;
pub(super) use summary::runs;
pub(super) use timeline::timeline;
