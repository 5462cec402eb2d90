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

use crate::commands::status::ended;
use crate::error::{CommandError, Result};
use kiln_observe::ask::{Connection, Folder, Owner, Reply, Request, ToPrompt, Typed, send_line as send};
use kiln_train::TrainError;
use kiln_train::metrics::print_line;
use kiln_train::process::output::printable;
use kiln_train::process::terminal;

const PATIENCE: Duration = Duration::from_secs(5);

/// If a run is held again within this time, the user has only stepped, and no message is shown.
const SOON: Duration = Duration::from_millis(500);

/// Prompt text while no rank is held.
const RUNNING: &str = "(running) ";

/// Arguments of `kiln attach`.
#[derive(Args, Clone, Debug)]
pub struct AttachArgs {
    /// Run folder.
    run: PathBuf,
    /// Rank to inspect once it is held [default: the first held rank].
    #[arg(long, value_name = "N")]
    rank: Option<usize>,
    /// Take the terminal from the parent process.
    #[arg(long, hide = true)]
    take_terminal: bool,
}

impl AttachArgs {
    /// Connects the terminal to the run until the user leaves or the run ends. Returns the exit code.
    pub fn run(&self) -> Result<u8> {
        if self.take_terminal {
            terminal::take();
        }
        converse(find(&self.run, self.rank)?)
            .map_err(TrainError::io("communicate with the run in", &self.run))?;
        Ok(0)
    }
}

struct Prompts {
    /// Each connection, with the first message received. Rank 0's process comes last; a rank held alone comes before.
    connections: Vec<(Connection, ToPrompt)>,
    focus: Option<usize>,
}

