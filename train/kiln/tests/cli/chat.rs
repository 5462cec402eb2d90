//! `kiln chat`.

use std::io::Write as _;
use std::process::Stdio;

use crate::support::{Ended, Workspace, tokenizer};
use crate::terminal::Terminal;

/// A template that adds no text, so that the conversation is one text.
const PLAIN: &str = "{% for m in messages %}{{ m.content }}{% endfor %}";

/// Returns a model that has learned to repeat the first letters of the alphabet, and the template [`PLAIN`].
fn trained(context: &str) -> Workspace {
    let workspace = Workspace::new();
    let ids = tokenizer().encode(&"abcdefg".repeat(250)).expect("ids");
    let ids: Vec<u16> = ids.into_iter().map(|id| u16::try_from(id).expect("a small id")).collect();
    workspace.write_data("data", &ids);
    let changes = [("train.steps", "40"), ("optim.lr", "3e-2"), ("model.context_length", context)];
    workspace.config("run.toml", &changes);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    workspace.write("plain.jinja", PLAIN);
    workspace
}

fn chat(workspace: &Workspace, input: &str, options: &[&str]) -> Ended {
    let arguments = ["chat", "run", "--temperature", "0", "--max-tokens", "5"];
    let mut command = workspace.command(&[&arguments, options].concat());
    let mut child = command.stdin(Stdio::piped()).spawn().expect("the binary starts");
    let mut pipe = child.stdin.take().expect("a pipe");
    // A program that refuses its arguments does not read.
    let _ = pipe.write_all(input.as_bytes());
    drop(pipe);
    workspace.end(child)
}

/// Returns the text after `prompt`, as `kiln generate` continues it.
fn continued(workspace: &Workspace, prompt: &str) -> String {
    let options = ["--temperature", "0", "--max-tokens", "5", "--prompt", prompt];
    let text = workspace.succeed(&[&["generate", "run"], &options[..]].concat());
    text.strip_prefix(prompt).expect("the prompt comes first").trim_end_matches('\n').to_owned()
}

#[test]
fn every_line_is_a_turn_of_one_conversation() {
    let workspace = trained("64");
    let plain = ["--chat-template", "plain.jinja"];
    let first = continued(&workspace, "abc");
    assert_eq!(first, "defga");
    let second = continued(&workspace, &format!("abc{first}bcd"));
    let ended = chat(&workspace, "abc\n\nbcd\r\n/clear\nabc\n/exit\nabc\n", &plain);
    assert_eq!((ended.code, ended.stdout), (Some(0), format!("{first}\n{second}\n{first}\n")));
    assert_eq!(ended.stderr.matches("[the answer ends after 5 tokens: --max-tokens").count(), 3);
    // Instructions come first, and are not forgotten.
    let options = [&plain[..], &["--system", "fga"]].concat();
    let ended = chat(&workspace, "bc\n/clear\nbc", &options);
    let answer = continued(&workspace, "fgabc");
    assert_eq!((ended.code, ended.stdout), (Some(0), format!("{answer}\n{answer}\n")));
    // A stop string ends an answer.
    let ended = chat(&workspace, "abc\n", &[&plain[..], &["--stop", "g"]].concat());
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("def\n", ""));
}

#[test]
fn a_full_context_drops_the_oldest_turns() {
    let workspace = trained("24");
    let plain = ["--chat-template", "plain.jinja"];
    // After two turns of 8 tokens, a third has room only without the first.
    let ended = chat(&workspace, "abc\nbcd\nefga\n", &plain);
    assert_eq!((ended.code, ended.stdout.lines().count()), (Some(0), 3), "{ended:?}");
    let second = ended.stdout.lines().nth(1).expect("an answer");
    let third = continued(&workspace, &format!("bcd{second}efga"));
    assert_eq!(ended.stdout.lines().nth(2), Some(third.as_str()));
    assert!(ended.stderr.contains("[the context of 24 tokens is full: the oldest turn was dropped]"));
    // A message that never fits is refused, and forgotten.
    let ended = chat(&workspace, &format!("{}\nabc\n", "abcdefg".repeat(4)), &plain);
    assert!(ended.stderr.contains("the message is too long: 28 of 24 tokens"), "{ended:?}");
    assert_eq!(ended.stdout, "defga\n");
}

#[test]
fn a_model_without_a_template_is_refused_with_advice() {
    let workspace = trained("64");
    let ended = chat(&workspace, "abc\n", &[]);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""));
    assert!(ended.stderr.contains("has no chat template") && ended.stderr.contains("--chat-template FILE"));
    // The model's own template needs no flag.
    workspace.succeed(&["export", "run", "--out", "hf"]);
    workspace.write("hf/chat_template.jinja", PLAIN);
    let mut command = workspace.command(&["chat", "hf", "--temperature", "0", "--max-tokens", "3"]);
    let mut child = command.stdin(Stdio::piped()).spawn().expect("the binary starts");
    child.stdin.take().expect("a pipe").write_all(b"abc").expect("it is read");
    assert_eq!(workspace.end(child).stdout, "def\n");
}

/// Ctrl-C ends the answer; at the prompt, it ends the program, as does Ctrl-D.
#[test]
fn an_interrupt_ends_the_answer() {
    let workspace = trained("100000");
    let arguments =
        ["chat", "run", "--chat-template", "plain.jinja", "--max-tokens", "90000", "--temperature", "0"];
    for end in ["\u{3}", "\u{4}"] {
        let mut command = workspace.command(&arguments);
        command.env_remove("NO_COLOR");
        let mut terminal = Terminal::start(crate::signals::with_defaults(&mut command));
        // It would keep the terminal open.
        drop(command);
        terminal.expect("> ");
        terminal.enter("abc");
        terminal.expect("defg");
        terminal.enter("\u{3}");
        terminal.expect("\u{1b}[2m[the answer was interrupted]\u{1b}[0m");
        terminal.expect("> ");
        terminal.enter("abc");
        terminal.expect("def");
        terminal.enter("\u{3}");
        terminal.expect("[the answer was interrupted]");
        terminal.expect("> ");
        terminal.enter(end);
        let (status, screen) = terminal.end();
        assert!(status.success(), "{status}: {screen}");
    }
}
