//! Spellings of special tokens in a text.

use aho_corasick::{AhoCorasick, MatchKind};

/// Counts the spellings of special tokens in a text.
pub(super) struct Spellings {
    tokens: Vec<String>,
    /// Number of occurrences of each token.
    counts: Vec<u64>,
    /// `None` if there are no tokens to search for.
    automaton: Option<AhoCorasick>,
}

impl Spellings {
    pub(super) fn new(tokens: Vec<String>) -> Self {
        let tokens: Vec<_> = tokens.into_iter().filter(|token| !token.is_empty()).collect();
        let mut builder = AhoCorasick::builder();
        let automaton = builder.match_kind(MatchKind::LeftmostLongest).build(&tokens).ok();
        Self { counts: vec![0; tokens.len()], automaton: automaton.filter(|_| !tokens.is_empty()), tokens }
    }

    /// Adds the occurrences in `text`.
    pub(super) fn count(&mut self, text: &str) {
        let Some(automaton) = &self.automaton else { return };
        for found in automaton.find_iter(text) {
            self.counts[found.pattern().as_usize()] += 1;
        }
    }

    /// Total number of occurrences.
    pub(super) fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the tokens that occurred, the commonest first.
    pub(super) fn seen(&self) -> Vec<String> {
        let mut seen: Vec<_> =
            self.tokens.iter().zip(&self.counts).filter(|(_, count)| **count > 0).collect();
        seen.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        seen.into_iter().map(|(token, _)| token.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_spelling_counts() {
        let mut spellings = Spellings::new(["<a>", "<a>b", "<c>"].map(str::to_owned).to_vec());
        spellings.count("<a><a>b <A> <c <a>");
        spellings.count("<a>");
        assert_eq!((spellings.total(), spellings.seen()), (4, vec!["<a>".to_owned(), "<a>b".to_owned()]));
        let mut none = Spellings::new(Vec::new());
        none.count("<a>");
        assert_eq!(none.total(), 0);
    }
}
