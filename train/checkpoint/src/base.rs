//! The model that adapters change. A checkpoint of adapters has its path instead of its weights.

use std::path::{Path, PathBuf};

use kiln_model::ModelConfig;
use kiln_sys::Checksum;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::source::ModelSource;
use crate::weights::Weights;
use crate::{Checkpoint, CheckpointError};

/// The model that the adapters of a checkpoint change, whose weights the checkpoint does not contain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseModel {
    /// Absolute path of the model's folder.
    pub path: PathBuf,
    /// Checksum of the weight of the final norm, which distinguishes the model from others of its shape.
    pub norm: Checksum,
}

/// The weight that [`BaseModel::norm`] covers.
const NORM: &str = "norm.weight";

impl BaseModel {
    /// Describes `base`, a model without adapters.
    ///
    /// # Errors
    ///
    /// If its weights cannot be read.
    pub fn describe(base: &ModelSource) -> Result<Self> {
        let path = std::path::absolute(base.folder()).map_err(CheckpointError::io("find", base.folder()))?;
        Ok(BaseModel { path, norm: checksum_of_norm(&*base.weights())? })
    }

    /// Opens the model for `checkpoint`, whose adapters change it: in `instead`, if it has moved there.
    fn open(&self, checkpoint: &Checkpoint, instead: Option<&Path>) -> Result<ModelSource> {
        let path = match instead {
            Some(instead) if !self.path.exists() => instead,
            _ => &self.path,
        };
        let failed = |problem: String| CheckpointError::Base {
            path: checkpoint.folder().to_owned(),
            base: path.to_owned(),
            problem,
        };
        if !path.exists() {
            return Err(failed("does not exist any more".to_owned()));
        }
        let base = ModelSource::open(path)?.into_base();
        let expected = ModelConfig { lora: None, ..checkpoint.state().model.clone() };
        let differences = crate::source::differences(base.model(), &expected);
        if !differences.is_empty() {
            return Err(failed(format!("is another model now ({})", differences.join(", "))));
        }
        let norm = checksum_of_norm(&*base.weights())?;
        if norm == self.norm { Ok(base) } else { Err(failed("has other weights now".to_owned())) }
    }
}

impl Checkpoint {
    /// Opens the model that the checkpoint's adapters change, if it contains only adapters: in `instead`, if the model
    /// has moved there.
    ///
    /// # Errors
    ///
    /// If the model is missing or has changed.
    pub fn with_base(self, instead: Option<&Path>) -> Result<Self> {
        let base = self.manifest().base.as_ref().map(|base| base.open(&self, instead)).transpose()?;
        Ok(self.on_base(base))
    }
}

fn checksum_of_norm(weights: &dyn Weights) -> Result<Checksum> {
    let numel = weights.shapes().get(NORM).map_or(0, |shape| shape.iter().product());
    let mut values = vec![0.0; numel];
    weights.read(NORM, 0..numel, &mut values)?;
    Ok(Checksum::of(bytemuck::cast_slice(&values)))
}
