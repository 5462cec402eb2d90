//! Conversations in the formats of training data: OpenAI's `messages`, ShareGPT's `conversations`, and the columns
//! `instruction`, `input` and `output` of Alpaca. They are lines of a `.jsonl` file or rows of a `.parquet` file.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;

use serde_json::{Map, Value};

use super::listing::{Format, Listed};
use super::text_file::BYTE_ORDER_MARK;
use super::{DataError, Message, Result, describe_json};

/// Maximum bytes of a line.
const MAX_LINE: u64 = 64 << 20;

/// Keys that make a message or conversation more than text.
const NOT_TEXT: [&str; 12] = [
    "tools",
    "functions",
    "tool_calls",
    "function_call",
    "tool_call_id",
    "image",
    "images",
    "audio",
    "audios",
    "video",
    "videos",
    "documents",
];

/// A line or row, and its conversation or the reason why it has none.
pub(super) struct Entry {
    /// Number of the line or row, from 1.
    pub(super) line: u64,
    pub(super) conversation: Result<Vec<Message>, String>,
}

/// Opens a file of conversations. The iterator ends after an error of the file itself.
pub(super) fn read(listed: &Listed) -> Result<Box<dyn Iterator<Item = Result<Entry>> + Send>> {
    let path = listed.path.clone();
    let refused = |problem: &str| {
        let problem = problem.to_owned();
        Err(DataError::NotConversations { path: path.clone(), problem })
    };
    if listed.stream.is_some() {
        return refused("conversations are read from regular files only");
    }
    match listed.format {
        Format::JsonLines => lines(&path),
        #[cfg(feature = "parquet")]
        Format::Parquet => rows(&path),
        #[cfg(not(feature = "parquet"))]
        Format::Parquet => Err(DataError::ParquetDisabled { path }),
        Format::Text | Format::Builtin(_) => refused("conversations are .jsonl, .ndjson or .parquet files"),
    }
}

fn lines(path: &Path) -> Result<Box<dyn Iterator<Item = Result<Entry>> + Send>> {
    let path = path.to_path_buf();
    let file = File::open(&path).map_err(DataError::io("open", &path))?;
    let (mut reader, mut number, mut buffer) = (BufReader::with_capacity(1 << 16, file), 0, Vec::new());
    let mut next = move || -> Result<Option<Entry>> {
        loop {
            buffer.clear();
            let read = (&mut reader).take(MAX_LINE + 1).read_until(b'\n', &mut buffer);
            if read.map_err(DataError::io("read", &path))? == 0 {
                return Ok(None);
            }
            number += 1;
            if buffer.len() as u64 > MAX_LINE {
                let problem = format!("the line is longer than {} MiB", MAX_LINE >> 20);
                return Err(DataError::Conversation { path: path.clone(), line: number, problem });
            }
            let mark = if number == 1 { BYTE_ORDER_MARK } else { b"" };
            let line = buffer.strip_prefix(mark).unwrap_or(&buffer);
            if line.trim_ascii().is_empty() {
                continue;
            }
            let value = serde_json::from_slice(line).map_err(|error| describe_json(&error));
            return Ok(Some(Entry { line: number, conversation: value.and_then(parse) }));
        }
    };
    Ok(Box::new(std::iter::from_fn(move || next().transpose())))
}

#[cfg(feature = "parquet")]
fn rows(path: &Path) -> Result<Box<dyn Iterator<Item = Result<Entry>> + Send>> {
    use ::parquet::file::reader::SerializedFileReader;
    use ::parquet::record::{Field, reader::RowIter};

    fn value(field: &Field) -> Value {
        match field {
            Field::Null => Value::Null,
            Field::Str(text) => Value::String(text.clone()),
            Field::ListInternal(list) => list.elements().iter().map(value).collect(),
            Field::Group(row) => {
                row.get_column_iter().map(|(name, field)| (name.clone(), value(field))).collect()
            }
            // Other columns are not text of a conversation, and only their presence matters.
            other => Value::String(other.to_string()),
        }
    }

    let path = path.to_path_buf();
    let failed = {
        let path = path.clone();
        move |problem: ::parquet::errors::ParquetError| DataError::Parquet {
            path: path.clone(),
            problem: problem.to_string(),
        }
    };
    let file = File::open(&path).map_err(DataError::io("open", &path))?;
    let reader = SerializedFileReader::new(file).map_err(&failed)?;
    let rows = RowIter::from_file_into(Box::new(reader));
    Ok(Box::new(rows.zip(1..).map(move |(row, line)| {
        let row = row.map_err(&failed)?;
        let columns = row.get_column_iter().map(|(name, field)| (name.clone(), value(field)));
        Ok(Entry { line, conversation: parse(columns.collect()) })
    })))
}

