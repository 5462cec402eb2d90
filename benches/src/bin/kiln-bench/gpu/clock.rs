//! Times calls on a device.

use std::time::Instant;

use burn::tensor::{DType, Device, Tensor};
use kiln::bench::median;
use kiln::run::TrainError;

use crate::measure::sync;

/// Target seconds of a sample, long enough that waiting for the device is negligible.
const SAMPLE: f64 = 0.02;

const MOST: usize = 200;

const SAMPLES: usize = 5;

/// Backward passes in a sample: each needs a forward pass whose results stay in memory until then.
const TAPES: usize = 8;

/// Times calls on a device. Queues many calls between two waits, so that the host stays ahead.
pub(super) struct Clock {
    pub(super) device: Device,
    pub(super) quick: bool,
}

impl Clock {
    pub(super) fn time(&self, mut call: impl FnMut()) -> Result<f64, TrainError> {
        // Compiles kernels and allocates memory.
        call();
        call();
        let once = self.sample(1, &mut call)?;
        let calls = match self.quick {
            true => 2,
            false => ((SAMPLE / once.max(1e-9)) as usize).clamp(1, MOST),
        };
        let samples: Result<Vec<_>, _> = (0..self.samples()).map(|_| self.sample(calls, &mut call)).collect();
        Ok(median(samples?))
    }

    fn sample(&self, calls: usize, call: &mut impl FnMut()) -> Result<f64, TrainError> {
        sync(&self.device)?;
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        sync(&self.device)?;
        Ok(start.elapsed().as_secs_f64() / calls as f64)
    }

    /// Returns the median seconds of the backward pass of `forward`, without the creation of the ones it starts from.
    pub(super) fn time_backward<const D: usize>(
        &self,
        forward: impl Fn() -> Tensor<D>,
    ) -> Result<f64, TrainError> {
        drop(forward().backward());
        let tapes = if self.quick { 2 } else { TAPES };
        let (shape, dtype) = {
            let y = forward();
            (y.dims(), y.dtype())
        };
        let mut samples = Vec::new();
        for _ in 0..self.samples() {
            let tapes: Vec<_> = (0..tapes).map(|_| forward()).collect();
            let count = tapes.len() as f64;
            sync(&self.device)?;
            let start = Instant::now();
            tapes.into_iter().for_each(|y| drop(y.backward()));
            sync(&self.device)?;
            samples.push(start.elapsed().as_secs_f64() / count);
        }
        let ones = self.time(|| drop(self.ones(shape, dtype)))?;
        let whole = median(samples);
        // On a device that is too fast or too busy for this difference, nothing is subtracted.
        Ok(if ones < whole { whole - ones } else { whole })
    }

    fn ones<const D: usize>(&self, shape: [usize; D], dtype: DType) -> Tensor<D> {
        Tensor::ones(shape, (&self.device, dtype))
    }

    fn samples(&self) -> usize {
        if self.quick { 1 } else { SAMPLES }
    }

    pub(super) fn release(&self) {
        self.device.memory_cleanup();
    }
}
