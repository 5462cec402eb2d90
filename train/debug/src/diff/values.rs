//! Comparison of metrics, weights and prepared data, value by value.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use kiln_shard::TensorDifference;
use kiln_sys::LineReader;
use serde_json::Value as Json;

use super::difference::{Difference, Expected, Judge, Size, TensorPlace};
use crate::error::DiffError;
use crate::error::Result;
use crate::hash::split;
use kiln_checkpoint::source::ModelSource;
use kiln_checkpoint::weights::Weights;
use kiln_checkpoint::{Checkpoint, CheckpointError, Saved};
use kiln_data::{self as data, DataInfo, Split, Tokenizer};
use kiln_sys::files;

const BLOCK: usize = 1 << 20;

pub struct ComparedValues {
    pub judge: Judge,
    /// A description, such as `metrics of steps 1 to 4`.
    pub what: String,
}

fn place(step: Option<u64>, phase: &str, module: &str, tensor: &str) -> TensorPlace {
    TensorPlace { step, phase: phase.to_owned(), module: module.to_owned(), tensor: tensor.to_owned() }
}

fn place_of(step: Option<u64>, phase: &str, name: &str, slot: &str) -> TensorPlace {
    match split(name) {
        (module, inner) if module.starts_with("layers.") => {
            place(step, phase, module, format!("{inner} {slot}").trim_end())
        }
        _ => place(step, phase, "model", format!("{name} {slot}").trim_end()),
    }
}

/// Compares losses and norms of common steps; `None` if there are none. `worst` is the largest difference so far.
pub fn metrics(
    a: &Path,
    b: &Path,
    expected: Expected,
    worst: f64,
) -> Result<Option<ComparedValues>, DiffError> {
    let (a, b) = (read_metrics(a)?, read_metrics(b)?);
    let mut judge = Judge::new(expected);
    judge.worst = worst;
    let both: Vec<_> = a.iter().filter_map(|(step, mine)| Some((*step, mine, b.get(step)?))).collect();
    let mut before = None;
    for (step, mine, theirs) in &both {
        // Over steps that are not logged, rounding noise may grow unobserved.
        let is_known = before.replace(*step) == step.checked_sub(1);
        for key in ["loss", "grad_norm", "val_loss"] {
            let value = |line: &BTreeMap<String, f64>| line.get(key).copied();
            let (Some(x), Some(y)) = (value(mine), value(theirs)) else { continue };
            if key == "val_loss" && mine.get("val_tokens") != theirs.get("val_tokens") {
                continue;
            }
            if x.to_bits() == y.to_bits() {
                judge.same();
                continue;
            }
            let relative = match x.is_finite() && y.is_finite() {
                true => (x - y).abs() / x.abs().max(y.abs()),
                false => f64::INFINITY,
            };
            let note = Some(format!("{x} in the first, {y} in the second"));
            let at = place(Some(*step), "metrics", "model", key);
            let size = Size { relative, count: u64::MAX, is_known };
            judge.other(Difference { at, relative: Some(relative).filter(|r| r.is_finite()), note }, size);
        }
    }
    let (Some(first), Some(last)) = (both.first(), both.last()) else { return Ok(None) };
    let what = format!("metrics of {} steps from {} to {}", both.len(), first.0, last.0);
    Ok(Some(ComparedValues { judge, what }))
}

fn unreadable(path: &Path) -> impl FnOnce(std::io::Error) -> DiffError {
    move |error| DiffError::File { reason: format!("cannot read {}: {error}", path.display()) }
}

/// Reads the numbers of every step. `null` means a number that is not finite.
fn read_metrics(path: &Path) -> Result<BTreeMap<u64, BTreeMap<String, f64>>, DiffError> {
    let mut lines = LineReader::open(path).map_err(unreadable(path))?;
    let mut steps: BTreeMap<u64, BTreeMap<String, f64>> = BTreeMap::new();
    while let Some(line) = lines.next_line().map_err(unreadable(path))? {
        let Ok(Json::Object(line)) = serde_json::from_slice(line) else { continue };
        let Some(step) = line.get("step").and_then(Json::as_u64) else { continue };
        let number = |value: &Json| if value.is_null() { Some(f64::NAN) } else { value.as_f64() };
        let numbers = line.into_iter().filter_map(|(key, value)| Some((key, number(&value)?)));
        steps.entry(step).or_default().extend(numbers);
    }
    Ok(steps)
}

