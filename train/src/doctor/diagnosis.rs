//! What the doctor has found, for people and for programs.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::place::Considered;
use crate::version::version;

/// What the doctor has found.
#[derive(Clone, Debug)]
pub struct Diagnosis {
    /// Who was asked where this process stands.
    pub(super) sources: Vec<Considered>,
    /// What was found of its place, the network, the ports, the machine and its GPUs, by title; of the network only
    /// if there are others to meet, and of kernels only if they were to be checked.
    pub(super) sections: [(&'static str, Option<Section>); 6],
    /// Whether training could start as far as one can tell; if not, the configuration is wrong.
    pub healthy: bool,
}

/// One part of a diagnosis.
#[derive(Clone, Debug, Default)]
pub(super) struct Section {
    /// For programs.
    pub(super) facts: Map<String, Value>,
    /// For people.
    pub(super) lines: Vec<String>,
}

impl Section {
    /// Something that there are only words for.
    pub(super) fn in_words(lines: Vec<String>) -> Self {
        Section { facts: Map::new(), lines }
    }

    /// `facts` is an object.
    pub(super) fn new(facts: Value, lines: Vec<String>) -> Self {
        let facts = match facts {
            Value::Object(facts) => facts,
            _ => Map::new(),
        };
        Section { facts, lines }
    }

    fn to_json(&self) -> Value {
        let mut facts = self.facts.clone();
        facts.insert("lines".to_owned(), json!(self.lines));
        Value::Object(facts)
    }
}

impl Diagnosis {
    /// Lines for people.
    pub fn to_text(&self) -> String {
        let mut text = "sources of this process's place, in order\n".to_owned();
        // Writing into a String cannot fail.
        for Considered { source, found, verdict } in &self.sources {
            let _ = writeln!(text, "  {:9} {verdict}", source.to_string());
            for (name, value) in found {
                let _ = writeln!(text, "            {name}={value}");
            }
        }
        for (title, section) in &self.sections {
            let Some(section) = section else { continue };
            let _ = writeln!(text, "\n{title}");
            for line in &section.lines {
                let _ = writeln!(text, "  {line}");
            }
        }
        text.truncate(text.trim_end().len());
        text
    }

    /// The same for programs: an object with the facts of each part beside its lines.
    pub fn to_json(&self) -> String {
        let source = |Considered { source, found, verdict }: &Considered| {
            let variables: Map<String, Value> =
                found.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
            json!({ "source": source.to_string(), "verdict": verdict, "variables": variables })
        };
        let mut diagnosis = json!({
            "version": version(),
            "healthy": self.healthy,
            "sources": self.sources.iter().map(source).collect::<Vec<_>>(),
        });
        for (title, section) in &self.sections {
            diagnosis[title.to_lowercase()] = json!(section.as_ref().map(Section::to_json));
        }
        format!("{diagnosis:#}")
    }
}
