//! Vector clocks: the operations before another operation, as a number for each stream.

/// For each stream, the number of its operations that come before an event or belong to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Clock(Vec<u32>);

impl Clock {
    /// Returns the number of earlier operations of `stream`.
    pub fn at(&self, stream: usize) -> u32 {
        self.0.get(stream).copied().unwrap_or(0)
    }

    /// Adds the first `count` operations of `stream`.
    pub fn raise(&mut self, stream: usize, count: u32) {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        self.0[stream] = self.0[stream].max(count);
    }

    /// Adds everything that comes before `other`.
    pub fn join(&mut self, other: &Clock) {
        for (stream, &count) in other.0.iter().enumerate() {
            self.raise(stream, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_has_the_later_of_both() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        a.raise(0, 5);
        a.raise(2, 1);
        b.raise(0, 3);
        b.raise(1, 7);
        a.join(&b);
        assert_eq!([a.at(0), a.at(1), a.at(2), a.at(9)], [5, 7, 1, 0]);
    }
}
