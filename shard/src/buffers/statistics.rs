//! Statistics of the values of a tensor, for debugging a run.

/// Statistics of the values of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorStatistics {
    /// Number of values that are NaN.
    pub nan: usize,
    /// Number of values that are infinite.
    pub infinite: usize,
    /// The smallest finite value; 0 if there is none.
    pub min: f32,
    /// The largest finite value; 0 if there is none.
    pub max: f32,
    /// The mean of the finite values.
    pub mean: f64,
    /// The root mean square of the finite values.
    pub rms: f64,
    /// The 2-norm of the finite values.
    pub norm: f64,
}

impl TensorStatistics {
    /// Computes the statistics of `values`.
    pub fn of(values: &[f32]) -> Self {
        let nan = values.iter().filter(|value| value.is_nan()).count();
        let infinite = values.iter().filter(|value| value.is_infinite()).count();
        let finite = || values.iter().copied().filter(|value| value.is_finite());
        let count = (values.len() - nan - infinite).max(1) as f64;
        let squares: f64 = finite().map(|value| f64::from(value) * f64::from(value)).sum();
        let sum: f64 = finite().map(f64::from).sum();
        TensorStatistics {
            nan,
            infinite,
            min: finite().reduce(f32::min).unwrap_or(0.0),
            max: finite().reduce(f32::max).unwrap_or(0.0),
            mean: sum / count,
            rms: (squares / count).sqrt(),
            norm: squares.sqrt(),
        }
    }
}

impl std::fmt::Display for TensorStatistics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let TensorStatistics { nan, infinite, min, max, mean, rms, norm } = self;
        write!(
            f,
            "min {min:.6e}  max {max:.6e}  mean {mean:.6e}  rms {rms:.6e}  norm {norm:.6e}  \
             NaN {nan}  Inf {infinite}"
        )
    }
}
