//! Held ranks: at every point and in every way, without making other ranks fail.
//!
//! `… -- --ignored held` holds ranks for three minutes with a deadline of 20 seconds.

use std::io::Write;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::Duration;

use kiln_testkit::{Said, run_to_end, status_of, wait_for};

use crate::support::{Ended, Run, config, end, kiln, signal, undisturbed};
use crate::terminal::Terminal;

/// The prompt of a run, controlled by a program.
pub struct Prompt {
    process: Child,
    lines: ChildStdin,
    said: Said,
    /// The line that names the place where the rank is held.
    held_at: String,
}

impl Prompt {
    /// Attaches to a started run once one of its ranks is held.
    fn of(run: &Run, more: &[&str]) -> Prompt {
        let out = run.out().display().to_string();
        let arguments = [&["attach", &out][..], more].concat();
        Prompt::started(|| kiln(&arguments))
    }

    /// Returns the prompt that `command` opens, after as many attempts as it takes.
    pub fn started(command: impl Fn() -> Command) -> Prompt {
        wait_for("a rank that is held", || {
            let mut command = command();
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
            let mut process = command.spawn().expect("the program starts");
            let mut said = Said::of(process.stdout.take().expect("its output"));
            let lines = process.stdin.take().expect("its input");
            let first = said.next_line().unwrap_or_default();
            if first.contains("held at") {
                return Ok(Prompt { process, lines, said, held_at: first });
            }
            let _ = process.kill();
            status_of(&mut process);
            Err(first)
        })
    }

    pub fn enter(&mut self, line: &str) {
        writeln!(self.lines, "{line}").expect("it is read");
    }

    /// Returns the next line that contains `text`.
    pub fn expect(&mut self, text: &str) -> String {
        self.said.expect(text)
    }

    /// Leaves the prompt without releasing the ranks.
    pub fn leave(mut self) {
        drop(self.lines);
        status_of(&mut self.process);
    }
}

/// Starts a run whose ranks are threads of one process.
fn start_alone(run: &Run, ranks: &str, more: &[&str]) -> Child {
    config();
    kiln(run.train_arguments(&[&["--ranks", ranks], more].concat())).spawn().expect("kiln starts")
}

/// Checks that a run held before the update of step 3 has saved that step and ended like one that was asked
/// to stop.
fn assert_stopped(run: &Run, process: Child) {
    let ended = end(process);
    assert_eq!(ended.code, Some(75), "{ended:?}");
    assert_eq!(run.check_checkpoints(), [2, 3]);
}

/// The input and output of a user who looks at rank 1 in the backward pass of block 1 in step 3.
fn look_around(terminal: &mut Terminal, file: &str) {
    terminal.expect("held at step 3, micro-batch 0, backward: the gradient of layers.1 output");
    terminal.expect("(rank 1) ");
    terminal.enter("p");
    terminal.expect("gradient of layers.1 output f32 [");
    terminal.expect("NaN 0");
    terminal.enter("p layers.1.ffn.up_proj.weight[0, :2]");
    terminal.expect("part of layers.1.ffn.up_proj.weight f32 [2]");
    terminal.enter(&format!("save layers.1.ffn.up_proj.weight {file}"));
    terminal.expect("saved to /");
    terminal.enter("s");
    terminal.expect("backward: the gradient of layers.1.ffn output");
    terminal.enter(&format!("diff layers.1.ffn.up_proj.weight {file}"));
    terminal.expect("equal, bit by bit");
    terminal.enter("delete all");
    terminal.expect("there are no breakpoints");
    terminal.enter("clear");
    terminal.expect("rank 1 stays held, the other ranks run");
}

#[test]
fn a_person_at_a_terminal_looks_into_threads_and_changes_no_bit() {
    config();
    let run = Run::new();
    let file = run.folder().join("w.npy").display().to_string();
    let place = ["--ranks", "4", "--break", "backward:layers.1@3", "--break-rank", "1"];
    let mut terminal = Terminal::start(&mut kiln(run.train_arguments(&place)));
    look_around(&mut terminal, &file);
    terminal.expect("rank 1 is held at step 3");
    terminal.enter("p layers.1.ffn.up_proj.weight");
    terminal.expect("(the other ranks are running, so it cannot be gathered)");
    terminal.enter("c");
    terminal.expect("done: 8 steps");
    let (status, all) = terminal.end();
    assert!(status.success(), "{all}");
    assert_eq!(run.losses(), undisturbed(4));
}

