//! One row per kernel and architecture.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::ptx::Kernel;

/// A kernel on one architecture: the most that any of its variants uses.
#[derive(Clone, Debug)]
pub struct Row {
    /// The maxima, and tensor cores if all variants use them.
    pub worst: Kernel,
    /// How many variants there are: of dtype, shape or vectorisation.
    pub variants: usize,
}

/// All kernels.
#[derive(Default)]
pub struct Table {
    rows: BTreeMap<(String, String), Row>,
}

impl Table {
    /// Adds a kernel, or a variant of one that is there.
    pub fn add(&mut self, kernel: Kernel) {
        let key = (kernel.name.clone(), kernel.architecture.clone());
        let row = self.rows.entry(key).or_insert_with(|| Row { worst: kernel.clone(), variants: 0 });
        row.variants += 1;
        let worst = &mut row.worst;
        worst.registers = worst.registers.max(kernel.registers);
        worst.spills = worst.spills.max(kernel.spills);
        worst.shared = worst.shared.max(kernel.shared);
        worst.tensor_cores &= kernel.tensor_cores;
    }

    /// The rows by name.
    pub fn rows(&self) -> impl Iterator<Item = &Row> {
        self.rows.values()
    }

    /// For people.
    pub fn text(&self) -> String {
        let width = self.rows().map(|row| row.worst.name.len()).max().unwrap_or(0).max(6);
        let mut text = format!(
            "{:width$}  {:8}  {:>8}  {:>9}  {:>6}  {:>7}  tensor cores\n",
            "kernel", "arch", "variants", "registers", "spills", "shared"
        );
        for Row { worst, variants } in self.rows() {
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

    /// As entries of a limits file, one per kernel, with the most of all architectures.
    pub fn entries(&self) -> String {
        let mut kernels: BTreeMap<&str, Kernel> = BTreeMap::new();
        for Row { worst, .. } in self.rows() {
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
