//! Interned names and texts: each is stored once in a trace and represented by a number.

use std::collections::HashMap;

use super::proto::{InternedData, InternedName, InternedString};

/// The names that one writer of packets has used.
#[derive(Default)]
pub(super) struct Names {
    events: HashMap<String, u64>,
    categories: HashMap<String, u64>,
    annotations: HashMap<String, u64>,
    texts: HashMap<String, u64>,
    /// Names used for the first time since the last [`Names::take_new`].
    new: InternedData,
}

/// Returns the number of `name`, and whether it is new. Zero represents no name.
fn number(known: &mut HashMap<String, u64>, name: &str) -> (u64, bool) {
    match known.get(name) {
        Some(number) => (*number, false),
        None => {
            let number = known.len() as u64 + 1;
            known.insert(name.to_owned(), number);
            (number, true)
        }
    }
}

fn named(known: &mut HashMap<String, u64>, new: &mut Vec<InternedName>, name: &str) -> u64 {
    let (iid, is_new) = number(known, name);
    if is_new {
        new.push(InternedName { iid: Some(iid), name: Some(name.to_owned()) });
    }
    iid
}

impl Names {
    pub(super) fn event(&mut self, name: &str) -> u64 {
        named(&mut self.events, &mut self.new.event_names, name)
    }

    pub(super) fn category(&mut self, name: &str) -> u64 {
        named(&mut self.categories, &mut self.new.event_categories, name)
    }

    pub(super) fn annotation(&mut self, name: &str) -> u64 {
        named(&mut self.annotations, &mut self.new.debug_annotation_names, name)
    }

    pub(super) fn text(&mut self, text: &str) -> u64 {
        let (iid, is_new) = number(&mut self.texts, text);
        if is_new {
            let str = Some(text.as_bytes().to_vec());
            self.new.debug_annotation_string_values.push(InternedString { iid: Some(iid), str });
        }
        iid
    }

    /// Takes the new names, for the packet that uses them first; `None` if there are none.
    pub(super) fn take_new(&mut self) -> Option<InternedData> {
        let new = std::mem::take(&mut self.new);
        (new != InternedData::default()).then_some(new)
    }
}
