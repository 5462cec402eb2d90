//! The protocol: rank 0 takes commands, all ranks run them, rank 0 answers.

use crate::exercise::{Exercise, Failure, Op, PATIENCE, Sources, label};
use kiln_collectives::{Buffer, Communicator, DType};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum wait for a command: the driver may be timing another system in between.
const IDLE: Duration = Duration::from_secs(3600);

/// Bytes of a broadcast command, padded with spaces.
const COMMAND_LENGTH: usize = 64;

struct Command {
    op: Op,
    bytes: usize,
    iterations: u32,
}

impl FromStr for Command {
    type Err = String;

    fn from_str(line: &str) -> Result<Command, String> {
        let usage = || format!("`{}` is not a command; send `OP BYTES ITERATIONS`", line.trim());
        let mut words = line.split_whitespace();
        let (Some(op), Some(bytes), Some(iterations), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(usage());
        };
        let op = Op::ALL.into_iter().find(|known| known.to_string() == op).ok_or_else(usage)?;
        let bytes = bytes.parse().map_err(|_| usage())?;
        let iterations = iterations.parse().ok().filter(|n| *n > 0).ok_or_else(usage)?;
        Ok(Command { op, bytes, iterations })
    }
}

/// Runs commands until there are no more. Only rank 0 reads and writes.
///
/// Reports the time of the slowest rank over all iterations, after one warm-up iteration and a barrier.
pub fn serve(group: &dyn Communicator, sources: Sources) -> Result<(), Failure> {
    let mut input = (group.rank() == 0).then(|| io::stdin().lock());
    let mut exercises: BTreeMap<(Op, usize), Exercise> = BTreeMap::new();
    while let Some(line) = next_line(group, input.as_mut())? {
        let answer = match line.parse::<Command>() {
            Err(problem) => json!({ "error": problem }),
            Ok(Command { op, bytes, iterations }) => {
                let exercise = match exercises.remove(&(op, bytes)) {
                    Some(exercise) => Ok(exercise),
                    None => Exercise::new(group, op, bytes, &sources),
                };
                match exercise {
                    Err(problem) => json!({ "error": problem }),
                    Ok(mut exercise) => {
                        let seconds = time(group, &mut exercise, iterations)?;
                        exercises.insert((op, bytes), exercise);
                        json!({
                            "op": op.to_string(),
                            "bytes": bytes,
                            "iterations": iterations,
                            "seconds_per_iteration": seconds / f64::from(iterations),
                        })
                    }
                }
            }
        };
        if group.rank() == 0 {
            let mut output = io::stdout().lock();
            writeln!(output, "{answer}")?;
            output.flush()?;
        }
    }
    Ok(())
}

/// Returns the next command, the same on every rank; `None` at the end of input or at a blank line.
fn next_line(
    group: &dyn Communicator,
    input: Option<&mut io::StdinLock<'_>>,
) -> Result<Option<String>, Failure> {
    let mut line = String::new();
    if let Some(input) = input {
        input.read_line(&mut line)?;
        // A longer line is not a valid command, and the answer reports that.
        line.retain(|character| character.is_ascii_graphic() || character == ' ');
        line.truncate(COMMAND_LENGTH);
    }
    let command = Buffer::from_slice(format!("{line:COMMAND_LENGTH$}").as_bytes());
    let command = group.broadcast(label("command"), command, 0).wait(IDLE)?;
    let line = std::str::from_utf8(command.as_bytes())?.trim().to_string();
    Ok((!line.is_empty()).then_some(line))
}

/// Returns the seconds that the slowest rank took for `iterations`.
fn time(group: &dyn Communicator, exercise: &mut Exercise, iterations: u32) -> Result<f64, Failure> {
    exercise.run(group)?;
    group.barrier(label("start")).wait(PATIENCE)?;
    let start = Instant::now();
    for _ in 0..iterations {
        exercise.run(group)?;
    }
    let own = Arc::new(Buffer::from_slice(&[start.elapsed().as_secs_f64()]));
    let all = Buffer::zeros(DType::F64, group.world_size());
    let all = group.all_gather(label("seconds"), own, all).wait(PATIENCE)?;
    Ok(all.as_slice::<f64>()?.iter().copied().fold(0.0, f64::max))
}
