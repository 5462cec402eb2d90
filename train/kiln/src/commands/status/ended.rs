//! The status of runs without a process that answers: finished, failed, killed, or about to start.

use std::path::Path;

use crate::commands::inspect;
use crate::error::{CommandError, Result};
use kiln_observe::ask::{ProcessState, state_of, threads_of};
use kiln_observe::status::{Look, ProcessLook, State};
use kiln_train::flight;
use kiln_train::process::{self, ProcessId, quoted};
use kiln_train::run::{FAILURE, Progress, Standing, last_event, progress, standing};

/// Returns the status of the run in `out`, judged by its files.
pub(crate) fn look(out: &Path, stacks: bool) -> Result<Look> {
    let standing = match standing(out)? {
        Standing::NoRun(why) => {
            return Err(CommandError::usage(format!(
                "{} is not a run folder: {why}; pass the folder given as --out, or the one that the run printed \
                 at its start",
                out.display()
            )));
        }
        standing => standing,
    };
    let Progress { steps, logged, loss, saved } = progress(out);
    let (state, text) = judge(out, &standing, steps, logged, saved);
    let processes = match standing {
        Standing::Held(Some(process)) => vec![holder(process, stacks)],
        _ => Vec::new(),
    };
    Ok(Look {
        run: out.display().to_string(),
        state,
        text,
        culprits: Vec::new(),
        step: logged.max(saved),
        steps,
        saved,
        loss,
        tokens_per_s: None,
        deadline_s: None,
        ranks: Vec::new(),
        processes,
    })
}

/// Returns the verdict on a failed run, from the flight recorders of its last start.
pub(super) fn verdict(out: &Path) -> Option<String> {
    let is_there = !flight::files_in(&flight::flight_folder(out)).is_empty();
    let text = is_there.then(|| inspect::flight(out).ok())?;
    let verdict = text.as_ref().and_then(|text| text.lines().next());
    let verdict = verdict.unwrap_or("verdict: unknown; see the run's folder flight");
    // A verdict that no rank waits is dropped: it does not say why the run failed.
    (!verdict.ends_with(NOTHING)).then(|| verdict.to_owned())
}

/// End of the verdict if the ranks failed without waiting for each other, as for a NaN loss.
const NOTHING: &str = "no rank waits for another";

/// Returns the reason why the last start of the run in `out` failed, according to the run's events.
fn failure(out: &Path) -> Option<String> {
    let event = last_event(out)?;
    (event.kind == FAILURE).then(|| format!("the run failed after step {}: {}", event.step, event.text))
}

fn holder(process: ProcessId, stacks: bool) -> ProcessLook {
    let threads = stacks.then(|| threads_of(process.pid)).filter(|_| process.is_gone() == Some(false));
    ProcessLook { host: process.host, process: process.pid, ranks: Vec::new(), threads }
}

fn judge(
    out: &Path,
    standing: &Standing,
    steps: Option<u64>,
    logged: Option<u64>,
    saved: Option<u64>,
) -> (State, String) {
    let go_on = match saved {
        Some(step) => {
            let program = process::command().unwrap_or("kiln");
            format!("step {step} is saved; resume with: {program} train --resume {}", quoted(out))
        }
        None => "nothing was saved".to_owned(),
    };
    match standing {
        Standing::Held(Some(process)) => {
            let is_here = process.is_gone() == Some(false);
            match state_of(process.pid) {
                ProcessState::Stopped if is_here => {
                    let by = "for example by Ctrl-Z, SIGSTOP or a debugger";
                    (State::Trouble, format!("process {} is stopped, {by}", process.pid))
                }
                _ if is_here => (
                    State::Starting,
                    format!("process {} is starting or ending the run, and no rank answers", process.pid),
                ),
                _ => {
                    let host = &process.host;
                    (State::Starting, format!("the run is on {host}: run kiln status there"))
                }
            }
        }
        Standing::Held(None) => (State::Starting, "a process is about to start or end the run".to_owned()),
        Standing::Killed(process) => {
            let (host, pid) = (&process.host, process.pid);
            let gone = format!("process {pid} on {host} was killed, or the machine went down");
            (State::Dead, format!("{gone}, without reporting an error; {go_on}"))
        }
        _ if let Some(why) = verdict(out).or_else(|| failure(out)) => {
            (State::Failed, format!("{why}; {go_on}"))
        }
        _ if steps.is_some() && logged.max(saved) >= steps => {
            (State::Finished, "all steps are done".to_owned())
        }
        _ if saved.is_some() && saved >= logged => (State::Stopped, format!("stopped on request; {go_on}")),
        _ => (State::Failed, format!("the run ended before its last step; {go_on}")),
    }
}
