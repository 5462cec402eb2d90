//! A held rank, which executes the commands typed at its prompt until it is released.
//!
//! While all ranks are held, all execute each line that rank 0 reads, so that a sharded tensor can be gathered. A rank
//! held alone reads its own lines and sees only its own shard.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kiln_collectives::Phase;
use kiln_shard::{Engine, ShardError};

use super::breakpoint::{Breakpoint, Others};
use super::command::{Command, HELP, Name};
use super::debugger::{Debugger, Going};
use super::point::Point;
use super::show::Shown;
use crate::share::share;
use kiln_train::error::Result;
use kiln_train::metrics::print_line;
use kiln_train::process::terminal;

const AROUND: usize = 6;

/// Interval at which a rank that waits for a line checks that the other ranks are still alive.
const LOOK: Duration = Duration::from_millis(100);

/// Interval at which ranks in different processes agree on whether the run should stop.
const ASK_EVERY: Duration = Duration::from_secs(2);

// Lines that cannot be typed: they contain a byte that no terminal sends.

/// The ranks agree on whether the run should stop.
const ASK: &str = "\0ask";

const STOP: &str = "\0stop";

const UNREACHABLE: &str = "\0unreachable";

const NO_TIME_WITH_MPI: &str = "with MPI, ranks can only be held together: the others would time out";

fn is_mpi(engine: &Engine) -> bool {
    !engine.world().shares_holds()
}

enum Next {
    Stay,
    Go,
    Alone,
}

pub(super) struct View<'a> {
    pub(super) engine: &'a Engine,
    pub(super) point: &'a Point,
    pub(super) tensor: Option<&'a Shown>,
    pub(super) alone: bool,
}

impl Debugger {
    pub(super) fn hold(
        &mut self,
        engine: &Engine,
        point: &Point,
        tensor: Option<Shown>,
        why: &str,
        alone: bool,
    ) -> Result<()> {
        let start = Instant::now();
        engine.world().hold(true);
        let held = self.stay(engine, point, tensor, why, alone);
        engine.world().hold(false);
        engine.world().recorder().was_held(start);
        held
    }

    fn stay(
        &mut self,
        engine: &Engine,
        point: &Point,
        tensor: Option<Shown>,
        why: &str,
        mut alone: bool,
    ) -> Result<()> {
        let mut reader = self.reader(alone);
        self.introduce(reader, point, why, alone);
        loop {
            let line = self.read(engine, reader, alone)?;
            let line = if line.trim().is_empty() { self.last_line.clone() } else { line };
            let view = View { engine, point, tensor: tensor.as_ref(), alone };
            let (text, next) = match line.as_str() {
                STOP => (self.let_go(alone, "stop requested: the run continues, saves and ends"), Next::Go),
                UNREACHABLE => (self.let_go(alone, ""), Next::Go),
                line => self.obey(&view, line)?,
            };
            self.last_line = if ["n", "s", "u"].contains(&line.trim()) { line } else { String::new() };
            let text = self.carry(engine, text, alone)?;
            let is_reader = reader == self.rank;
            match next {
                Next::Stay if is_reader => self.prompts.send(reader, &text, Some(&self.ask(alone))),
                Next::Stay => {}
                Next::Go => {
                    if is_reader {
                        self.prompts.send(reader, &text, None);
                        self.prompts.release(reader);
                    }
                    return Ok(());
                }
                Next::Alone => {
                    if is_reader {
                        self.prompts.send(reader, &text, None);
                        self.prompts.release(reader);
                    }
                    alone = true;
                    reader = self.rank;
                    self.introduce(reader, point, "the other ranks are released", alone);
                }
            }
        }
    }

    /// Executes the lines that were typed while the run continued. Called at the end of a step.
    pub(super) fn listen(&mut self, engine: &Engine, point: &Point) -> Result<()> {
        loop {
            let waiting = f64::from(u8::from(self.rank == 0 && self.prompts.has_line(0)));
            if engine.sum_over_ranks("debugger", &[waiting])?[0] == 0.0 {
                return Ok(());
            }
            let line = self.read(engine, 0, false)?;
            if line.trim() == "pause" {
                return self.hold(engine, point, None, "paused", false);
            }
            let view = View { engine, point, tensor: None, alone: false };
            let (text, _) = match line.parse() {
                Ok(Command::Clear) => ("no rank is held".to_owned(), Next::Stay),
                _ => self.obey(&view, &line)?,
            };
            let text = self.carry(engine, text, false)?;
            if self.rank == 0 {
                self.prompts.send(0, &text, None);
            }
        }
    }

