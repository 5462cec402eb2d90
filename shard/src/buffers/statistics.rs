//! What the values of a tensor are like, for people who look into a run.

/// What the values of a tensor are like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorStatistics {
    /// Values that are NaN.
    pub nan: usize,
    /// Values that are infinite.
    pub infinite: usize,
    /// The least of the finite values; 0 if there are none.
    pub min: f32,
    /// The largest of the finite values; 0 if there are none.
    pub max: f32,
    /// The mean of the finite values.
    pub mean: f64,
    /// The root of the mean of their squares.
    pub rms: f64,
    /// Their 2-norm.
    pub norm: f64,
}

impl TensorStatistics {
    /// The statistics of `values`.
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
