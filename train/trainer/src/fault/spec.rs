//! Faults and their syntax.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use kiln_collectives::Phase;

use kiln_config::ByteSize;

/// The way in which a rank fails.
#[derive(Clone, Debug, PartialEq)]
pub enum FaultKind {
    /// The process of the rank is killed without notice.
    Kill,
    /// The process of the rank is stopped, as on a machine that hangs.
    Stop,
    /// The rank receives SIGSEGV, as after reading unmapped memory.
    Segv,
    /// The rank reads a page beyond the end of a mapped file: SIGBUS.
    Bus,
    /// The rank recurses until its stack overflows.
    Overflow,
    /// The rank ends its process with SIGABRT, as C code does on a failed assertion.
    Abort,
    /// The rank panics.
    Panic,
    /// A helper thread of the rank panics.
    Worker,
    /// The rank calls a collective with invalid arguments or, in data loading, returns an error.
    Error,
    /// The rank skips one collective.
    Skip,
    /// The rank calls one collective with a different count than the other ranks.
    Size,
    /// The rank is late by this duration.
    Slow(Duration),
    /// One element of the rank's gradient becomes NaN.
    Nan,
    /// The rank's part of a gradient is multiplied by this factor.
    Scale(f64),
    /// The rank uses its own addend instead of the sum over the ranks.
    Unreduced,
    /// The rank uses stale weights: the result of the previous gather of the same parameter group.
    Stale,
    /// The rank runs a program, such as one that pulls a cable, and continues.
    Run(PathBuf),
    /// From here on, the rank's process may use at most this much memory.
    Memory(ByteSize),
    /// The rank's clock is ahead by this many seconds, for `kiln check`, which compares clocks.
    Clock(f64),
}

/// The phase of a run at whose first collective a rank fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FaultPhase {
    /// Before the first step; written as step 0.
    Start,
    /// Before the data of a step are fetched, which involves no collective.
    Data,
    /// Forward pass.
    Forward,
    /// Backward pass.
    Backward,
    /// Gradient norm and optimizer update.
    Optimizer,
    /// Saving after a step.
    Checkpoint,
}

/// A fault, written `KIND@PHASE:STEP:RANK`, or `KIND@PHASE:STEP+:RANK` to repeat it in every later step.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// The way in which the rank fails.
    pub kind: FaultKind,
    /// The phase at whose first collective the fault occurs.
    pub phase: FaultPhase,
    /// The optimizer step.
    pub step: u64,
    /// True if the fault occurs again in every later step, written `STEP+`.
    pub onwards: bool,
    /// The rank.
    pub rank: usize,
    /// True if the fault occurs again when the job is restarted, written `KIND!`.
    pub every_life: bool,
}

/// The text is not a valid fault.
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
            wrong(
                "KIND is kill, stop, segv, bus, overflow, abort, panic, worker, error, skip, size, slow=SECONDS, \
                 nan, scale=FACTOR, unreduced, stale, run=PROGRAM, memory=SIZE or clock=SECONDS",
            )
        })?;
        let phase = FaultPhase::from_str(phase, false)
            .map_err(|_| wrong("PHASE is start, data, forward, backward, optimizer or checkpoint"))?;
        let (step, onwards) = match step.strip_suffix('+') {
            Some(step) => (step, true),
            None => (step, false),
        };
        let step: u64 = step.parse().map_err(|_| wrong("STEP is not a number"))?;
        let rank = rank.parse().map_err(|_| wrong("RANK is not a number"))?;
        if (phase == FaultPhase::Start) != (step == 0) {
            return Err(wrong("write step 0 for start, and a later step for every other phase"));
        }
        if phase == FaultPhase::Data && kind.changes_a_call() && kind != FaultKind::Error {
            return Err(wrong("data loading has no collective to skip or to change"));
        }
        let is_of_gradient = matches!(kind, FaultKind::Nan | FaultKind::Scale(_) | FaultKind::Unreduced);
        if is_of_gradient && phase != FaultPhase::Backward {
            return Err(wrong("gradients are computed in backward"));
        }
        if kind == FaultKind::Stale && !matches!(phase, FaultPhase::Forward | FaultPhase::Backward) {
            return Err(wrong("weights are gathered in forward and backward"));
        }
        Ok(Fault { kind, phase, step, onwards, rank, every_life })
    }
}

