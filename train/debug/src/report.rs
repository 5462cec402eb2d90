use std::sync::Arc;
use std::time::Duration;

use kiln_shard::memory;

use crate::prompt::Prompts;
use kiln_collectives::StepTimeline;
use kiln_observe::ask::{Known, ProcessStatus, RankStatus, Thread};
use kiln_sys::position::{self, Whereabouts};
use kiln_sys::stacks;

/// Operations reported for each rank: a few steps of most models.
const RECORDS: usize = 256;

/// Longest time that ranks of other processes may take to answer.
const PATIENCE: Duration = Duration::from_millis(700);

#[derive(Clone, Debug)]
pub(crate) struct About {
    pub(crate) world_size: usize,
    pub(crate) steps: u64,
    /// Longest time a rank may wait for the others in one collective.
    pub(crate) deadline: Duration,
    /// Set if the ranks compute on GPUs, whose memory is counted elsewhere.
    pub(crate) on_gpu: bool,
    pub(crate) prompts: Arc<Prompts>,
}

impl About {
    /// Reports the activity of `ranks`; with `stacks`, the stacks of threads; with `all`, reports of other processes.
    pub(crate) fn status(&self, ranks: &[usize], stacks: bool, all: bool) -> ProcessStatus {
        let mut here = position::all();
        here.retain(|whereabouts| ranks.contains(&whereabouts.rank));
        let asked = all.then(|| here.iter().find_map(|whereabouts| whereabouts.view.ask_all(PATIENCE)));
        ProcessStatus {
            world_size: self.world_size,
            steps: self.steps,
            deadline_s: Some(self.deadline.as_secs_f64()).filter(|_| self.deadline < Duration::MAX),
            all: asked.flatten().map(|all| all.into_iter().map(Known::from).collect()),
            threads: stacks.then(threads),
            held: here.first().map_or_else(Vec::new, |whereabouts| whereabouts.view.held()),
            held_at: self.prompts.held(),
            ranks: here.into_iter().map(|whereabouts| self.rank(&whereabouts)).collect(),
        }
    }

    pub(crate) fn timelines(&self, ranks: &[usize]) -> Vec<StepTimeline> {
        let here = position::all().into_iter().filter(|whereabouts| ranks.contains(&whereabouts.rank));
        here.filter_map(|whereabouts| whereabouts.view.timeline(None)).collect()
    }

    fn rank(&self, whereabouts: &Whereabouts) -> RankStatus {
        let Whereabouts { rank, step, saved, peak_bytes, settled, ref view } = *whereabouts;
        let counted = |bytes: usize| Some(bytes as u64).filter(|bytes| *bytes > 0 && !self.on_gpu);
        let peak_on_gpu = Some(peak_bytes).filter(|peak| *peak > 0 && self.on_gpu);
        RankStatus {
            rank,
            step,
            saved,
            loss: settled.map(|settled| settled.loss).filter(|loss| loss.is_finite()),
            tokens_per_s: settled.map(|settled| settled.tokens_per_s).filter(|speed| speed.is_finite()),
            longest_step_s: settled.map(|settled| settled.step_s),
            bytes: counted(memory::live_bytes(rank)),
            peak_bytes: peak_on_gpu.or_else(|| counted(memory::peak_bytes(rank))),
            flight: view.flight(RECORDS),
        }
    }
}

fn threads() -> Vec<Thread> {
    let thread = |stack: stacks::ThreadStack| {
        let (addresses, problem) = match stack.calls {
            Ok(calls) => (calls.into_iter().map(|call| call as u64).collect(), None),
            Err(why) => (Vec::new(), Some(why.to_owned())),
        };
        Thread { id: stack.id, name: stack.name, calls: Vec::new(), addresses, problem }
    };
    stacks::of_all_threads().into_iter().map(thread).collect()
}
