//! Whole steps on one rank, alternating between Kiln and PyTorch.

use kiln::config::{Backend, Config, Precision};
use kiln::device::Peak;
use kiln::run::TrainError;
use kiln_model::ModelConfig;
use kiln_shard::Recompute;

use super::device::Chosen;
use super::peer::Peer;
use super::predicted::PredictedStep;
use super::shapes::tiny;
use super::table::StepPair;
use crate::error::BenchError;
use crate::measure::{Steps, measure};
use crate::report::StepReport;
use crate::step::checked;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) config: Config,
    pub(super) model: ModelConfig,
}

/// Preset, sequences, tokens per sequence: 16,384 tokens per step each.
const PRESETS: [(&str, usize, usize); 3] = [("90m", 32, 512), ("300m", 16, 1024), ("1b", 8, 2048)];

impl Row {
    /// Returns three presets, with all activations kept and with blocks recomputed, or a tiny model if `quick`.
    pub(super) fn all(precision: Precision, quick: bool, backend: Backend) -> Result<Vec<Row>, TrainError> {
        let models = match quick {
            true => vec![("tiny", 2, 32)],
            false => PRESETS.to_vec(),
        };
        let mut rows = Vec::new();
        for (model, batch, seq_len) in models {
            for (suffix, recompute) in [("", Recompute::None), ("+recompute", Recompute::Block)] {
                let mut config = Config::default();
                match quick {
                    true => config.model = tiny(),
                    false => config.model.preset = Some(model.to_owned()),
                }
                config.data.vocab_size = 32_000;
                config.data.seq_len = seq_len;
                config.train.global_batch = batch;
                config.train.micro_batch = batch.into();
                config.train.ranks = 1;
                config.shard.recompute = recompute.into();
                config.precision.compute = precision.into();
                config.device.backend = backend;
                let model_config = checked(&mut config)?;
                rows.push(Row { name: format!("{model}{suffix}"), config, model: model_config });
            }
        }
        Ok(rows)
    }
}

pub(super) struct EndToEnd<'a> {
    pub(super) chosen: &'a Chosen,
    pub(super) peer: Option<&'a Peer>,
    pub(super) pairs: usize,
    pub(super) predicted: Vec<PredictedStep>,
}

impl EndToEnd<'_> {
    /// Measures a row. A failure ends the row and is reported in it.
    pub(super) fn row(&self, row: Row, count: Steps) -> StepPair {
        let Row { name, config, model } = row;
        let predicted = self.predicted.iter().find(|step| step.is_of(&config)).cloned();
        let mut pair = StepPair { name, predicted, kiln: Vec::new(), peer: Vec::new(), failure: None };
        for _ in 0..self.pairs {
            if let Err(error) = self.turn(&config, &model, count, &mut pair) {
                pair.failure = Some(error.to_string());
                break;
            }
        }
        pair
    }

    fn turn(
        &self,
        config: &Config,
        model: &ModelConfig,
        count: Steps,
        pair: &mut StepPair,
    ) -> Result<(), BenchError> {
        self.chosen.check_memory(config, model)?;
        self.chosen.check_kernels(config, model)?;
        let measured = measure(config, model, &self.chosen.device, count)?;
        self.chosen.device.memory_cleanup();
        let peak = match config.device.peak_tflops {
            Some(peak) => Some(Peak::given(peak * 1e12)),
            None => self.chosen.peak(config.precision.compute())?,
        };
        let name = self.chosen.name.clone();
        let report = StepReport::new(config, model.clone(), name, peak, measured);
        pair.kiln.push(report);
        tracing::info!("{}", pair.told());
        if let Some(report) = self.peer.map(|peer| peer.steps(config, count)).transpose()?.flatten() {
            tracing::info!("{} of the peer: {} tok/s", pair.name, report["tokens_per_s"]);
            pair.peer.push(report);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Backend, Precision, Row};

    #[test]
    fn rows_are_configurations_that_can_be() {
        let names = |quick| -> Vec<String> {
            let rows = Row::all(Precision::F32, quick, Backend::Cpu).expect("rows");
            rows.into_iter().map(|row| row.name).collect()
        };
        let all = ["90m", "90m+recompute", "300m", "300m+recompute", "1b", "1b+recompute"];
        assert_eq!(names(false), all);
        assert_eq!(names(true), ["tiny", "tiny+recompute"]);
    }
}
