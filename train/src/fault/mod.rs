//! Fire drills: a fault on purpose, at a chosen place of a run.
//!
//! `kiln train --fault KIND@PHASE:STEP:RANK` makes one rank fail in one way, once. [`Faulty`] stands
//! between the rank and its communicator; the run itself does not know whether it is there.

mod faulty;

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kiln_collectives::{Communicator, Label, Phase};
use rustix::process::{Signal, getpid, kill_process};

use crate::train::TrainError;

pub use faulty::Faulty;

/// How a rank fails.
#[derive(Clone, Debug, PartialEq)]
pub enum FaultKind {
    /// Its process is killed, without a chance to say anything.
    Kill,
    /// Its process is stopped, as by a machine that hangs.
    Stop,
    /// It is sent SIGSEGV, as when it reads memory that is not there.
    Segv,
    /// It panics.
    Panic,
    /// It calls a collective with arguments that cannot be, or, in data loading, returns an error.
    Error,
    /// It leaves out one collective.
    Skip,
    /// It calls one collective with another count than the others.
    Size,
    /// It is late by this much.
    Slow(Duration),
    /// One element of its gradient becomes NaN.
    Nan,
    /// It runs a program, such as one that pulls a cable, and goes on.
    Run(PathBuf),
}

/// Where in a run a rank fails: at the first collective of this phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultPhase {
    /// Before the first step, which is step 0.
    Start,
    /// Before the data of a step is fetched; no collective.
    Data,
    /// Forward pass.
    Forward,
    /// Backward pass.
    Backward,
    /// Norm of the gradient and optimizer.
    Optimizer,
    /// Saving after a step.
    Checkpoint,
}

/// A fault, written as `KIND@PHASE:STEP:RANK`.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// How: `kill`, `stop`, `segv`, `panic`, `error`, `skip`, `size`, `slow=SECONDS`,
    /// `nan` or `run=PROGRAM`.
    pub kind: FaultKind,
    /// Where: `start`, `data`, `forward`, `backward`, `optimizer` or `checkpoint`.
    pub phase: FaultPhase,
    /// In which optimizer step.
    pub step: u64,
    /// On which rank.
    pub rank: usize,
    /// Whether it comes again when the job is started again: `KIND!`.
    pub every_life: bool,
}

/// A text that names no fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; write it as KIND@PHASE:STEP:RANK, for example kill@backward:3:1")]
pub struct FaultParseError {
    problem: String,
}

impl FromStr for Fault {
    type Err = FaultParseError;

    fn from_str(text: &str) -> Result<Self, FaultParseError> {
        let wrong = |problem: &str| FaultParseError { problem: problem.to_owned() };
        let (kind, place) = text.split_once('@').ok_or_else(|| wrong("there is no @"))?;
        let parts: Vec<_> = place.split(':').collect();
        let [phase, step, rank] = parts[..] else {
            return Err(wrong("there are not three parts after the @"));
        };
        let (kind, every_life) = match kind.strip_suffix('!') {
            Some(kind) => (kind, true),
            None => (kind, false),
        };
        let kind = parse_kind(kind).ok_or_else(|| {
            wrong("KIND is kill, stop, segv, panic, error, skip, size, slow=SECONDS, nan or run=PROGRAM")
        })?;
        let phase = parse_phase(phase).ok_or_else(|| {
            wrong("PHASE is start, data, forward, backward, optimizer or checkpoint")
        })?;
        let step: u64 = step.parse().map_err(|_| wrong("STEP is not a number"))?;
        let rank = rank.parse().map_err(|_| wrong("RANK is not a number"))?;
        if (phase == FaultPhase::Start) != (step == 0) {
            return Err(wrong("start is step 0, and nothing else is"));
        }
        if phase == FaultPhase::Data && kind.changes_a_call() && kind != FaultKind::Error {
            return Err(wrong("data loading calls no collective to leave out or to change"));
        }
        if kind == FaultKind::Nan && phase != FaultPhase::Backward {
            return Err(wrong("gradients are made in backward"));
        }
        Ok(Fault { kind, phase, step, rank, every_life })
    }
}

fn parse_kind(text: &str) -> Option<FaultKind> {
    if let Some(seconds) = text.strip_prefix("slow=") {
        return Duration::try_from_secs_f64(seconds.parse().ok()?).ok().map(FaultKind::Slow);
    }
    if let Some(program) = text.strip_prefix("run=") {
        return Some(FaultKind::Run(program.into()));
    }
    Some(match text {
        "kill" => FaultKind::Kill,
        "stop" => FaultKind::Stop,
        "segv" => FaultKind::Segv,
        "panic" => FaultKind::Panic,
        "error" => FaultKind::Error,
        "skip" => FaultKind::Skip,
        "size" => FaultKind::Size,
        "nan" => FaultKind::Nan,
        _ => return None,
    })
}

fn parse_phase(text: &str) -> Option<FaultPhase> {
    Some(match text {
        "start" => FaultPhase::Start,
        "data" => FaultPhase::Data,
        "forward" => FaultPhase::Forward,
        "backward" => FaultPhase::Backward,
        "optimizer" => FaultPhase::Optimizer,
        "checkpoint" => FaultPhase::Checkpoint,
        _ => return None,
    })
}

/// What a drill can change of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Changeable {
    /// Nothing: there is no result to stand in for.
    Nothing,
    /// Its arguments, or whether it happens.
    Call,
    /// That, and what is summed.
    Sum,
}

impl FaultKind {
    /// Whether it needs a collective to happen to.
    fn changes_a_call(&self) -> bool {
        matches!(self, FaultKind::Error | FaultKind::Skip | FaultKind::Size | FaultKind::Nan)
    }