/// Compares the weights of two models, and their optimizer state if both have it.
pub fn models(a: &Path, b: &Path, expected: Expected) -> Result<ComparedValues> {
    let sources = [ModelSource::open(a)?, ModelSource::open(b)?];
    let [weights_a, weights_b] = sources.each_ref().map(ModelSource::weights);
    let (shapes_a, shapes_b) = (weights_a.shapes(), weights_b.shapes());
    let what = || format!("{} and {}", a.display(), b.display());
    let only = |mine: &BTreeMap<&str, &[usize]>, theirs: &BTreeMap<&str, &[usize]>| {
        mine.keys().find(|name| !theirs.contains_key(**name)).map(|name| (*name).to_owned())
    };
    for (name, which) in [(only(&shapes_a, &shapes_b), "first"), (only(&shapes_b, &shapes_a), "second")] {
        if let Some(name) = name {
            let reason = format!("only the {which} has the weight `{name}`");
            return Err(DiffError::Apart { what: what(), reason }.into());
        }
    }
    let mut judge = Judge::new(expected);
    let step = |source: &ModelSource| match source {
        ModelSource::Checkpoint(checkpoint, _) => Some(checkpoint.state().step),
        ModelSource::HuggingFace(_) | ModelSource::Adapters(..) => None,
    };
    let [step_a, step_b] = sources.each_ref().map(step);
    let step = step_a.filter(|_| step_a == step_b);
    for (name, shape) in &shapes_a {
        if shapes_b[name] != *shape {
            let reason = format!("`{name}` is {shape:?} in the first and {:?} in the second", shapes_b[name]);
            return Err(DiffError::Apart { what: what(), reason }.into());
        }
        let read = |weights: &dyn Weights, range, values: &mut [f32]| weights.read(name, range, values);
        let [x, y] = [&weights_a, &weights_b]
            .map(|weights| move |range, values: &mut [f32]| read(&**weights, range, values));
        compare_tensor(&mut judge, place_of(step, "weights", name, ""), shape.iter().product(), x, y)?;
    }
    let mut compared = "the weights".to_owned();
    if let [ModelSource::Checkpoint(x, _), ModelSource::Checkpoint(y, _)] = &sources {
        compared += slots(&mut judge, step, x, y)?;
    }
    let of = |step: Option<u64>| step.map_or_else(String::new, |step| format!(" of step {step}"));
    let what = match step_a == step_b {
        true => format!("{compared}{}", of(step_a)),
        false => format!("{compared}{} with those{}", of(step_a), of(step_b)),
    };
    Ok(ComparedValues { judge, what })
}

fn slots(
    judge: &mut Judge,
    step: Option<u64>,
    a: &Checkpoint,
    b: &Checkpoint,
) -> Result<&'static str, CheckpointError> {
    let (reader_a, reader_b) = (a.reader(), b.reader());
    let tensors = a.manifest().tensors.iter().filter(|tensor| tensor.saved != Saved::Weight);
    let tensors: Vec<_> = tensors.filter(|tensor| reader_b.has(&tensor.name, &tensor.saved)).collect();
    for tensor in &tensors {
        let at = place_of(step, "moments", &tensor.name, tensor.saved.slot().unwrap_or_default());
        let count = tensor.shape.iter().product();
        let x = |range, values: &mut [f32]| reader_a.read(&tensor.name, &tensor.saved, range, values);
        let y = |range, values: &mut [f32]| reader_b.read(&tensor.name, &tensor.saved, range, values);
        compare_tensor(judge, at, count, x, y)?;
    }
    Ok(if tensors.is_empty() { "" } else { " and moments" })
}

