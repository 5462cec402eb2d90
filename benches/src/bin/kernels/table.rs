//! The table of kernels: one row per kernel and architecture.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::ptx::Kernel;

/// Maximum usage and number of variants (of dtype, shape or vectorisation), by kernel and architecture.
#[derive(Default)]
pub struct Table(BTreeMap<(String, String), (Kernel, usize)>);

impl Table {
    pub fn add(&mut self, kernel: Kernel) {
        let key = (kernel.name.clone(), kernel.architecture.clone());
        let (worst, variants) = self.0.entry(key).or_insert_with(|| (kernel.clone(), 0));
        *variants += 1;
        worst.registers = worst.registers.max(kernel.registers);
        worst.spills = worst.spills.max(kernel.spills);
        worst.shared = worst.shared.max(kernel.shared);
        worst.tensor_cores &= kernel.tensor_cores;
    }

    pub fn rows(&self) -> impl Iterator<Item = &(Kernel, usize)> {
        self.0.values()
    }

    pub fn text(&self) -> String {
        let width = self.rows().map(|(worst, _)| worst.name.len()).max().unwrap_or(0).max(6);
        let mut text = format!(
            "{:width$}  {:8}  {:>8}  {:>9}  {:>6}  {:>7}  tensor cores\n",
            "kernel", "arch", "variants", "registers", "spills", "shared"
        );
        for (worst, variants) in self.rows() {
            let _ = writeln!(
                text,
                "{:width$}  {:8}  {variants:>8}  {:>9}  {:>6}  {:>7}  {}",
                worst.name,
                worst.architecture,
                worst.registers,
                worst.spills,
                worst.shared,
                if worst.tensor_cores { "yes" } else { "no" }
            );
        }
        text
    }

    /// Formats the table as entries of a limits file, one per kernel, with the maximum of all architectures.
    pub fn entries(&self) -> String {
        let mut kernels: BTreeMap<&str, Kernel> = BTreeMap::new();
        for (worst, _) in self.rows() {
            let most = kernels.entry(&worst.name).or_insert_with(|| worst.clone());
            most.registers = most.registers.max(worst.registers);
            most.spills = most.spills.max(worst.spills);
            most.tensor_cores &= worst.tensor_cores;
        }
        let mut text = String::new();
        for (name, kernel) in kernels {
            let Kernel { registers, spills, tensor_cores, .. } = kernel;
            let _ = write!(text, "[[kernel]]\nname = \"{name}\"\nregisters = {registers}\n");
            let _ = writeln!(text, "spills = {spills}");
            if tensor_cores {
                text.push_str("tensor_cores = true\n");
            }
            text.push('\n');
        }
        text
    }
}
