//! Choice of the next token.

use crate::Key;

/// Settings for choosing tokens.
#[derive(Clone, Debug)]
pub struct Sampling {
    /// Maximum number of tokens to generate.
    pub max_tokens: usize,
    /// 0 chooses the most probable token; higher values are more random. Must be finite and not negative.
    pub temperature: f64,
    /// Number of most probable tokens to choose from; 0 for all.
    pub top_k: usize,
    /// Restricts the choice to the most probable tokens that together reach this probability (nucleus
    /// sampling, Holtzman et al., 2020); 1 for all. Must be above 0, and at most 1.
    pub top_p: f64,
    /// Key of the random choices.
    pub key: Key,
    /// Maximum number of tokens that the model reads at a time.
    pub context_length: usize,
    /// Tokens that end the generated text, in addition to the tokenizer's end-of-text token.
    pub end_ids: Vec<u32>,
}

impl Sampling {
    /// Returns the id of the next token, given the logits of all tokens. The choice depends only on the key,
    /// `counter` and the logits; use a new `counter` for each choice.
    ///
    /// The temperature is applied first, then top-k, then top-p to the remaining tokens, and then a token is drawn.
    /// Among equal logits, the lower id counts as more probable. NaN is less than all other values. The id is 0 for
    /// an empty slice.
    pub fn choose(&self, logits: &[f32], counter: u64) -> u32 {
        let best = (0..logits.len())
            .fold(0, |best, id| if value(logits[id]) > value(logits[best]) { id } else { best });
        if self.temperature <= 0.0 || logits.is_empty() {
            return best as u32;
        }
        let weight = |id: u32| {
            let distance = value(logits[id as usize]) - value(logits[best]);
            (f64::from(distance) / self.temperature).exp()
        };
        let kept = self.kept(logits, weight);
        let total: f64 = kept.iter().map(|id| weight(*id)).sum();
        let mut left = self.key.uniform(counter) * total;
        for id in kept {
            left -= weight(id);
            if left < 0.0 {
                return id;
            }
        }
        best as u32
    }

    /// Returns the first of `logits` that is not finite. If there is one, no token should be chosen.
    pub fn non_finite(logits: &[f32]) -> Option<f32> {
        logits.iter().copied().find(|logit| !logit.is_finite())
    }

    /// Returns the ids that can be chosen, in ascending order.
    fn kept(&self, logits: &[f32], weight: impl Fn(u32) -> f64) -> Vec<u32> {
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let likelier = |a: &u32, b: &u32| {
            let [a_value, b_value] = [a, b].map(|id| value(logits[*id as usize]));
            b_value.total_cmp(&a_value).then(a.cmp(b))
        };
        if (1..ids.len()).contains(&self.top_k) {
            ids.select_nth_unstable_by(self.top_k - 1, likelier);
            ids.truncate(self.top_k);
        }
        if self.top_p < 1.0 {
            ids.sort_unstable_by(likelier);
            let wanted = self.top_p * ids.iter().map(|id| weight(*id)).sum::<f64>();
            let mut reached = 0.0;
            let enough = ids.iter().position(|id| {
                reached += weight(*id);
                reached >= wanted
            });
            ids.truncate(enough.map_or(ids.len(), |last| last + 1));
        }
        ids.sort_unstable();
        ids
    }
}

