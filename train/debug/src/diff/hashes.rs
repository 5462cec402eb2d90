use std::collections::{HashMap, HashSet};

use super::difference::{Difference, Expected, Judge, ROUNDING, Size, TensorPlace};
use crate::hash::{Entry, StepHashes, StepPhase};

pub struct Compared {
    pub judge: Judge,
    pub steps: Vec<u64>,
    /// The phase in which the runs diverge or, if they do not, first have different bits.
    pub phase: Option<StepPhase>,
    /// Tensors that only one run has, although both runs have tensors of that kind.
    pub unpaired: Vec<String>,
    /// The dtypes, in the two runs, of the tensor at which the runs diverge.
    pub dtypes: Option<[String; 2]>,
    /// Phases seen in earlier steps, for which the usual distance of the runs is known.
    known: HashSet<StepPhase>,
}

/// Returns the norms of all tensors of one kind in one module; a single one, such as a bias of keys, may be noise.
fn scales(step: &StepHashes) -> HashMap<(StepPhase, &str, &str), f64> {
    let mut squares = HashMap::new();
    for entry in &step.entries {
        *squares.entry(scale_of(entry)).or_insert(0.0) += entry.norm * entry.norm;
    }
    squares.into_iter().map(|(key, squares): (_, f64)| (key, squares.sqrt())).collect()
}

fn scale_of(entry: &Entry) -> (StepPhase, &str, &str) {
    let kind = match entry.phase {
        StepPhase::Start | StepPhase::Gradient | StepPhase::Update => {
            entry.tensor.split_once(' ').map_or("", |(_, slot)| slot)
        }
        _ => &entry.tensor,
    };
    (entry.phase, &entry.module, kind)
}

fn is_half(steps: &[StepHashes]) -> bool {
    let mut entries = steps.iter().flat_map(|step| &step.entries);
    entries.any(is_of_half)
}

fn is_of_half(entry: &Entry) -> bool {
    matches!(entry.dtype.as_str(), "bf16" | "f16")
}

/// Compares the steps that both runs have, up to the first difference.
pub fn compare(a: &[StepHashes], b: &[StepHashes], expected: Expected) -> Compared {
    let ranks = |steps: &[StepHashes]| steps.first().map(|step| step.ranks);
    let is_strict = expected.is_strict && ranks(a) == ranks(b);
    // A run in a narrow type and a run in f32 are expected to differ.
    let is_half = expected.is_half || (is_half(a) && is_half(b));
    let judge = Judge::new(Expected { is_strict, is_half });
    let (steps, unpaired) = (Vec::new(), Vec::new());
    let mut compared = Compared { judge, steps, phase: None, unpaired, dtypes: None, known: HashSet::new() };
    for mine in a {
        let Some(theirs) = b.iter().find(|step| step.step == mine.step) else { continue };
        compared.steps.push(mine.step);
        compared.step(mine, theirs);
        compared.known.extend(mine.entries.iter().map(|entry| entry.phase));
        if compared.judge.parted.is_some() {
            break;
        }
    }
    compared
}

