//! The side channel of a forward pass: losses added by layers, and values to log.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use burn::tensor::{DType, FloatDType, Tensor};
use serde::{Deserialize, Serialize};

use crate::ops::RouterSums;

/// The kind of value that a layer has recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RecordKind {
    /// A loss of [`Context::add_loss`](super::Context::add_loss), with its weight.
    Loss,
    /// A value of [`Context::record`](super::Context::record).
    Value,
    /// The root mean square of the residual stream after a module; see [`Records::new`].
    Activation,
}

/// A value recorded by a layer in one forward pass.
#[derive(Clone, Debug)]
pub struct Record {
    /// Place in the decoder, such as `layers.3.ffn`; `embed` and `head` for the outer modules.
    pub place: String,
    /// The name given by the layer; empty for an activation.
    pub name: String,
    /// Kind of the value.
    pub kind: RecordKind,
    /// Mean over the tokens of the pass, `[1]` in `f32`, on the device of the pass and off the tape.
    pub value: Tensor<1>,
    /// The pass's share of the step's tokens. For a loss, the value of the step is the sum of `share * value` over
    /// all passes and ranks; for other values, that sum divided by the sum of `share`.
    pub share: f64,
}

/// The values that layers record in the forward passes of one step, on one rank. A training loop that logs a step
/// passes one collection to the contexts of all passes ([`Context::recording`](super::Context::recording)), and reads
/// it after the last one. Cheap to clone; clones share the values.
#[derive(Clone, Debug, Default)]
pub struct Records {
    taken: Arc<Mutex<Vec<Record>>>,
    activations: bool,
}

impl Records {
    /// Creates an empty collection. With `activations`, the decoder records the root mean square of a token's
    /// residual stream, after the embedding and after every block.
    pub fn new(activations: bool) -> Self {
        Records { taken: Arc::default(), activations }
    }

    /// Removes and returns the values so far, in the order of the passes and, within a pass, of the modules.
    pub fn take(&self) -> Vec<Record> {
        std::mem::take(&mut *lock(&self.taken))
    }

    /// Adds the values of a pass, which has `share` of the step's tokens.
    pub(crate) fn extend(&self, records: impl IntoIterator<Item = Record>, share: f64) {
        lock(&self.taken).extend(records.into_iter().map(|record| Record { share, ..record }));
    }
}

/// The values that the layers of one module record in one run of the module.
#[derive(Clone, Debug, Default)]
pub(super) struct SideChannel {
    losses: Arc<Mutex<Vec<Tensor<1>>>>,
    /// The sums over the routers of this pass.
    routers: RouterSums,
    recorder: Option<Recorder>,
}

/// The destination of recorded values.
#[derive(Clone, Debug)]
struct Recorder {
    step: Records,
    place: String,
    run: Arc<Mutex<Vec<Record>>>,
}

impl SideChannel {
    pub(super) fn recording(records: &Records) -> Self {
        let recorder = Recorder { step: records.clone(), place: String::new(), run: Arc::default() };
        SideChannel { recorder: Some(recorder), ..SideChannel::default() }
    }

    /// Returns the side channel for `place` within this place.
    pub(super) fn at(&self, place: &str) -> Self {
        let recorder = self
            .recorder
            .as_ref()
            .map(|recorder| Recorder { place: inner_place(&recorder.place, place), ..recorder.clone() });
        SideChannel { recorder, ..self.clone() }
    }

    /// Returns this side channel without the values recorded so far.
    pub(super) fn emptied(&self) -> Self {
        let recorder = self.recorder.as_ref();
        let recorder = recorder.map(|recorder| Recorder { run: Arc::default(), ..recorder.clone() });
        SideChannel { losses: Arc::default(), recorder, ..self.clone() }
    }

    /// Returns this side channel for a new pass.
    pub(super) fn of_new_pass(&self) -> Self {
        SideChannel { routers: RouterSums::default(), ..self.emptied() }
    }

    pub(super) fn routers(&self) -> &RouterSums {
        &self.routers
    }

    pub(super) fn records(&self) -> Option<&Records> {
        self.recorder.as_ref().map(|recorder| &recorder.step)
    }

    pub(super) fn records_activations(&self) -> bool {
        self.records().is_some_and(|records| records.activations)
    }

    /// Records the root mean square of `x` `[batch, seq, d_model]`.
    pub(super) fn record_activation(&self, x: &Tensor<3>) {
        // Computed per token and then averaged, so that the value is the same for every split of the step into
        // passes.
        let x = x.clone().without_autodiff().cast(FloatDType::F32);
        self.push("", RecordKind::Activation, x.powi_scalar(2).mean_dim(2).sqrt().mean());
    }

    pub(super) fn add_loss(&self, name: &str, loss: Tensor<1>) {
        if self.recorder.is_some() {
            self.push(name, RecordKind::Loss, loss.clone());
        }
        lock(&self.losses).push(loss);
    }

    pub(super) fn record(&self, name: &str, value: Tensor<1>) {
        self.push(name, RecordKind::Value, value);
    }

    fn push(&self, name: &str, kind: RecordKind, value: Tensor<1>) {
        let Some(recorder) = &self.recorder else { return };
        // A record must not keep the tape of the pass.
        let value = value.without_autodiff();
        let value = if value.dtype() == DType::F32 { value } else { value.cast(FloatDType::F32) };
        let value = if value.dims() == [1] { value } else { value.mean() };
        let (place, name) = (recorder.place.clone(), name.to_owned());
        lock(&recorder.run).push(Record { place, name, kind, value, share: 0.0 });
    }

    /// Takes the sum of the losses that were added.
    pub(super) fn take_loss(&self) -> Option<Tensor<1>> {
        std::mem::take(&mut *lock(&self.losses)).into_iter().reduce(|a, b| a + b)
    }

    /// Takes the values that were recorded.
    pub(super) fn take_records(&self) -> Vec<Record> {
        self.recorder.as_ref().map_or_else(Vec::new, |recorder| std::mem::take(&mut *lock(&recorder.run)))
    }
}

/// The records of a module that may run twice, of which only the first run counts. Takes no memory if nothing is
/// recorded.
#[derive(Clone, Debug, Default)]
pub(crate) struct FirstRun(Option<Arc<OnceLock<Vec<Record>>>>);

impl FirstRun {
    pub(crate) fn new(is_recording: bool) -> Self {
        FirstRun(is_recording.then(Arc::default))
    }

    /// Stores `records`, unless there was an earlier run.
    pub(crate) fn keep(&self, records: impl FnOnce() -> Vec<Record>) {
        if let Some(first) = &self.0 {
            first.get_or_init(records);
        }
    }

    /// Returns the records of the first run.
    pub(crate) fn records(&self) -> &[Record] {
        self.0.as_ref().and_then(|first| first.get()).map_or(&[], Vec::as_slice)
    }
}

/// Joins `outer` and `place`, as in `layers.3.ffn`.
pub(super) fn inner_place(outer: &str, place: &str) -> String {
    match outer {
        "" => place.to_owned(),
        outer => format!("{outer}.{place}"),
    }
}

/// Locks `mutex`, even after a panic: a panic during a push leaves the list unchanged or one longer, so it stays
/// valid.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
