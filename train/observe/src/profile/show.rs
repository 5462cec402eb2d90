//! Describing the peak in words.

use std::fmt::{self, Display, Formatter};

use super::model::{Peak, Profile};

/// Maximum number of modules that are named.
const MODULES: usize = 6;

pub(super) fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

impl Display for Profile {
    /// Writes one line, as in
    /// `peak 21.3 MiB in backward of layers.3: activations 11.0 MiB (layers.0 3.1, layers.1 3.1), weights 4.0 MiB`.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Peak { held, activity, module } = &self.peak;
        write!(f, "peak {} in {activity}", mib(held.total()))?;
        module.iter().try_for_each(|module| write!(f, " of {module}"))?;
        let mut separator = ":";
        for (owner, bytes) in self.by_owner(&held.bytes) {
            write!(f, "{separator} {owner} {}", mib(bytes))?;
            self.show_modules(f, &owner, &held.bytes)?;
            separator = ",";
        }
        if self.missing > 0 {
            write!(f, "; {} allocations were too many to be recorded", self.missing)?;
        }
        if self.unexplained != 0 {
            write!(f, "; {} bytes at the end of the step are not explained", self.unexplained)?;
        }
        Ok(())
    }
}

impl Profile {
    /// Returns the owners and their bytes, the largest first.
    fn by_owner(&self, bytes: &[u64]) -> Vec<(String, u64)> {
        let mut owners: Vec<(String, u64)> = Vec::new();
        for (holder, bytes) in self.holders.iter().zip(bytes) {
            match owners.iter_mut().find(|(owner, _)| *owner == holder.owner) {
                Some((_, sum)) => *sum += bytes,
                None => owners.push((holder.owner.clone(), *bytes)),
            }
        }
        owners.retain(|(_, bytes)| *bytes > 0);
        owners.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        owners
    }

    /// Writes the modules that an owner's bytes belong to, if any.
    fn show_modules(&self, f: &mut Formatter<'_>, owner: &str, bytes: &[u64]) -> fmt::Result {
        let of_owner = self.holders.iter().zip(bytes).filter(|(holder, _)| holder.owner == owner);
        let mut modules: Vec<(&str, u64)> = of_owner
            .map(|(holder, bytes)| (holder.module.as_deref().unwrap_or("elsewhere"), *bytes))
            .collect();
        if modules.iter().all(|(module, _)| *module == "elsewhere") {
            return Ok(());
        }
        modules.retain(|(_, bytes)| *bytes > 0);
        modules.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        for (index, (module, bytes)) in modules.iter().take(MODULES).enumerate() {
            let separator = if index == 0 { " (" } else { ", " };
            write!(f, "{separator}{module} {:.1}", *bytes as f64 / f64::from(1 << 20))?;
        }
        let rest: u64 = modules.iter().skip(MODULES).map(|(_, bytes)| bytes).sum();
        if rest > 0 {
            write!(f, ", {} more {:.1}", modules.len() - MODULES, rest as f64 / f64::from(1 << 20))?;
        }
        f.write_str(")")
    }
}