impl Compared {
    fn step(&mut self, a: &StepHashes, b: &StepHashes) {
        let others: HashMap<_, _> = b.entries.iter().map(|entry| (entry.name(), entry)).collect();
        let names: HashSet<_> = a.entries.iter().map(Entry::name).collect();
        // A kind of tensor that only one run hashed does not count as a difference.
        let kind = |entry: &Entry| (entry.phase, entry.tensor.contains(' '));
        let kinds = |step: &StepHashes| step.entries.iter().map(kind).collect::<HashSet<_>>();
        let (of_a, of_b) = if a.by_module == b.by_module { (kinds(a), kinds(b)) } else { Default::default() };
        let (scales_a, scales_b) = (scales(a), scales(b));
        let scale = |entry: &Entry| {
            let of = |scales: &HashMap<_, f64>| scales.get(&scale_of(entry)).copied().unwrap_or_default();
            of(&scales_a).max(of(&scales_b))
        };
        // Parameters whose gradient is rounding noise, which AdamW turns into full-size steps.
        let mut noise = HashSet::new();
        for mine in &a.entries {
            let Some(theirs) = others.get(&mine.name()) else {
                if of_b.contains(&kind(mine)) {
                    self.unpaired.push(format!("{}: {} (only the first)", mine.module, mine.tensor));
                }
                continue;
            };
            if mine.hash == theirs.hash && mine.dtype == theirs.dtype && mine.count == theirs.count {
                self.judge.same();
                continue;
            }
            let (difference, size) = differ(a.step, mine, theirs, scale(mine));
            let parameter = mine.tensor.split(' ').next().unwrap_or_default();
            if mine.phase == StepPhase::Gradient
                && difference.relative.is_some_and(|r| r > 0.01)
                && size < ROUNDING
            {
                noise.insert((&*mine.module, parameter));
            }
            let is_noise = mine.phase == StepPhase::Update && noise.contains(&(&*mine.module, parameter));
            let had = (self.judge.first.is_some(), self.judge.parted.is_some());
            let relative = if is_noise { 0.0 } else { size };
            // Sums in f32, such as gradients and norms, have no bf16 elements that could round the other way.
            let count = if is_of_half(mine) { mine.count } else { u64::MAX };
            let size = Size { relative, count, is_known: self.known.contains(&mine.phase) };
            self.judge.other(difference, size);
            if had != (self.judge.first.is_some(), self.judge.parted.is_some()) {
                self.phase = Some(mine.phase);
                self.dtypes = Some([mine.dtype.clone(), theirs.dtype.clone()]);
            }
        }
        let unpaired =
            b.entries.iter().filter(|entry| of_a.contains(&kind(entry)) && !names.contains(&entry.name()));
        self.unpaired
            .extend(unpaired.map(|entry| format!("{}: {} (only the second)", entry.module, entry.tensor)));
    }
}

fn differ(step: u64, a: &Entry, b: &Entry, scale: f64) -> (Difference, f64) {
    let at = TensorPlace {
        step: Some(step),
        phase: a.phase.to_string(),
        module: a.module.clone(),
        tensor: a.tensor.clone(),
    };
    let over = |scale: f64| if scale > 0.0 { a.distance(b) / scale } else { 0.0 };
    let (own, size) = (over(a.norm.max(b.norm)), over(scale));
    let (relative, size, note) = match () {
        () if a.phase == StepPhase::Data => (None, f64::INFINITY, Some("different token ids".to_owned())),
        () if a.count != b.count => (
            None,
            f64::INFINITY,
            Some(format!("{} elements in the first, {} in the second", a.count, b.count)),
        ),
        () if a.non_finite != b.non_finite => {
            let note =
                format!("{} non-finite elements in the first, {} in the second", a.non_finite, b.non_finite);
            (None, f64::INFINITY, Some(note))
        }
        () if a.non_finite > 0 && (!a.phase.may_mask() || a.sketch == b.sketch) => {
            let note = format!("both have {} non-finite elements", a.non_finite);
            (None, f64::INFINITY, Some(note))
        }
        () if a.dtype != b.dtype => {
            (Some(own), size, Some(format!("{} in the first, {} in the second", a.dtype, b.dtype)))
        }
        () if a.count == 1 => {
            let value = |entry: &Entry| entry.sketch[0];
            (Some(own), size, Some(format!("{} in the first, {} in the second", value(a), value(b))))
        }
        () => (Some(own), size, None),
    };
    let ranks: Vec<_> = a.ranks_apart(b).iter().map(usize::to_string).collect();
    let of_ranks = (!ranks.is_empty()).then(|| format!("only on rank {}", ranks.join(", ")));
    let notes: Vec<_> = note.into_iter().chain(of_ranks).collect();
    let note = (!notes.is_empty()).then(|| notes.join("; "));
    (Difference { at, relative, note }, size)
}
