//! A small set of combinations of settings that contains every pair of values.

use std::collections::BTreeSet;

/// Two settings and a value of each: `((setting, value), (setting, value))`.
type Pair = ((usize, usize), (usize, usize));

/// Returns every combination of settings with `sizes` values each.
pub fn product(sizes: &[usize]) -> Vec<Vec<usize>> {
    sizes.iter().fold(vec![Vec::new()], |cases, size| {
        cases.iter().flat_map(|case| (0..*size).map(move |value| [&case[..], &[value]].concat())).collect()
    })
}

/// Returns a set of combinations in which every pair of values of any two settings occurs. Greedy: always adds the
/// first combination of those that contain the most new pairs.
pub fn pairwise(sizes: &[usize]) -> Vec<Vec<usize>> {
    let all = product(sizes);
    let mut missing: BTreeSet<Pair> = all.iter().flat_map(|case| pairs(case)).collect();
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let gain = |case: &[usize]| pairs(case).iter().filter(|pair| missing.contains(pair)).count();
        let best = all.iter().rev().max_by_key(|case| gain(case)).expect("there is a combination");
        for pair in pairs(best) {
            missing.remove(&pair);
        }
        chosen.push(best.clone());
    }
    chosen
}

/// Returns the pairs that a combination contains.
pub fn pairs(case: &[usize]) -> Vec<Pair> {
    let settings = || case.iter().copied().enumerate();
    settings().flat_map(|a| settings().skip(a.0 + 1).map(move |b| (a, b))).collect()
}

#[test]
fn every_pair_is_covered_by_few_combinations() {
    let sizes = [5, 5, 3, 2, 2, 2];
    let cases = pairwise(&sizes);
    let covered: BTreeSet<Pair> = cases.iter().flat_map(|case| pairs(case)).collect();
    for (a, size_a) in sizes.iter().enumerate() {
        for (b, size_b) in sizes.iter().enumerate().skip(a + 1) {
            for pair in product(&[*size_a, *size_b]) {
                assert!(covered.contains(&((a, pair[0]), (b, pair[1]))), "{a} {b} {pair:?}");
            }
        }
    }
    // 25 is the minimum, the product of the sizes of the two largest settings.
    assert!((25..=35).contains(&cases.len()), "{} combinations", cases.len());
    assert_eq!(cases, pairwise(&sizes));
}
