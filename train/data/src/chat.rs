//! Chat templates: the text of a conversation in the format of a model.
//!
//! A template is a Jinja program that comes with the tokenizer. It runs in the environment that Hugging Face's
//! transformers gives it, within limits of time, memory, recursion and output.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use kiln_sys::files::{self, MAX_WHOLE};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{DataError, Result};

const TEMPLATE_FILE: &str = "chat_template.jinja";
const CONFIG_FILE: &str = "tokenizer_config.json";

/// Maximum size of a template in bytes; real ones have a few thousand.
const MAX_TEMPLATE: u64 = 1 << 20;
/// Maximum number of Jinja instructions in one rendering. A message takes about a hundred.
const FUEL: u64 = 10_000_000;
/// Maximum depth of nested macro calls.
const RECURSION: usize = 100;
/// Maximum bytes of the text of one conversation.
const MAX_OUTPUT: usize = 64 << 20;
/// Maximum time of one rendering. One instruction can take long, such as a replacement in a huge string.
const MAX_TIME: Duration = Duration::from_secs(10);
/// Maximum growth of the process' memory in bytes while a template runs.
const MAX_MEMORY: u64 = 1 << 30;
/// Interval between checks of time and memory.
const CHECK: Duration = Duration::from_millis(20);
/// Stack of the thread that runs a template, enough for `RECURSION`.
const STACK: usize = 16 << 20;

/// Characters around the text of a `{% generation %}` block. Unicode reserves them for internal use.
const START: char = '\u{FDD0}';
const END: char = '\u{FDD1}';

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The author: usually `system`, `user` or `assistant`. The template decides which roles exist.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// Creates a message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// The text of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rendered {
    pub(super) text: String,
    /// Byte ranges of `text` inside `{% generation %}` blocks, in order.
    pub(super) generation: Vec<Range<usize>>,
}

/// A model's chat template, which turns a conversation into text.
///
/// ```no_run
/// use kiln_data::{ChatTemplate, Message};
///
/// if let Some(template) = ChatTemplate::load("models/qwen".as_ref())? {
///     let prompt = template.render(&[Message::new("user", "Hello!")], true)?;
/// }
/// # Ok::<(), kiln_data::DataError>(())
/// ```
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    path: PathBuf,
    source: Arc<str>,
    /// Tokens by the names that templates use, such as `bos_token`.
    tokens: BTreeMap<String, String>,
    has_generation: bool,
}

impl ChatTemplate {
    /// Reads the template of the model in the folder `path`: `chat_template.jinja`, or `chat_template` of
    /// `tokenizer_config.json`. `path` may also name a `.jinja` file, next to a `tokenizer_config.json` or alone.
    /// Returns `None` for a folder without a template.
    ///
    /// # Errors
    ///
    /// If `path` does not exist, or a file cannot be read or is invalid.
    pub fn load(path: &Path) -> Result<Option<Self>> {
        let (folder, file) = match path.is_file() {
            true => (path.parent().unwrap_or(Path::new("")), path.to_path_buf()),
            false => (path, path.join(TEMPLATE_FILE)),
        };
        let exists = |path: &Path| path.try_exists().map_err(DataError::io("open", path));
        if !exists(path)? {
            return Err(DataError::Missing { path: path.to_path_buf() });
        }
        let config_path = folder.join(CONFIG_FILE);
        let config: TokenizerConfig = match exists(&config_path)? {
            true => {
                let content =
                    files::read(&config_path, MAX_WHOLE).map_err(DataError::io("read", &config_path))?;
                serde_json::from_slice(&content).map_err(|error| DataError::ChatTemplate {
                    path: config_path.clone(),
                    problem: error.to_string(),
                })?
            }
            false => TokenizerConfig::default(),
        };
        let tokens = config.tokens();
        if exists(&file)? {
            let content = files::read(&file, MAX_TEMPLATE).map_err(DataError::io("read", &file))?;
            let source = String::from_utf8(content).map_err(|error| DataError::ChatTemplate {
                path: file.clone(),
                problem: error.to_string(),
            })?;
            return Self::new(source, tokens, file).map(Some);
        }
        match config.chat_template {
            Some(Templates::One(source)) => Self::new(source, tokens, config_path).map(Some),
            Some(Templates::Named(named)) => {
                let default = named.into_iter().find(|named| named.name == "default");
                let default = default.ok_or_else(|| DataError::ChatTemplate {
                    path: config_path.clone(),
                    problem: "chat_template is a list without the name \"default\"".to_owned(),
                })?;
                Self::new(default.template, tokens, config_path).map(Some)
            }
            None => Ok(None),
        }
    }

