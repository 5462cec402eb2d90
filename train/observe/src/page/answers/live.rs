//! A run's ranks at this moment: `/api/look`.

use serde::{Serialize, Serializer};

use super::super::watched::WatchedRun;
use crate::status::Look;

#[derive(Serialize)]
struct Answer<'a> {
    run: &'a str,
    look: Option<&'a Look>,
    /// Why there is no look.
    problem: Option<&'a str>,
}

/// The last look at a run.
pub(in super::super) fn look(watched: &WatchedRun) -> impl Serialize {
    LastLook(watched)
}

struct LastLook<'a>(&'a WatchedRun);

impl Serialize for LastLook<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (look, problem) = {
            let seen = self.0.seen();
            (seen.look.clone(), seen.problem.clone())
        };
        Answer { run: &self.0.id, look: look.as_deref(), problem: problem.as_deref() }.serialize(serializer)
    }
}
