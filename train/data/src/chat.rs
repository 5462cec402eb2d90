//! Chat templates: the text of a conversation in the format of a model.
//!
//! A template is a Jinja program that comes with the tokenizer. It runs in the environment that Hugging Face's
//! transformers gives it, and its time, memory, output and recursion are limited.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_sys::files::{self, MAX_WHOLE};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, context};
use serde::{Deserialize, Serialize};

use super::{DataError, Result};

const TEMPLATE_FILE: &str = "chat_template.jinja";
const CONFIG_FILE: &str = "tokenizer_config.json";

/// Maximum size of a template in bytes; real ones have a few thousand.
const MAX_TEMPLATE: u64 = 1 << 20;
/// Work that one rendering may do: an instruction costs 1, and so do 64 bytes of any text that it makes. A message
/// takes about a hundred instructions.
const FUEL: u64 = 4_000_000;
/// Maximum depth of nested macro calls.
const RECURSION: usize = 100;

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
/// let template = ChatTemplate::load("models/qwen")?;
/// let prompt = template.render(&[Message::new("user", "Hello!")], true)?;
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
    /// Reads the template of the model in `folder`: `chat_template.jinja`, or `chat_template` of
    /// `tokenizer_config.json`. `folder` may also name a `.jinja` file, next to a `tokenizer_config.json` or alone.
    ///
    /// # Errors
    ///
    /// If there is no template, or a file cannot be read or is invalid.
    pub fn load(folder: impl AsRef<Path>) -> Result<Self> {
        let path = folder.as_ref();
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
            return Self::new(source, tokens, file);
        }
        match config.chat_template {
            Some(Templates::One(source)) => Self::new(source, tokens, config_path),
            Some(Templates::Named(named)) => {
                let default = named.into_iter().find(|named| named.name == "default");
                let default = default.ok_or_else(|| DataError::ChatTemplate {
                    path: config_path.clone(),
                    problem: "chat_template is a list without the name \"default\"".to_owned(),
                })?;
                Self::new(default.template, tokens, config_path)
            }
            None => Err(DataError::NoChatTemplate { folder: folder.to_path_buf() }),
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
        environment.set_unknown_method_callback(call_python_method);
        environment.set_formatter(format_as_python);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_function("kiln_generation", generation);
        environment.add_filter("tojson", to_json);
        environment.add_filter("format", format_printf);
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

    /// Returns the spelling of the token with the name `name`, such as `eos_token`.
    pub fn token(&self, name: &str) -> Option<&str> {
        self.tokens.get(name).map(String::as_str)
    }

    /// Reports whether the template marks the assistant's text itself, with `{% generation %}`.
    pub(super) fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// Reports whether the template prints the current date, so that its text differs from day to day.
    pub fn has_date(&self) -> bool {
        self.source.contains("strftime_now")
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
        prefixes
            .iter()
            .map(|(count, prompt)| self.render_prefix(&messages[..*count], *prompt).map_err(failed))
            .collect()
    }

    fn render_prefix(&self, messages: &[Message], add_generation_prompt: bool) -> Result<Rendered, String> {
        let template = self.environment.get_template("chat_template").map_err(|error| describe(&error))?;
        let message = |message: &Message| {
            Value::from_pairs([("role", message.role.as_str()), ("content", message.content.as_str())])
        };
        let messages: Vec<_> = messages.iter().map(message).collect();
        let given = context! {
            messages => messages,
            add_generation_prompt => add_generation_prompt,
            tools => Value::from(()),
            documents => Value::from(()),
        };
        let tokens = self.tokens.iter().map(|(name, token)| (name.as_str(), token.as_str()));
        let context = context! { ..given, ..Value::from_pairs(tokens) };
        let text = template.render(context).map_err(|error| describe(&error))?;
        Ok(if self.has_generation { unmark(&text) } else { Rendered { text, generation: Vec::new() } })
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("path", &self.path).field("tokens", &self.tokens).finish()
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
        Ok(value) if matches!(value, true) => "True",
        Ok(_) => "False",
        Err(_) => return minijinja::escape_formatter(output, state, value),
    };
    output.write_str(constant).map_err(Error::from)
}

/// Calls a method of Python's strings, lists and dictionaries.
fn call_python_method(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if let ("format", Some(format)) = (method, value.as_str()) {
        check_width(format)?;
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)
}

/// Jinja's filter `format`.
fn format_printf(state: &mut State, format: Value, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    check_width(format.as_str().unwrap_or_default())?;
    minijinja::filters::format(state, &format, arguments)
}

/// Refuses fields of more than 9,999 columns: Jinja's work does not include them.
fn check_width(format: &str) -> Result<(), Error> {
    let mut runs = format.split(|letter: char| !letter.is_ascii_digit());
    match runs.any(|digits| digits.len() > 4) {
        true => Err(Error::new(ErrorKind::InvalidOperation, "the field is too wide")),
        false => Ok(()),
    }
}

/// Returns what failed, and the line of the template.
fn describe(error: &Error) -> String {
    let mut text = match error.kind() {
        ErrorKind::OutOfFuel => {
            format!("it does more work than one conversation needs (limit: {FUEL} instructions)")
        }
        kind => error.detail().map_or_else(|| kind.to_string(), str::to_owned),
    };
    if let Some(line) = error.line() {
        text += &format!(" (line {line} of the template)");
    }
    text
}

#[cfg(test)]
mod tests;
