use serde::{Deserialize, Serialize};
use std::fmt;

/// Kind of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// A rank died.
    Died,
    /// A rank exists but does not answer.
    Silent,
    /// Ranks issued different operations under the same number.
    Mismatch,
    /// A rank never entered an operation in which other ranks wait.
    Missing,
    /// A rank entered an operation so late that another rank's wait had timed out.
    Late,
    /// A rank's process, or every process, was not running while others waited for it.
    Stopped,
    /// All ranks are in the operation, but the transfer does not finish.
    Transfer,
    /// No operation is pending.
    Nothing,
}

/// The ranks to look at first after a failure, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// Kind of failure.
    pub finding: Finding,
    /// World ranks to look at first.
    pub culprits: Vec<usize>,
    /// One sentence for messages.
    pub text: String,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
