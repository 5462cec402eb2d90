use super::{Result, SampleOrder, Samples};

/// Samples for one forward pass, one per row.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Input tokens, row after row.
    pub inputs: Vec<i32>,
    /// Target tokens: the token that follows each input token.
    pub targets: Vec<i32>,
    /// A weight for each target, if the data have weights.
    pub weights: Option<Vec<f32>>,
    /// Number of samples.
    pub rows: usize,
    /// Number of tokens per sample.
    pub seq_len: usize,
    /// Position in the run of the first sample; the others follow consecutively.
    pub first_global_index: u64,
}

/// Reads batches of samples in a given order.
#[derive(Debug)]
pub struct BatchSource {
    samples: Samples,
    /// The order of the groups of samples; `None` for endless samples, which come in the order of their indices.
    order: Option<SampleOrder>,
}

impl BatchSource {
    /// Creates a source of batches over all samples, reshuffled every epoch if `shuffle` is true.
    ///
    /// # Errors
    ///
    /// If there are no samples.
    pub fn new(samples: impl Into<Samples>, shuffle: bool, seed: u64) -> Result<Self> {
        let samples = samples.into();
        let groups = samples.num_samples().map(|count| count / samples.group_size() as u64);
        let order = groups.map(|count| SampleOrder::new(count, shuffle, seed)).transpose()?;
        Ok(Self { samples, order })
    }

    /// Returns the samples.
    pub fn samples(&self) -> &Samples {
        &self.samples
    }

    /// Returns the number of tokens per sample.
    pub fn seq_len(&self) -> usize {
        self.samples.seq_len()
    }

    /// Returns the number of samples in an epoch, or `None` if the samples are endless.
    pub fn num_samples(&self) -> Option<u64> {
        self.samples.num_samples()
    }

    /// Returns whether the batches have weights.
    pub fn is_weighted(&self) -> bool {
        self.samples.is_weighted()
    }

    /// Returns the index of the sample at a position of the run.
    pub fn sample_at(&self, global_index: u64) -> u64 {
        let group = self.samples.group_size() as u64;
        let place =
            |order: &SampleOrder| order.sample_at(global_index / group) * group + global_index % group;
        self.order.as_ref().map_or(global_index, place)
    }

    /// Returns `count` samples, starting at position `first_global_index`. A batch may cross into the next epoch.
    ///
    /// # Errors
    ///
    /// If a sample cannot be read, or has a token outside the vocabulary.
    pub fn fetch(&self, first_global_index: u64, count: usize) -> Result<Batch> {
        let seq_len = self.seq_len();
        // Reading a sample briefly adds one extra token to the inputs.
        let inputs = Vec::with_capacity(count * seq_len + 1);
        let targets = Vec::with_capacity(count * seq_len);
        let weights = self.is_weighted().then(|| Vec::with_capacity(count * seq_len));
        let mut batch = Batch { inputs, targets, weights, rows: count, seq_len, first_global_index };
        for global_index in first_global_index..first_global_index + count as u64 {
            let Batch { inputs, targets, weights, .. } = &mut batch;
            let of_sample = self.samples.read(self.sample_at(global_index), inputs, targets)?;
            weights.iter_mut().for_each(|weights| weights.extend(&of_sample));
        }
        Ok(batch)
    }
}

/// Returns the position in the run of the first sample in a rank's micro-batch.
///
/// The global batch has `G` samples, a micro-batch has `M`, and there are `R` ranks. At step `s`, micro-batch `j` of
/// rank `r` starts at `s * G + r * (G / R) + j * M`. The positions of a step do not depend on `R` or `M`.
///
/// # Panics
///
/// If `ranks` is 0. In debug builds, also unless `R` divides `G`, `M` divides `G / R`, and both indices are in range.
pub fn slice_for(
    step: u64,
    global_batch: u64,
    rank: u64,
    ranks: u64,
    micro_batch_index: u64,
    micro_batch: u64,
) -> u64 {
    let per_rank = global_batch / ranks;
    debug_assert!(global_batch.is_multiple_of(ranks), "ranks must divide the global batch");
    debug_assert!(per_rank.is_multiple_of(micro_batch), "micro-batches must fill a rank's share");
    debug_assert!(rank < ranks, "rank out of range");
    debug_assert!((micro_batch_index + 1) * micro_batch <= per_rank, "micro-batch out of range");
    step * global_batch + rank * per_rank + micro_batch_index * micro_batch
}

#[cfg(test)]
mod tests {
    use super::super::dataset::tests::folder;
    use super::super::{Split, TokenFile, TokenWidth};
    use super::*;

    fn source(shuffle: bool) -> (tempfile::TempDir, BatchSource) {
        let folder = folder(TokenWidth::U16, 41, 100);
        let file = TokenFile::open(folder.path(), Split::Train, 4).unwrap();
        (folder, BatchSource::new(file, shuffle, 3).unwrap())
    }

    #[test]
    fn batches_cross_epochs() {
        let (_folder, source) = source(false);
        let batch = source.fetch(9, 2).unwrap();
        assert_eq!((batch.rows, batch.seq_len, batch.first_global_index), (2, 4, 9));
        assert_eq!(batch.inputs, [36, 37, 38, 39, 0, 1, 2, 3]);
        assert_eq!(batch.targets, [37, 38, 39, 40, 1, 2, 3, 4]);
        assert_eq!(source.fetch(5, 0).unwrap().rows, 0);
    }

    #[test]
    fn ranks_and_micro_batches_share_a_batch() {
        let (_folder, source) = source(true);
        for step in 0..7 {
            let whole = source.fetch(slice_for(step, 12, 0, 1, 0, 12), 12).unwrap();
            for (ranks, micro_batch) in [(1, 4), (2, 3), (3, 2), (4, 3), (12, 1)] {
                let mut inputs = Vec::new();
                for rank in 0..ranks {
                    for index in 0..12 / ranks / micro_batch {
                        let first = slice_for(step, 12, rank, ranks, index, micro_batch);
                        inputs.extend(source.fetch(first, micro_batch as usize).unwrap().inputs);
                    }
                }
                assert_eq!(inputs, whole.inputs);
            }
        }
    }

    #[test]
    fn sources_can_be_shared_between_threads() {
        fn check<T: Send + Sync>() {}
        check::<BatchSource>();
    }
}
