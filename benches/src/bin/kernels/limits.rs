//! The limits file: registers and spilled bytes that a kernel may use, and whether it must use tensor cores.

use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::ptx::Kernel;
use crate::table::Table;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    kernel: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// Kernel name; `*` stands for any text. The first matching entry applies.
    name: String,
    registers: u32,
    #[serde(default)]
    spills: u32,
    #[serde(default)]
    tensor_cores: bool,
}

impl Limits {
    pub fn read(path: &Path) -> Result<Self, String> {
        let at = |problem: String| format!("{}: {problem}", path.display());
        let text = fs::read_to_string(path).map_err(|error| at(error.to_string()))?;
        toml::from_str(&text).map_err(|error| at(error.to_string()))
    }

    /// Returns one sentence for each kernel that exceeds its limits or has no entry.
    pub fn check(&self, table: &Table) -> Vec<String> {
        table.rows().flat_map(|(worst, _)| self.check_kernel(worst)).collect()
    }

    fn check_kernel(&self, worst: &Kernel) -> Vec<String> {
        let name = format!("{} on {}", worst.name, worst.architecture);
        let Some(entry) = self.kernel.iter().find(|entry| fits(&entry.name, &worst.name)) else {
            return vec![format!("{name}: has no entry")];
        };
        let mut problems = Vec::new();
        for (what, used, limit) in
            [("registers", worst.registers, entry.registers), ("bytes of spills", worst.spills, entry.spills)]
        {
            if used > limit {
                problems.push(format!("{name}: {used} {what}, and the limit is {limit}"));
            }
        }
        if entry.tensor_cores && !worst.tensor_cores {
            problems.push(format!("{name}: does not use tensor cores, and has to"));
        }
        problems
    }
}

fn fits(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((before, after)) => name.strip_prefix(before).is_some_and(|rest| {
            (0..=rest.len()).any(|at| rest.is_char_boundary(at) && fits(after, &rest[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::{Limits, fits};
    use crate::ptx::Kernel;
    use crate::table::Table;

    #[test]
    fn patterns_fit_names() {
        for (pattern, name, expected) in [
            ("attention", "attention", true),
            ("attention", "attention_2", false),
            ("attention*", "attention", true),
            ("*forward*bf16", "attention_forward_64_bf16", true),
            ("*forward*bf16", "attention_forward_64_f32", false),
        ] {
            assert_eq!(fits(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn every_limit_is_kept() {
        let limits: Limits = toml::from_str(
            "[[kernel]]\nname = 'product'\nregisters = 100\nspills = 8\ntensor_cores = true\n\
             [[kernel]]\nname = 'p*'\nregisters = 10",
        )
        .expect("limits");
        let check = |name: &str, registers, spills, tensor_cores| {
            let (name, architecture) = (name.to_owned(), "sm_80".to_owned());
            let mut table = Table::default();
            table.add(Kernel { name, architecture, registers, spills, tensor_cores, ..Kernel::default() });
            limits.check(&table)
        };
        assert_eq!(check("product", 100, 8, true), [""; 0]);
        assert_eq!(check("plain", 10, 0, false), [""; 0]);
        assert_eq!(
            check("product", 101, 9, false),
            [
                "product on sm_80: 101 registers, and the limit is 100",
                "product on sm_80: 9 bytes of spills, and the limit is 8",
                "product on sm_80: does not use tensor cores, and has to",
            ]
        );
        assert_eq!(check("plain", 10, 1, false).len(), 1);
        assert_eq!(check("other", 1, 0, true), ["other on sm_80: has no entry"]);
    }
}
