//! Flags of the commands that generate text, and the settings that they stand for.

use clap::Args;
use kiln_checkpoint::source::ModelSource;
use kiln_config::ConfigError;
use kiln_model::Key;
use kiln_train::error::Result;
use kiln_train::generate::Sampling;

/// Default temperature if the model recommends none.
const TEMPERATURE: f64 = 0.8;

/// Flags that control the choice of tokens. Defaults are those of the model's `generation_config.json`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct SamplingFlags {
    /// Sampling temperature: 0 always picks the most likely token, higher values are more random [default: the
    /// model's, or 0.8].
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f64>,
    /// Sample from the K most likely tokens; 0 means all [default: the model's, or 0].
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<usize>,
    /// Sample from the most likely tokens whose probabilities add up to P; 1 means all [default: the model's, or 1].
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Exclude tokens less likely than this share of the most likely one; 0 means none [default: the model's, or 0].
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f64>,
    /// Make tokens of the text so far less likely: 1.1 is mild, 1 changes nothing [default: the model's, or 1].
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f64>,
    /// End the text before this string; may be repeated.
    #[arg(long, value_name = "STRING", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Seed of the sampling.
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 0)]
    seed: u64,
}

impl SamplingFlags {
    /// Fails if a value is out of range.
    pub(crate) fn check(&self) -> Result<()> {
        self.with(Sampling::default()).map(|_| ())
    }

    /// Returns the settings for generating text with the model `source`.
    pub(crate) fn sampling(&self, source: &ModelSource, max_tokens: usize) -> Result<Sampling> {
        let model = source.sampling_defaults()?;
        self.with(Sampling {
            max_tokens,
            temperature: model.temperature.unwrap_or(TEMPERATURE),
            top_k: model.top_k.unwrap_or(0),
            top_p: model.top_p.unwrap_or(1.0),
            min_p: model.min_p.unwrap_or(0.0),
            repetition_penalty: model.repetition_penalty.unwrap_or(1.0),
            context_length: source.context_length(),
            end_ids: source.end_ids()?,
            ..Sampling::default()
        })
    }

    /// Returns `defaults` with the flags in their place. Fails if a value is out of range.
    fn with(&self, defaults: Sampling) -> Result<Sampling> {
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            stop: self.stop.clone(),
            key: Key::new(self.seed),
            ..defaults
        };
        let Sampling { temperature, top_p, min_p, repetition_penalty, .. } = sampling;
        let in_range = [
            (
                "temperature",
                temperature,
                temperature >= 0.0 && temperature.is_finite(),
                "zero or more, and finite",
            ),
            ("top-p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1"),
            ("min-p", min_p, (0.0..=1.0).contains(&min_p), "at least 0 and at most 1"),
            (
                "repetition-penalty",
                repetition_penalty,
                repetition_penalty > 0.0 && repetition_penalty.is_finite(),
                "above 0, and finite",
            ),
        ];
        let mut problems: Vec<_> = in_range
            .into_iter()
            .filter(|(_, _, is_valid, _)| !is_valid)
            .map(|(flag, value, _, range)| format!("--{flag} = {value}: must be {range}"))
            .collect();
        if self.stop.iter().any(String::is_empty) {
            problems.push("--stop: the string is empty".to_owned());
        }
        if problems.is_empty() { Ok(sampling) } else { Err(ConfigError::Invalid { problems }.into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        let flags = SamplingFlags::default;
        let said = |flags: SamplingFlags| flags.with(Sampling::default()).unwrap_err().to_string();
        for top_p in [0.0, -0.5, 1.5, f64::NAN] {
            let expected = format!("--top-p = {top_p}: must be above 0 and at most 1");
            assert_eq!(said(SamplingFlags { top_p: Some(top_p), ..flags() }), expected);
        }
        for value in [-1.0, f64::NAN, f64::INFINITY] {
            let value = Some(value);
            assert!(said(SamplingFlags { temperature: value, ..flags() }).starts_with("--temperature = "));
            assert!(said(SamplingFlags { min_p: value, ..flags() }).starts_with("--min-p = "));
            let penalty = SamplingFlags { repetition_penalty: value, ..flags() };
            assert!(said(penalty).starts_with("--repetition-penalty = "));
        }
        assert_eq!(
            said(SamplingFlags { stop: vec![String::new()], ..flags() }),
            "--stop: the string is empty"
        );
        let edges = SamplingFlags {
            temperature: Some(0.0),
            top_p: Some(1e-9),
            min_p: Some(1.0),
            repetition_penalty: Some(0.1),
            ..flags()
        };
        assert_eq!(edges.with(Sampling::default()).unwrap().min_p, 1.0);
    }
}
