//! `kiln plan`: predicts a run's memory, traffic and step time.
//!
//! `memory` runs through a step without values; `engine` and `update` model its parameter groups, `clock` its
//! time, `pages` the memory that a GPU's runtime reserves for it. `target` describes the hardware of a plan,
//! `table` the ways to run a configuration, `accumulate` recommends another sum of gradients where it suits
//! better, `report` prints the plan, `sweep` shows how the best way scales, `calibrate` measures this machine.

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
