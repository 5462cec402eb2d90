//! Choice of the next token.

use std::borrow::Cow;
use std::collections::BTreeSet;

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
    /// Excludes tokens whose probability is less than this share of the most probable token's (min-p sampling, Nguyen
    /// et al., 2024); 0 for none. Must be from 0 to 1.
    pub min_p: f64,
    /// Makes tokens that the text already contains less probable: divides their positive logits by this number, and
    /// multiplies their negative ones by it (CTRL, Keskar et al., 2019). 1 for no change. Must be finite and above 0.
    pub repetition_penalty: f64,
    /// Key of the random choices.
    pub key: Key,
    /// Maximum number of tokens that the model reads at a time.
    pub context_length: usize,
    /// Tokens that end the generated text, in addition to the tokenizer's end-of-text token.
    pub end_ids: Vec<u32>,
    /// Strings that end the generated text, which then lacks them. Empty strings are ignored.
    pub stop: Vec<String>,
}

impl Default for Sampling {
    /// Draws from all tokens with the model's probabilities, and ends only after 200 tokens or at the tokenizer's
    /// end-of-text token.
    fn default() -> Self {
        Sampling {
            max_tokens: 200,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            key: Key::new(0),
            context_length: usize::MAX,
            end_ids: Vec::new(),
            stop: Vec::new(),
        }
    }
}

impl Sampling {
    /// Returns the id of the next token, given the logits of all tokens and the `ids` of the text so far, prompt
    /// included. The choice depends only on the settings, the key, `counter`, the logits and, with a repetition
    /// penalty, `ids`; use a new `counter` for each choice.
    ///
    /// The order is that of transformers: the repetition penalty changes the logits, the temperature divides them,
    /// then top-k, top-p and min-p each apply to the remaining tokens, and then a token is drawn. Among equal logits,
    /// the lower id counts as more probable. NaN is less than all other values. The id is 0 for an empty slice.
    pub fn choose(&self, logits: &[f32], ids: &[u32], counter: u64) -> u32 {
        let logits = &*self.penalized(logits, ids);
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

    /// Returns the natural logarithm of the model's probability of token `id`, before any setting changes it.
    ///
    /// # Panics
    ///
    /// If there is no logit of `id`.
    pub fn log_probability(logits: &[f32], id: u32) -> f64 {
        let largest = logits.iter().fold(f64::NEG_INFINITY, |largest, logit| largest.max(f64::from(*logit)));
        let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
        f64::from(logits[id as usize]) - largest - sum.ln()
    }

    fn penalized<'a>(&self, logits: &'a [f32], ids: &[u32]) -> Cow<'a, [f32]> {
        if self.repetition_penalty == 1.0 {
            return logits.into();
        }
        let mut logits = logits.to_vec();
        for id in ids.iter().collect::<BTreeSet<_>>() {
            if let Some(logit) = logits.get_mut(*id as usize) {
                let penalty = self.repetition_penalty as f32;
                *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
            }
        }
        logits.into()
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
        if self.min_p > 0.0 {
            // The weight of the most probable token is 1.
            ids.retain(|id| weight(*id) >= self.min_p);
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
        Sampling { temperature, top_k, top_p, key: Key::new(1).fork("test"), ..Sampling::default() }
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
            counts[sampling.choose(logits, &[], counter) as usize] += 1;
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
        assert_eq!(sampling(0.0, 0, 1.0).choose(&equal, &[], 0), 0);
        assert_eq!(sampling(0.0, 0, 1.0).choose(&[-1.0, 2.0, 2.0], &[], 0), 1);
        assert_shares(&sampling(1.0, 2, 1.0), &equal, &[0.5, 0.5, 0.0, 0.0]);
        assert_shares(&sampling(1.0, 0, 0.7), &equal, &[1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0, 0.0]);
        // Among many tokens, of which the last are more probable.
        let mut many = vec![0.0; 300];
        many[250..].fill(1.0);
        let drawn: Vec<_> =
            (0..2000).map(|counter| sampling(1.0, 60, 1.0).choose(&many, &[], counter)).collect();
        assert!(drawn.iter().all(|id| *id < 10 || *id >= 250), "{drawn:?}");
        assert!(drawn.contains(&9) && drawn.contains(&299));
    }

    #[test]
    fn choices_depend_on_key_and_counter_alone() {
        let (logits, first) = (logits(&P), sampling(1.0, 0, 1.0));
        let second = Sampling { key: Key::new(2), ..first.clone() };
        let draws = |sampling: &Sampling, counters: &mut dyn Iterator<Item = u64>| -> Vec<u32> {
            counters.map(|counter| sampling.choose(&logits, &[], counter)).collect()
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
            assert_eq!(sampling(0.0, top_k, top_p).choose(&logits(&P), &[], 7), 1);
        }
        assert_eq!(sampling(1.0, 1, 1.0).choose(&logits(&P), &[], 7), 1);
    }

