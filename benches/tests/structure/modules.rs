//! The files of a crate, and their dependencies.
//!
//! A file uses another if it names something that is defined there, in a `use` or a path. For re-exported
//! names (`pub use`), the file with the definition counts, not the one that re-exports it. Tests do not
//! count, and neither do names of other crates, even where a file re-exports them: the compiler lets no two
//! crates use each other.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, ItemUse, UseTree};

/// The path of a module inside its crate; empty for the root.
type Name = Vec<String>;

#[derive(Default)]
struct Module {
    file: PathBuf,
    /// Names of child modules.
    children: BTreeSet<String>,
    /// Names brought in by `use`, with the path of each.
    imports: BTreeMap<String, Name>,
    /// Names brought in by `use` from other crates.
    foreign: BTreeSet<String>,
    /// All paths named here, from the root of the crate.
    uses: BTreeSet<Name>,
}

/// One crate.
pub struct Crate {
    modules: BTreeMap<Name, Module>,
}

impl Crate {
    /// Reads the crate that begins with the file `start`.
    pub fn read(start: &Path) -> Self {
        let mut modules = BTreeMap::new();
        read_file(start, start.parent().unwrap().to_owned(), Vec::new(), &mut modules);
        Crate { modules }
    }

    /// Returns every circle of files, and of modules below one parent, as a list of its members with the names that
    /// connect them. A module counts with everything inside it.
    pub fn circles(&self, root: &Path) -> Vec<String> {
        let (mut files, mut siblings) = (Edges::new(), Edges::new());
        for (name, module) in &self.modules {
            for path in &module.uses {
                let Some((home, item)) = self.resolve(path, 0) else { continue };
                let file = |name: &Name| {
                    let file = &self.modules[name].file;
                    file.strip_prefix(root).unwrap_or(file).display().to_string()
                };
                add(&mut files, file(name), file(&home), &item);
                let shared = name.iter().zip(&home).take_while(|(a, b)| a == b).count();
                if shared < name.len().min(home.len()) {
                    let branch =
                        |name: &Name| format!("{}: {}", file(&Vec::new()), name[..=shared].join("::"));
                    add(&mut siblings, branch(name), branch(&home), &item);
                }
            }
        }
        [circles_of(&files), circles_of(&siblings)].concat()
    }

    /// Returns the module that defines the item at `path`, and the item's name there.
    fn resolve(&self, path: &[String], depth: usize) -> Option<(Name, String)> {
        let mut module: Name = Vec::new();
        for (index, part) in path.iter().enumerate() {
            let here = &self.modules[&module];
            if let Some(target) = here.imports.get(part).filter(|_| depth < 16) {
                let full: Name = target.iter().chain(&path[index + 1..]).cloned().collect();
                if full != path {
                    return self.resolve(&full, depth + 1);
                }
            }
            if here.children.contains(part) {
                module.push(part.clone());
                continue;
            }
            if here.foreign.contains(part) {
                return None;
            }
            // Defined here, or re-exported by a glob.
            return Some((module, part.clone()));
        }
        // A module itself: naming it uses the contents of its own file.
        let name = module.last()?.clone();
        Some((module, format!("mod {name}")))
    }
}

/// The uses of files or modules by others, with the names that are used.
type Edges = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

fn add(edges: &mut Edges, from: String, to: String, item: &str) {
    if from != to {
        edges.entry(from).or_default().entry(to).or_default().insert(item.to_owned());
    }
}

fn circles_of(edges: &Edges) -> Vec<String> {
    let mut circles = Vec::new();
    let mut done = BTreeSet::new();
    for node in edges.keys() {
        if done.contains(node) {
            continue;
        }
        let reached = reachable(edges, node);
        let circle: BTreeSet<_> =
            reached.into_iter().filter(|other| reachable(edges, other).contains(node)).collect();
        if circle.is_empty() {
            continue;
        }
        let mut lines = vec![format!("circle of {}:", circle.len())];
        for from in &circle {
            for (to, names) in edges[from].iter().filter(|(to, _)| circle.contains(*to)) {
                let names: Vec<_> = names.iter().map(String::as_str).collect();
                lines.push(format!("  {from} -> {to}: {}", names.join(", ")));
            }
        }
        circles.push(lines.join("\n"));
        done.extend(circle);
    }
    circles
}

/// Returns what can be reached from `start` in one step or more.
fn reachable(edges: &Edges, start: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut next = vec![start.to_owned()];
    while let Some(node) = next.pop() {
        for to in edges.get(&node).into_iter().flat_map(BTreeMap::keys) {
            if reached.insert(to.clone()) {
                next.push(to.clone());
            }
        }
    }
    reached
}

