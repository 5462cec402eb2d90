//! When a rank is held.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use kiln_model::ops::Seen;
use kiln_shard::Engine;

use super::breakpoint::{Breakpoint, Number, Others, Part, Reach, Trigger};
use super::desk::Desk;
use super::point::{Point, What};
use super::show::Shown;
use crate::debug::options::DebugOptions;
use crate::device::ResolvedDevice;
use crate::error::Result;
use crate::metrics::StepMetrics;
use crate::run::{Controls, MicroBatch, Moment, Observer};

/// Whether breakpoints in the code of layers hold a run.
pub const BREAKPOINTS_IN_CODE: bool = cfg!(feature = "breakpoints");

/// Holds a run in the code of a layer, where `$tensor` can be looked at; the value is the tensor. All ranks are
/// held, so all of them must come here. Does nothing, and costs nothing, in a build without the feature
/// `breakpoints`.
///
/// ```ignore
/// let mixed = kiln::breakpoint!(context, "after attention", mixed);
/// ```
#[macro_export]
macro_rules! breakpoint {
    ($context:expr, $name:literal, $tensor:expr) => {
        if $crate::debug::BREAKPOINTS_IN_CODE {
            $context.probe(concat!("breakpoint: ", $name), $tensor)
        } else {
            $tensor
        }
    };
}

/// What the debugger of a rank has to know of it.
pub(crate) struct DebuggedRank {
    pub(crate) rank: usize,
    /// Where it computes.
    pub(crate) device: ResolvedDevice,
    pub(crate) desk: Arc<Desk>,
    pub(crate) controls: Controls,
    /// Asks the run to stop.
    pub(crate) stop: Arc<AtomicBool>,
    /// The file of the data's tokenizer.
    pub(crate) tokenizer: Arc<[u8]>,
    /// Tokens of a sample.
    pub(crate) seq_len: usize,
    /// Samples of a micro-batch.
    pub(crate) rows: usize,
    /// The run folder.
    pub(crate) out: PathBuf,
    /// The steps and places of the run.
    pub(crate) reach: Reach,
}

/// Holds one rank at breakpoints, and does what is typed at the prompt there. Every rank has one, and all of
/// them know the same breakpoints.
pub(crate) struct Debugger {
    pub(super) desk: Arc<Desk>,
    pub(super) controls: Controls,
    /// Asks the run to stop.
    pub(super) stop: Arc<AtomicBool>,
    /// The file of the data's tokenizer.
    pub(super) tokenizer: Arc<[u8]>,
    /// Tokens of a sample.
    pub(super) seq_len: usize,
    /// The run folder.
    pub(super) out: PathBuf,
    /// The steps and places of the run.
    pub(super) reach: Reach,
    /// Whether the prompt may be opened on the terminal of the run.
    pub(super) has_prompt: bool,
    pub(super) rank: usize,
    /// By number, the same on all ranks.
    pub(super) breakpoints: BTreeMap<usize, Breakpoint>,
    /// Those that hold this rank alone, and do so no more. The other ranks do not know of it.
    pub(super) muted: BTreeSet<usize>,
    /// Those that have come.
    reached: BTreeSet<usize>,
    /// The number of the next one.
    pub(super) next_number: usize,
    /// Where all ranks are held next, besides.
    pub(super) going: Going,
    /// Where this rank is held next, which the others are not.
    pub(super) alone: Going,
    /// The rank that is looked at.
    pub(super) focus: usize,
    /// The micro-batch that is under way.
    pub(super) batch: Option<(Moment, MicroBatch)>,
    /// The points of this step so far, and those of the step before.
    pub(super) points: [Vec<Point>; 2],
    /// The numbers of the last step.
    pub(super) metrics: Option<StepMetrics>,
    /// The step whose gradient was found not to be finite.
    spoilt: Option<u64>,
    /// The last line, which an empty one repeats.
    pub(super) last_line: String,
}

/// Where a rank is held next, besides breakpoints.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum Going {
    /// Nowhere.
    #[default]
    Free,
    /// At the next point.
    ToNext,
    /// At the next point that is not further inside than this.
    Over(usize),
    /// Where the pass leaves the place of this point.
    ToEndOf(Point),
}

