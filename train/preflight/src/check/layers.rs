//! Mistakes of custom layers that training hides, for the stage `model`.

use kiln_model::Layers;
use kiln_model::verify::layers::{MistakeKind, find_mistakes};

use super::model::Trained;
use super::step;
use crate::findings::{Findings, Stage};
use kiln_train::registry::Registry;

const MODEL: Stage = Stage::Model;

/// Runs the model on the CPU if it has custom layers; a large one is narrowed, as for the stage `step`.
pub(super) fn examine(parts: &Trained, registry: &Registry, findings: &mut Findings) {
    if Layers::default().missing(&parts.model).is_empty() {
        return;
    }
    let Some(reduced) = findings.take(MODEL, "layers", step::reduced(parts)) else { return };
    let found = find_mistakes(registry.layers(), &reduced.model, parts.config.data.seq_len);
    let Some(mistakes) = findings.take(MODEL, "layers", found) else { return };
    if mistakes.is_empty() {
        findings.ok(MODEL, "layers", "causal, cache, lengths, batches, keys, randomness ok");
    }
    for mistake in mistakes {
        let (text, fix) = (mistake.to_string(), mistake.kind.fix());
        match mistake.kind {
            // A step of the model would panic, too.
            MistakeKind::Panic => findings.fail(MODEL, "model", text, fix),
            // May be intended.
            MistakeKind::EqualWeights => findings.warn(MODEL, "layers", text, fix),
            _ => findings.fail(MODEL, "layers", text, fix),
        }
    }
}