    fn reader(&self, alone: bool) -> usize {
        if alone { self.rank } else { 0 }
    }

    fn ask(&self, alone: bool) -> String {
        let rank = if alone { self.rank } else { self.focus };
        format!("(rank {rank}) ")
    }

    fn introduce(&self, reader: usize, point: &Point, why: &str, alone: bool) {
        if reader != self.rank {
            return;
        }
        let who = match alone {
            true => format!("rank {} is held", self.rank),
            false => "all ranks are held".to_owned(),
        };
        let text = format!("{who} at {point} ({why})");
        self.prompts.hold(reader, &text, &self.ask(alone));
        if !self.prompts.has_prompt(reader) {
            let rank = if alone { format!(" --rank {}", self.rank) } else { String::new() };
            let opened = self.has_prompt && self.open_prompt(alone);
            if !opened {
                print_line(&format!("{text}; inspect it with: kiln attach {}{rank}", self.out.display()));
            }
        }
    }

    fn open_prompt(&self, alone: bool) -> bool {
        let Ok(program) = std::env::current_exe() else { return false };
        let mut command = std::process::Command::new(program);
        command.arg("attach").arg(&self.out).arg("--take-terminal");
        if alone {
            command.arg(format!("--rank={}", self.rank));
        }
        terminal::lend(command)
    }

    /// Releases this rank, with all others or `alone`. Returns `text`.
    fn let_go(&mut self, alone: bool, text: &str) -> String {
        match alone {
            // The others keep their breakpoints; this rank mutes the breakpoints that it shares with them.
            true => self.muted.extend(self.breakpoints.keys()),
            false => self.breakpoints.clear(),
        }
        text.to_owned()
    }

    /// Returns the answer of the rank in focus, on the rank that has the prompt. Collective unless `alone`.
    fn carry(&self, engine: &Engine, text: String, alone: bool) -> Result<String> {
        if alone || self.focus == 0 {
            return Ok(text);
        }
        Ok(String::from_utf8_lossy(&share(engine, text.into_bytes(), self.focus)?).into_owned())
    }