fn find(run: &Path, rank: Option<usize>) -> Result<Prompts> {
    let folder = Folder::open(run).ok();
    let owners = folder.as_ref().map(Folder::owners).unwrap_or_default();
    let Some(folder) = folder.filter(|_| !owners.is_empty()) else {
        // Fails with a better message if the folder holds no run.
        ended::look(run, false)?;
        return Err(CommandError::usage(format!(
            "no process of the run in {} is on this machine: the run has ended, or you need to attach on the machine of rank 0",
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
        Ok((_, Reply::Refused(reason))) => Err(CommandError::usage(format!("the run refuses: {reason}"))),
        Ok((_, Reply::Status(_) | Reply::Timeline(_))) => {
            Err(CommandError::usage("the run sent an unexpected reply: is it another build of kiln?"))
        }
        Err(error) => Err(TrainError::io("reach the run in", run)(error).into()),
    };
    let first = talk(&owners[0], None)?;
    let mut connections = Vec::new();
    match rank {
        // A rank that is held alone has its own prompt; while all ranks are held, the prompt is rank 0's.
        Some(rank) => {
            let Some(own) = owners.iter().find(|owner| owner.ranks.contains(&rank)) else {
                let text =
                    format!("rank {rank} has no process on this machine: attach on the machine of that rank");
                return Err(CommandError::usage(text));
            };
            if own.ranks != owners[0].ranks {
                connections.push(talk(own, Some(rank))?);
            }
        }
        // Looks for a rank that is held alone in another process. Processes that do not answer are skipped.
        None if first.1 == ToPrompt::Running => {
            let held = |owner| talk(owner, None).ok().filter(|(_, first)| *first != ToPrompt::Running);
            connections.extend(owners[1..].iter().find_map(held));
        }
        None => {}
    }
    connections.push(first);
    Ok(Prompts { connections, focus: rank })
}

fn terminal_state() -> Option<Termios> {
    termios::tcgetattr(stdin()).ok()
}

fn converse(Prompts { connections, focus }: Prompts) -> std::io::Result<()> {
    let other = std::io::Error::other::<ReadlineError>;
    let mut editor = DefaultEditor::new().map_err(other)?;
    let before = terminal_state();
    let is_terminal = stdin().is_terminal();
    let (asks, asked) = mpsc::channel();
    let mut streams = Vec::new();
    for (index, (connection, first)) in connections.into_iter().enumerate() {
        let (stream, mut replies) = connection.split()?;
        streams.push(stream);
        let (asks, mut printer, before) =
            (asks.clone(), editor.create_external_printer().ok(), before.clone());
        handle(first, index, &mut printer, &asks, before.as_ref());
        // If the run sends nothing more, this thread ends with the process.
        thread::Builder::new().name("kiln-prompt".to_owned()).spawn(move || {
            while let Ok(Reply::Prompt(message)) = replies.receive() {
                if handle(message, index, &mut printer, &asks, before.as_ref()).is_none() {
                    break;
                }
            }
            leave("the connection to the run was lost", before.as_ref());
        })?;
    }
    let mut prompts = Asked { texts: vec![RUNNING.to_owned(); streams.len()], asked };
    prompts.wait();
    if let Some(rank) = focus {
        prompts.wait_until_held();
        send(&streams[prompts.index()], &Typed::new(&format!("rank {rank}"))?)?;
        prompts.wait();
    }
    loop {
        // If commands are piped in, only the answers are shown.
        let shown = if is_terminal { prompts.text() } else { "" };
        let line = match editor.readline(shown) {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => {
                print_line("c continues, q saves and ends the run, Ctrl-D leaves the prompt");
                continue;
            }
            Err(ReadlineError::Eof) => return Ok(()),
            Err(error) => return Err(other(error)),
        };
        if !line.trim().is_empty() {
            let _ = editor.add_history_entry(&line);
        }
        prompts.catch_up();
        if focus.is_some() {
            // A line for one rank must not be sent while the run is not held.
            prompts.wait_until_held();
        }
        let was_held = prompts.is_held();
        if line.trim().is_empty() && !was_held {
            continue;
        }
        let typed = match Typed::new(&line) {
            Ok(typed) => typed,
            Err(error) => {
                print_line(&error.to_string());
                continue;
            }
        };
        send(&streams[prompts.index()], &typed)?;
        if was_held {
            prompts.wait();
            let mut is_told = !is_terminal;
            while !prompts.is_held() {
                if !is_told && !prompts.wait_for(SOON) {
                    print_line("the run continues; press Ctrl-C to leave it running");
                    is_told = true;
                } else if is_told {
                    prompts.wait();
                }
            }
        }
    }
}

struct Asked {
    texts: Vec<String>,
    asked: Receiver<(usize, String)>,
}

impl Asked {
    /// Returns the index of the first prompt at which a rank is held, else that of rank 0's prompt, the last one.
    fn index(&self) -> usize {
        let held = self.texts.iter().position(|text| text != RUNNING);
        held.unwrap_or(self.texts.len() - 1)
    }

    fn text(&self) -> &str {
        &self.texts[self.index()]
    }

    fn is_held(&self) -> bool {
        self.text() != RUNNING
    }

    /// Waits for a message from any prompt. The process ends when the run does.
    fn wait(&mut self) {
        if let Ok((index, text)) = self.asked.recv() {
            self.texts[index] = text;
        }
        self.catch_up();
    }

    fn wait_until_held(&mut self) {
        while !self.is_held() {
            self.wait();
        }
    }

    fn wait_for(&mut self, patience: Duration) -> bool {
        let said = self.asked.recv_timeout(patience);
        let is_said = said.is_ok();
        said.into_iter().for_each(|(index, text)| self.texts[index] = text);
        self.catch_up();
        is_said
    }

    fn catch_up(&mut self) {
        while let Ok((index, text)) = self.asked.try_recv() {
            self.texts[index] = text;
        }
    }
}

/// Shows a message of the prompt with `index`. Returns `None` when the run has ended the conversation.
fn handle<P: ExternalPrinter>(
    message: ToPrompt,
    index: usize,
    printer: &mut Option<P>,
    asks: &mpsc::Sender<(usize, String)>,
    before: Option<&Termios>,
) -> Option<()> {
    match message {
        ToPrompt::Text(text) => {
            // The text may come from another build, a file or a tokenizer, so its control characters are escaped.
            let text = printable(&text);
            let printed = printer.as_mut().is_some_and(|printer| printer.print(format!("{text}\n")).is_ok());
            if !printed {
                print_line(&text);
            }
        }
        ToPrompt::Ask(prompt) => asks.send((index, printable(&prompt).into_owned())).ok()?,
        ToPrompt::Running => asks.send((index, RUNNING.to_owned())).ok()?,
        ToPrompt::End => leave("the run has ended", before),
    }
    Some(())
}

fn leave(why: &str, before: Option<&Termios>) -> ! {
    if let Some(before) = before {
        let _ = termios::tcsetattr(stdin(), OptionalActions::Flush, before);
        // Ends the line with the prompt, at which the user was typing.
        print_line("");
    }
    print_line(why);
    std::process::exit(0)
}
