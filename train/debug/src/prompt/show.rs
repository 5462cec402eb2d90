use kiln_shard::{TensorDifference, TensorStatistics};
use sha2::{Digest, Sha256};

const SHOWN: usize = 8;

const MOST_ROWS: usize = 32;

const BARS: usize = 12;

const LONGEST: usize = 40;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Shown {
    /// The tensor's name, such as `layers.0.ffn output`.
    pub(super) title: String,
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    /// Its values in row-major order.
    pub(super) values: Vec<f32>,
}

impl Shown {
    /// Returns the output of `p`: shape, statistics and the first values.
    pub(super) fn summary(&self) -> String {
        let statistics = TensorStatistics::of(&self.values);
        format!("{} {} {:?}\n{statistics}\n{}", self.title, self.dtype, self.shape, self.first_values())
    }

    /// Formats the values row by row, up to `MOST_ROWS` rows.
    pub(super) fn all_values(&self) -> String {
        let width = self.shape.last().copied().unwrap_or(1).max(1);
        let row = |row: &[f32]| row.iter().map(|value| format!("{value:.6}")).collect::<Vec<_>>().join(", ");
        let mut lines = vec![format!("{} {} {:?}", self.title, self.dtype, self.shape)];
        lines.extend(self.values.chunks(width).take(MOST_ROWS).map(|values| format!("[{}]", row(values))));
        let rows = self.values.len().div_ceil(width);
        if rows > MOST_ROWS {
            lines.push(format!("… {} more rows", rows - MOST_ROWS));
        }
        lines.join("\n")
    }

    fn first_values(&self) -> String {
        let first: Vec<_> = self.values.iter().take(SHOWN).map(|value| format!("{value:.6}")).collect();
        let more = if self.values.len() > SHOWN { ", …" } else { "" };
        format!("[{}{more}]", first.join(", "))
    }

    pub(super) fn histogram(&self) -> String {
        let TensorStatistics { min, max, nan, infinite, .. } = TensorStatistics::of(&self.values);
        let width = (f64::from(max) - f64::from(min)) / BARS as f64;
        let mut counts = [0_usize; BARS];
        for value in self.values.iter().filter(|value| value.is_finite()) {
            let at = (f64::from(*value) - f64::from(min)) / width;
            counts[if width > 0.0 { (at as usize).min(BARS - 1) } else { 0 }] += 1;
        }
        let most = counts.iter().copied().max().unwrap_or(0).max(1);
        let bars = if width > 0.0 { BARS } else { 1 };
        let mut text = format!("{} {} {:?}\n", self.title, self.dtype, self.shape);
        for (index, count) in counts.iter().take(bars).enumerate() {
            let from = f64::from(min) + width * index as f64;
            let bar = "#".repeat((count * LONGEST).div_ceil(most));
            text.push_str(&format!("{from:>13.5e}  {count:>9}  {bar}\n"));
        }
        text.push_str(&format!("{:>13.5e}  NaN {nan}  Inf {infinite}", f64::from(max)));
        text
    }

    /// Returns the output of `hash`: SHA-256 of the values as f32, little-endian, in row-major order.
    pub(super) fn hash(&self) -> String {
        let mut hash = Sha256::new();
        self.values.iter().for_each(|value| hash.update(value.to_le_bytes()));
        let digest: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        format!("{} {} {:?}  sha256 {digest}…", self.title, self.dtype, self.shape)
    }

    /// Returns the output of `diff`: the difference between this tensor and `other`, read from a file.
    pub(super) fn difference(&self, shape: &[usize], other: &[f32]) -> String {
        if shape != self.shape {
            return format!("{}: shape {:?} here, and {shape:?} in the file", self.title, self.shape);
        }
        let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
        let different = self.values.iter().zip(other).filter(|pair| differs(*pair)).count();
        let Some(first) = self.values.iter().zip(other).position(differs) else {
            return format!("{}: equal, bit by bit", self.title);
        };
        let (title, values) = (&self.title, self.values.len());
        let mut difference = TensorDifference::default();
        difference.add(0, &self.values, other);
        if difference.non_finite > 0 {
            let (index, [here, there]) = (difference.furthest.index, difference.furthest.values);
            return format!(
                "{title}: {different} of {values} values differ, {} of them NaN or infinite here or in the file; \
                 the first of these is number {index}: {here} here, {there} in the file",
                difference.non_finite
            );
        }
        let largest = self.values.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let scale = other.iter().map(|value| value.abs()).fold(0.0, f32::max);
        format!(
            "{title}: {different} of {values} values differ, by at most {largest:.3e} ({:.3e} of the largest value); \
             the first is number {first}: {} here, {} in the file",
            largest / scale,
            self.values[first],
            other[first]
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(values: &[f32]) -> Shown {
        let shape = vec![values.len()];
        Shown { title: "x".to_owned(), dtype: "f32".to_owned(), shape, values: values.to_vec() }
    }

    #[test]
    fn statistics_ignore_non_finite_values() {
        let TensorStatistics { nan, infinite, min, max, mean, rms, norm } =
            TensorStatistics::of(&[3.0, f32::NAN, -4.0, f32::INFINITY]);
        assert_eq!((nan, infinite, min, max, mean, norm), (1, 1, -4.0, 3.0, -0.5, 5.0));
        assert!((rms - (12.5_f64).sqrt()).abs() < 1e-12);
        let nothing = TensorStatistics::of(&[]);
        assert_eq!((nothing.min, nothing.norm), (0.0, 0.0));
    }

    #[test]
    fn histograms_count_every_value() {
        let text = shown(&[0.0, 0.1, 0.2, 1.0, 1.0, f32::NAN]).histogram();
        let counted: usize = text
            .lines()
            .skip(1)
            .filter_map(|line| line.split_whitespace().nth(1).and_then(|count| count.parse::<usize>().ok()))
            .sum();
        assert_eq!(counted, 5, "{text}");
        assert!(text.ends_with("NaN 1  Inf 0"), "{text}");
        assert!(shown(&[2.0; 7]).histogram().contains("        7  "), "one bar where all are the same");
    }

    #[test]
    fn differences_name_the_first() {
        let tensor = shown(&[1.0, 2.0, 4.0]);
        assert_eq!(tensor.difference(&[3], &[1.0, 2.0, 4.0]), "x: equal, bit by bit");
        let text = tensor.difference(&[3], &[1.0, 2.5, 4.0]);
        assert!(
            text.contains("1 of 3 values differ, by at most 5.000e-1")
                && text.contains("number 1: 2 here, 2.5")
        );
        let text = tensor.difference(&[3], &[1.0, 2.5, f32::NAN]);
        assert!(text.contains("2 of 3 values differ, 1 of them NaN or infinite"), "{text}");
        assert!(text.ends_with("number 2: 4 here, NaN in the file"), "{text}");
        assert!(tensor.difference(&[1, 3], &[1.0, 2.0, 4.0]).contains("[1, 3] in the file"));
        assert_ne!(tensor.hash(), shown(&[1.0, 2.0, -4.0]).hash());
    }
}
