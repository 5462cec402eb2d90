//! Slurm's lists: hosts such as `gpu[01-03,7],login-2`, and counts such as `2(x3),1`.
//!
//! Neither is ever expanded: a list of a few bytes can stand for more hosts than fit in memory.

use super::vars::MAX_RANKS;

/// The contents of a host list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostList {
    /// The first host.
    pub first: String,
    /// Number of hosts.
    pub count: usize,
}

/// Parses a host list. The error describes the fault in it.
pub fn parse(list: &str) -> Result<HostList, String> {
    let mut first = None;
    let mut count = 0usize;
    for entry in split(list)? {
        let hosts = parse_entry(entry)?;
        count = count.saturating_add(hosts.count);
        if count > MAX_RANKS {
            return Err(format!("more than {MAX_RANKS} hosts"));
        }
        first.get_or_insert(hosts.first);
    }
    match first {
        Some(first) => Ok(HostList { first, count }),
        None => Err("no host".to_owned()),
    }
}

/// Splits at the commas outside brackets.
fn split(list: &str) -> Result<Vec<&str>, String> {
    let mut entries = Vec::new();
    let mut start = 0;
    let mut inside = false;
    for (at, c) in list.char_indices() {
        match c {
            '[' if inside => return Err("a bracket within brackets".to_owned()),
            '[' => inside = true,
            ']' if !inside => return Err("a closing bracket without an opening one".to_owned()),
            ']' => inside = false,
            ',' if !inside => {
                entries.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("a bracket that is not closed".to_owned());
    }
    entries.push(&list[start..]);
    Ok(entries)
}

/// Parses one entry: literal text and any number of bracketed ranges, such as `rack[1-2]n[01-16]`.
fn parse_entry(entry: &str) -> Result<HostList, String> {
    let mut first = String::new();
    let mut count = 1usize;
    let mut rest = entry.trim();
    while let Some((literal, after)) = rest.split_once('[') {
        let (ranges, after) = after.split_once(']').ok_or("a bracket that is not closed")?;
        let ranges = parse_ranges(ranges)?;
        first.push_str(literal);
        first.push_str(&ranges.first);
        count = count.saturating_mul(ranges.count);
        rest = after;
    }
    first.push_str(rest);
    let legal = first.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
    if first.is_empty() || first.len() > 253 || !legal {
        return Err("a host name that is none".to_owned());
    }
    Ok(HostList { first, count })
}

/// Parses the contents of brackets, such as `01-03,7`.
fn parse_ranges(ranges: &str) -> Result<HostList, String> {
    let mut first = None;
    let mut count = 0usize;
    for range in ranges.split(',') {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        let (low, high) = (index(from)?, index(to)?);
        if low > high {
            return Err(format!("the range {from}-{to} runs backwards"));
        }
        count = count.saturating_add((high - low).saturating_add(1));
        first.get_or_insert(from.to_owned());
    }
    Ok(HostList { first: first.unwrap_or_default(), count })
}

/// Parses a host's index, of at most 18 digits so that it fits.
fn index(digits: &str) -> Result<usize, String> {
    let legal = (1..=18).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
    let index = if legal { digits.parse().ok() } else { None };
    index.ok_or_else(|| "an index in brackets that is no number".to_owned())
}

/// Returns the count for `node` in a list of counts per node, such as `2(x3),1`; `None` past its end.
pub fn tasks_of_node(list: &str, node: usize) -> Result<Option<usize>, String> {
    let mut left = node;
    for entry in list.split(',') {
        let entry = entry.trim();
        let (tasks, times) = match entry.split_once("(x") {
            Some((tasks, times)) => {
                (tasks, index(times.strip_suffix(')').ok_or("a bracket that is not closed")?)?)
            }
            None => (entry, 1),
        };
        let tasks = index(tasks)?;
        if left < times {
            return Ok(Some(tasks));
        }
        left -= times;
    }
    Ok(None)
}
