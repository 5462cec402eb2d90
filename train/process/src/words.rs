//! Words of messages that depend on a number.

use std::fmt::Display;

/// Such as `1 rank` or `2 ranks`, for nouns whose plural ends in s.
pub fn number_of<N: Display + From<u8> + PartialEq>(count: N, noun: &str) -> String {
    let plural = if count == N::from(1) { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_not_many() {
        let ranks = |count: usize| number_of(count, "rank");
        assert_eq!([ranks(0), ranks(1), ranks(2)], ["0 ranks", "1 rank", "2 ranks"]);
    }
}
