//! The fault of one rank, which occurs at a chosen point of the run.

use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicU64, Ordering};

use kiln_collectives::Label;
use kiln_shard::memory;
use rustix::process::{Signal, getpid, kill_process};

use crate::process::drills;
use kiln_config::ByteSize;

use super::spec::{Changeable, Fault, FaultKind, FaultPhase};

/// The fault of this rank, and the progress of the run that decides when it occurs.
#[derive(Debug)]
pub struct Drill {
    fault: Fault,
    step: AtomicU64,
    /// One more than the step in which the fault last occurred; 0 before its first occurrence.
    fired: AtomicU64,
}

impl Drill {
    pub(super) fn new(fault: &Fault) -> Self {
        Drill { fault: fault.clone(), step: AtomicU64::new(0), fired: AtomicU64::new(0) }
    }

    pub(super) fn is_stale(&self) -> bool {
        self.fault.kind == FaultKind::Stale
    }

    /// Informs the drill that optimizer step `step` begins.
    pub fn begin_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
    }

    /// Informs the drill that data are about to be fetched. Returns an error if fetching should fail.
    pub fn data_loading(&self) -> Result<(), String> {
        if self.fault.phase != FaultPhase::Data || !self.fires() {
            return Ok(());
        }
        if self.fault.kind == FaultKind::Error {
            return Err(self.text());
        }
        self.act();
        Ok(())
    }

    /// Informs the drill of a collective call. Returns the fault to apply to the call itself, if any.
    pub(super) fn calling(&self, label: &Label, call: Changeable) -> Option<FaultKind> {
        let kind = &self.fault.kind;
        if !self.fault.phase.has(label.phase) || !kind.can_happen_to(call) || !self.fires() {
            return None;
        }
        self.act();
        kind.changes_a_call().then(|| kind.clone())
    }

    fn fires(&self) -> bool {
        let step = self.step.load(Ordering::Relaxed);
        let is_due = step == self.fault.step || (self.fault.onwards && step > self.fault.step);
        is_due && self.fired.swap(step + 1, Ordering::Relaxed) != step + 1
    }

    fn act(&self) {
        match &self.fault.kind {
            // If a signal cannot be sent, the outcome of the drill shows that nothing happened.
            FaultKind::Kill => _ = kill_process(getpid(), Signal::KILL),
            FaultKind::Stop => _ = kill_process(getpid(), Signal::STOP),
            FaultKind::Segv => drills::raise_segv(),
            FaultKind::Bus => drills::read_beyond_a_file(),
            FaultKind::Overflow => drills::overflow_the_stack(),
            FaultKind::Abort => std::process::abort(),
            FaultKind::Panic => panic!("{}", self.text()),
            FaultKind::Worker => self.panic_in_a_thread(),
            FaultKind::Slow(time) => std::thread::sleep(*time),
            FaultKind::Run(program) => self.run(program),
            FaultKind::Memory(ByteSize(bytes)) => memory::lower_limit(*bytes as usize),
            _ => {}
        }
    }

    /// Panics in a helper thread; as with compute threads, the panic resumes in the rank itself.
    fn panic_in_a_thread(&self) {
        let work = || {
            memory::bind_to_rank(self.fault.rank);
            panic!("{}", self.text())
        };
        std::thread::scope(|scope| {
            let Err(panic) = scope.spawn(work).join();
            std::panic::resume_unwind(panic)
        });
    }

    fn run(&self, program: &Path) {
        let outcome = Command::new(program).status();
        if !outcome.as_ref().is_ok_and(ExitStatus::success) {
            tracing::warn!("{}: {} failed: {outcome:?}", self.text(), program.display());
        }
    }

    fn text(&self) -> String {
        let part = match self.fault.phase {
            FaultPhase::Data => "data loading".to_owned(),
            phase => format!("{phase:?}").to_lowercase(),
        };
        format!("fault drill in {part} of step {}", self.fault.step)
    }
}