fn read_file(file: &Path, children_in: PathBuf, name: Name, modules: &mut BTreeMap<Name, Module>) {
    let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let parsed = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    read_items(&parsed.items, file, children_in, name, modules);
}

fn read_items(
    items: &[Item],
    file: &Path,
    children_in: PathBuf,
    name: Name,
    modules: &mut BTreeMap<Name, Module>,
) {
    let mut module = Module { file: file.to_owned(), ..Module::default() };
    for item in items {
        let Item::Mod(ItemMod { ident, content, attrs, .. }) = item else { continue };
        if is_test(attrs) {
            continue;
        }
        let child = ident.to_string();
        let path: Name = name.iter().cloned().chain([child.clone()]).collect();
        let below = children_in.join(&child);
        module.children.insert(child.clone());
        match content {
            Some((_, items)) => read_items(items, file, below, path, modules),
            None => {
                let given = path_attribute(attrs).map(|given| children_in.join(given));
                let candidates = [children_in.join(format!("{child}.rs")), below.join("mod.rs")];
                let found = given.into_iter().chain(candidates).find(|file| file.is_file());
                let found = found.unwrap_or_else(|| panic!("no file of {}", path.join("::")));
                read_file(&found, below, path, modules);
            }
        }
    }
    let mut names = Names { module, name: name.clone() };
    items.iter().filter(|item| !matches!(item, Item::Mod(_))).for_each(|item| names.visit_item(item));
    modules.insert(name, names.module);
}

/// Collects the names used by a module.
struct Names {
    module: Module,
    name: Name,
}

impl Names {
    /// Returns `parts` from the root of the crate, if they belong to this crate.
    fn absolute(&self, parts: &[String]) -> Option<Name> {
        let mut base = match parts.first()?.as_str() {
            "crate" => Vec::new(),
            "self" | "super" => self.name.clone(),
            first if self.module.children.contains(first) => {
                return Some(self.name.iter().chain(parts).cloned().collect());
            }
            first if self.module.imports.contains_key(first) => {
                let target = &self.module.imports[first];
                return Some(target.iter().chain(&parts[1..]).cloned().collect());
            }
            _ => return None,
        };
        for (index, part) in parts.iter().enumerate() {
            match part.as_str() {
                "crate" | "self" => {}
                "super" => {
                    base.pop();
                }
                _ => {
                    base.extend(parts[index..].iter().cloned());
                    break;
                }
            }
        }
        Some(base)
    }

    fn add_tree(&mut self, tree: &UseTree, before: &[String], hands_on: bool) {
        let with = |ident: &syn::Ident| before.iter().cloned().chain([ident.to_string()]).collect::<Vec<_>>();
        match tree {
            UseTree::Path(path) => self.add_tree(&path.tree, &with(&path.ident), hands_on),
            UseTree::Name(name) if name.ident == "self" => {
                let known = before.last().cloned().unwrap_or_default();
                self.add_use(before.to_vec(), Some(known), hands_on);
            }
            UseTree::Name(name) => {
                self.add_use(with(&name.ident), Some(name.ident.to_string()), hands_on);
            }
            UseTree::Rename(rename) => {
                self.add_use(with(&rename.ident), Some(rename.rename.to_string()), hands_on);
            }
            UseTree::Glob(_) => self.add_use(before.to_vec(), None, hands_on),
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.add_tree(tree, before, hands_on));
            }
        }
    }

    fn add_use(&mut self, parts: Vec<String>, known_as: Option<String>, hands_on: bool) {
        let Some(path) = self.absolute(&parts) else {
            self.module.foreign.extend(known_as);
            return;
        };
        if !hands_on {
            self.module.uses.insert(path.clone());
        }
        if let Some(known_as) = known_as {
            self.module.imports.insert(known_as, path);
        }
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item(&mut self, item: &'ast Item) {
        let attrs = match item {
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            Item::Struct(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if !is_test(attrs) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        // Re-exported names are not used here.
        let hands_on = !matches!(item.vis, syn::Visibility::Inherited);
        self.add_tree(&item.tree, &[], hands_on);
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {
        // `pub(in crate::data)` restricts visibility; it uses nothing.
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let parts: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if parts.len() > 1
            && let Some(path) = self.absolute(&parts)
        {
            self.module.uses.insert(path);
        }
        visit::visit_path(self, path);
    }
}

fn is_test(attrs: &[Attribute]) -> bool {
    attrs.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| list.tokens.to_string() == "test")
    })
}

/// Returns the value of `#[path = "…"]`.
fn path_attribute(attrs: &[Attribute]) -> Option<String> {
    let attribute = attrs.iter().find(|attribute| attribute.path().is_ident("path"))?;
    match &attribute.meta.require_name_value().ok()?.value {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
        _ => None,
    }
}