fn compare_tensor(
    judge: &mut Judge,
    at: TensorPlace,
    count: usize,
    x: impl Fn(std::ops::Range<usize>, &mut [f32]) -> Result<(), CheckpointError>,
    y: impl Fn(std::ops::Range<usize>, &mut [f32]) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let (mut a, mut b) = (vec![0.0; count.min(BLOCK)], vec![0.0; count.min(BLOCK)]);
    let mut difference = TensorDifference::default();
    let mut start = 0;
    while start < count {
        let end = count.min(start + BLOCK);
        let (a, b) = (&mut a[..end - start], &mut b[..end - start]);
        x(start..end, a)?;
        y(start..end, b)?;
        difference.add(start, a, b);
        start = end;
    }
    let others = difference.others;
    if others == 0 {
        judge.same();
        return Ok(());
    }
    let (relative, furthest) = (difference.relative(), difference.furthest);
    let (index, [x, y]) = (furthest.index, furthest.values);
    if difference.non_finite > 0 {
        let note = Some(format!(
            "{others} of {count} elements have different bits, {} of them NaN or infinite; the first is element \
             {index}: {x:e} in the first, {y:e} in the second",
            difference.non_finite
        ));
        judge.non_finite(Difference { at, relative: None, note });
        return Ok(());
    }
    let note = Some(format!(
        "{others} of {count} elements have different bits; element {index} differs most: {x:e} in the first, {y:e} in \
         the second"
    ));
    let size = Size { relative, count: count as u64, is_known: false };
    judge.other(Difference { at, relative: Some(relative), note }, size);
    Ok(())
}

/// Compares prepared data: the tokens of both splits, and the tokenizers.
pub fn data(a: &Path, b: &Path) -> Result<ComparedValues> {
    let (of_a, of_b) = (DataInfo::load(a)?, DataInfo::load(b)?);
    let mut judge = Judge::new(Expected { is_strict: true, is_half: false });
    let mut note = |tensor: &str, x: String, y: String| {
        if x == y {
            judge.same();
            return;
        }
        let note = Some(format!("{x} in the first, {y} in the second"));
        let size = Size { relative: f64::INFINITY, count: 1, is_known: false };
        judge.other(Difference { at: place(None, "data", "tokens", tensor), relative: None, note }, size);
    };
    note("width of an id", format!("{:?}", of_a.dtype), format!("{:?}", of_b.dtype));
    note("vocabulary", of_a.vocab_size.to_string(), of_b.vocab_size.to_string());
    note("end of text", format!("id {}", of_a.end_of_text), format!("id {}", of_b.end_of_text));
    let (x, y) = other_tokenizers(a, b)?;
    note("tokenizer.json", x, y);
    if of_a.dtype == of_b.dtype {
        for split in [Split::Train, Split::Validation] {
            let (name, width) = (split.file_name(), of_a.dtype.bytes());
            let found = first_other(&a.join(name), &b.join(name), width)?;
            let (x, y) = found.map_or_else(Default::default, |(at, x, y)| {
                let said =
                    |id: Option<u32>| id.map_or_else(|| "no token".to_owned(), |id| format!("id {id}"));
                (format!("token {at} is {}", said(x)), said(y))
            });
            note(name, x, y);
        }
    }
    let what = format!("prepared data of {} and {} tokens", of_a.train.tokens, of_b.train.tokens);
    Ok(ComparedValues { judge, what })
}

/// Describes the first difference between two tokenizers, once per folder; two equal texts if there is none.
fn other_tokenizers(a: &Path, b: &Path) -> Result<(String, String)> {
    let [of_a, of_b] = [data::read_tokenizer_of(a)?, data::read_tokenizer_of(b)?];
    let parse = |folder: &Path, content: &[u8]| {
        Tokenizer::from_file(content.to_vec(), &folder.join("tokenizer.json")).ok()
    };
    let (Some(x), Some(y)) = (parse(a, &of_a), parse(b, &of_b)) else {
        return Ok(match of_a == of_b {
            true => Default::default(),
            false => ("one file".to_owned(), "another file".to_owned()),
        });
    };
    if !data::tokenizers_differ(&of_a, &of_b) {
        return Ok(Default::default());
    }
    let token = |tokenizer: &Tokenizer, id: u32| {
        let token = tokenizer.token(id).map_or_else(|| "no token".to_owned(), |token| format!("{token:?}"));
        format!("id {id} is {token}")
    };
    let ids = 0..x.vocab_size().max(y.vocab_size()) as u32;
    Ok(match ids.into_iter().find(|id| x.token(*id) != y.token(*id)) {
        Some(id) => (token(&x, id), token(&y, id)),
        None => ("the same tokens with one set of rules".to_owned(), "with another".to_owned()),
    })
}

