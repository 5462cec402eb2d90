//! Sizes of the timed operations.

use burn::tensor::DType;
use kiln::config::{ModelSection, Precision};
use kiln_model::ModelConfig;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Shapes {
    /// The preset with these sizes, if the peer should know them.
    pub(super) preset: Option<&'static str>,
    /// The model, whose number of blocks does not matter.
    pub(super) model: ModelConfig,
    pub(super) batch: usize,
    pub(super) seq: usize,
    pub(super) precision: Precision,
}

impl Shapes {
    /// Returns the shapes of a run: 1b in `precision`, plus 10m in f32 if that is bf16; tiny shapes if `quick`.
    pub(super) fn all(precision: Precision, quick: bool) -> Vec<Shapes> {
        if quick {
            let (batch, seq) = (1, 32);
            let model = tiny().resolve(None).expect("the tiny model has all sizes");
            return vec![Shapes { preset: None, model, batch, seq, precision }];
        }
        let mut all: Vec<_> = Shapes::preset("1b", 1, 2048, precision).into_iter().collect();
        if precision == Precision::Bf16 {
            all.extend(Shapes::preset("10m", 4, 256, Precision::F32));
        }
        all
    }

    fn preset(name: &'static str, batch: usize, seq: usize, precision: Precision) -> Option<Shapes> {
        let model = ModelConfig::preset(name)?;
        Some(Shapes { preset: Some(name), model, batch, seq, precision })
    }

    pub(super) fn dtype(&self) -> DType {
        match self.precision {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }

    pub(super) fn size(&self) -> f64 {
        self.dtype().size() as f64
    }

    pub(super) fn rows(&self) -> usize {
        self.batch * self.seq
    }

    pub(super) fn name(&self) -> String {
        let dtype = self.precision;
        let model = self.preset.unwrap_or("tiny");
        format!("{model}, {} x {} tokens, {dtype}", self.batch, self.seq)
    }
}

pub(super) fn tiny() -> ModelSection {
    ModelSection {
        vocab_size: Some(300),
        d_model: Some(64),
        layers: Some(2),
        heads: Some(4),
        kv_heads: Some(2),
        d_ff: Some(96),
        tie_embeddings: Some(true),
        ..ModelSection::default()
    }
}

#[cfg(test)]
mod tests {
    use super::{Precision, Shapes};

    #[test]
    fn shapes_are_those_of_models() {
        for (precision, quick, count) in
            [(Precision::Bf16, false, 2), (Precision::F32, false, 1), (Precision::F32, true, 1)]
        {
            let all = Shapes::all(precision, quick);
            assert_eq!(all.len(), count);
            for shapes in all {
                shapes.model.validate().expect("a model that can exist");
                assert!(shapes.rows() > 0);
                assert_eq!(shapes.preset.is_none(), quick);
            }
        }
    }
}
