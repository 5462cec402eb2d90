//! The command `kiln attach`: the prompt of a run.

use std::io::{IsTerminal, stdin};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use clap::Args;
use rustix::termios::{self, OptionalActions, Termios};
use rustyline::error::ReadlineError;
use rustyline::{DefaultEditor, ExternalPrinter};

use super::client::{Connection, say as send};
use super::ended;
use super::message::{Reply, Request, Typed};
use super::prompt::ToPrompt;
use super::socket::{Folder, Owner};
use crate::error::{Result, TrainError};
use crate::metrics::say;
use crate::process::terminal;

/// How long a process may take to take a line.
const PATIENCE: Duration = Duration::from_secs(5);

/// A run that is held again by then was only stepped.
const SOON: Duration = Duration::from_millis(500);

/// What is in front of a line while no rank is held.
const RUNNING: &str = "(running) ";

/// Arguments of `kiln attach`.
#[derive(Args, Clone, Debug)]
pub struct AttachArgs {
    /// Run folder.
    run: PathBuf,
    /// The rank to look at [default: the first one that is held].
    #[arg(long, value_name = "N")]
    rank: Option<usize>,
    /// Take the terminal from the process that has started this one.
    #[arg(long, hide = true)]
    take_terminal: bool,
}

impl AttachArgs {
    /// Talks to the run until one of them is gone. Returns the exit code.
    ///
    /// # Errors
    ///
    /// If there is no such run, or none that goes on on this machine.
    pub fn run(&self) -> Result<u8> {
        if self.take_terminal {
            terminal::take();
        }
        let (connection, first, focus) = find(&self.run, self.rank)?;
        converse(connection, first, focus).map_err(TrainError::io("talk to the run in", &self.run))?;
        Ok(0)
    }
}

/// A connection to the process that has the prompt, what it has said first, and the rank that is to be looked at
/// there.
fn find(run: &Path, rank: Option<usize>) -> Result<(Connection, ToPrompt, Option<usize>)> {
    let folder = Folder::open(run).ok();
    let owners = folder.as_ref().map(Folder::owners).unwrap_or_default();
    let Some(folder) = folder.filter(|_| !owners.is_empty()) else {
        // Says so if it is no run at all.
        ended::look(run, false)?;
        return Err(TrainError::usage(format!(
            "no process of the run in {} is on this machine: it has ended, or attach on the machine of rank 0",
            run.display()
        )));
    };
    let attach = |owner: &Owner, rank: Option<usize>| {
        let mut connection = Connection::open(&folder, owner, PATIENCE)?;
        let reply = connection.ask(&Request::Attach { rank })?;
        Ok::<_, std::io::Error>((connection, reply))
    };
    let talk = |owner: &Owner, rank: Option<usize>| match attach(owner, rank) {
        Ok((connection, Reply::Prompt(first))) => Ok((connection, first)),
        Ok((_, Reply::Refused(reason))) => Err(TrainError::usage(format!("the run refuses: {reason}"))),
        Ok((_, Reply::Status(_))) => Err(TrainError::usage("the run answers something else")),
        Err(error) => Err(TrainError::io("reach the run in", run)(error)),
    };
    // A rank that is held alone has a prompt of its own; where all are held, rank 0 has it.
    if let Some(rank) = rank {
        let Some(own) = owners.iter().find(|owner| owner.ranks.contains(&rank)) else {
            return Err(TrainError::usage(format!("rank {rank} of the run has no process on this machine")));
        };
        let (connection, first) = talk(own, Some(rank))?;
        if first != ToPrompt::Running {
            return Ok((connection, first, None));
        }
    }
    let (connection, first) = talk(&owners[0], None)?;
    Ok((connection, first, rank))
}

/// What the terminal was like before a prompt was shown.
fn terminal_state() -> Option<Termios> {
    termios::tcgetattr(stdin()).ok()
}

