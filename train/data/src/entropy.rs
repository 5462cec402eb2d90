//! The loss of predicting the validation text from token counts alone, which any model that uses context must
//! beat.

use super::UnigramEntropy;

/// Computes the unigram figures from the token counts of the two splits. Both slices have one entry per token
/// of the vocabulary.
pub(super) fn unigram_entropy(train: &[u64], validation: &[u64]) -> UnigramEntropy {
    // Adding one to every count keeps tokens possible that training never saw.
    let train_total = train.iter().sum::<u64>() as f64 + train.len() as f64;
    let total = validation.iter().sum::<u64>() as f64;
    let (mut entropy, mut cross_entropy) = (0.0, 0.0);
    for (&in_train, &count) in train.iter().zip(validation) {
        if count > 0 {
            let share = count as f64 / total;
            entropy -= share * share.ln();
            cross_entropy -= share * ((in_train + 1) as f64 / train_total).ln();
        }
    }
    UnigramEntropy { validation_under_train: cross_entropy, validation: entropy }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_formulas() {
        let figures = unigram_entropy(&[2, 0, 0], &[1, 1, 0]);
        assert!((figures.validation - 2.0_f64.ln()).abs() < 1e-12);
        // Smoothed training shares: 3/5, 1/5, 1/5.
        let expected = -0.5 * (0.6_f64.ln() + 0.2_f64.ln());
        assert!((figures.validation_under_train - expected).abs() < 1e-12);
    }

    #[test]
    fn cross_entropy_is_never_below_entropy() {
        let figures = unigram_entropy(&[100, 10, 1, 7], &[3, 3, 3, 1]);
        assert!(figures.validation_under_train > figures.validation);
    }
}
