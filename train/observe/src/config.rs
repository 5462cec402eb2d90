//! The configuration of a run as a list of keys, such as `optim.lr`.

use toml::{Table, Value};

/// Returns every value of `table` with its dotted key. Only tables in arrays get an index in their key.
pub(crate) fn flatten(table: Table) -> Vec<(String, Value)> {
    let mut flat = Vec::new();
    add("", Value::Table(table), &mut flat);
    flat
}

fn add(key: &str, value: Value, flat: &mut Vec<(String, Value)>) {
    let below = |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    match value {
        Value::Table(table) => table.into_iter().for_each(|(name, value)| add(&below(&name), value, flat)),
        Value::Array(list) if list.iter().any(Value::is_table) => {
            let named = list.into_iter().enumerate();
            named.for_each(|(index, value)| add(&below(&index.to_string()), value, flat));
        }
        value => flat.push((key.to_owned(), value)),
    }
}