impl Going {
    fn is_over(&self, point: &Point) -> bool {
        match self {
            Going::Free => false,
            Going::ToNext => true,
            Going::Over(depth) => point.depth() <= *depth,
            Going::ToEndOf(start) => point.ends(start),
        }
    }
}

/// Why a rank is held.
struct Reason {
    text: String,
    /// Whether the others run on.
    alone: bool,
    /// The rank to look at first.
    focus: Option<usize>,
}

impl Debugger {
    /// The debugger of a rank.
    pub(crate) fn new(options: &DebugOptions, of: DebuggedRank) -> Self {
        let DebuggedRank { rank, desk, controls, stop, tokenizer, seq_len, out, reach, rows: _, device: _ } =
            of;
        for breakpoint in options.breakpoints.iter().filter(|_| rank == 0) {
            if let Some(why) = reach.objection(breakpoint) {
                tracing::warn!("the breakpoint {breakpoint} cannot come: {why}");
            }
        }
        Debugger {
            desk,
            controls,
            stop,
            tokenizer,
            seq_len,
            out,
            reach,
            spoilt: None,
            has_prompt: options.has_prompt,
            rank,
            muted: BTreeSet::new(),
            reached: BTreeSet::new(),
            next_number: options.breakpoints.len() + 1,
            breakpoints: (1..).zip(options.breakpoints.iter().cloned()).collect(),
            going: Going::Free,
            alone: Going::Free,
            focus: 0,
            batch: None,
            points: [Vec::new(), Vec::new()],
            metrics: None,
            last_line: String::new(),
        }
    }

    /// Why this rank is held at `point`, if it is. `happens` says whether what a breakpoint waits for has
    /// happened; it may communicate.
    ///
    /// `note` stands behind the breakpoint that is the reason.
    fn reason(
        &mut self,
        point: &Point,
        note: &str,
        mut happens: impl FnMut(&Breakpoint) -> Result<bool>,
    ) -> Result<Option<Reason>> {
        let in_code = point.in_code().map(|name| Reason { text: name.to_owned(), alone: false, focus: None });
        let (mut common, mut own) = (in_code, None);
        for (number, breakpoint) in self.breakpoints.iter().filter(|(_, of)| of.is_in(point.step)) {
            // All ranks ask about all breakpoints, so that they communicate alike.
            if !happens(breakpoint)? {
                continue;
            }
            self.reached.insert(*number);
            let alone = breakpoint.rank.is_some() && breakpoint.others == Others::Run;
            let reason = Reason { text: format!("{breakpoint}{note}"), alone, focus: breakpoint.rank };
            match alone {
                false => _ = common.get_or_insert(reason),
                true if breakpoint.rank == Some(self.rank) && !self.muted.contains(number) => {
                    own.get_or_insert(reason);
                }
                true => {}
            }
        }
        let stepped = |alone| Reason { text: "stepped".to_owned(), alone, focus: None };
        // What holds all ranks goes before what holds this one: the others are held already.
        Ok(common
            .or_else(|| self.going.is_over(point).then(|| stepped(false)))
            .or(own)
            .or_else(|| self.alone.is_over(point).then(|| stepped(true))))
    }

    /// Comes to `point`, where `tensor` is what can be looked at, and holds this rank if there is a reason.
    fn come_to(
        &mut self,
        engine: &Engine,
        point: Point,
        tensor: impl FnOnce() -> Option<Shown>,
        note: &str,
        happens: impl FnMut(&Breakpoint) -> Result<bool>,
    ) -> Result<()> {
        let reason = self.reason(&point, note, happens)?;
        let [now, before] = &mut self.points;
        if now.first().is_some_and(|first| first.step != point.step) {
            *before = std::mem::take(now);
        }
        now.push(point.clone());
        let Some(Reason { text, alone, focus }) = reason else { return Ok(()) };
        if !alone {
            self.focus = focus.unwrap_or(self.focus);
            self.going = Going::Free;
        }
        self.alone = Going::Free;
        self.hold(engine, &point, tensor(), &text, alone)
    }