/// Returns a logit in the form used for comparisons, in which NaN is less than all other values, and the two zeros
/// are equal.
fn value(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit + 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f64, top_k: usize, top_p: f64) -> Sampling {
        let key = Key::new(1).fork("test");
        let (max_tokens, context_length, end_ids) = (1, 8, Vec::new());
        Sampling { max_tokens, temperature, top_k, top_p, key, context_length, end_ids }
    }

    /// Returns logits with the given probabilities.
    fn logits(probabilities: &[f64]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln() as f32 + 3.0).collect()
    }

    const DRAWS: u64 = 40_000;

    /// Returns how often each id is drawn.
    fn shares(sampling: &Sampling, logits: &[f32]) -> Vec<f64> {
        let mut counts = vec![0u64; logits.len()];
        for counter in 0..DRAWS {
            counts[sampling.choose(logits, counter) as usize] += 1;
        }
        counts.into_iter().map(|count| count as f64 / DRAWS as f64).collect()
    }

    /// Fails unless each share is within four standard errors of its expected value; an id with probability 0 must
    /// never be drawn.
    #[track_caller]
    fn assert_shares(sampling: &Sampling, logits: &[f32], expected: &[f64]) {
        for (id, (share, p)) in shares(sampling, logits).iter().zip(expected).enumerate() {
            let error = (p * (1.0 - p) / DRAWS as f64).sqrt();
            assert!((share - p).abs() <= 4.0 * error, "{sampling:?}: id {id} {share}, not {p}");
        }
    }

    const P: [f64; 5] = [0.1, 0.4, 0.05, 0.25, 0.2];

    #[test]
    fn tokens_are_drawn_as_often_as_they_are_likely() {
        assert_shares(&sampling(1.0, 0, 1.0), &logits(&P), &P);
        // At temperature 2, weights are square roots.
        let total: f64 = P.iter().map(|p| p.sqrt()).sum();
        let flat = P.map(|p| p.sqrt() / total);
        assert_shares(&sampling(2.0, 0, 1.0), &logits(&P), &flat);
    }

    #[test]
    fn top_k_keeps_exactly_k() {
        let logits = logits(&P);
        assert_shares(&sampling(1.0, 1, 1.0), &logits, &[0.0, 1.0, 0.0, 0.0, 0.0]);
        assert_shares(&sampling(1.0, 2, 1.0), &logits, &[0.0, 0.4 / 0.65, 0.0, 0.25 / 0.65, 0.0]);
        let three = [0.0, 0.4, 0.0, 0.25, 0.2].map(|p| p / 0.85);
        assert_shares(&sampling(1.0, 3, 1.0), &logits, &three);
        for all in [0, 5, 6, usize::MAX] {
            assert_shares(&sampling(1.0, all, 1.0), &logits, &P);
        }
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_it() {
        let logits = logits(&P);
        let one = [0.0, 1.0, 0.0, 0.0, 0.0];
        let two = [0.0, 0.4 / 0.65, 0.0, 0.25 / 0.65, 0.0];
        for (top_p, expected) in [(1e-9, one), (0.39, one), (0.41, two), (0.64, two)] {
            assert_shares(&sampling(1.0, 0, top_p), &logits, &expected);
        }
        let four = [0.1, 0.4, 0.0, 0.25, 0.2].map(|p| p / 0.95);
        assert_shares(&sampling(1.0, 0, 0.86), &logits, &four);
        assert_shares(&sampling(1.0, 0, 0.96), &logits, &P);
        // Top-p applies to the tokens that top-k leaves, the first of which has 0.4 / 0.65 = 0.62.
        assert_shares(&sampling(1.0, 2, 0.6), &logits, &one);
        assert_shares(&sampling(1.0, 2, 0.63), &logits, &two);
        // Top-p applies after the temperature, which changes the probability of the first token from 0.4 to 0.31.
        let total: f64 = P.iter().map(|p| p.sqrt()).sum();
        let (a, b) = (0.4f64.sqrt() / total, 0.25f64.sqrt() / total);
        assert!(a < 0.35 && a + b > 0.35);
        let hot = [0.0, a / (a + b), 0.0, b / (a + b), 0.0];
        assert_shares(&sampling(2.0, 0, 0.35), &logits, &hot);
    }

    #[test]
    fn equal_logits_go_by_their_ids() {
        let equal = [0.0f32, -0.0, 0.0, 0.0];
        assert_eq!(sampling(0.0, 0, 1.0).choose(&equal, 0), 0);
        assert_eq!(sampling(0.0, 0, 1.0).choose(&[-1.0, 2.0, 2.0], 0), 1);
        assert_shares(&sampling(1.0, 2, 1.0), &equal, &[0.5, 0.5, 0.0, 0.0]);
        assert_shares(&sampling(1.0, 0, 0.7), &equal, &[1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0, 0.0]);
        // Among many tokens, of which the last are more probable.
        let mut many = vec![0.0; 300];
        many[250..].fill(1.0);
        let drawn: Vec<_> = (0..2000).map(|counter| sampling(1.0, 60, 1.0).choose(&many, counter)).collect();
        assert!(drawn.iter().all(|id| *id < 10 || *id >= 250), "{drawn:?}");
        assert!(drawn.contains(&9) && drawn.contains(&299));
    }

    #[test]
    fn choices_depend_on_key_and_counter_alone() {
        let (logits, first) = (logits(&P), sampling(1.0, 0, 1.0));
        let second = Sampling { key: Key::new(2), ..first.clone() };
        let draws = |sampling: &Sampling, counters: &mut dyn Iterator<Item = u64>| -> Vec<u32> {
            counters.map(|counter| sampling.choose(&logits, counter)).collect()
        };
        let forward = draws(&first, &mut (0..100));
        let mut backward = draws(&first, &mut (0..100).rev());
        backward.reverse();
        assert_eq!(forward, backward);
        assert_ne!(forward, draws(&second, &mut (0..100)));
    }

    #[test]
    fn greedy_ignores_seed_and_truncation() {
        for (top_k, top_p) in [(0, 1.0), (3, 0.2)] {
            assert_eq!(sampling(0.0, top_k, top_p).choose(&logits(&P), 7), 1);
        }
        assert_eq!(sampling(1.0, 1, 1.0).choose(&logits(&P), 7), 1);
    }

    #[test]
    fn what_is_no_number_is_never_chosen() {
        let logits = [f32::NAN, 1.0, f32::NEG_INFINITY, 1.0];
        assert_eq!(sampling(0.0, 0, 1.0).choose(&logits, 0), 1);
        for (top_k, top_p) in [(0, 1.0), (3, 1.0), (0, 0.9)] {
            assert_shares(&sampling(1.0, top_k, top_p), &logits, &[0.0, 0.5, 0.0, 0.5]);
        }
    }
}