/// Returns the messages of a conversation.
fn parse(value: Value) -> Result<Vec<Message>, String> {
    let Value::Object(fields) = value else {
        return Err(
            "expected an object with `messages`, `conversations`, or `instruction` and `output`".to_owned()
        );
    };
    refuse_more_than_text(&fields)?;
    let is_given = |key: &str| fields.get(key).is_some_and(|value| !value.is_null());
    if let Some(key) = ["messages", "conversations"].into_iter().find(|key| is_given(key)) {
        let Some(Value::Array(messages)) = fields.get(key) else {
            return Err(format!("`{key}` is not a list"));
        };
        if messages.is_empty() {
            return Err(format!("`{key}` is empty"));
        }
        let messages = messages.iter().enumerate();
        return messages
            .map(|(index, value)| {
                message(value).map_err(|problem| format!("message {}: {problem}", index + 1))
            })
            .collect();
    }
    if is_given("instruction") {
        let text = |key: &str| match fields.get(key) {
            Some(Value::String(text)) => Ok(text.clone()),
            Some(Value::Null) | None if key == "input" => Ok(String::new()),
            _ => Err(format!("`{key}` is not a string")),
        };
        let (instruction, input, output) = (text("instruction")?, text("input")?, text("output")?);
        let request = if input.is_empty() { instruction } else { format!("{instruction}\n\n{input}") };
        return Ok(vec![Message::new("user", request), Message::new("assistant", output)]);
    }
    Err("there is neither `messages`, nor `conversations`, nor `instruction` and `output`".to_owned())
}

fn refuse_more_than_text(fields: &Map<String, Value>) -> Result<(), String> {
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    };
    match NOT_TEXT.iter().find(|key| fields.get(**key).is_some_and(|value| !is_empty(value))) {
        Some(key) => Err(format!("`{key}` is not supported: conversations consist of text only")),
        None => Ok(()),
    }
}

fn message(value: &Value) -> Result<Message, String> {
    let fields = value.as_object().ok_or("expected an object with `role` and `content`")?;
    refuse_more_than_text(fields)?;
    // ShareGPT names its fields `from` and `value`.
    let field = |names: [&str; 2]| names.into_iter().find_map(|name| fields.get(name));
    let role = field(["role", "from"]).ok_or("the field `role` is missing")?;
    let role = match role.as_str().ok_or("`role` is not a string")? {
        "system" => "system",
        "user" | "human" => "user",
        "assistant" | "gpt" => "assistant",
        "tool" | "function" | "ipython" | "observation" | "function_call" => {
            return Err("messages of tools are not supported: conversations consist of text only".to_owned());
        }
        other => {
            return Err(format!("the role {other:?} is unknown; use \"system\", \"user\" or \"assistant\""));
        }
    };
    match field(["content", "value"]) {
        Some(Value::String(content)) => Ok(Message::new(role, content.as_str())),
        Some(Value::Array(parts)) if parts.is_empty() => Err("`content` is an empty list".to_owned()),
        Some(Value::Array(parts)) => {
            Ok(Message::new(role, parts.iter().map(part).collect::<Result<String, _>>()?))
        }
        Some(_) => Err("`content` is not a string".to_owned()),
        None => Err("the field `content` is missing".to_owned()),
    }
}

/// Returns the text of a part of a message.
fn part(value: &Value) -> Result<&str, String> {
    match value.get("type").and_then(Value::as_str) {
        Some("text") => value.get("text").and_then(Value::as_str).ok_or("a part has no `text`".to_owned()),
        Some(other) => {
            Err(format!("a part of type {other:?} is not supported: conversations consist of text only"))
        }
        None => Err("a part of `content` has no `type`".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Vec<(String, String)>, String> {
        let messages = parse(serde_json::from_str(line).unwrap())?;
        Ok(messages.into_iter().map(|message| (message.role, message.content)).collect())
    }

    #[test]
    fn all_formats_are_read() {
        let expected = [("user", "a"), ("assistant", "b")].map(|(r, c)| (r.to_owned(), c.to_owned()));
        for line in [
            r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": []}"#,
            r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": 7}"#,
            r#"{"instruction": "a", "input": "", "output": "b"}"#,
            r#"{"instruction": "a", "output": "b"}"#,
            r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b", "tool_calls": null}]}"#,
        ] {
            assert_eq!(parsed(line).unwrap(), expected, "{line}");
        }
        assert_eq!(parsed(r#"{"instruction": "a", "input": "x", "output": "b"}"#).unwrap()[0].1, "a\n\nx");
    }

    #[test]
    fn more_than_text_is_refused() {
        for (line, expected) in [
            ("[]", "expected an object"),
            ("{}", "neither `messages`"),
            (r#"{"messages": []}"#, "`messages` is empty"),
            (r#"{"messages": "a"}"#, "not a list"),
            (r#"{"messages": [{"role": "user"}]}"#, "message 1: the field `content` is missing"),
            (r#"{"messages": [{"role": "user", "content": []}]}"#, "an empty list"),
            (r#"{"messages": [{"role": "user", "content": null}]}"#, "`content` is not a string"),
            (r#"{"messages": [{"role": "critic", "content": "a"}]}"#, "the role \"critic\" is unknown"),
            (r#"{"messages": [{"role": "tool", "content": "a"}]}"#, "messages of tools"),
            (r#"{"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}"#, "`tool_calls`"),
            (
                r#"{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}"#,
                "`tools` is not supported",
            ),
            (r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#, "type \"image_url\""),
            (r#"{"instruction": "a", "output": null}"#, "`output` is not a string"),
        ] {
            let problem = parsed(line).unwrap_err();
            assert!(problem.contains(expected), "{line}: {problem}");
        }
    }
}
