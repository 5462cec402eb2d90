//! Predicts a run's memory, traffic and step time, for `kiln plan` and for the check of memory before a run.
//!
//! `memory` runs through a step without values; `engine` models the memory of parameter groups, `clock` the time,
//! and `pages` the memory that a GPU's runtime reserves. `target` describes the hardware of a plan, `table`
//! compares the ways to run a configuration, `plan_report` recommends one and prints the plan.

mod clock;
mod engine;
mod memory;
mod pages;
mod plan_report;
mod table;
mod target;

pub use clock::{Axis, Speed};
pub use engine::{COMMUNICATION, GATHERED, Gathers, OPTIMIZER, WEIGHTS};
pub use memory::{PlannedStep, RankShape};
pub use plan_report::{PlanReport, Recommendation, advise, not_described, recommend};
pub use table::{PlanRow, Planned, divisor};
pub use target::{Cores, Hardware, MARGIN, Target, beside_blocks, products_share};