    /// Executes `line`. The user's errors become part of the returned text.
    fn obey(&mut self, view: &View<'_>, line: &str) -> Result<(String, Next)> {
        if line.trim().is_empty() {
            return Ok((String::new(), Next::Stay));
        }
        let command = match line.parse::<Command>() {
            Ok(command) => command,
            Err(error) => return Ok((error.to_string(), Next::Stay)),
        };
        let stay = |text: String| Ok((text, Next::Stay));
        match command {
            Command::Help => stay(HELP.to_owned()),
            Command::Where => stay(self.place(view)),
            Command::Ranks => stay(self.ranks(view)?),
            Command::Rank(rank) => stay(self.look_at(view, rank)),
            Command::List => stay(self.points_around(view.point)),
            Command::Print(name, slice) => stay(self.print(view, &name, slice.as_ref())?),
            Command::Histogram(name) => stay(self.tensor(view, &name)?.map_or_else(|e| e, |t| t.histogram())),
            Command::Hash(name) => stay(self.tensor(view, &name)?.map_or_else(|e| e, |t| t.hash())),
            Command::Save(name, file) => stay(self.save(view, &name, &file)?),
            Command::Diff(name, file) => stay(self.diff(view, &name, &file)?),
            Command::Batch => stay(self.show_batch()),
            Command::Params(pattern) => stay(self.parameters(view, &pattern)),
            Command::Next => Ok(self.go(view, Going::Over(view.point.depth()))),
            Command::Step => Ok(self.go(view, Going::ToNext)),
            Command::UntilEnd => Ok(self.go(view, Going::ToEndOf(view.point.clone()))),
            Command::Continue => Ok((String::new(), Next::Go)),
            Command::Clear if is_mpi(view.engine) => stay(NO_TIME_WITH_MPI.to_owned()),
            Command::Break(Breakpoint { others: Others::Run, rank: Some(_), .. }) if is_mpi(view.engine) => {
                stay(NO_TIME_WITH_MPI.to_owned())
            }
            Command::Break(Breakpoint { rank: Some(rank), .. })
                if rank >= view.engine.world().world_size() =>
            {
                stay(format!("no rank {rank}"))
            }
            Command::Clear if view.alone => stay("the other ranks are not held".to_owned()),
            Command::Clear => match self.focus == self.rank {
                true => Ok((
                    format!(
                        "rank {} stays held, the other ranks run; if it has its own process, attach with: kiln attach \
                         {} --rank {}",
                        self.rank,
                        self.out.display(),
                        self.rank
                    ),
                    Next::Alone,
                )),
                false => Ok((String::new(), Next::Go)),
            },
            Command::Breakpoints => stay(self.list_breakpoints()),
            // State that all ranks share changes only while all of them are held.
            Command::Delete(number) if view.alone => stay(self.delete(number, true)),
            Command::Break(_) | Command::Set(..) | Command::Checkpoint if view.alone => {
                stay("only possible when all ranks are held: continue with c first".to_owned())
            }
            Command::Break(breakpoint) => {
                let mut text = format!("{}: {breakpoint}", self.next_number);
                if let Some(why) = super::breakpoint::objection(&self.reach, &breakpoint) {
                    text += &format!(", which cannot be hit: {why}");
                }
                self.breakpoints.insert(self.next_number, breakpoint);
                self.next_number += 1;
                stay(text)
            }
            Command::Delete(number) => stay(self.delete(number, false)),
            Command::Set(key, value) => {
                let text = self.controls.set(&key, &value);
                if self.rank == 0 {
                    print_line(&format!("step {}, at the prompt: {text}", view.point.step));
                }
                stay(text)
            }
            Command::Checkpoint => {
                self.controls.save();
                stay("a checkpoint is saved after this step".to_owned())
            }
            Command::Pause => stay("the run is already held".to_owned()),
            Command::Quit => {
                self.stop.store(true, Ordering::Relaxed);
                Ok((self.let_go(view.alone, "the run saves and ends"), Next::Go))
            }
        }
    }

    fn go(&mut self, view: &View<'_>, going: Going) -> (String, Next) {
        match view.alone {
            true => self.alone = going,
            false => self.going = going,
        }
        (String::new(), Next::Go)
    }

    fn place(&self, view: &View<'_>) -> String {
        let shape = view.tensor.map_or_else(String::new, |tensor| format!(" {:?}", tensor.shape));
        let samples = self
            .batch
            .as_ref()
            .map_or_else(String::new, |(at, _)| format!(", samples from {}", at.first_sample));
        format!("rank {} is at {}{shape}{samples}", self.rank, view.point)
    }

    fn ranks(&self, view: &View<'_>) -> Result<String> {
        if view.alone {
            return Ok("the other ranks are running: kiln status shows their positions".to_owned());
        }
        let mine = self.place(view);
        let all = view.engine.all_gather_bytes(Phase::Other, "debugger", mine.as_bytes())?;
        let lines: Vec<_> = all.iter().map(|line| String::from_utf8_lossy(line)).collect();
        Ok(lines.join("\n"))
    }

    fn look_at(&mut self, view: &View<'_>, rank: usize) -> String {
        let ranks = view.engine.world().world_size();
        if view.alone {
            return format!("rank {} is held alone", self.rank);
        }
        if rank >= ranks {
            return format!("no rank {rank}: the run has {ranks} ranks");
        }
        self.focus = rank;
        self.place(view)
    }

    fn points_around(&self, point: &Point) -> String {
        let [now, before] = &self.points;
        let here = now.len().saturating_sub(1);
        let first = here.saturating_sub(AROUND);
        let mut lines: Vec<_> = now[first..here].iter().map(|point| format!("   {}", point.name())).collect();
        lines.push(format!("-> {}", point.name()));
        // The previous step shows which points come next.
        let coming = before.iter().skip(here + 1).take(AROUND);
        lines.extend(coming.map(|point| format!("   {}", point.name())));
        lines.join("\n")
    }

