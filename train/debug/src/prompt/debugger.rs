use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use kiln_model::ops::Seen;
use kiln_shard::Engine;

use super::breakpoint::{Breakpoint, Number, Others, Part, Trigger, objection};
use super::point::{Point, What};
use super::prompts::Prompts;
use super::show::Shown;
use kiln_train::error::Result;
use kiln_train::metrics::StepMetrics;
use kiln_train::run::{Controls, MicroBatch, Moment, ObservedRank, Observer, Reach};

/// `true` if this build supports breakpoints in the code of layers.
pub const BREAKPOINTS_IN_CODE: bool = cfg!(feature = "breakpoints");

/// Holds a run in the code of a layer, where `$tensor` can be inspected; evaluates to the tensor. All ranks must reach
/// this point. Does nothing without the feature `breakpoints`.
///
/// ```ignore
/// let mixed = kiln::breakpoint!(context, "after attention", mixed);
/// ```
#[macro_export]
macro_rules! breakpoint {
    ($context:expr, $name:literal, $tensor:expr) => {
        if $crate::BREAKPOINTS_IN_CODE {
            $context.probe(concat!("breakpoint: ", $name), $tensor)
        } else {
            $tensor
        }
    };
}

/// Holds a rank at breakpoints, and executes the commands of its prompt. The debuggers of all ranks have the same
/// breakpoints.
pub struct Debugger {
    pub(super) prompts: Arc<Prompts>,
    pub(super) controls: Controls,
    pub(super) stop: Arc<AtomicBool>,
    /// The content of the tokenizer file of the data.
    pub(super) tokenizer: Arc<[u8]>,
    pub(super) seq_len: usize,
    pub(super) out: PathBuf,
    pub(super) reach: Reach,
    pub(super) has_prompt: bool,
    pub(super) rank: usize,
    /// Breakpoints by number, the same on all ranks.
    pub(super) breakpoints: BTreeMap<usize, Breakpoint>,
    /// Breakpoints that no longer hold this rank, but still hold the other ranks.
    pub(super) muted: BTreeSet<usize>,
    reached: BTreeSet<usize>,
    pub(super) next_number: usize,
    /// Where all ranks are held next, apart from breakpoints.
    pub(super) going: Going,
    /// Where this rank alone is held next.
    pub(super) alone: Going,
    /// The rank whose state is shown.
    pub(super) focus: usize,
    pub(super) batch: Option<(Moment, MicroBatch)>,
    /// The points of this step so far, and those of the previous step.
    pub(super) points: [Vec<Point>; 2],
    pub(super) metrics: Option<StepMetrics>,
    /// The step whose gradient was found to have non-finite values.
    spoilt: Option<u64>,
    /// The last line typed, which an empty line repeats.
    pub(super) last_line: String,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum Going {
    #[default]
    Free,
    ToNext,
    /// At the next point that is at most this deep.
    Over(usize),
    /// At the point where the pass leaves the place of this point.
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

struct Reason {
    text: String,
    alone: bool,
    focus: Option<usize>,
}

impl Debugger {
    pub(crate) fn new(
        breakpoints: &[Breakpoint],
        has_prompt: bool,
        prompts: Arc<Prompts>,
        of: ObservedRank,
    ) -> Self {
        let ObservedRank { rank, controls, stop, tokenizer, seq_len, out, mut reach, rows: _, device: _ } =
            of;
        reach.has_own_places |= BREAKPOINTS_IN_CODE;
        for breakpoint in breakpoints.iter().filter(|_| rank == 0) {
            if let Some(why) = objection(&reach, breakpoint) {
                tracing::warn!("breakpoint {breakpoint} cannot be hit: {why}");
            }
        }
        Debugger {
            prompts,
            controls,
            stop,
            tokenizer,
            seq_len,
            out,
            reach,
            spoilt: None,
            has_prompt,
            rank,
            muted: BTreeSet::new(),
            reached: BTreeSet::new(),
            next_number: breakpoints.len() + 1,
            breakpoints: (1..).zip(breakpoints.iter().cloned()).collect(),
            going: Going::Free,
            alone: Going::Free,
            focus: 0,
            batch: None,
            points: [Vec::new(), Vec::new()],
            metrics: None,
            last_line: String::new(),
        }
    }

    /// Returns the reason to hold this rank at `point`, if any, with `note` appended to that of a breakpoint. `happens`
    /// reports whether a breakpoint's event has occurred; it may communicate.
    fn reason(
        &mut self,
        point: &Point,
        note: &str,
        mut happens: impl FnMut(&Breakpoint) -> Result<bool>,
    ) -> Result<Option<Reason>> {
        let in_code = point.in_code().map(|name| Reason { text: name.to_owned(), alone: false, focus: None });
        let (mut common, mut own) = (in_code, None);
        for (number, breakpoint) in self.breakpoints.iter().filter(|(_, of)| of.is_in(point.step)) {
            // All ranks evaluate all breakpoints, so that they call the same collectives.
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
        // A reason to hold all ranks takes precedence: the other ranks are held already.
        Ok(common
            .or_else(|| self.going.is_over(point).then(|| stepped(false)))
            .or(own)
            .or_else(|| self.alone.is_over(point).then(|| stepped(true))))
    }

    /// Holds this rank at `point` if there is a reason; the prompt can then show `tensor`.
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
                        !(was_spoilt || metrics.loss.is_finite() && metrics.grad_norm.is_finite())
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

fn is_spoilt(seen: &Seen<'_>) -> bool {
    !seen.values.clone().is_finite().all().into_data().iter::<bool>().all(|all| all)
}

impl Observer for Debugger {
    fn is_observing(&self, step: u64) -> bool {
        BREAKPOINTS_IN_CODE
            || self.going != Going::Free
            || self.breakpoints.values().any(|breakpoint| breakpoint.is_in(step))
    }

    fn is_observing_passes(&self, step: u64) -> bool {
        self.is_observing(step) || self.alone != Going::Free
    }

    fn on_batch(&mut self, engine: &Engine, at: Moment, batch: &MicroBatch) -> Result<()> {
        self.batch = Some((at, batch.clone()));
        match at.micro_batch {
            0 => self.part(engine, at.step, Part::Data),
            _ => Ok(()),
        }
    }

    fn on_tensor(&mut self, engine: &Engine, at: Moment, seen: &Seen<'_>) -> Result<()> {
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

    fn on_gradients(&mut self, engine: &Engine, step: u64) -> Result<()> {
        self.part(engine, step, Part::Optimizer)
    }

    fn on_step_done(&mut self, engine: &Engine, metrics: &StepMetrics) -> Result<()> {
        self.metrics = Some(metrics.clone());
        self.part(engine, metrics.step, Part::Step)
    }

    fn has_request(&self) -> bool {
        self.rank == 0 && self.prompts.has_line(0)
    }

    fn serve_requests(&mut self, engine: &Engine, step: u64) -> Result<()> {
        let point = Point { step, what: What::Part(Part::Step) };
        self.listen(engine, &point)
    }
}

impl Drop for Debugger {
    fn drop(&mut self) {
        if self.rank != 0 {
            return;
        }
        self.prompts.end();
        // Most likely its place does not exist, or the run never takes its step.
        for (_, breakpoint) in self.breakpoints.iter().filter(|(number, _)| !self.reached.contains(number)) {
            tracing::warn!("breakpoint {breakpoint} was never hit");
        }
    }
}
