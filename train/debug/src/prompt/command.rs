use std::path::PathBuf;
use std::str::FromStr;

use super::breakpoint::{Breakpoint, BreakpointError};
use super::slice::Slice;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Command {
    Help,
    Where,
    Ranks,
    Rank(usize),
    List,
    Print(Name, Option<Slice>),
    Histogram(Name),
    Hash(Name),
    Save(Name, PathBuf),
    Diff(Name, PathBuf),
    Batch,
    Params(String),
    Next,
    Step,
    UntilEnd,
    Continue,
    Clear,
    Break(Breakpoint),
    Breakpoints,
    /// Deletes the breakpoint with this number, from 1; 0 deletes all.
    Delete(usize),
    Set(String, String),
    Checkpoint,
    Pause,
    Quit,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Name {
    Here,
    /// A parameter, its gradient, or a slot of the optimizer: `name`, `name.grad`, `name.exp_avg`.
    Parameter(String),
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}; h lists the commands")]
pub(super) struct CommandError(String);

pub(super) const HELP: &str = "\
where, w             position of this rank       ranks              positions of all ranks
list, l              nearby points               rank N             inspect another rank
p [NAME][[0, :8]]    print a tensor: shape, statistics, first values [default: the tensor here]
hist [NAME]          print its histogram         hash [NAME]        print its checksum
save NAME FILE.npy   write it to a file          diff NAME FILE.npy compare it with a file
batch                print the tokens            params [PATTERN]   list parameter names and shapes
n                    step over to the next point s                  step into the next point
u                    run to the end of the place c                  continue to the next breakpoint
break WHERE [rank N [run]]                       breaks, delete N   list and remove breakpoints
clear                release the other ranks     set KEY = VALUE    change optim.lr or optim.grad_clip
checkpoint           save after this step        q                  save and end the run
NAME is `here`, a parameter such as layers.0.ffn.up_proj.weight, or one with .grad or a slot of
the optimizer appended, such as .exp_avg. An empty line repeats n, s and u.";

impl FromStr for Name {
    type Err = CommandError;

    fn from_str(text: &str) -> Result<Self, CommandError> {
        Ok(match text {
            "" | "here" | "input" | "output" | "gradient" => Name::Here,
            name => Name::Parameter(name.to_owned()),
        })
    }
}

impl FromStr for Command {
    type Err = CommandError;

    fn from_str(line: &str) -> Result<Self, CommandError> {
        let wrong = |text: String| CommandError(text);
        let line = line.trim();
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let number =
            |what: &str| rest.parse().map_err(|_| wrong(format!("{word} takes {what}, found \"{rest}\"")));
        let with_file = || {
            let (name, file) = rest
                .rsplit_once(char::is_whitespace)
                .ok_or_else(|| wrong(format!("{word} takes a name and a file, such as {word} here x.npy")))?;
            Ok::<_, CommandError>((name.trim().parse()?, PathBuf::from(file)))
        };
        Ok(match word {
            "h" | "help" | "?" => Command::Help,
            "w" | "where" => Command::Where,
            "ranks" => Command::Ranks,
            "rank" => Command::Rank(number("a rank number")?),
            "l" | "list" => Command::List,
            "p" | "print" => {
                let (name, slice) = match rest.split_once('[') {
                    None => (rest, None),
                    Some((name, slice)) => {
                        let inside = slice.strip_suffix(']');
                        let inside = inside.ok_or_else(|| wrong(format!("unclosed [ in \"{rest}\"")))?;
                        (
                            name.trim(),
                            Some(inside.parse::<Slice>().map_err(|error| wrong(error.to_string()))?),
                        )
                    }
                };
                Command::Print(name.parse()?, slice)
            }
            "hist" => Command::Histogram(rest.parse()?),
            "hash" => Command::Hash(rest.parse()?),
            "save" => with_file().map(|(name, file)| Command::Save(name, file))?,
            "diff" => with_file().map(|(name, file)| Command::Diff(name, file))?,
            "batch" => Command::Batch,
            "params" => Command::Params(rest.to_owned()),
            "n" | "next" => Command::Next,
            "s" | "step" => Command::Step,
            "u" | "until" => Command::UntilEnd,
            "c" | "continue" => Command::Continue,
            "clear" => Command::Clear,
            "b" | "break" => {
                Command::Break(rest.parse().map_err(|error: BreakpointError| wrong(error.to_string()))?)
            }
            "breaks" => Command::Breakpoints,
            "delete" if rest == "all" => Command::Delete(0),
            "delete" => match number("a breakpoint number or all")? {
                0 => return Err(wrong("breakpoints are numbered from 1".to_owned())),
                number => Command::Delete(number),
            },
            "set" => {
                let (key, value) = rest
                    .split_once('=')
                    .ok_or_else(|| wrong("set takes KEY = VALUE, such as set optim.lr = 1e-4".to_owned()))?;
                Command::Set(key.trim().to_owned(), value.trim().to_owned())
            }
            "checkpoint" => Command::Checkpoint,
            "pause" => Command::Pause,
            "q" | "quit" => Command::Quit,
            word => return Err(wrong(format!("\"{word}\" is not a command"))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands() {
        let parsed = |line: &str| line.parse::<Command>();
        assert_eq!(parsed("  w "), Ok(Command::Where));
        assert_eq!(parsed("p"), Ok(Command::Print(Name::Here, None)));
        let weight = Name::Parameter("layers.0.ffn.up_proj.weight".to_owned());
        let slice = "0, :8".parse().expect("a slice");
        assert_eq!(
            parsed("p layers.0.ffn.up_proj.weight[0, :8]"),
            Ok(Command::Print(weight.clone(), Some(slice)))
        );
        assert_eq!(
            parsed("save layers.0.ffn.up_proj.weight w.npy"),
            Ok(Command::Save(weight, PathBuf::from("w.npy")))
        );
        assert_eq!(parsed("set optim.lr=1e-4"), Ok(Command::Set("optim.lr".to_owned(), "1e-4".to_owned())));
        assert_eq!(parsed("delete all"), Ok(Command::Delete(0)));
        let Ok(Command::Break(breakpoint)) = parsed("break backward:layers.1@3 rank 2 run") else {
            panic!("a breakpoint")
        };
        assert_eq!(breakpoint.to_string(), "backward:layers.1@3 rank 2 run");
        let Ok(Command::Break(breakpoint)) = parsed("b grad_norm > 10") else { panic!("a breakpoint") };
        assert_eq!(breakpoint.to_string(), "grad_norm > 10");
        for (line, problem) in [
            ("walk", "\"walk\" is not a command"),
            ("rank two", "found \"two\""),
            ("p here[0", "unclosed ["),
            ("save here", "takes a name and a file"),
            ("set lr", "KEY = VALUE"),
            ("break", "is not a breakpoint"),
            ("break step rank x", "missing rank number"),
            ("delete 0", "numbered from 1"),
        ] {
            let error = parsed(line).expect_err(line).to_string();
            assert!(error.contains(problem) && error.ends_with("h lists the commands"), "{error}");
        }
    }
}