#[test]
fn a_person_at_the_launchers_terminal_looks_into_processes_and_changes_no_bit() {
    config();
    let run = Run::new();
    let file = run.folder().join("w.npy").display().to_string();
    let place = ["--break", "backward:layers.1@3", "--break-rank", "1"];
    let mut terminal = Terminal::start(&mut run.launcher(4, &[], &place));
    look_around(&mut terminal, &file);
    // So far the prompt was rank 0's, for all ranks; now rank 1 has a prompt of its own.
    let mut prompt = Prompt::of(&run, &["--rank", "1"]);
    prompt.enter("w");
    prompt.expect("rank 1 is at step 3");
    prompt.enter("c");
    terminal.expect("done: 8 steps");
    let (status, all) = terminal.end();
    assert!(status.success(), "{all}");
    assert_eq!(run.losses(), undisturbed(4));
    prompt.leave();
}

#[test]
fn every_phase_holds_any_rank_in_every_way() {
    for place in
        ["data@2", "forward:layers.0@2", "recompute:layers.1@2", "backward:embed@2", "optimizer@2", "step@2"]
    {
        let recompute = if place.starts_with("recompute") { "block" } else { "none" };
        let recompute = format!("shard.recompute={recompute}");
        let calm = Run::new();
        let set = ["--set", &recompute, "--set", "comm.timeout_s=5"];
        let ended = end(start_alone(&calm, "2", &set));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        for who in ["", " rank 0", " rank 1", " rank 0 run", " rank 1 run"] {
            let run = Run::new();
            let at = format!("{place}{who}");
            let process = start_alone(&run, "2", &[&set[..], &["--break", &at]].concat());
            let mut prompt = Prompt::of(&run, &[]);
            prompt.enter("w");
            let said = prompt.expect(" is at ");
            let rank = who.strip_prefix(" rank ").map_or("0", |who| &who[..1]);
            assert!(said.contains(&format!("rank {rank} is at")), "{at}: {said}");
            assert!(said.contains("step 2"), "{at}: {said}");
            prompt.enter("delete all");
            prompt.expect("there are no breakpoints");
            prompt.enter("c");
            prompt.leave();
            let ended = end(process);
            assert_eq!(ended.code, Some(0), "{at}: {ended:?}");
            assert_eq!(run.losses(), calm.losses(), "{at}");
        }
    }
}

#[test]
fn a_prompt_is_left_killed_and_taken_up_again_and_two_breakpoints_hold_one_after_the_other() {
    let run = Run::new();
    let places = ["--break", "forward:layers.1@3", "--break", "optimizer@3"];
    let process = start_alone(&run, "2", &places);
    let mut prompt = Prompt::of(&run, &[]);
    prompt.enter("breaks");
    prompt.expect("2: optimizer@3");
    prompt.leave();
    let mut prompt = Prompt::of(&run, &[]);
    prompt.enter("w");
    prompt.expect("forward: layers.1 input");
    prompt.process.kill().expect("a signal");
    prompt.leave();
    let mut prompt = Prompt::of(&run, &["--rank", "1"]);
    prompt.expect("rank 1 is at step 3");
    prompt.enter("delete 1");
    prompt.expect("2: optimizer@3");
    prompt.enter("c");
    prompt.expect("held at step 3, before the update");
    prompt.enter("p layers.0.attention.q_proj.weight.grad");
    prompt.expect("layers.0.attention.q_proj.weight.grad f32 [");
    prompt.enter("set optim.lr = 0.5");
    prompt.expect("optim.lr = 0.5 from the next update on");
    prompt.enter("checkpoint");
    prompt.expect("saved after this step");
    prompt.enter("c");
    prompt.leave();
    let ended = end(process);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(run.check_checkpoints(), [6, 8], "3 was saved as well, and removed again");
    let (changed, calm) = (run.losses(), undisturbed(2));
    assert_eq!(changed.range(..4).collect::<Vec<_>>(), calm.range(..4).collect::<Vec<_>>());
    assert_ne!(changed.get(&8), calm.get(&8), "another learning rate");
}

