//! `kiln warmup --products`: the fastest algorithm of each matrix product, as measured by the ranks.

use std::time::Duration;

use kiln_collectives::Communicator;

use kiln_train::error::Result;

#[cfg(feature = "cuda")]
pub(super) use on_nvidia::Measurement;

#[cfg(feature = "cuda")]
mod on_nvidia {
    use std::path::PathBuf;

    use kiln_model::ops::cube::matmul::{ProductAlgorithms, measure_algorithms, measured_algorithms};

    use super::{Communicator, Duration, Result};
    use kiln_config::device;
    use kiln_sys::words::number_of;
    use kiln_train::error::TrainError;
    use kiln_train::process::output::say;
    use kiln_train::world;

    /// A measurement in progress by this process.
    pub(in crate::warmup) struct Measurement {
        /// Folder for the results.
        folder: PathBuf,
    }

    impl Measurement {
        /// Starts to measure the first product of each kind.
        ///
        /// # Errors
        ///
        /// If there is no folder for the algorithms, or its content cannot be read.
        pub(in crate::warmup) fn start() -> Result<Measurement> {
            let unknown = |error| TrainError::usage(format!("measured algorithms cannot be kept: {error}"));
            let folder = device::products_folder().map_err(unknown)?;
            device::check_products(&folder).map_err(TrainError::io("read", &folder))?;
            measure_algorithms();
            Ok(Measurement { folder })
        }

        /// Collects the measurements of all ranks. If several ranks have measured a product, the algorithm of
        /// the first of them counts, so that all machines keep the same algorithms. Collective.
        pub(in crate::warmup) fn gather(
            &self,
            world: &dyn Communicator,
            timeout: Duration,
        ) -> Result<ProductAlgorithms> {
            let failed = |error: serde_json::Error| {
                TrainError::Crash(format!("what the ranks have measured cannot be put together: {error}"))
            };
            let mine = serde_json::to_vec(&measured_algorithms()).map_err(failed)?;
            let mut all = ProductAlgorithms::default();
            for of_rank in world::gather(world, "measured products", &mine, timeout)?.iter().rev() {
                all = all.with(serde_json::from_slice(of_rank).map_err(failed)?);
            }
            Ok(all)
        }

        /// Stores the measured algorithms, and reports their gains.
        pub(in crate::warmup) fn keep(&self, measured: ProductAlgorithms) -> Result<()> {
            let (products, gains) = (number_of(measured.len(), "matrix product"), measured.gains());
            let folder = &self.folder;
            device::keep_products(folder, measured)
                .map_err(TrainError::io("keep measured algorithms in", folder))?;
            let gained = match (gains.get(gains.len() / 2), gains.last()) {
                (Some(median), Some(most)) => format!(
                    "{} faster than with cuBLASLt's first choice, {median:.2} times as fast in the median of these, \
                     {most:.2} at most",
                    gains.len()
                ),
                _ => "cuBLASLt's first choice is the fastest for all".to_owned(),
            };
            say(&format!("measured {products}: {gained}; kept in {}", folder.display()));
            Ok(())
        }
    }
}

/// Placeholder for builds without CUDA, which cannot be constructed.
#[cfg(not(feature = "cuda"))]
pub(super) enum Measurement {}

#[cfg(not(feature = "cuda"))]
impl Measurement {
    pub(super) fn start() -> Result<Measurement> {
        Err(kiln_config::device::DeviceError::NotBuilt.into())
    }

    pub(super) fn gather(&self, _: &dyn Communicator, _: Duration) -> Result<()> {
        match *self {}
    }

    pub(super) fn keep(&self, (): ()) -> Result<()> {
        match *self {}
    }
}
