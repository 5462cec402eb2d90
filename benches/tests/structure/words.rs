//! Retired words, and the identifiers of a source file.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use syn::visit::{self, Visit};
use syn::{Ident, Macro};

/// The crates to search.
pub const CRATES: [&str; 5] = ["benches", "collectives", "model", "shard", "train"];

/// Retired identifiers, each with its replacement.
pub const RETIRED: [(&str, &str); 29] = [
    ("Parts", "Modules"),
    ("Unit", "ParamGroup"),
    ("Units", "ParamGroups"),
    ("Token", "OrderToken"),
    ("weights_in_backward", "unshard_in_backward"),
    ("Member", "ProcessGroup"),
    ("Guardian", "Backend"),
    ("sum_in", "all_reduce_f64"),
    ("Together", "StepSync"),
    ("Reading", "Readback"),
    ("loan", "peer_read"),
    ("Lobby", "PendingConnections"),
    ("Doorway", "Listener"),
    ("Awake", "SpinWait"),
    ("turned", "transposed"),
    ("lies_across", "is_transposed"),
    ("Halves", "Bf16"),
    ("Reals", "floats"),
    ("Selected", "ResolvedDevice"),
    ("Demand", "DeviceRequest"),
    ("Suits", "DeviceDefaults"),
    ("Place", "RankEnv"),
    ("PlaceError", "EnvError"),
    ("Outline", "PlanMessage"),
    ("Piece", "Chunk"),
    ("UnitEntry", "GroupEntry"),
    ("UnitWriter", "GroupWriter"),
    ("UnitFiles", "GroupFiles"),
    ("units_of", "module_shapes"),
];

/// Files, from the root of the workspace, in which a retired word has another meaning.
pub const EXCEPTIONS: [(&str, &str); 0] = [];

/// Returns the identifiers in the Rust file at `path`.
pub fn identifiers(path: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(path).unwrap();
    let parsed = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut identifiers = Identifiers(BTreeSet::new());
    identifiers.visit_file(&parsed);
    identifiers.0
}

struct Identifiers(BTreeSet<String>);

impl<'ast> Visit<'ast> for Identifiers {
    fn visit_ident(&mut self, ident: &'ast Ident) {
        self.0.insert(ident.to_string());
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        // The arguments are not parsed: their text counts, except for quoted parts.
        let text = call.tokens.to_string().replace("\\\"", "").replace("'\"'", "");
        let is_break = |c: char| !c.is_alphanumeric() && c != '_';
        for code in text.split('"').step_by(2) {
            self.0.extend(code.split(is_break).map(str::to_owned));
        }
        visit::visit_macro(self, call);
    }
}
