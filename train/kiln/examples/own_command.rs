//! A custom command next to those of `kiln`: all ranks sum a number, and rank 0 prints the sum.
//!
//!     cargo run --release --example own_command -- sum 1.5
//!     cargo run --release --example own_command -- launch --nproc-per-node 2 -- sum 1.5

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use kiln::collectives::{Buffer, Label, Phase};
use kiln::prelude::*;

kiln::allocator!();

/// Runs on one rank. All ranks make the same calls in the same order.
fn sum(arguments: &[String], world: Arc<dyn Communicator>) -> CommandResult {
    let [number] = arguments else {
        return Err("name one number".into());
    };
    let mine = Buffer::from_slice(&[number.parse::<f64>()?]);
    let sum = world.all_reduce(Label::new("sum", Phase::Other), mine).wait(Duration::from_secs(60))?;
    if world.rank() == 0 {
        println!("{} over {} ranks", sum.as_slice::<f64>()?[0], world.world_size());
    }
    Ok(())
}

fn main() -> ExitCode {
    let help = "Sum a number over all ranks\n\nUsage: own_command sum NUMBER";
    kiln::cli::main(Registry::default().command("sum", sum).command_help("sum", help))
}
