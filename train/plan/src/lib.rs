//! Predicts a run's memory, traffic and step time, for `kiln plan` and for the check of memory before a run.
//!
//! `memory` runs through a step without values; `engine` and `update` model its parameter groups, `clock` its
//! time, `pages` the memory that a GPU's runtime reserves for it. `target` describes the hardware of a plan,
//! `table` the ways to run a configuration, `accumulate` recommends another sum of gradients where it suits
//! better, `report` prints the plan.

mod accumulate;
mod clock;
mod engine;
mod memory;
mod pages;
mod report;
mod table;
mod target;
mod update;

pub use accumulate::advise;
pub use clock::{Axis, LinkSpeed, PlannedCall, Speed};
pub use engine::{COMMUNICATION, GATHERED, Gathers, OPTIMIZER, WEIGHTS};
pub use memory::{PlannedStep, RankShape};
pub use report::not_described;
pub use report::{PlanReport, Recommendation, recommend};
pub use table::{PlanRow, Planned, divisor};
pub use target::{Cores, Hardware, MARGIN, Target, beside_blocks, products_share};
