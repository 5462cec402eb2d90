use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use globset::{Glob, GlobSet, GlobSetBuilder};
use kiln_model::layers::{HEAD_LAYER_PREFIX, is_adapter};
use kiln_shard::{Engine, StateKind};
use kiln_sys::Meter;

use crate::error::{Mismatch, Result};
use crate::{CheckpointError, manifest::WIDTH};

/// Named weights that can be read in parts, with the names, shapes and element order of Kiln's decoder.
pub trait Weights {
    /// Returns the folder of the weights, for messages.
    fn folder(&self) -> &Path;

    /// Returns full names and shapes of all weights.
    fn shapes(&self) -> BTreeMap<&str, &[usize]>;

    /// Reads elements `range` of the flat weight `name` as f32 into `values`, which must have the same length.
    fn read(&self, name: &str, range: Range<usize>, values: &mut [f32]) -> Result<()>;
}

/// Patterns, such as `lm_head.*`, for names of weights that may be missing from the checkpoint, so that they keep their
/// initial values. Weights of the head's layer may also be missing from the model, and are then not loaded.
#[derive(Clone, Debug, Default)]
pub struct AllowMissing {
    patterns: Vec<String>,
    set: GlobSet,
    /// True if all weights but adapters may be missing.
    only_adapters: bool,
}

impl AllowMissing {
    /// Parses name patterns, in which `*` matches any text. The error describes an invalid pattern.
    pub fn new(patterns: &[String]) -> Result<Self, String> {
        let mut set = GlobSetBuilder::new();
        for pattern in patterns {
            let glob =
                Glob::new(pattern).map_err(|error| format!("--allow-missing {pattern}: {}", error.kind()))?;
            set.add(glob);
        }
        let set = set.build().map_err(|error| format!("--allow-missing: {error}"))?;
        Ok(AllowMissing { patterns: patterns.to_vec(), set, only_adapters: false })
    }

    /// Allows everything but adapters to be missing.
    pub(crate) fn all_but_adapters() -> Self {
        AllowMissing { only_adapters: true, ..AllowMissing::default() }
    }

    /// Reports whether the weight `name` may be missing.
    pub fn allows(&self, name: &str) -> bool {
        self.set.is_match(name) || (self.only_adapters && !is_adapter(name))
    }

    /// Reports whether no weight may be missing.
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// Returns the patterns, as given.
    pub fn patterns(&self) -> &[String] {
        &self.patterns
    }
}

/// The weights of a model, and its adapters.
pub(crate) struct AdaptedWeights<'a> {
    pub(crate) base: Box<dyn Weights + 'a>,
    pub(crate) adapters: Box<dyn Weights + 'a>,
}

impl Weights for AdaptedWeights<'_> {
    fn folder(&self) -> &Path {
        self.adapters.folder()
    }

    fn shapes(&self) -> BTreeMap<&str, &[usize]> {
        self.base.shapes().into_iter().chain(self.adapters.shapes()).collect()
    }

    fn read(&self, name: &str, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        match is_adapter(name) {
            true => self.adapters.read(name, range, values),
            false => self.base.read(name, range, values),
        }
    }
}

/// Compares names and shapes of `weights` with the engine's layout. Returns the names of the allowed missing weights.
pub(crate) fn compare(
    engine: &Engine,
    weights: &dyn Weights,
    allow_missing: &AllowMissing,
) -> Result<BTreeSet<String>> {
    let mut saved = weights.shapes();
    // A model without adapters gets new ones.
    let adapters_are_new = !saved.keys().any(|name| is_adapter(name));
    let (mut absent, mut mismatch) = (BTreeSet::new(), Mismatch::default());
    for (_, parameter) in engine.layout().parameters() {
        let name = &parameter.name;
        match saved.remove(name.as_str()) {
            Some(shape) if *shape != parameter.shape => {
                let shapes = format!("`{name}` is {shape:?} there and {:?} in the model", parameter.shape);
                mismatch.misshapen.push(shapes);
            }
            Some(_) => {}
            None if allow_missing.allows(name) || (adapters_are_new && is_adapter(name)) => {
                absent.insert(name.clone());
            }
            None => mismatch.missing.push(name.clone()),
        }
    }
    // Only objectives run the layer of the head, so the model is the same without it.
    let is_dropped = |name: &str| name.starts_with(HEAD_LAYER_PREFIX) && allow_missing.allows(name);
    let unexpected = saved.into_keys().filter(|name| !is_dropped(name));
    mismatch.unexpected = unexpected.map(str::to_owned).collect();
    if mismatch.is_empty() {
        return Ok(absent);
    }
    Err(CheckpointError::Names { path: weights.folder().to_owned(), mismatch })
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct NotFinite {
    /// The first weight with a non-finite value, and that value.
    first: Option<(String, f32)>,
    weights: BTreeSet<String>,
    values: usize,
}

impl NotFinite {
    pub(crate) fn check_values(&mut self, name: &str, values: &[f32]) {
        let mut others = values.iter().filter(|value| !value.is_finite());
        let Some(value) = others.next() else { return };
        self.first.get_or_insert_with(|| (name.to_owned(), *value));
        self.values += 1 + others.count();
        self.weights.insert(name.to_owned());
    }

    /// Fails if a value was not finite. Call this only after verifying the checksums. `all`: all weights were checked.
    pub(crate) fn check(self, folder: &Path, all: bool) -> Result<()> {
        let NotFinite { first, weights, values } = self;
        let Some((name, value)) = first else { return Ok(()) };
        let all = all.then_some((values, weights.len()));
        Err(CheckpointError::NotFinite { path: folder.to_owned(), name, value, all })
    }
}

/// Wraps weights to check and count values as they are read.
pub(crate) struct Watched<'a> {
    weights: &'a dyn Weights,
    meter: &'a Meter,
    found: RefCell<NotFinite>,
}

impl<'a> Watched<'a> {
    /// Wraps `weights`, of which `numel` elements must be read, once; `meter` counts the bytes.
    pub(crate) fn new(weights: &'a dyn Weights, numel: usize, meter: &'a Meter) -> Self {
        meter.begin(numel as u64 * WIDTH);
        Watched { weights, meter, found: RefCell::default() }
    }

    pub(crate) fn read(&self, name: &str, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        self.weights.read(name, range, values)?;
        self.found.borrow_mut().check_values(name, values);
        self.meter.add(size_of_val(values) as u64);
        Ok(())
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.found.take().check(self.weights.folder(), true)
    }
}

/// Loads this rank's part of all weights except `absent` into `engine`. Returns the weights with non-finite values.
pub(crate) fn load(
    engine: &Engine,
    weights: &dyn Weights,
    absent: &BTreeSet<String>,
    meter: &Meter,
) -> Result<NotFinite> {
    let names = || {
        let names = engine.layout().parameters().map(|(_, parameter)| &parameter.name);
        names.filter(|name| !absent.contains(*name))
    };
    let numel = names().map(|name| Ok(engine.held(name)?.len())).sum::<Result<usize>>()?;
    meter.begin(numel as u64 * WIDTH);
    let mut not_finite = NotFinite::default();
    for name in names() {
        engine.fill_parameter(name, StateKind::Weight, |range, values| {
            weights.read(name, range, values)?;
            not_finite.check_values(name, values);
            meter.add(size_of_val(values) as u64);
            Ok::<_, CheckpointError>(())
        })?;
    }
    Ok(not_finite)
}
