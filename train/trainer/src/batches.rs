//! The batches of a training loop from scratch.

use std::path::Path;

use burn::tensor::{Device, Int, Tensor};
use kiln_collectives::Communicator;
use kiln_config::device::tokens;
use kiln_data::{BatchSource, DataInfo, Split, TokenFile, slice_for};

use crate::error::{Result, TrainError};

/// The training split of prepared data, shuffled and cut into the batches of all ranks, in the order of the stock
/// trainer.
///
/// ```no_run
/// use burn::tensor::Device;
/// use kiln_collectives::LocalGroup;
/// use kiln_train::batches::Batches;
///
/// let batches = Batches::open("runs/data/debug".as_ref(), 64, 8, 0)?;
/// let world = &LocalGroup::new(1)[0];
/// let batch = batches.for_rank(0, world, &Device::flex().autodiff())?;
/// assert_eq!(batch.inputs.dims(), [8, 64]);
/// # Ok::<(), kiln_train::error::TrainError>(())
/// ```
#[derive(Debug)]
pub struct Batches {
    source: BatchSource,
    info: DataInfo,
    global_batch: u64,
}

/// A rank's share of a batch.
#[derive(Clone, Debug)]
pub struct RankBatch {
    /// Input tokens, `[batch, seq]`.
    pub inputs: Tensor<2, Int>,
    /// Target tokens, `[batch, seq]`: for each input, the token that follows it.
    pub targets: Tensor<2, Int>,
    /// Position in the run of the first sample, for [`Context::training`](kiln_model::Context::training).
    pub first_sample: u64,
    /// One over the number of tokens of all ranks, for [`decoder::loss`](kiln_model::decoder::loss): the losses of the
    /// ranks are summed.
    pub scale: f64,
}

impl Batches {
    /// Opens the folder `data`, for batches of `global_batch` samples of `seq_len` tokens.
    ///
    /// # Errors
    ///
    /// If the data are missing or unusable.
    pub fn open(data: &Path, seq_len: usize, global_batch: u64, seed: u64) -> Result<Self> {
        if global_batch == 0 {
            return Err(TrainError::usage("a batch of 0 sequences: use at least 1"));
        }
        let file = TokenFile::open(data, Split::Train, seq_len)?;
        let info = file.info().clone();
        Ok(Batches { source: BatchSource::new(file, true, seed)?, info, global_batch })
    }

    /// Returns the description of the data.
    pub fn info(&self) -> &DataInfo {
        &self.info
    }

    /// Returns this rank's share of the batch of `step`, counted from 0, on `device`. Not collective.
    ///
    /// # Errors
    ///
    /// If the ranks of `world` cannot share the batch evenly, or the data cannot be read.
    pub fn for_rank(&self, step: u64, world: &dyn Communicator, device: &Device) -> Result<RankBatch> {
        let (rank, ranks, all) = (world.rank() as u64, world.world_size() as u64, self.global_batch);
        if !all.is_multiple_of(ranks) {
            return Err(TrainError::usage(format!(
                "{ranks} ranks cannot share a batch of {all} sequences: use a multiple of {ranks}"
            )));
        }
        let rows = all / ranks;
        let first_sample = slice_for(step, all, rank, ranks, 0, rows);
        let batch = self.source.fetch(first_sample, rows as usize)?;
        let tensor = |ids| tokens(ids, batch.rows, batch.seq_len, device);
        Ok(RankBatch {
            inputs: tensor(batch.inputs),
            targets: tensor(batch.targets),
            first_sample,
            scale: 1.0 / (all as usize * batch.seq_len) as f64,
        })
    }
}