    fn part(&mut self, engine: &Engine, step: u64, part: Part) -> Result<()> {
        let point = Point { step, what: What::Part(part) };
        let metrics = self.metrics.clone().filter(|metrics| metrics.step == step);
        let asks = |breakpoint: &Breakpoint| breakpoint.on == Trigger::Nan && breakpoint.is_in(step);
        // No pass shows the gradients of parameters.
        let spoilt = match part {
            Part::Optimizer if self.breakpoints.values().any(asks) => engine.first_non_finite_gradient()?,
            _ => None,
        };
        let note = spoilt.as_ref().map_or_else(String::new, |name| format!(": the gradient of {name}"));
        let was_spoilt = self.spoilt == Some(step);
        self.spoilt = spoilt.as_ref().map(|_| step).or(self.spoilt);
        self.come_to(
            engine,
            point,
            || None,
            &note,
            |breakpoint| {
                Ok(match &breakpoint.on {
                    Trigger::Part(wanted) => *wanted == part,
                    Trigger::Tensor { .. } => false,
                    // Loss and norm are the same on all ranks, so all ranks decide alike.
                    Trigger::Nan if part == Part::Step => metrics.as_ref().is_some_and(|metrics| {
                        !was_spoilt && !(metrics.loss.is_finite() && metrics.grad_norm.is_finite())
                    }),
                    Trigger::Nan => spoilt.is_some(),
                    Trigger::Number { number, above, than } => {
                        let value = match (number, part) {
                            (Number::GradNorm, Part::Optimizer) => Some(engine.grad_norm()?),
                            (Number::Loss, Part::Step) => metrics.as_ref().map(|metrics| metrics.loss),
                            _ => None,
                        };
                        value.is_some_and(|value| if *above { value > *than } else { value < *than })
                    }
                })
            },
        )
    }
}

/// Whether a tensor has a value that is not finite.
fn is_spoilt(seen: &Seen<'_>) -> bool {
    !seen.values.clone().is_finite().all().into_data().iter::<bool>().all(|all| all)
}

impl Observer for Debugger {
    fn looks_into(&self, step: u64) -> bool {
        BREAKPOINTS_IN_CODE
            || self.going != Going::Free
            || self.breakpoints.values().any(|breakpoint| breakpoint.is_in(step))
    }

    fn is_shown(&self, step: u64) -> bool {
        self.looks_into(step) || self.alone != Going::Free
    }

    fn fetched(&mut self, engine: &Engine, at: Moment, batch: &MicroBatch) -> Result<()> {
        self.batch = Some((at, batch.clone()));
        match at.micro_batch {
            0 => self.part(engine, at.step, Part::Data),
            _ => Ok(()),
        }
    }

    fn seen(&mut self, engine: &Engine, at: Moment, seen: &Seen<'_>) -> Result<()> {
        self.come_to(
            engine,
            Point::of(at, seen),
            || Some(Shown::of(seen)),
            "",
            |breakpoint| {
                Ok(match &breakpoint.on {
                    Trigger::Nan => match breakpoint.others {
                        Others::Run => is_spoilt(seen),
                        Others::Hold => {
                            let flag = f64::from(u8::from(is_spoilt(seen)));
                            engine.sum_over_ranks("breakpoint", &[flag])?[0] > 0.0
                        }
                    },
                    _ => breakpoint.is_at(at.pass, seen.place, seen.name),
                })
            },
        )
    }

    fn reduced(&mut self, engine: &Engine, step: u64) -> Result<()> {
        self.part(engine, step, Part::Optimizer)
    }

    fn stepped(&mut self, engine: &Engine, metrics: &StepMetrics) -> Result<()> {
        self.metrics = Some(metrics.clone());
        self.part(engine, metrics.step, Part::Step)
    }

    fn is_asked(&self) -> bool {
        self.rank == 0 && self.desk.has_line(0)
    }

    fn answer(&mut self, engine: &Engine, step: u64) -> Result<()> {
        let point = Point { step, what: What::Part(Part::Step) };
        self.listen(engine, &point)
    }
}

impl Drop for Debugger {
    fn drop(&mut self) {
        if self.rank != 0 {
            return;
        }
        self.desk.end();
        // A place that is not there, or a step that the run does not have, most likely.
        for (_, breakpoint) in self.breakpoints.iter().filter(|(number, _)| !self.reached.contains(number)) {
            tracing::warn!("the breakpoint {breakpoint} has never come");
        }
    }
}
