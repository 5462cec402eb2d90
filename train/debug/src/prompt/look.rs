use std::fs;
use std::io;
use std::path::Path;

use kiln_model::ops::Seen;
use kiln_shard::{Engine, ParameterLayout, StateKind};

use super::command::Name;
use super::debugger::Debugger;
use super::session::View;
use super::show::Shown;
use super::slice::Slice;
use kiln_data::Tokenizer;
use kiln_sys::npy::{self, Array};
use kiln_train::error::Result;

const LONGEST_TEXT: usize = 400;

impl Shown {
    pub(super) fn of(seen: &Seen<'_>) -> Self {
        let of = if seen.is_gradient { "gradient of " } else { "" };
        let data = seen.values.clone().into_data();
        Shown {
            title: format!("{of}{} {}", seen.place, seen.name),
            dtype: format!("{:?}", data.dtype()).to_lowercase(),
            shape: seen.shape.clone(),
            values: data.iter::<f32>().collect(),
        }
    }

    pub(super) fn part(&self, slice: &Slice) -> String {
        match slice.of(&self.shape, &self.values) {
            Ok((shape, values)) => {
                let title = format!("part of {}", self.title);
                Shown { title, dtype: self.dtype.clone(), shape, values }.all_values()
            }
            Err(error) => error.to_string(),
        }
    }
}

/// Compares `tensor` with the array in `file`; returns the output of `diff NAME FILE`.
fn difference(tensor: &Shown, file: &Path) -> io::Result<String> {
    let array = Array::open(file)?;
    let shape = array.shape.clone();
    // The file may claim any shape. Its values are read only if its shape is that of the tensor.
    let values = if shape == tensor.shape { array.values()? } else { Vec::new() };
    Ok(tensor.difference(&shape, &values))
}

fn parameter<'a>(engine: &'a Engine, name: &str) -> Option<&'a ParameterLayout> {
    let parameters = engine.layout().groups.iter().flat_map(|group| &group.parameters);
    parameters.into_iter().find(|parameter| parameter.name == name)
}

impl Debugger {
    /// Returns the tensor of this name, or the message to show instead. Collective where all ranks are held.
    pub(super) fn tensor(&self, view: &View<'_>, name: &Name) -> Result<Result<Shown, String>> {
        let engine = view.engine;
        let name = match name {
            Name::Here => {
                let nothing =
                    "there is no tensor at this point: name a parameter, or continue with s".to_owned();
                return Ok(view.tensor.cloned().ok_or(nothing));
            }
            Name::Parameter(name) => name.as_str(),
        };
        let (found, kind) = match (parameter(engine, name), name.rsplit_once('.')) {
            (Some(found), _) => (found, StateKind::Weight),
            (None, Some((of, kind))) if parameter(engine, of).is_some() => {
                let kind = if kind == "grad" { StateKind::Gradient } else { StateKind::Slot(kind) };
                let Some(found) = parameter(engine, of) else { return Ok(Err(String::new())) };
                (found, kind)
            }
            _ => {
                let text = format!("there is no parameter `{name}`; params lists them");
                return Ok(Err(text));
            }
        };
        let shown = |title: String, shape: Vec<usize>, values: Vec<f32>| Shown {
            title,
            dtype: "f32".to_owned(),
            shape,
            values,
        };
        let none = || match kind {
            StateKind::Gradient => {
                format!("{name} is not available: gradients exist from the end of backward to the update")
            }
            StateKind::Slot(slot) => {
                format!(
                    "{name} is not available: the optimizer has no {slot} for it, or has made no step yet"
                )
            }
            StateKind::Weight => format!("{name} is not available"),
        };
        if view.alone {
            let part = engine.read_parameter(&found.name, kind, |range, values| (range, values.to_vec()))?;
            return Ok(match part {
                Some((range, values)) => {
                    let title = format!(
                        "{name}, elements {}..{} of {}, the shard of this rank (the other ranks are running, so it cannot be gathered)",
                        range.start,
                        range.end,
                        found.numel()
                    );
                    Ok(shown(title, vec![values.len()], values))
                }
                None if engine.held(&found.name)?.is_empty() => Err(format!(
                    "rank {} holds no part of {name} (the other ranks are running, so it cannot be gathered)",
                    self.rank
                )),
                None => Err(none()),
            });
        }
        let whole = engine.gather_parameter(&found.name, kind)?;
        let owned = if let StateKind::Slot(slot) = kind { found.owned_slot(slot) } else { None };
        let shape = owned.map_or(&found.shape, |slot| &slot.shape);
        Ok(whole.map(|values| shown(name.to_owned(), shape.clone(), values)).ok_or_else(none))
    }

