use std::ops::Range;
use std::str::FromStr;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slice(Vec<Part>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// One index; negative indices count from the end.
    At(i64),
    /// A half-open range from the first to the second index.
    Between(Option<i64>, Option<i64>),
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SliceError {
    #[error("\"{0}\" is not a slice; write an index, or FROM:TO")]
    Unreadable(String),
    #[error("{parts} indices for a tensor with {dimensions} dimensions")]
    Dimensions { parts: usize, dimensions: usize },
    #[error("index {index} is out of range for a dimension of size {size}")]
    Outside { index: i64, size: usize },
}

impl FromStr for Slice {
    type Err = SliceError;

    fn from_str(text: &str) -> Result<Self, SliceError> {
        let part = |text: &str| {
            let text = text.trim();
            let number =
                |text: &str| text.trim().parse().map_err(|_| SliceError::Unreadable(text.to_owned()));
            let end = |text: &str| match text.trim() {
                "" => Ok(None),
                text => number(text).map(Some),
            };
            match text.split_once(':') {
                None => number(text).map(Part::At),
                Some((from, to)) => Ok(Part::Between(end(from)?, end(to)?)),
            }
        };
        text.split(',').map(part).collect::<Result<_, _>>().map(Slice)
    }
}

impl Slice {
    /// Returns the shape and values of the slice; the shape omits dimensions with a single index.
    pub(super) fn of(&self, shape: &[usize], values: &[f32]) -> Result<(Vec<usize>, Vec<f32>), SliceError> {
        if self.0.len() > shape.len() {
            return Err(SliceError::Dimensions { parts: self.0.len(), dimensions: shape.len() });
        }
        let mut taken = Vec::new();
        let mut kept = Vec::new();
        for (dimension, &size) in shape.iter().enumerate() {
            let part = self.0.get(dimension).copied().unwrap_or(Part::Between(None, None));
            taken.push(part.range(size)?);
            if matches!(part, Part::Between(..)) {
                kept.push(taken[dimension].len());
            }
        }
        let mut offsets = vec![0];
        for (range, &size) in taken.iter().zip(shape) {
            offsets = offsets.iter().flat_map(|at| range.clone().map(move |i| at * size + i)).collect();
        }
        Ok((kept, offsets.into_iter().map(|at| values[at]).collect()))
    }
}

impl Part {
    fn range(self, size: usize) -> Result<Range<usize>, SliceError> {
        let place = |index: i64| if index < 0 { index + size as i64 } else { index };
        match self {
            Part::At(index) => {
                let at = usize::try_from(place(index)).ok().filter(|at| *at < size);
                at.map(|at| at..at + 1).ok_or(SliceError::Outside { index, size })
            }
            // As in NumPy, bounds beyond the tensor are clamped to it.
            Part::Between(from, to) => {
                let end = |index: i64| place(index).clamp(0, size as i64) as usize;
                let (from, to) = (from.map_or(0, end), to.map_or(size, end));
                Ok(from..to.max(from))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_those_of_numpy() {
        let values: Vec<f32> = (0..24).map(|i| i as f32).collect();
        let of = |text: &str| text.parse::<Slice>().expect(text).of(&[2, 3, 4], &values);
        assert_eq!(of("1, 2, 3"), Ok((vec![], vec![23.0])));
        assert_eq!(of("0, :2"), Ok((vec![2, 4], (0..8).map(|i| i as f32).collect())));
        assert_eq!(of(":, -1, 1:3"), Ok((vec![2, 2], vec![9.0, 10.0, 21.0, 22.0])));
        assert_eq!(of("1, 2:9, :"), Ok((vec![1, 4], vec![20.0, 21.0, 22.0, 23.0])));
        assert_eq!(of("0, 2:1"), Ok((vec![0, 4], vec![])));
        assert_eq!(of("2"), Err(SliceError::Outside { index: 2, size: 2 }));
        assert_eq!(of("0,0,0,0"), Err(SliceError::Dimensions { parts: 4, dimensions: 3 }));
        assert_eq!("x".parse::<Slice>(), Err(SliceError::Unreadable("x".to_owned())));
        assert!("".parse::<Slice>().is_err());
    }
}
