//! Orders: the only requests that change a run, taken by servers that were told to take them.

use std::path::Path;
use std::sync::Arc;

use hyper::header::HeaderMap;

/// A header that an order must have, with any value: no form and no link of another site can send it.
const HEADER: &str = "x-kiln-control";

/// Says a line to the prompt of the run in a folder, as `kiln attach` does, and returns what the run says to it.
pub type Tell = Arc<dyn Fn(&Path, &str) -> Result<String, String> + Send + Sync>;

/// What a run can be asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Save a checkpoint after this step.
    Checkpoint,
    /// Save, and end.
    Stop,
}

impl Order {
    /// The order that has this address.
    pub(super) fn of(path: &str) -> Option<Order> {
        match path {
            "/api/checkpoint" => Some(Order::Checkpoint),
            "/api/stop" => Some(Order::Stop),
            _ => None,
        }
    }

    /// The line that means it at a prompt.
    pub(super) fn line(self) -> &'static str {
        match self {
            Order::Checkpoint => "checkpoint",
            Order::Stop => "quit",
        }
    }

    /// Whether a request with these headers means it.
    pub(super) fn is_meant(headers: &HeaderMap) -> bool {
        headers.contains_key(HEADER)
    }
}