fn converse(connection: Connection, first: ToPrompt, focus: Option<usize>) -> std::io::Result<()> {
    let other = std::io::Error::other::<ReadlineError>;
    let (stream, mut replies) = connection.split()?;
    let mut editor = DefaultEditor::new().map_err(other)?;
    let mut printer = editor.create_external_printer().ok();
    let before = terminal_state();
    let is_terminal = stdin().is_terminal();
    let (asks, asked) = mpsc::channel();
    let _ = handle(first, &mut printer, &asks, before.as_ref());
    // Ends with the process, if the run says nothing more.
    thread::Builder::new().name("kiln-prompt".to_owned()).spawn(move || {
        while let Ok(Reply::Prompt(message)) = replies.next() {
            if handle(message, &mut printer, &asks, before.as_ref()).is_none() {
                break;
            }
        }
        leave("the connection to the run is gone", before.as_ref());
    })?;
    let mut prompt = next_prompt(&asked);
    if let Some(rank) = focus.filter(|_| prompt.as_deref().is_some_and(|prompt| prompt != RUNNING)) {
        send(&stream, &Typed { typed: format!("rank {rank}") })?;
        prompt = next_prompt(&asked);
    }
    while let Some(text) = &prompt {
        // Somebody who pipes commands in sees the answers alone.
        let shown = if is_terminal { text.as_str() } else { "" };
        let line = match editor.readline(shown) {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => {
                say("c goes on, q saves and ends the run, Ctrl-D leaves the prompt");
                continue;
            }
            Err(ReadlineError::Eof) => return Ok(()),
            Err(error) => return Err(other(error)),
        };
        if !line.trim().is_empty() {
            let _ = editor.add_history_entry(&line);
        }
        // What came while the line was typed.
        while let Ok(newer) = asked.try_recv() {
            prompt = Some(newer);
        }
        if line.trim().is_empty() && prompt.as_deref() == Some(RUNNING) {
            continue;
        }
        let was_held = prompt.as_deref() != Some(RUNNING);
        send(&stream, &Typed { typed: line })?;
        if was_held {
            prompt = next_prompt(&asked);
            // The next line is for ranks that are held again.
            while prompt.as_deref() == Some(RUNNING) {
                prompt = match asked.recv_timeout(SOON) {
                    Err(mpsc::RecvTimeoutError::Timeout) => {
                        if is_terminal {
                            say("the run goes on; Ctrl-C leaves it alone");
                        }
                        next_prompt(&asked)
                    }
                    newer => newer.ok(),
                };
            }
        }
    }
    Ok(())
}

/// What is in front of the next line, once it is known; `None` if there is none.
fn next_prompt(asked: &Receiver<String>) -> Option<String> {
    let mut prompt = asked.recv().ok()?;
    while let Ok(newer) = asked.try_recv() {
        prompt = newer;
    }
    Some(prompt)
}

/// Shows what a prompt is sent. `None` at the end.
fn handle<P: ExternalPrinter>(
    message: ToPrompt,
    printer: &mut Option<P>,
    asks: &mpsc::Sender<String>,
    before: Option<&Termios>,
) -> Option<()> {
    match message {
        ToPrompt::Text(text) => {
            let printed = printer.as_mut().is_some_and(|printer| printer.print(format!("{text}\n")).is_ok());
            if !printed {
                say(&text);
            }
        }
        ToPrompt::Ask(prompt) => asks.send(prompt).ok()?,
        ToPrompt::Running => asks.send(RUNNING.to_owned()).ok()?,
        ToPrompt::End => leave("the run is over", before),
    }
    Some(())
}

/// Ends this process, with the terminal as it was.
fn leave(why: &str, before: Option<&Termios>) -> ! {
    if let Some(before) = before {
        // A terminal that is gone needs nothing.
        let _ = termios::tcsetattr(stdin(), OptionalActions::Flush, before);
    }
    say(&format!("\r{why}"));
    std::process::exit(0)
}