#[test]
fn what_holds_all_ranks_goes_before_what_holds_one() {
    let run = Run::new();
    let places = ["--break", "forward:layers.1@3 rank 1 run", "--break", "forward:layers.1@3"];
    let more = ["--break", "backward:layers.1.ffn@3 rank 1 run", "--break", "optimizer@3"];
    let process = start_alone(&run, "2", &[&places[..], &more].concat());
    let mut prompt = Prompt::of(&run, &[]);
    prompt.enter("ranks");
    prompt.expect("rank 1 is at step 3, micro-batch 0, forward: layers.1 input");
    prompt.enter("delete 1");
    prompt.enter("delete 2");
    prompt.expect("4: optimizer@3");
    // The next breakpoint of all ranks is at the end of the block; that of rank 1 is inside the block.
    prompt.enter("c");
    prompt.expect("rank 1 is held at step 3, micro-batch 0, backward: the gradient of layers.1.ffn output");
    prompt.enter("q");
    prompt.leave();
    assert_stopped(&run, process);
}

#[test]
fn a_rank_that_is_asked_to_stop_while_all_are_held_stops_the_run() {
    config();
    let run = Run::new();
    let process = run.launcher(2, &[], &["--break", "optimizer@3"]).spawn().expect("kiln starts");
    let prompt = Prompt::of(&run, &[]);
    send("USR1", &run, 1);
    assert_stopped(&run, process);
    prompt.leave();
}

/// Sends a signal to the process of a rank.
fn send(name: &str, run: &Run, rank: usize) {
    let text = std::fs::read_to_string(run.out().join(format!("debug/rank_{rank}.json"))).expect("a file");
    let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let sent = Command::new("kill").args(["-s", name, &value["process"]["pid"].to_string()]).status();
    assert!(sent.expect("kill").success());
}

#[test]
fn a_rank_that_dies_while_others_are_held_ends_the_run() {
    config();
    let run = Run::new();
    let process = run.launcher(4, &[], &["--break", "optimizer@3"]).spawn().expect("kiln starts");
    let prompt = Prompt::of(&run, &[]);
    send("KILL", &run, 2);
    let ended = end(process);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("rank 2"), "{ended:?}");
    prompt.leave();
}

#[test]
fn a_run_that_is_held_saves_and_ends_when_it_is_asked_to() {
    let run = Run::new();
    let process = start_alone(&run, "2", &["--break", "optimizer@3"]);
    let prompt = Prompt::of(&run, &[]);
    signal("TERM", &process);
    assert_stopped(&run, process);
    prompt.leave();
}

#[test]
fn a_breakpoint_that_cannot_come_is_refused_or_told() {
    config();
    let run = Run::new();
    let ended = end(start_alone(&run, "2", &["--break", "step rank 2"]));
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("no rank 2: the run has 2 ranks"), "{ended:?}");
    assert!(!run.out().exists());
    let ended = end(start_alone(&run, "2", &["--break", "forward:layers.7", "--break", "step@9"]));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for never in [
        "breakpoint forward:layers.7 cannot be hit: the model has no such place",
        "breakpoint step@9 cannot be hit: the run has steps 1 to 8",
        "breakpoint forward:layers.7 was never hit",
        "breakpoint step@9 was never hit",
    ] {
        assert!(ended.stderr.contains(never), "{ended:?}");
    }
}

#[test]
fn a_breakpoint_that_cannot_come_is_named_before_the_first_step() {
    let run = Run::new();
    let mut process = start_alone(&run, "2", &["--break", "forward:layers.7", "--break", "data@1"]);
    let mut prompt = Prompt::of(&run, &[]);
    let mut said = Said::of(process.stderr.take().expect("its messages"));
    said.expect("forward:layers.7 cannot be hit");
    prompt.enter("break backward:layers.9");
    prompt.expect("3: backward:layers.9, which cannot be hit: the model has no such place");
    prompt.enter("delete all");
    prompt.enter("c");
    prompt.leave();
    assert_eq!(end(process).code, Some(0));
}

#[test]
fn a_gradient_that_is_not_a_number_holds_before_the_update() {
    let run = Run::new();
    let drill = ["--fault", "nan@backward:3:1", "--set", "train.nonfinite=skip", "--break", "nan"];
    let process = start_alone(&run, "2", &drill);
    let mut prompt = Prompt::of(&run, &[]);
    let held_at = &prompt.held_at;
    assert!(
        held_at.contains("all ranks are held at step 3, before the update (nan: the gradient of "),
        "{held_at}"
    );
    // The rank is held once, and not again at the end of the step.
    prompt.enter("c");
    prompt.leave();
    assert_eq!(end(process).code, Some(0));
}

