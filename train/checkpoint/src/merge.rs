//! Weights with their low-rank adapters merged in.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use kiln_model::layers::is_adapter;

use crate::error::Result;
use crate::weights::Weights;

/// The weights of a model with adapters, as those of the same model without: `W + scale · A B`.
pub(crate) struct MergedWeights<'a> {
    weights: Box<dyn Weights + 'a>,
    scale: f64,
    /// The adapter that was read last.
    last: RefCell<Option<Adapter>>,
}

struct Adapter {
    map: String,
    /// `A` `[d_in, rank]`.
    a: Vec<f32>,
    /// `B` `[rank, d_out]`.
    b: Vec<f32>,
    rank: usize,
}

impl<'a> MergedWeights<'a> {
    /// Merges the adapters among `weights`, whose results are multiplied by `scale`.
    pub(crate) fn new(weights: Box<dyn Weights + 'a>, scale: f64) -> Self {
        MergedWeights { weights, scale, last: RefCell::default() }
    }

    /// Reads the adapter of `map`, which has one.
    fn adapter(&self, map: &str) -> Result<Adapter> {
        let shapes = self.weights.shapes();
        let read = |part: &str| -> Result<(Vec<f32>, usize)> {
            let name = format!("{map}.lora.{part}");
            let shape = shapes.get(name.as_str()).copied().unwrap_or_default();
            let mut values = vec![0.0; shape.iter().product()];
            self.weights.read(&name, 0..values.len(), &mut values)?;
            Ok((values, shape.last().copied().unwrap_or(0)))
        };
        let ((a, rank), (b, _)) = (read("a")?, read("b")?);
        Ok(Adapter { map: map.to_owned(), a, b, rank })
    }
}

impl Weights for MergedWeights<'_> {
    fn folder(&self) -> &Path {
        self.weights.folder()
    }

    fn shapes(&self) -> BTreeMap<&str, &[usize]> {
        self.weights.shapes().into_iter().filter(|(name, _)| !is_adapter(name)).collect()
    }

    fn read(&self, name: &str, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        self.weights.read(name, range.clone(), values)?;
        let Some(map) = name.strip_suffix(".weight") else { return Ok(()) };
        let (adapted, d_out) = {
            let shapes = self.weights.shapes();
            let d_out = shapes.get(name).and_then(|shape| shape.last()).copied().unwrap_or(0);
            (shapes.contains_key(format!("{map}.lora.a").as_str()), d_out)
        };
        if !adapted {
            return Ok(());
        }
        let mut last = self.last.borrow_mut();
        let adapter = match last.take_if(|adapter| adapter.map == map) {
            Some(adapter) => last.insert(adapter),
            None => last.insert(self.adapter(map)?),
        };
        let Adapter { a, b, rank, .. } = adapter;
        let mut at = range.start;
        let mut rest = values;
        while at < range.end {
            let (row, column) = (at / d_out, at % d_out);
            let count = (d_out - column).min(range.end - at);
            let (now, later) = std::mem::take(&mut rest).split_at_mut(count);
            let mut sums = vec![0.0_f64; count];
            for (index, factor) in a[row * *rank..(row + 1) * *rank].iter().enumerate() {
                let from = index * d_out + column;
                for (sum, value) in sums.iter_mut().zip(&b[from..from + count]) {
                    *sum += f64::from(*factor) * f64::from(*value);
                }
            }
            for (value, sum) in now.iter_mut().zip(sums) {
                *value = (f64::from(*value) + self.scale * sum) as f32;
            }
            (rest, at) = (later, at + count);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A map `[2, 3]` with an adapter of rank 2.
    struct Fixed(BTreeMap<String, (Vec<usize>, Vec<f32>)>);

    impl Weights for Fixed {
        fn folder(&self) -> &Path {
            Path::new("fixed")
        }

        fn shapes(&self) -> BTreeMap<&str, &[usize]> {
            self.0.iter().map(|(name, (shape, _))| (name.as_str(), shape.as_slice())).collect()
        }

        fn read(&self, name: &str, range: Range<usize>, values: &mut [f32]) -> Result<()> {
            values.copy_from_slice(&self.0[name].1[range]);
            Ok(())
        }
    }

    #[test]
    fn adapters_are_added_to_any_range() {
        let tensor = |name: &str, shape: [usize; 2], values: &[f32]| {
            (name.to_owned(), (shape.to_vec(), values.to_vec()))
        };
        let fixed = Fixed(BTreeMap::from([
            tensor("m.weight", [2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
            tensor("m.lora.a", [2, 2], &[1.0, 0.0, 2.0, -1.0]),
            tensor("m.lora.b", [2, 3], &[0.5, 1.0, 1.5, 10.0, 20.0, 30.0]),
            tensor("n.weight", [1, 2], &[7.0, 8.0]),
        ]));
        let merged = MergedWeights::new(Box::new(fixed), 2.0);
        assert_eq!(merged.shapes().into_keys().collect::<Vec<_>>(), ["m.weight", "n.weight"]);
        let expected = [2.0, 4.0, 6.0, -14.0, -31.0, -48.0];
        for start in 0..6 {
            for end in start..=6 {
                let mut values = vec![0.0; end - start];
                merged.read("m.weight", start..end, &mut values).unwrap();
                assert_eq!(values, expected[start..end], "{start}..{end}");
            }
        }
        let mut values = [0.0; 2];
        merged.read("n.weight", 0..2, &mut values).unwrap();
        assert_eq!(values, [7.0, 8.0]);
    }
}