fn parse_kind(text: &str) -> Option<FaultKind> {
    Some(match text.split_once('=') {
        None => match text {
            "kill" => FaultKind::Kill,
            "stop" => FaultKind::Stop,
            "segv" => FaultKind::Segv,
            "bus" => FaultKind::Bus,
            "overflow" => FaultKind::Overflow,
            "abort" => FaultKind::Abort,
            "panic" => FaultKind::Panic,
            "worker" => FaultKind::Worker,
            "error" => FaultKind::Error,
            "skip" => FaultKind::Skip,
            "size" => FaultKind::Size,
            "nan" => FaultKind::Nan,
            "unreduced" => FaultKind::Unreduced,
            "stale" => FaultKind::Stale,
            _ => return None,
        },
        Some(("scale", factor)) => {
            FaultKind::Scale(factor.parse().ok().filter(|factor: &f64| factor.is_finite())?)
        }
        Some(("slow", seconds)) => FaultKind::Slow(Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?),
        Some(("clock", seconds)) => {
            FaultKind::Clock(seconds.parse().ok().filter(|seconds: &f64| seconds.is_finite())?)
        }
        Some(("memory", size)) => FaultKind::Memory(size.parse().ok()?),
        Some(("run", program)) => FaultKind::Run(program.into()),
        Some(_) => return None,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Changeable {
    Nothing,
    Call,
    Sum,
    Gather,
}

impl FaultKind {
    pub(super) fn changes_a_call(&self) -> bool {
        let is_call = matches!(self, FaultKind::Error | FaultKind::Skip | FaultKind::Size);
        is_call || self.is_of_sum() || *self == FaultKind::Stale
    }

    fn is_of_sum(&self) -> bool {
        matches!(self, FaultKind::Nan | FaultKind::Scale(_) | FaultKind::Unreduced)
    }

    pub(super) fn can_happen_to(&self, call: Changeable) -> bool {
        match self {
            kind if kind.is_of_sum() => call == Changeable::Sum,
            FaultKind::Stale => call == Changeable::Gather,
            kind => !kind.changes_a_call() || call != Changeable::Nothing,
        }
    }
}

impl FaultPhase {
    pub(super) fn has(self, phase: Phase) -> bool {
        let own = match self {
            FaultPhase::Start => Phase::Init,
            FaultPhase::Data => return false,
            FaultPhase::Forward => Phase::Forward,
            FaultPhase::Backward => Phase::Backward,
            FaultPhase::Optimizer => Phase::Optimizer,
            FaultPhase::Checkpoint => Phase::Checkpoint,
        };
        phase == own
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_as_they_are_written() {
        let fault: Fault = "kill@backward:3:2".parse().unwrap();
        let (kind, phase) = (FaultKind::Kill, FaultPhase::Backward);
        assert_eq!(fault, Fault { kind, phase, step: 3, onwards: false, rank: 2, every_life: false });
        let fault: Fault = "run=/bin/cut@data:1:0".parse().unwrap();
        assert_eq!(fault.kind, FaultKind::Run("/bin/cut".into()));
        let fault: Fault = "scale=-0.5@backward:1:0".parse().unwrap();
        assert_eq!(fault.kind, FaultKind::Scale(-0.5));
        let fault: Fault = "slow=0.5!@start:0:1".parse().unwrap();
        let (kind, phase) = (FaultKind::Slow(Duration::from_millis(500)), FaultPhase::Start);
        assert_eq!(fault, Fault { kind, phase, step: 0, onwards: false, rank: 1, every_life: true });
        let fault: Fault = "slow=0.5@backward:7+:1".parse().unwrap();
        assert_eq!((fault.step, fault.onwards, fault.rank), (7, true, 1));
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
            ("scale=2@optimizer:1:0", "gradients"),
            ("scale@backward:1:0", "KIND"),
            ("stale@optimizer:1:0", "gathered"),
        ] {
            let error = text.parse::<Fault>().unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("kill@backward:3:1"), "{error}");
        }
    }
}