#[test]
fn a_rank_that_is_held_alone_says_which_breakpoints_it_cannot_delete() {
    let run = Run::new();
    let places = ["--break", "forward:layers.1@3 rank 1 run", "--break", "optimizer@4"];
    let process = start_alone(&run, "2", &places);
    let mut prompt = Prompt::of(&run, &[]);
    prompt.enter("delete 2");
    prompt.expect("breakpoint 2 holds all ranks, so it can be deleted only when");
    prompt.enter("delete all");
    prompt.expect("2: optimizer@4");
    prompt.expect("breakpoints that hold all ranks can be deleted when all ranks are held");
    prompt.enter("c");
    prompt.expect("all ranks are held at step 4, before the update");
    prompt.enter("delete 2");
    prompt.expect("1: forward:layers.1@3 rank 1 run");
    prompt.enter("c");
    prompt.leave();
    assert_eq!(end(process).code, Some(0));
}

#[test]
fn a_run_that_goes_on_is_paused_and_told_to_break() {
    let run = Run::new();
    let process =
        start_alone(&run, "2", &["--set", "train.steps=1000000", "--set", "optim.schedule=constant"]);
    let out = run.out().display().to_string();
    run.wait_for_steps(1);
    let mut attached = kiln(["attach", &out]).stdin(Stdio::piped()).spawn().expect("kiln starts");
    let mut lines = attached.stdin.take().expect("its input");
    let mut said = Said::of(attached.stdout.take().expect("its output"));
    writeln!(lines, "pause").expect("it is read");
    said.expect("held at the end of step");
    writeln!(lines, "break backward:layers.0").expect("it is read");
    said.expect("1: backward:layers.0");
    writeln!(lines, "c").expect("it is read");
    said.expect("backward: the gradient of layers.0 output");
    writeln!(lines, "q").expect("it is read");
    said.expect("the run saves and ends");
    let ended = end(process);
    assert_eq!(ended.code, Some(75), "{ended:?}");
    drop(lines);
    status_of(&mut attached);
}

/// Other users cannot attach to a run.
#[test]
#[ignore = "needs root and util-linux: cargo test --release -p kiln --test faults -- --ignored held"]
fn held_strangers_are_refused() {
    let run = Run::new();
    let process = start_alone(&run, "2", &["--break", "step@2"]);
    let mut prompt = Prompt::of(&run, &[]);
    let out = run.out().display().to_string();
    // All users may read these folders, but not the sockets.
    for folder in
        run.out().ancestors().take(2).map(std::path::Path::to_owned).chain([run.out().join("debug")])
    {
        let opened = std::process::Command::new("chmod").arg("a+rx").arg(&folder).status();
        assert!(opened.expect("chmod").success());
    }
    let mut stranger = std::process::Command::new("setpriv");
    stranger.args(["--reuid=65534", "--regid=65534", "--clear-groups", env!("CARGO_BIN_EXE_kiln")]);
    let ended = Ended::from(run_to_end(stranger.args(["attach", &out])));
    assert_ne!(ended.code, Some(0), "{ended:?}");
    assert!(!ended.stdout.contains("held at"), "{ended:?}");
    prompt.enter("c");
    prompt.leave();
    assert_eq!(end(process).code, Some(0));
}

#[test]
#[ignore = "takes minutes: cargo test --release -p kiln --test faults -- --ignored held"]
fn held_for_three_minutes_with_a_deadline_of_twenty_seconds() {
    config();
    for at in ["backward:layers.1@3 rank 1", "backward:layers.1@3 rank 1 run"] {
        let run = Run::new();
        let more = ["--set", "comm.timeout_s=20", "--break", at];
        let process = run.launcher(4, &[], &more).spawn().expect("kiln starts");
        let mut prompt = Prompt::of(&run, &["--rank", "1"]);
        thread::sleep(Duration::from_secs(180));
        prompt.enter("w");
        prompt.expect("rank 1 is at step 3");
        prompt.enter("delete all");
        prompt.expect("there are no breakpoints");
        prompt.enter("c");
        prompt.leave();
        let ended = end(process);
        assert_eq!(ended.code, Some(0), "{at}: {ended:?}");
        assert_eq!(run.losses(), undisturbed(4), "{at}");
    }
}