    fn print(&mut self, view: &View<'_>, name: &Name, slice: Option<&super::slice::Slice>) -> Result<String> {
        let number = match (name, &self.metrics) {
            (Name::Parameter(name), Some(metrics)) => match name.as_str() {
                "loss" => Some(metrics.loss),
                "grad_norm" => Some(metrics.grad_norm),
                "lr" => Some(metrics.lr),
                _ => None,
            },
            _ => None,
        };
        if let Some(number) = number {
            return Ok(format!("{number} in step {}", self.metrics.as_ref().map_or(0, |m| m.step)));
        }
        Ok(match (self.tensor(view, name)?, slice) {
            (Err(text), _) => text,
            (Ok(tensor), None) => tensor.summary(),
            (Ok(tensor), Some(slice)) => tensor.part(slice),
        })
    }

    fn list_breakpoints(&self) -> String {
        let is_there =
            |number: &usize, of: &Breakpoint| of.others == Others::Hold || !self.muted.contains(number);
        let lines = self.breakpoints.iter().filter(|(number, breakpoint)| is_there(number, breakpoint));
        let lines: Vec<_> = lines.map(|(number, breakpoint)| format!("{number}: {breakpoint}")).collect();
        if lines.is_empty() { "there are no breakpoints".to_owned() } else { lines.join("\n") }
    }

    /// Deletes breakpoint `number`, or all with 0. For a rank held `alone`, mutes them instead.
    fn delete(&mut self, number: usize, alone: bool) -> String {
        if number != 0 && !self.breakpoints.contains_key(&number) {
            return format!("there is no breakpoint {number}");
        }
        let holds_all =
            |breakpoint: &Breakpoint| breakpoint.others == Others::Hold || breakpoint.rank.is_none();
        if alone && self.breakpoints.get(&number).is_some_and(holds_all) {
            return format!(
                "breakpoint {number} holds all ranks, so it can be deleted only when all ranks are held: continue with c first"
            );
        }
        match (alone, number) {
            (false, 0) => self.breakpoints.clear(),
            (false, number) => drop(self.breakpoints.remove(&number)),
            (true, 0) => self.muted.extend(self.breakpoints.keys()),
            (true, number) => _ = self.muted.insert(number),
        }
        let left = self.list_breakpoints();
        match alone && self.breakpoints.values().any(holds_all) {
            true => format!("{left}\nbreakpoints that hold all ranks can be deleted when all ranks are held"),
            false => left,
        }
    }

    /// Reads the next line on `reader` and returns it on all held ranks. Collective unless `alone`.
    fn read(&mut self, engine: &Engine, reader: usize, alone: bool) -> Result<String> {
        let asks_others = !alone && engine.world().backend() != "local";
        loop {
            let line = match reader == self.rank {
                true => self.wait_for_line(engine, asks_others)?,
                false => String::new(),
            };
            let line = match alone {
                true => line,
                false => String::from_utf8_lossy(&share(engine, line.into_bytes(), reader)?).into_owned(),
            };
            if line != ASK {
                return Ok(line);
            }
            let asked = f64::from(u8::from(self.stop.load(Ordering::Relaxed)));
            if engine.sum_over_ranks("debugger", &[asked])?[0] > 0.0 {
                return Ok(STOP.to_owned());
            }
        }
    }

    /// Waits for the next line for this rank. With `asks_others`, returns [`ASK`] at regular intervals.
    fn wait_for_line(&self, engine: &Engine, asks_others: bool) -> Result<String> {
        if !self.prompts.is_open() {
            tracing::warn!("a breakpoint was skipped: this process has no socket for kiln attach");
            return Ok(UNREACHABLE.to_owned());
        }
        let begun = Instant::now();
        loop {
            if let Some(line) = self.prompts.next(self.rank, LOOK) {
                return Ok(line);
            }
            if let Some(error) = engine.world().failure() {
                return Err(ShardError::from(error).into());
            }
            // A stop request means that the run should save and end instead of waiting for a prompt.
            if self.stop.load(Ordering::Relaxed) {
                return Ok(STOP.to_owned());
            }
            if asks_others && begun.elapsed() > ASK_EVERY {
                return Ok(ASK.to_owned());
            }
        }
    }
}