    /// Returns chi-squared statistic and degrees of freedom of 20,000 draws after the text `ids`, for the probabilities
    /// `expected`. A token of probability 0 must never be drawn.
    fn chi_squared(sampling: &Sampling, logits: &[f32], ids: &[u32], expected: &[f64]) -> (f64, usize) {
        const TOKENS: u64 = 20_000;
        let mut counts = vec![0u64; logits.len()];
        for counter in 0..TOKENS {
            counts[sampling.choose(logits, ids, counter) as usize] += 1;
        }
        let (mut statistic, mut possible) = (0.0, 0);
        for (id, (count, p)) in counts.iter().zip(expected).enumerate() {
            if *p == 0.0 {
                assert_eq!(*count, 0, "{sampling:?}: id {id} is impossible");
                continue;
            }
            let expected = p * TOKENS as f64;
            statistic += (*count as f64 - expected).powi(2) / expected;
            possible += 1;
        }
        (statistic, possible - 1)
    }

    /// Returns the probabilities under `sampling`, as softmax of masked logits after each step, which is how
    /// transformers defines them.
    fn probabilities(sampling: &Sampling, logits: &[f32], ids: &[u32]) -> Vec<f64> {
        let softmax = |scores: &[f64]| {
            let total: f64 = scores.iter().map(|score| score.exp()).sum();
            scores.iter().map(|score| score.exp() / total).collect::<Vec<_>>()
        };
        let mut scores: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
        for (id, score) in scores.iter_mut().enumerate() {
            if ids.contains(&(id as u32)) {
                let penalty = sampling.repetition_penalty;
                *score *= if *score < 0.0 { penalty } else { 1.0 / penalty };
            }
            *score /= sampling.temperature;
        }
        let remove = |scores: &mut Vec<f64>, is_removed: &dyn Fn(f64, &[f64]) -> bool| {
            let p = softmax(scores);
            scores.iter_mut().zip(&p).for_each(|(score, own)| {
                if is_removed(*own, &p) {
                    *score = f64::NEG_INFINITY;
                }
            });
        };
        if sampling.top_k > 0 {
            // As many tokens as k, or more, are more probable.
            remove(&mut scores, &|own, p| p.iter().filter(|p| **p > own).count() >= sampling.top_k);
        }
        // The more probable tokens already reach top-p.
        remove(&mut scores, &|own, p| p.iter().filter(|p| **p > own).sum::<f64>() >= sampling.top_p);
        remove(&mut scores, &|own, p| own < sampling.min_p * p.iter().copied().fold(0.0, f64::max));
        softmax(&scores)
    }

    /// The bound is the statistic's 99.9th percentile (Wilson and Hilferty, 1931); the draws are fixed by their key.
    #[test]
    fn every_option_has_its_distribution() {
        let logits: Vec<f32> = (0..24).map(|id| (id * 7 % 24) as f32 * 0.2 - 2.3).collect();
        let text = [3, 3, 7, 20, 23, 11, 40];
        let all = Sampling { key: Key::new(8).fork("test"), ..Sampling::default() };
        let options = [
            all.clone(),
            Sampling { temperature: 0.7, ..all.clone() },
            Sampling { top_k: 9, ..all.clone() },
            Sampling { top_p: 0.8, ..all.clone() },
            Sampling { min_p: 0.15, ..all.clone() },
            Sampling { repetition_penalty: 1.4, ..all.clone() },
            Sampling { repetition_penalty: 0.8, ..all.clone() },
            Sampling {
                temperature: 1.5,
                top_k: 20,
                top_p: 0.9,
                min_p: 0.2,
                repetition_penalty: 1.2,
                ..all.clone()
            },
        ];
        let mut seen: Vec<Vec<f64>> = Vec::new();
        for sampling in &options {
            let expected = probabilities(sampling, &logits, &text);
            let (statistic, freedom) = chi_squared(sampling, &logits, &text, &expected);
            let spread = 2.0 / (9.0 * freedom as f64);
            let bound = freedom as f64 * (1.0 - spread + 3.09 * spread.sqrt()).powi(3);
            assert!(statistic < bound, "{sampling:?}: {statistic} of {bound}, {freedom} degrees of freedom");
            assert!(!seen.contains(&expected), "{sampling:?} changes nothing");
            seen.push(expected);
        }
    }

    #[test]
    fn greedy_choices_heed_the_repetition_penalty() {
        let sampling = Sampling { repetition_penalty: 2.0, ..sampling(0.0, 0, 1.0) };
        for (logits, expected) in [([3.0, 2.0], 1), ([-1.0, -1.5], 1), ([3.0, 1.0], 0)] {
            // How often a token occurs makes no difference.
            assert_eq!(sampling.choose(&logits, &[0, 0, 0], 0), expected, "{logits:?}");
            assert_eq!(sampling.choose(&logits, &[], 0), 0);
        }
    }

    #[test]
    fn log_probabilities_are_of_the_model() {
        for (id, p) in P.iter().enumerate() {
            let found = Sampling::log_probability(&logits(&P), id as u32);
            assert!((found - p.ln()).abs() < 1e-6, "{found}, not {}", p.ln());
        }
    }

    #[test]
    fn what_is_no_number_is_never_chosen() {
        let logits = [f32::NAN, 1.0, f32::NEG_INFINITY, 1.0];
        assert_eq!(sampling(0.0, 0, 1.0).choose(&logits, &[], 0), 1);
        for (top_k, top_p) in [(0, 1.0), (3, 1.0), (0, 0.9)] {
            assert_shares(&sampling(1.0, top_k, top_p), &logits, &[0.0, 0.5, 0.0, 0.5]);
        }
    }
}