    fn can_happen_to(&self, call: Changeable) -> bool {
        match self {
            FaultKind::Nan => call == Changeable::Sum,
            kind => !kind.changes_a_call() || call != Changeable::Nothing,
        }
    }
}

impl FaultPhase {
    /// Whether collectives of `phase` are of this part of a run.
    fn has(self, phase: Phase) -> bool {
        match self {
            FaultPhase::Start => phase == Phase::Init,
            FaultPhase::Data => false,
            FaultPhase::Forward => phase == Phase::Forward,
            FaultPhase::Backward => phase == Phase::Backward,
            FaultPhase::Optimizer => phase == Phase::Optimizer,
            FaultPhase::Checkpoint => phase == Phase::Checkpoint,
        }
    }
}

impl fmt::Display for FaultPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FaultPhase::Start => "start",
            FaultPhase::Data => "data loading",
            FaultPhase::Forward => "forward",
            FaultPhase::Backward => "backward",
            FaultPhase::Optimizer => "optimizer",
            FaultPhase::Checkpoint => "checkpoint",
        })
    }
}

/// The drill of the rank that is to fail.
#[derive(Debug)]
pub struct Drill {
    fault: Fault,
    step: AtomicU64,
    fired: AtomicBool,
}

/// `world` with the fault built in, and the drill to be kept informed, if it is this rank's turn in
/// a job that was started again `restarts` times.
pub fn rehearse(
    world: Arc<dyn Communicator>,
    fault: Option<&Fault>,
    restarts: u64,
) -> (Arc<dyn Communicator>, Option<Arc<Drill>>) {
    match fault {
        Some(fault) if fault.rank == world.rank() && (restarts == 0 || fault.every_life) => {
            let drill = Arc::new(Drill {
                fault: fault.clone(),
                step: AtomicU64::new(0),
                fired: AtomicBool::new(false),
            });
            (Arc::new(Faulty::new(world, drill.clone())), Some(drill))
        }
        _ => (world, None),
    }
}

impl Drill {
    /// Says which optimizer step begins.
    pub fn begin_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
    }

    /// Says that data is about to be fetched.
    pub fn data_loading(&self) -> Result<(), TrainError> {
        if self.fault.phase != FaultPhase::Data || !self.fires() {
            return Ok(());
        }
        if self.fault.kind == FaultKind::Error {
            return Err(TrainError::Drill(self.text()));
        }
        self.act();
        Ok(())
    }

    /// Says that a collective is about to be called. Returns what is to happen to the call itself.
    fn calling(&self, label: &Label, call: Changeable) -> Option<FaultKind> {
        let kind = &self.fault.kind;
        if !self.fault.phase.has(label.phase) || !kind.can_happen_to(call) || !self.fires() {
            return None;
        }
        self.act();
        kind.changes_a_call().then(|| kind.clone())
    }

    /// Whether this is the step, for the first time.
    fn fires(&self) -> bool {
        self.step.load(Ordering::Relaxed) == self.fault.step
            && !self.fired.swap(true, Ordering::Relaxed)
    }

    /// Does what needs no collective.
    fn act(&self) {
        match &self.fault.kind {
            // Nothing to do about a signal that cannot be sent: the drill shows that nothing happened.
            FaultKind::Kill => _ = kill_process(getpid(), Signal::KILL),
            FaultKind::Stop => _ = kill_process(getpid(), Signal::STOP),
            FaultKind::Segv => crate::process::raise_segv(),
            FaultKind::Panic => panic!("{}", self.text()),
            FaultKind::Slow(time) => std::thread::sleep(*time),
            FaultKind::Run(program) => self.run(program),
            _ => {}
        }
    }

    fn run(&self, program: &Path) {
        let outcome = Command::new(program).status();
        if !outcome.as_ref().is_ok_and(ExitStatus::success) {
            tracing::warn!("{}: {} did not run well: {outcome:?}", self.text(), program.display());
        }
    }

    fn text(&self) -> String {
        format!("fault drill in {} of step {}", self.fault.phase, self.fault.step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_as_they_are_written() {
        let fault: Fault = "kill@backward:3:2".parse().unwrap();
        let (kind, phase) = (FaultKind::Kill, FaultPhase::Backward);
        assert_eq!(fault, Fault { kind, phase, step: 3, rank: 2, every_life: false });
        let fault: Fault = "run=/bin/cut@data:1:0".parse().unwrap();
        assert_eq!(fault.kind, FaultKind::Run("/bin/cut".into()));
        let fault: Fault = "slow=0.5!@start:0:1".parse().unwrap();
        let (kind, phase) = (FaultKind::Slow(Duration::from_millis(500)), FaultPhase::Start);
        assert_eq!(fault, Fault { kind, phase, step: 0, rank: 1, every_life: true });
    }

    #[test]
    fn what_is_no_fault_is_refused_with_the_reason() {
        for (text, reason) in [
            ("kill", "no @"),
            ("kill@backward:3", "three parts"),
            ("kill@backward:3:1:0", "three parts"),
            ("melt@backward:3:1", "KIND"),
            ("slow@backward:3:1", "KIND"),
            ("slow=-1@backward:3:1", "KIND"),
            ("slow=nan@backward:3:1", "KIND"),
            ("kill@lunch:3:1", "PHASE"),
            ("kill@backward:x:1", "STEP"),
            ("kill@backward:3:-1", "RANK"),
            ("kill@start:1:0", "step 0"),
            ("kill@backward:0:0", "step 0"),
            ("skip@data:1:0", "no collective"),
            ("nan@forward:1:0", "gradients"),
        ] {
            let error = text.parse::<Fault>().unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("kill@backward:3:1"), "{error}");
        }
    }
}
