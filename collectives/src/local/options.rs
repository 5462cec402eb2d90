//! The settings of a world of threads.

use crate::backend::WorkerStart;
use crate::recorder::DEFAULT_CAPACITY;
use std::fmt;
use std::time::Duration;

/// Settings of a [`LocalGroup`](crate::LocalGroup).
#[derive(Clone)]
pub struct LocalOptions {
    /// Name of the group for logs. Default `"world"`.
    pub name: String,
    /// Seed of random delays before and during each operation, for tests that nothing depends on timing.
    /// Default none: no delays.
    pub random_delay_seed: Option<u64>,
    /// Upper limit of one random delay. Default 1 ms.
    pub max_delay: Duration,
    /// Number of records that each rank keeps. Default [`DEFAULT_CAPACITY`].
    pub recorder_capacity: usize,
    /// Called with the world rank first thing on each worker thread, also on those of groups split off later.
    /// Lets memory accounting bind threads to ranks. Default nothing.
    pub on_worker_start: Option<WorkerStart>,
}

impl Default for LocalOptions {
    fn default() -> LocalOptions {
        LocalOptions {
            name: "world".into(),
            random_delay_seed: None,
            max_delay: Duration::from_millis(1),
            recorder_capacity: DEFAULT_CAPACITY,
            on_worker_start: None,
        }
    }
}

impl fmt::Debug for LocalOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalOptions")
            .field("name", &self.name)
            .field("random_delay_seed", &self.random_delay_seed)
            .field("max_delay", &self.max_delay)
            .field("recorder_capacity", &self.recorder_capacity)
            .field("on_worker_start", &self.on_worker_start.is_some())
            .finish()
    }
}
