use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// The part of a training step that a collective belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Setup: initial weights and groups.
    Init,
    /// Forward pass.
    Forward,
    /// Backward pass.
    Backward,
    /// Optimizer step with gradient clipping.
    Optimizer,
    /// Averaging of losses and metrics.
    Loss,
    /// Saving and loading checkpoints.
    Checkpoint,
    /// Anything else.
    Other,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// The purpose of a collective, shown in every record, error and log line. Ranks with different scopes have diverged,
/// and get [`CommError::Mismatch`](crate::CommError::Mismatch).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Label {
    /// Part of the model or program, such as `"block 3"`; the field `module` in flight recorder files.
    #[serde(rename = "module", with = "text")]
    pub scope: Arc<str>,
    /// Part of the training step.
    pub phase: Phase,
}

impl Label {
    /// Creates a label.
    pub fn new(scope: impl Into<Arc<str>>, phase: Phase) -> Label {
        Label { scope: scope.into(), phase }
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\" ({})", self.scope, self.phase)
    }
}

pub(crate) mod text {
    use serde::de::{Error, Visitor};
    use serde::{Deserializer, Serializer};
    use std::fmt;
    use std::sync::Arc;

    pub(crate) fn serialize<S: Serializer>(text: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(text)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<str>, D::Error> {
        deserializer.deserialize_str(Text)
    }

    /// Copies the text only once: flight recorders have thousands of labels.
    struct Text;

    impl Visitor<'_> for Text {
        type Value = Arc<str>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a string")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Arc<str>, E> {
            Ok(text.into())
        }
    }
}
