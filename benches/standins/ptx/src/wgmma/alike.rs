//! Checks that the four warps of a warpgroup execute the same `wgmma` instructions on the same matrices.

use crate::error::{Fault, Other};

/// Number of warps of a warpgroup.
pub const WARPS: usize = 4;

/// An instruction that a warp has executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Its index in the code.
    pub at: u32,
    pub line: u32,
    /// Descriptors, or 0.
    pub matrices: [u64; 2],
    pub adds: bool,
}

/// The instructions that the warps of a warpgroup have executed since the last barrier.
#[derive(Debug, Default)]
struct Group {
    /// The steps of the leading warp, each with the first warp that executed it.
    steps: Vec<(Step, usize)>,
    /// Number of steps of each warp.
    counts: [usize; WARPS],
}

/// The warpgroups of a block.
#[derive(Debug)]
pub struct Alike {
    block: u32,
    groups: Vec<Group>,
}

impl Alike {
    pub fn new(warps: usize) -> Alike {
        Alike { block: 0, groups: (0..warps.div_ceil(WARPS)).map(|_| Group::default()).collect() }
    }

    pub fn begin(&mut self, block: u32) {
        self.block = block;
        self.groups.iter_mut().for_each(|group| *group = Group::default());
    }

    fn other(&self, warp: usize, line: u32) -> Option<Other> {
        Some(Other { block: self.block, thread: 32 * warp as u32, line })
    }

    /// Records that a warp executes an instruction.
    pub fn step(&mut self, warp: usize, step: Step) -> Result<(), Fault> {
        let group = &mut self.groups[warp / WARPS];
        let number = group.counts[warp % WARPS];
        group.counts[warp % WARPS] += 1;
        let Some(&(known, first)) = group.steps.get(number) else {
            group.steps.push((step, warp));
            return Ok(());
        };
        let what = if known.at != step.at {
            "instruction"
        } else if known.matrices[0] != step.matrices[0] {
            "descriptor of A"
        } else if known.matrices[1] != step.matrices[1] {
            "descriptor of B"
        } else if known.adds != step.adds {
            "predicate"
        } else {
            return Ok(());
        };
        Err(Fault::Unlike { what, other: self.other(first, known.line) })
    }

    /// Called when all warps are at a barrier or have ended. Returns a warp that has executed fewer steps
    /// than another one of its warpgroup, if there is one.
    pub fn meet(&mut self) -> Option<(usize, Fault)> {
        for (number, group) in self.groups.iter().enumerate() {
            // Warps that the block does not have cannot have executed steps.
            if let Some(less) = group.counts.iter().position(|&count| count < group.steps.len()) {
                let (step, first) = group.steps[group.counts[less]];
                let other = self.other(first, step.line);
                return Some((WARPS * number + less, Fault::Unlike { what: "instruction", other }));
            }
        }
        for group in &mut self.groups {
            group.steps.clear();
            group.counts = [0; WARPS];
        }
        None
    }
}
