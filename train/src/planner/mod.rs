//! What a run will hold, send and take, before it starts: `kiln plan`.
//!
//! `memory` goes through a step without values; `engine` and `update` are its parameter groups, `clock` its
//! time, `pages` the memory that a GPU's runtime takes for it. `target` is what a plan is for, `table` has
//! the ways to run a configuration, `accumulate` says where another sum of gradients suits better, `report` shows them, `sweep` shows how the best one scales, `calibrate`
//! measures this machine.

mod accumulate;
mod calibrate;
mod clock;
mod command;
mod engine;
mod memory;
mod pages;
mod report;
mod sweep;
mod table;
mod target;
mod update;

pub use clock::{Axis, LinkSpeed, PlannedCall, Speed};
pub(crate) use command::{PlanArgs, share_of_percent};
pub use engine::{COMMUNICATION, GATHERED, Gathers, OPTIMIZER, WEIGHTS};
pub use memory::{PlannedStep, RankShape};
pub(crate) use report::not_described;
pub use report::{PlanReport, Recommendation, recommend};
pub use table::{PlanRow, Planned};
pub use target::{Cores, Hardware, MARGIN, Target, beside_blocks, products_share};
