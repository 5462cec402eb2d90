mod breakpoint;
mod command;
mod debugger;
mod look;
mod point;
mod prompts;
mod session;
mod show;
mod slice;

pub use breakpoint::{Breakpoint, BreakpointError, Number, Others, Part, Trigger};
pub use debugger::BREAKPOINTS_IN_CODE;
pub(crate) use debugger::Debugger;
pub use prompts::Prompts;
