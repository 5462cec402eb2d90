//! Times calls on a device.

use std::time::Instant;

use burn::tensor::{DType, Device, Tensor};
use kiln::bench::median;
use kiln::run::TrainError;

use crate::measure::sync;

/// Seconds that a sample of calls is to take, so that waiting for the device does not count.
const SAMPLE: f64 = 0.02;

/// Calls in a sample, at most.
const MOST: usize = 200;

/// Samples; their median counts.
const SAMPLES: usize = 5;

/// Backward passes in a sample: each needs a forward pass that stays in memory until then.
const TAPES: usize = 8;

/// Times calls on a device. Between two waits for it there are many calls, of which the host is ahead.
pub(super) struct Clock {
    /// Without autodiff.
    pub(super) device: Device,
    /// Whether two calls will do.
    pub(super) quick: bool,
}

impl Clock {
    /// Median seconds of a call.
    pub(super) fn time(&self, mut call: impl FnMut()) -> Result<f64, TrainError> {
        // Kernels are compiled, and memory is found.
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

    /// Seconds per call of some calls.
    fn sample(&self, calls: usize, call: &mut impl FnMut()) -> Result<f64, TrainError> {
        sync(&self.device)?;
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        sync(&self.device)?;
        Ok(start.elapsed().as_secs_f64() / calls as f64)
    }

    /// Median seconds of the backward pass of `forward`, whose inputs are tracked. Backward starts from
    /// ones, and the time that these take is not counted.
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
        // On a device that is too fast or too busy to tell, nothing is taken off.
        Ok(if ones < whole { whole - ones } else { whole })
    }

    fn ones<const D: usize>(&self, shape: [usize; D], dtype: DType) -> Tensor<D> {
        Tensor::ones(shape, (&self.device, dtype))
    }

    fn samples(&self) -> usize {
        if self.quick { 1 } else { SAMPLES }
    }

    /// Gives memory back that nothing uses any more, so that what follows has all of it.
    pub(super) fn release(&self) {
        self.device.memory_cleanup();
    }
}
