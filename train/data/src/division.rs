use std::collections::HashSet;

use super::Split;
use super::mix::mix_pair;

/// Number of documents whose sizes are examined before any document is assigned to a split.
pub(super) const SURVEYED: usize = 1000;

/// Minimum number of documents for holding out whole documents, whatever the validation share.
const ENOUGH: f64 = 20.0;

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Division {
    fraction: f64,
    seed: u64,
    /// Number of surveyed documents; each later document is assigned at random.
    surveyed: u64,
    held_out: HashSet<u64>,
    /// Byte offset that divides each document, if there are too few to hold out whole ones. `None`: training only.
    divided: Option<Vec<Option<u64>>>,
}

impl Division {
    pub(super) fn new(sizes: &[u64], is_all: bool, fraction: f64, seed: u64) -> Self {
        let surveyed = sizes.len() as u64;
        let division = Self { fraction, seed, surveyed, ..Self::default() };
        if is_all && (sizes.len() as f64) < ENOUGH.min((1.0 / fraction).ceil()) {
            return Self { divided: Some(divide(sizes, fraction)), ..division };
        }
        Self { held_out: choose(sizes, fraction, seed), ..division }
    }

    pub(super) fn divided(&self) -> usize {
        self.divided.iter().flatten().flatten().count()
    }

    pub(super) fn section_of(&self, document: u64) -> Option<u64> {
        let document = usize::try_from(document).ok()?;
        *self.divided.as_ref()?.get(document)?
    }

    /// Returns the split of a document, or of its first section if it is divided.
    pub(super) fn split_of(&self, document: u64) -> Split {
        let is_held_out = match document < self.surveyed {
            true => self.held_out.contains(&document),
            // 53 bits: the precision of an `f64` in 0..1.
            false => (mix_pair(self.seed, document) >> 11) as f64 / ((1_u64 << 53) as f64) < self.fraction,
        };
        if is_held_out { Split::Validation } else { Split::Train }
    }
}

/// Picks documents in random order while they fit into the share, and at least the smallest document.
fn choose(sizes: &[u64], fraction: f64, seed: u64) -> HashSet<u64> {
    let room = fraction * sizes.iter().sum::<u64>() as f64;
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|document| mix_pair(seed, *document as u64));
    let (mut chosen, mut taken) = (HashSet::new(), 0);
    for &document in &order {
        if (taken + sizes[document]) as f64 <= room {
            taken += sizes[document];
            chosen.insert(document as u64);
        }
    }
    if chosen.is_empty() {
        chosen.extend(
            order.into_iter().min_by_key(|document| sizes[*document]).map(|document| document as u64),
        );
    }
    chosen
}

/// Holds out `fraction` of every document, at its end, and at least one byte of the longest document.
fn divide(sizes: &[u64], fraction: f64) -> Vec<Option<u64>> {
    let part = |size: u64| (fraction * size as f64).round() as u64;
    let mut held_out: Vec<u64> = sizes.iter().map(|size| part(*size)).collect();
    if let Some(longest) = (0..sizes.len()).max_by_key(|document| sizes[*document]) {
        held_out[longest] = held_out[longest].clamp(1, sizes[longest].saturating_sub(1).max(1));
    }
    let divide = |(size, held_out): (&u64, u64)| (held_out > 0 && held_out < *size).then(|| size - held_out);
    sizes.iter().zip(held_out).map(divide).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held_out(division: &Division, documents: u64) -> Vec<u64> {
        (0..documents).filter(|document| division.split_of(*document) == Split::Validation).collect()
    }

    #[test]
    fn whole_documents_make_up_the_share() {
        for seed in 0..50 {
            let division = Division::new(&[70_000; 60], true, 0.05, seed);
            assert_eq!((held_out(&division, 60).len(), division.divided()), (3, 0));
            let uneven: Vec<u64> = (0..200).map(|document| 100 + document * document % 977).collect();
            let division = Division::new(&uneven, true, 0.1, seed);
            let sum: u64 = held_out(&division, 200).iter().map(|document| uneven[*document as usize]).sum();
            let share = sum as f64 / uneven.iter().sum::<u64>() as f64;
            assert!((0.09..=0.1).contains(&share), "{share}");
        }
        let of = |seed| held_out(&Division::new(&[10; 60], true, 0.05, seed), 60);
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn later_documents_are_assigned_at_random() {
        let division = Division::new(&[10; SURVEYED], false, 0.05, 3);
        assert_eq!(held_out(&division, SURVEYED as u64).len(), 50);
        let all = held_out(&division, 101_000).len();
        assert!((4500..5600).contains(&all), "{all}");
    }

    #[test]
    fn no_split_is_empty() {
        for fraction in [1e-9, 0.05, 0.5, 0.95, 1.0 - 1e-9] {
            for sizes in [&[100; 40][..], &[1, 1_000_000, 3], &[5, 5], &[1; 25]] {
                let division = Division::new(sizes, true, fraction, 0);
                let mut splits = HashSet::new();
                for document in 0..sizes.len() as u64 {
                    splits.insert(division.split_of(document));
                    splits.extend(division.section_of(document).map(|_| Split::Validation));
                }
                assert_eq!(splits.len(), 2, "{fraction} of {sizes:?}");
            }
        }
    }

    #[test]
    fn few_documents_are_divided() {
        let division = Division::new(&[1000, 10, 2000], true, 0.1, 0);
        let sections: Vec<_> = (0..3).map(|document| division.section_of(document)).collect();
        assert_eq!((sections, division.divided()), (vec![Some(900), Some(9), Some(1800)], 3));
        assert!(held_out(&division, 3).is_empty());
        assert_eq!(held_out(&Division::new(&[10; 4], true, 0.5, 0), 4).len(), 2);
    }
}