/// Position of the first token that differs, and the token id in each file; `None` if the file is shorter.
type OtherToken = (u64, Option<u32>, Option<u32>);

fn first_other(a: &Path, b: &Path, width: usize) -> Result<Option<OtherToken>, DiffError> {
    let open = |path: &Path| {
        let file = files::open(path).map_err(unreadable(path))?;
        Ok::<BufReader<File>, DiffError>(BufReader::with_capacity(BLOCK, file))
    };
    let (mut x, mut y) = (open(a)?, open(b)?);
    let read = |reader: &mut BufReader<File>, path: &Path| {
        let mut bytes = Vec::with_capacity(BLOCK);
        reader.by_ref().take(BLOCK as u64).read_to_end(&mut bytes).map_err(unreadable(path))?;
        Ok::<Vec<u8>, DiffError>(bytes)
    };
    let mut before = 0;
    loop {
        let (x, y) = (read(&mut x, a)?, read(&mut y, b)?);
        if x == y {
            if x.is_empty() {
                return Ok(None);
            }
            before += (x.len() / width) as u64;
            continue;
        }
        let same = x.iter().zip(&y).take_while(|(x, y)| x == y).count() / width;
        let id = |bytes: &[u8]| {
            let bytes = bytes.get(same * width..(same + 1) * width)?;
            Some(bytes.iter().rev().fold(0, |id, byte| id << 8 | u32::from(*byte)))
        };
        return Ok(Some((before + same as u64, id(&x), id(&y))));
    }
}

#[cfg(test)]
mod tests {
    use super::super::difference::Verdict;
    use super::*;

    fn compared(a: &[f64], b: &[f64]) -> (Verdict, f64) {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, losses: &[f64]| {
            let line = |(step, loss)| serde_json::json!({ "step": step, "loss": loss }).to_string();
            let lines: Vec<_> = (1..).zip(losses).map(line).collect::<Vec<String>>();
            let path = folder.path().join(name);
            std::fs::write(&path, lines.join("\n")).unwrap();
            path
        };
        let (a, b) = (write("a.jsonl", a), write("b.jsonl", b));
        let ComparedValues { judge, .. } = metrics(&a, &b, Expected::default(), 0.0).unwrap().unwrap();
        (judge.verdict(), judge.worst)
    }

    #[test]
    fn losses_one_bit_apart_differ() {
        let losses: Vec<f64> = (1..2000).map(|at| 2.0 + f64::from(at).sqrt().sin()).collect();
        assert_eq!(compared(&losses, &losses).0, Verdict::Equal);
        for at in 0..losses.len() {
            let mut other = losses.clone();
            other[at] = f64::from_bits(other[at].to_bits() + 1);
            let (verdict, worst) = compared(&losses[at..=at], &other[at..=at]);
            assert_eq!(verdict, Verdict::Rounding, "{}", losses[at]);
            assert!(worst > 0.0 && worst < 1e-15, "{worst}");
        }
    }

    #[test]
    fn non_finite_losses_differ() {
        assert_eq!(compared(&[2.0, f64::NAN], &[2.0, f64::NAN]).0, Verdict::Equal);
        for other in [[2.0, f64::NAN], [2.0, f64::INFINITY]] {
            assert_eq!(compared(&other, &[2.0, 1.5]), (Verdict::Different, f64::INFINITY));
            assert_eq!(compared(&[2.0, 1.5], &other), (Verdict::Different, f64::INFINITY));
        }
    }
}
