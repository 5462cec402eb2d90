//! Predictions of steps by `benches/predict.sh`, shown next to the measurements.

use std::fs;
use std::path::Path;

use kiln::config::{Config, Precision};
use kiln_shard::Recompute;
use serde::Serialize;

use super::peer::preset_of;
use crate::error::BenchError;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PredictedStep {
    pub gpu: String,
    pub preset: String,
    pub tokens: usize,
    /// Number of kernels and matrix products that the host launches.
    pub launches: f64,
    /// Time at the data sheet's rates.
    pub least_ms: f64,
    /// Time at the rates that such kernels reach elsewhere.
    pub expected_ms: f64,
    pub most_mfu: f64,
    pub expected_mfu: f64,
}

const COLUMNS: [&str; 7] =
    ["preset", "tokens", "launches", "at least, ms", "MFU, at most", "expected, ms", "expected MFU"];

/// Reads the table of presets in `file`, as `benches/predict.sh` prints it.
pub(super) fn read(file: &Path) -> Result<Vec<PredictedStep>, BenchError> {
    let failed = |problem: String| BenchError::Predicted { file: file.display().to_string(), problem };
    let text = fs::read_to_string(file).map_err(|error| failed(error.to_string()))?;
    parse(&text).map_err(failed)
}

fn parse(text: &str) -> Result<Vec<PredictedStep>, String> {
    let gpu = text.lines().find_map(|line| line.strip_prefix("# Predicted for ")?.split(':').next());
    let gpu = gpu.ok_or("it has no line \"# Predicted for GPU: …\"")?;
    let mut lines = text.lines().map(cells).skip_while(|cells| cells.first() != Some(&COLUMNS[0]));
    let head = lines.next().ok_or("it has no table of presets")?;
    let place = |column: &str| {
        let place = head.iter().position(|name| *name == column);
        place.ok_or(format!("its table has no column \"{column}\""))
    };
    let places = COLUMNS.map(place).into_iter().collect::<Result<Vec<_>, _>>()?;
    let step = |cells: Vec<&str>| -> Option<PredictedStep> {
        let cell = |column: usize| cells.get(places[column]).copied();
        let number =
            |column: usize| -> Option<f64> { cell(column)?.trim_end_matches(['%', ' ']).parse().ok() };
        Some(PredictedStep {
            gpu: gpu.to_owned(),
            preset: cell(0)?.to_owned(),
            tokens: cell(1)?.parse().ok()?,
            launches: number(2)?,
            least_ms: number(3)?,
            most_mfu: number(4)?,
            expected_ms: number(5)?,
            expected_mfu: number(6)?,
        })
    };
    lines
        .skip(1)
        .take_while(|cells| !cells.is_empty())
        .map(|cells| {
            let row = cells.join(" | ");
            step(cells).ok_or(format!("this row of its table is invalid: {row}"))
        })
        .collect()
}

/// Returns the cells of a row of a Markdown table; none for other lines.
fn cells(line: &str) -> Vec<&str> {
    let row = line.trim().strip_prefix('|').and_then(|row| row.strip_suffix('|'));
    row.map_or_else(Vec::new, |row| row.split('|').map(str::trim).collect())
}

impl PredictedStep {
    /// Returns whether the prediction is for `config`: an unchanged preset in bf16 on one rank, in one micro-batch,
    /// with all activations and state on the GPU.
    pub(super) fn is_of(&self, config: &Config) -> bool {
        preset_of(config).is_some_and(|preset| preset == self.preset)
            && config.train.global_batch * config.data.seq_len == self.tokens
            && config.train.ranks == 1
            && config.micro_batch() == config.train.global_batch
            && config.precision.compute() == Precision::Bf16
            && config.shard.recompute() == Recompute::None
            && !config.shard.offload
    }
}

#[cfg(test)]
mod tests {
    use kiln::config::{Config, Precision};

    use super::parse;

    const TABLE: &str = "# Predicted for h100: not measured\n\nText.\n\n\
        | preset | tokens | launches | at least, ms | MFU, at most | more | expected, ms | expected MFU |\n\
        |---|---|---|---|---|---|---|---|\n\
        | 300m | 16384 | 1327 | 71.9 | 47.9 % | x | 86.7 | 39.7 % |\n\
        | 1b | 16384 | 1388 | 195.3 | 62.0 % | x | 272.1 | 44.5 % |\n\n\
        | kernel | registers |\n|---|---|\n| a | 1 |\n";

    #[test]
    fn predictions_are_those_of_the_same_step() {
        let steps = parse(TABLE).expect("a table");
        assert_eq!(steps.len(), 2);
        let first = &steps[0];
        assert_eq!((&*first.gpu, &*first.preset, first.tokens), ("h100", "300m", 16_384));
        assert_eq!((first.launches, first.least_ms, first.expected_ms), (1327.0, 71.9, 86.7));
        assert_eq!((first.most_mfu, first.expected_mfu), (47.9, 39.7));

        let mut config = Config::default();
        config.model.preset = Some("300m".to_owned());
        (config.train.global_batch, config.data.seq_len, config.train.ranks) = (16, 1024, 1);
        config.train.micro_batch = 16.into();
        config.precision.compute = Precision::Bf16.into();
        assert_eq!(steps.iter().map(|step| step.is_of(&config)).collect::<Vec<_>>(), [true, false]);
        config.shard.offload = true;
        assert!(!first.is_of(&config));
        config.shard.offload = false;
        config.data.seq_len = 512;
        assert!(!first.is_of(&config));
    }

    #[test]
    fn what_is_no_prediction_is_told() {
        let said = |text: &str| parse(text).expect_err("no prediction");
        assert!(said("| preset |").contains("# Predicted for"));
        assert!(said("# Predicted for h100: x").contains("no table"));
        assert!(said(&TABLE.replace("launches", "calls")).contains("\"launches\""));
        assert!(said(&TABLE.replace("1388", "many")).contains("many"));
    }

    /// `benches/gpu.sh` selects one of the predictions in the repository by the name of the GPU.
    #[test]
    fn predictions_of_both_gpus_are_read() {
        let reports = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/reports"));
        let expected = [
            ("2026-11-25-predicted.md", "h100", &["300m", "1b", "7b"][..]),
            ("2026-11-27-predicted-h200.md", "h200", &["300m", "1b"][..]),
        ];
        for (file, gpu, presets) in expected {
            let steps = super::read(&reports.join(file)).expect("a prediction");
            assert_eq!(steps.iter().map(|step| &*step.preset).collect::<Vec<_>>(), presets);
            assert!(steps.iter().all(|step| step.gpu == gpu), "{file}");
        }
    }
}
