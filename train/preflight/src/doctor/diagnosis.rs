//! The doctor's findings as text and JSON.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use kiln_launch::place::Considered;
use kiln_train::version::version;

/// The doctor's findings.
#[derive(Clone, Debug)]
pub struct Diagnosis {
    /// The sources consulted for this process's place.
    pub(super) sources: Vec<Considered>,
    /// Findings about place, network, ports, machine and GPUs, and kernels, by title. The network is present
    /// only if there are other machines to connect to, and kernels only if requested.
    pub(super) sections: [(&'static str, Option<Section>); 6],
    /// `true` if training could start as far as the doctor can determine; otherwise the configuration is wrong.
    pub healthy: bool,
}

/// One section of a diagnosis.
#[derive(Clone, Debug, Default)]
pub(super) struct Section {
    /// The findings for JSON.
    pub(super) facts: Map<String, Value>,
    /// The findings as lines of text.
    pub(super) lines: Vec<String>,
}

impl Section {
    /// Creates a section that has text only.
    pub(super) fn in_words(lines: Vec<String>) -> Self {
        Section { facts: Map::new(), lines }
    }

    /// Creates a section. `facts` must be an object.
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
    /// The diagnosis as text.
    pub fn to_text(&self) -> String {
        let mut text = "sources of this process's place, in order\n".to_owned();
        // Writing to a `String` cannot fail.
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

    /// The diagnosis as JSON: an object with the facts of each section alongside its lines.
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
