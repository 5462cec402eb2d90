//! Checks that the way from `main` to a training step is the one shown in ARCHITECTURE.md, and is short.

use std::collections::BTreeSet;
use std::fs;

use syn::visit::{self, Visit};
use syn::{Block, Ident, ImplItemFn, ItemFn};

/// Maximum number of calls from `main` to the step, and of files that contain them.
const MOST_CALLS: usize = 6;
const MOST_FILES: usize = 4;

/// Collects the names in the functions called `name`.
struct Named<'a> {
    name: &'a str,
    names: BTreeSet<String>,
}

impl Named<'_> {
    fn look_into(&mut self, name: &Ident, body: &Block) {
        if name == self.name {
            let mut names = Names(BTreeSet::new());
            names.visit_block(body);
            self.names.append(&mut names.0);
        }
    }
}

impl<'ast> Visit<'ast> for Named<'_> {
    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        self.look_into(&function.sig.ident, &function.block);
    }

    fn visit_impl_item_fn(&mut self, method: &'ast ImplItemFn) {
        self.look_into(&method.sig.ident, &method.block);
    }
}

struct Names(BTreeSet<String>);

impl<'ast> Visit<'ast> for Names {
    fn visit_ident(&mut self, name: &'ast Ident) {
        self.0.insert(name.to_string());
        visit::visit_ident(self, name);
    }
}

#[test]
fn a_step_is_near_main() {
    let map = fs::read_to_string(super::root().join("ARCHITECTURE.md")).unwrap();
    // Rows such as "| `Trainer::run` | `train/kiln/src/run/trainer/run.rs` | … |".
    let rows = map.lines().skip_while(|line| !line.starts_with("| function | file |")).skip(2);
    let way: Vec<(&str, &str)> = rows
        .map_while(|line| {
            let mut code = line.strip_prefix('|')?.split('`').skip(1).step_by(2);
            Some((code.next()?.rsplit(':').next()?, code.next()?))
        })
        .collect();
    assert_eq!((way[0].0, way[way.len() - 1].0), ("main", "train_step"));
    assert!(way.len() - 1 <= MOST_CALLS, "{way:?}");
    let files: BTreeSet<_> = way.iter().map(|(_, file)| file).collect();
    assert!(files.len() <= MOST_FILES, "{files:?}");
    for (&(name, file), (next, _)) in way.iter().zip(&way[1..]) {
        let parsed = syn::parse_file(&fs::read_to_string(super::root().join(file)).unwrap());
        let mut named = Named { name, names: BTreeSet::new() };
        named.visit_file(&parsed.unwrap());
        assert!(named.names.contains(*next), "{name} in {file} does not call {next}");
    }
}
