//! Built-in text, to try a training run without any file.

use super::mix::{SplitMix, mix_pair};
use super::{DataError, Result};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::path::Path;

const PREFIX: &str = "builtin:";
/// Seed of the generated text. Changing it changes every run on this text.
const SEED: u64 = 0x6B69_6C6E;
const DOCUMENTS: u64 = 400;
/// Number of lines in each document.
const LINES: u64 = 12;

const NAMES: [&str; 12] =
    ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Klara", "Leo"];
const ANIMALS: [&str; 8] = ["cat", "dog", "bird", "horse", "fox", "mouse", "cow", "fish"];
const THINGS: [&str; 8] = ["apple", "ball", "book", "stone", "flower", "boat", "coin", "ribbon"];
const ADJECTIVES: [&str; 10] =
    ["small", "big", "old", "young", "quiet", "happy", "red", "blue", "green", "bright"];
const VERBS: [&str; 8] = ["sees", "finds", "likes", "carries", "wants", "takes", "hides", "loses"];
const PLACES: [&str; 8] = [
    "in the garden",
    "by the river",
    "on the hill",
    "under the table",
    "near the house",
    "at the market",
    "in the forest",
    "behind the door",
];

/// A generated text, selected by an input such as `builtin:arithmetic`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Builtin {
    /// Sums, and short sentences generated from a small grammar.
    Arithmetic,
}

impl Builtin {
    /// Returns the built-in text that `input` names; `None` if `input` is a path.
    pub(super) fn parse(input: &Path) -> Result<Option<Self>> {
        let Some(name) = input.to_str().and_then(|text| text.strip_prefix(PREFIX)) else {
            return Ok(None);
        };
        match name {
            "arithmetic" => Ok(Some(Self::Arithmetic)),
            _ => {
                Err(DataError::UnknownBuiltin { name: name.to_owned(), known: format!("{PREFIX}arithmetic") })
            }
        }
    }

    pub(super) fn documents(self) -> u64 {
        DOCUMENTS
    }

    pub(super) fn bytes(self) -> u64 {
        (0..self.documents()).map(|index| self.document(index).len() as u64).sum()
    }

    pub(super) fn digest(self) -> String {
        let mut hasher = Sha256::new();
        (0..self.documents()).for_each(|index| hasher.update(self.document(index)));
        format!("{:x}", hasher.finalize())
    }

    /// Generates the document at `index`, identically on every machine.
    pub(super) fn document(self, index: u64) -> String {
        let Self::Arithmetic = self;
        let mut random = SplitMix::new(mix_pair(SEED, index));
        let mut text = String::new();
        for _ in 0..LINES {
            line(&mut random, &mut text);
            text.push('\n');
        }
        text
    }
}

fn line(random: &mut SplitMix, text: &mut String) {
    for position in 0..=random.below(3) {
        if position > 0 {
            text.push(' ');
        }
        // Writing into a String cannot fail.
        let _ = match random.below(5) {
            0 | 1 => sum(random, text),
            2 => count(random, text),
            3 => animal(random, text),
            _ => person(random, text),
        };
    }
}

fn sum(random: &mut SplitMix, text: &mut String) -> std::fmt::Result {
    let (first, second) = (random.below(50), random.below(50));
    if random.below(3) == 0 {
        write!(text, "{} - {} = {}.", first + second, second, first)
    } else {
        write!(text, "{first} + {second} = {}.", first + second)
    }
}

fn count(random: &mut SplitMix, text: &mut String) -> std::fmt::Result {
    let (name, thing) = (random.choose(&NAMES), random.choose(&THINGS));
    let (first, second) = (2 + random.below(9), 2 + random.below(9));
    write!(
        text,
        "{name} has {first} {thing}s and gets {second} more, so {name} now has {} {thing}s.",
        first + second
    )
}

fn animal(random: &mut SplitMix, text: &mut String) -> std::fmt::Result {
    write!(
        text,
        "The {} {} {} the {} {} {}.",
        random.choose(&ADJECTIVES),
        random.choose(&ANIMALS),
        random.choose(&VERBS),
        random.choose(&ADJECTIVES),
        random.choose(&THINGS),
        random.choose(&PLACES)
    )
}

fn person(random: &mut SplitMix, text: &mut String) -> std::fmt::Result {
    write!(
        text,
        "{} {} the {} {} {}.",
        random.choose(&NAMES),
        random.choose(&VERBS),
        random.choose(&ADJECTIVES),
        random.choose(&ANIMALS),
        random.choose(&PLACES)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed() -> Result<(), DataError> {
        assert_eq!(Builtin::parse(Path::new("builtin:arithmetic"))?, Some(Builtin::Arithmetic));
        assert_eq!(Builtin::parse(Path::new("books"))?, None);
        let error = Builtin::parse(Path::new("builtin:poems")).map_err(|error| error.to_string());
        assert_eq!(error, Err("there is no built-in text \"poems\"; use one of: builtin:arithmetic".into()));
        Ok(())
    }

    #[test]
    fn the_text_is_fixed_and_of_useful_size() {
        let text = Builtin::Arithmetic;
        assert_eq!(text.document(7), text.document(7));
        assert_ne!(text.document(7), text.document(8));
        assert!((200_000..500_000).contains(&text.bytes()), "{}", text.bytes());
    }

    #[test]
    fn the_sums_are_right() {
        let mut checked = 0;
        for sentence in Builtin::Arithmetic.document(0).split(['.', '\n']) {
            let words: Vec<&str> = sentence.split_whitespace().collect();
            if let [first, operator, second, "=", result] = words[..] {
                let number = |text: &str| text.parse::<i64>().unwrap();
                let expected = match operator {
                    "+" => number(first) + number(second),
                    _ => number(first) - number(second),
                };
                assert_eq!(number(result), expected, "{sentence}");
                checked += 1;
            }
        }
        assert!(checked > 3);
    }
}