    /// Compiles a template. `tokens`: special tokens by the names that templates use, such as `bos_token`. `path`: the
    /// file that errors name.
    ///
    /// # Errors
    ///
    /// If the template is too long or invalid.
    pub fn new(source: String, tokens: BTreeMap<String, String>, path: PathBuf) -> Result<Self> {
        let failed = |problem: String| DataError::ChatTemplate { path: path.clone(), problem };
        if source.len() as u64 > MAX_TEMPLATE {
            return Err(failed(format!("it has {} bytes; the maximum is {MAX_TEMPLATE}", source.len())));
        }
        let (calls, has_generation) = with_calls(&source);
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| failed(describe(&error)))?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(format_as_python);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_function("kiln_generation", generation);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned("chat_template", calls).map_err(|error| failed(describe(&error)))?;
        let environment = Arc::new(environment);
        Ok(Self { environment, path, source: source.into(), tokens, has_generation })
    }

    /// Returns the text of a conversation. `add_generation_prompt`: end with the start of the assistant's next turn.
    /// The text includes the special tokens, also the one that starts a text: encode it with special tokens as tokens
    /// and without adding any.
    ///
    /// # Errors
    ///
    /// If the template refuses the conversation, fails, or exceeds its limits.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        Ok(self.render_marked(messages, &[(messages.len(), add_generation_prompt)])?.remove(0).text)
    }

    /// Returns the path of the file that has the template.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the source of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the SHA-256 of the template's source, in hexadecimal.
    pub(super) fn digest(&self) -> String {
        format!("{:x}", Sha256::digest(self.source()))
    }

    /// Returns the spelling of the token with the name `name`, such as `eos_token`.
    pub fn token(&self, name: &str) -> Option<&str> {
        self.tokens.get(name).map(String::as_str)
    }

    /// Reports whether the template marks the assistant's text itself, with `{% generation %}`.
    pub(super) fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// Renders prefixes of a conversation, each with or without a generation prompt.
    pub(super) fn render_marked(
        &self,
        messages: &[Message],
        prefixes: &[(usize, bool)],
    ) -> Result<Vec<Rendered>> {
        let failed = |problem: String| DataError::ChatTemplate { path: self.path.clone(), problem };
        if messages.iter().any(|message| message.content.contains([START, END])) {
            let problem = format!("a message contains {START:?} or {END:?}, which is not a character");
            return Err(failed(problem));
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let (this, messages, prefixes) = (self.clone(), messages.to_vec(), prefixes.to_vec());
        // A template cannot be interrupted, and its instructions take any amount of memory. Its thread is abandoned
        // when it exceeds a limit.
        let run = move || {
            let rendered: Result<Vec<_>, _> = prefixes
                .iter()
                .map(|(count, prompt)| this.render_here(&messages[..*count], *prompt))
                .collect();
            // The result of an abandoned thread has no receiver.
            let _ = sender.send(rendered);
        };
        let builder = thread::Builder::new().name("chat-template".to_owned()).stack_size(STACK);
        builder.spawn(run).map_err(|error| failed(format!("cannot start a thread: {error}")))?;
        let (start, memory) = (Instant::now(), resident_bytes());
        loop {
            match receiver.recv_timeout(CHECK) {
                Ok(rendered) => return rendered.map_err(|failure| failure.error(&self.path)),
                Err(RecvTimeoutError::Disconnected) => return Err(failed("it panics".to_owned())),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if start.elapsed() > MAX_TIME {
                let problem = format!("it takes longer than {} s", MAX_TIME.as_secs());
                return Err(Failure::Limit(problem).error(&self.path));
            }
            if let (Some(memory), Some(now)) = (memory, resident_bytes())
                && now.saturating_sub(memory) > MAX_MEMORY
            {
                let problem = format!("it takes more than {} MiB of memory", MAX_MEMORY >> 20);
                return Err(Failure::Limit(problem).error(&self.path));
            }
        }
    }

    /// Renders a conversation on this thread.
    fn render_here(&self, messages: &[Message], add_generation_prompt: bool) -> Result<Rendered, Failure> {
        let template = self.environment.get_template("chat_template").map_err(|error| Failure::of(&error))?;
        let messages = messages.iter().map(|Message { role, content }| {
            Value::from_pairs([("role", role.as_str()), ("content", content.as_str())])
        });
        let given = [
            ("messages", messages.collect::<Value>()),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
        ];
        let tokens = self.tokens.iter().map(|(name, token)| (name.as_str(), Value::from(token.as_str())));
        let context = Value::from_pairs(given.into_iter().chain(tokens));
        let mut output = Limited(Vec::new());
        let rendered = template.render_captured_to(context, &mut output);
        if output.0.len() > MAX_OUTPUT {
            return Err(Failure::Limit(format!("its output exceeds {} MiB", MAX_OUTPUT >> 20)));
        }
        rendered.map_err(|error| Failure::of(&error))?;
        let text = String::from_utf8(output.0).map_err(|error| Failure::Refused(error.to_string()))?;
        Ok(if self.has_generation { unmark(&text) } else { Rendered { text, generation: Vec::new() } })
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("path", &self.path).field("tokens", &self.tokens).finish()
    }
}

/// A failed rendering.
enum Failure {
    /// The template refuses the conversation, or is wrong.
    Refused(String),
    /// The template exceeds a limit.
    Limit(String),
}

impl Failure {
    fn of(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::OutOfFuel => Self::Limit(describe(error)),
            _ => Self::Refused(describe(error)),
        }
    }

    fn error(self, path: &Path) -> DataError {
        let path = path.to_path_buf();
        match self {
            Self::Refused(problem) => DataError::ChatTemplate { path, problem },
            Self::Limit(problem) => DataError::ChatTemplateLimit { path, problem },
        }
    }
}