    pub(super) fn save(&self, view: &View<'_>, name: &Name, file: &Path) -> Result<String> {
        Ok(match self.tensor(view, name)? {
            Err(text) => text,
            Ok(_) if !view.alone && self.focus != self.rank => String::new(),
            Ok(tensor) if file.exists() => {
                format!("{} already exists: name another file for {}", file.display(), tensor.title)
            }
            Ok(tensor) => match npy::write(file, &tensor.shape, &tensor.values) {
                Ok(()) => {
                    let whole = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
                    format!("{} {:?} saved to {}", tensor.title, tensor.shape, whole.display())
                }
                Err(error) => format!("cannot write {}: {error}", file.display()),
            },
        })
    }

    pub(super) fn diff(&self, view: &View<'_>, name: &Name, file: &Path) -> Result<String> {
        Ok(match self.tensor(view, name)? {
            Err(text) => text,
            Ok(_) if !view.alone && self.focus != self.rank => String::new(),
            Ok(tensor) => match difference(&tensor, file) {
                Ok(text) => text,
                Err(error) => format!("cannot read {}: {error}", file.display()),
            },
        })
    }

    pub(super) fn show_batch(&self) -> String {
        let Some((at, batch)) = &self.batch else { return "no batch is being processed".to_owned() };
        let tokenizer = match Tokenizer::from_file(self.tokenizer.to_vec(), Path::new("tokenizer.json")) {
            Ok(tokenizer) => tokenizer,
            Err(error) => return error.to_string(),
        };
        let mut lines = vec![format!(
            "step {}, micro-batch {}: {} tokens in {} samples, from sample {} of the global order",
            at.step,
            at.micro_batch,
            batch.inputs.len(),
            batch.inputs.len() / self.seq_len.max(1),
            at.first_sample
        )];
        for (index, sample) in batch.inputs.chunks(self.seq_len.max(1)).enumerate() {
            let ids: Vec<u32> = sample.iter().filter_map(|id| u32::try_from(*id).ok()).collect();
            let text = tokenizer.decode(&ids).unwrap_or_else(|error| error.to_string());
            let text: String = text.chars().take(LONGEST_TEXT).collect();
            lines.push(format!("sample {}: {text:?}", at.first_sample + index as u64));
        }
        lines.join("\n")
    }

    pub(super) fn parameters(&self, view: &View<'_>, pattern: &str) -> String {
        let mut lines = Vec::new();
        for group in &view.engine.layout().groups {
            for parameter in group.parameters.iter().filter(|parameter| parameter.name.contains(pattern)) {
                let held = view.engine.held(&parameter.name).map_or(0, |held| held.len());
                let frozen = if group.trainable { "" } else { ", frozen" };
                lines.push(format!(
                    "{} {:?}, {held} of {} elements here{frozen}",
                    parameter.name,
                    parameter.shape,
                    parameter.numel()
                ));
            }
        }
        if lines.is_empty() { format!("no parameter name contains \"{pattern}\"") } else { lines.join("\n") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_another_shape_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.npy");
        let tensor = Shown { title: "x".into(), dtype: "f32".into(), shape: vec![2], values: vec![1.0, 2.0] };
        npy::write(&path, &[2], &tensor.values).unwrap();
        assert_eq!(difference(&tensor, &path).unwrap(), "x: equal, bit by bit");
        let huge = 1 << 36;
        npy::write(&path, &[huge], &[]).unwrap();
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_len(file.metadata().unwrap().len() + 4 * huge as u64).unwrap();
        assert_eq!(
            difference(&tensor, &path).unwrap(),
            format!("x: shape [2] here, and [{huge}] in the file")
        );
    }
}
