//! What comes before a run: checks that it would start, measurements of machine and strategies, tuning.

pub mod bench;
mod calibrate;
pub mod check;
pub mod doctor;
pub mod smoke;
pub mod warmup;

pub use calibrate::calibrated;