/// Part of `tokenizer_config.json`.
#[derive(Default, Deserialize)]
struct TokenizerConfig {
    chat_template: Option<Templates>,
    #[serde(flatten)]
    others: BTreeMap<String, serde_json::Value>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "chat_template is neither a template nor a list of named templates")]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl TokenizerConfig {
    /// Returns the special tokens. The file has their spelling, or an object with it.
    fn tokens(&self) -> BTreeMap<String, String> {
        let named = self.others.iter().filter(|(name, _)| name.ends_with("_token"));
        let spelled = named.filter_map(|(name, value)| {
            let spelling = value.as_str().or_else(|| value.get("content")?.as_str())?;
            Some((name.clone(), spelling.to_owned()))
        });
        spelled.collect()
    }
}

/// Keeps at most [`MAX_OUTPUT`] bytes, and fails at the next one.
struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        match self.0.len() > MAX_OUTPUT {
            true => Err(io::Error::other("too much output")),
            false => Ok(bytes.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces the tags `generation` and `endgeneration` by those of a call block, as transformers does when it parses a
/// template: the block's text becomes the result of a function. Returns whether there are any.
fn with_calls(source: &str) -> (String, bool) {
    let (mut calls, mut rest, mut found) = (String::with_capacity(source.len()), source, false);
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        calls += before;
        let name = tag.trim_start_matches(['-', '+']).trim_start();
        let word: usize =
            name.chars().take_while(|c| c.is_alphanumeric() || *c == '_').map(char::len_utf8).sum();
        let call = match &name[..word] {
            "generation" => "call kiln_generation()",
            "endgeneration" => "endcall",
            _ => {
                rest = tag;
                continue;
            }
        };
        found = true;
        calls += &tag[..tag.len() - name.len()];
        calls += call;
        rest = &name[word..];
    }
    calls += rest;
    (calls, found)
}

/// Removes the marks around the text of `{% generation %}` blocks.
fn unmark(marked: &str) -> Rendered {
    let (mut text, mut generation, mut start) = (String::with_capacity(marked.len()), Vec::new(), 0);
    for letter in marked.chars() {
        match letter {
            START => start = text.len(),
            END => generation.push(start..text.len()),
            letter => text.push(letter),
        }
    }
    Rendered { text, generation }
}

fn generation(state: &mut State, options: Kwargs) -> Result<String, Error> {
    let caller: Value = options.get("caller")?;
    let text = caller.call(state, &[])?;
    Ok(format!("{START}{text}{END}"))
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// Formats the local time as `datetime.now().strftime` in Python.
fn strftime_now(format: String) -> Result<String, Error> {
    use std::fmt::Write as _;
    let mut text = String::new();
    write!(text, "{}", chrono::Local::now().format(&format)).map_err(|_| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now: the format {format:?} is invalid"))
    })?;
    Ok(text)
}

/// Writes JSON as Python's `json.dumps` with `ensure_ascii=False`, without the escapes for HTML of Jinja's own filter.
fn to_json(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut json = Vec::new();
    let written = match indent {
        Some(width) => {
            let indent = vec![b' '; width.min(64)];
            let pretty = serde_json::ser::PrettyFormatter::with_indent(&indent);
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, pretty))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, Spaced)),
    };
    let failed = |problem: String| Error::new(ErrorKind::BadSerialization, problem);
    written.map_err(|error| failed(error.to_string()))?;
    String::from_utf8(json).map_err(|error| failed(error.to_string()))
}

/// Separators of Python's `json.dumps`.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Prints a value as Python does, whose constants have capitals.
fn format_as_python(output: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let constant = match bool::try_from(value.clone()) {
        _ if value.is_none() => "None",
        Ok(true) => "True",
        Ok(false) => "False",
        Err(_) => return minijinja::escape_formatter(output, state, value),
    };
    output.write_str(constant).map_err(Error::from)
}

/// Returns what failed, and the line of the template.
fn describe(error: &Error) -> String {
    let mut text = match error.kind() {
        ErrorKind::OutOfFuel => format!("it takes more than {FUEL} instructions"),
        kind => error.detail().map_or_else(|| kind.to_string(), str::to_owned),
    };
    if let Some(line) = error.line() {
        text += &format!(" (line {line} of the template)");
    }
    text
}

/// Returns the memory of this process in bytes, where the system reports it.
fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests;
