//! A cache of answers that lasts until something changes.

use std::collections::HashMap;

use hyper::body::Bytes;

/// Maximum number of cached bytes, and of cached answers.
const MOST_BYTES: usize = 32 << 20;
const MOST_ANSWERS: usize = 256;

/// A content type and a body.
pub(super) type Answer = (&'static str, Bytes);

/// The version of the data behind the answers: the version of the runs, and the number of failed threads.
pub(super) type Version = (u64, usize);

/// Answers by request, all made from one version.
#[derive(Debug, Default)]
pub(super) struct Kept {
    version: Version,
    bytes: usize,
    answers: HashMap<String, Answer>,
}

impl Kept {
    /// Returns the answer to `asked`. Drops all answers made from another version.
    pub(super) fn get(&mut self, version: Version, asked: &str) -> Option<Answer> {
        if self.version != version {
            *self = Kept { version, ..Kept::default() };
        }
        self.answers.get(asked).cloned()
    }

    /// Stores an answer, if it was made from the same version as the others. Drops all others when there is
    /// no room.
    pub(super) fn keep(&mut self, version: Version, asked: String, answer: Answer) {
        let bytes = asked.len() + answer.1.len();
        if self.version != version || bytes > MOST_BYTES || self.answers.contains_key(&asked) {
            return;
        }
        if self.bytes + bytes > MOST_BYTES || self.answers.len() >= MOST_ANSWERS {
            *self = Kept { version, ..Kept::default() };
        }
        self.bytes += bytes;
        self.answers.insert(asked, answer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_kept_within_bounds() {
        let answer = |bytes: usize| ("text/plain", Bytes::from(vec![0; bytes]));
        let mut kept = Kept::default();
        assert!(kept.get((1, 0), "a").is_none());
        kept.keep((1, 0), "a".to_owned(), answer(MOST_BYTES / 2));
        kept.keep((0, 0), "old".to_owned(), answer(1));
        kept.keep((1, 0), "large".to_owned(), answer(MOST_BYTES));
        assert!(kept.get((1, 0), "old").is_none() && kept.get((1, 0), "large").is_none());
        assert!(kept.get((1, 0), "a").is_some());
        kept.keep((1, 0), "b".to_owned(), answer(MOST_BYTES / 2));
        assert!(kept.get((1, 0), "a").is_none() && kept.get((1, 0), "b").is_some());
        assert_eq!(kept.bytes, 1 + MOST_BYTES / 2);
        for number in 0..2 * MOST_ANSWERS {
            kept.keep((1, 0), number.to_string(), answer(1));
        }
        assert!(kept.answers.len() <= MOST_ANSWERS);
        assert!(kept.get((1, 1), "b").is_none() && kept.bytes == 0);
    }
}
