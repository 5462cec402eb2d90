//! Describes the differences between the given weights and those of a model.

/// Maximum number of names shown of each kind; those of a whole model would fill the screen.
const SHOWN: usize = 8;

/// Formats differences, such as `missing [a, b], of another shape [c]`; omits empty kinds.
pub(crate) fn describe(missing: &[String], unexpected: &[String], misshapen: &[String]) -> String {
    let kinds = [("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen)];
    let kinds = kinds.iter().filter(|(_, names)| !names.is_empty());
    kinds.map(|(what, names)| format!("{what} [{}]", first_of(names))).collect::<Vec<_>>().join(", ")
}

/// Formats names, or the first of many.
pub(crate) fn first_of(names: &[String]) -> String {
    let shown = names[..names.len().min(SHOWN)].join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_said() {
        let names = |count: usize| (0..count).map(|name| name.to_string()).collect::<Vec<_>>();
        assert_eq!(describe(&names(2), &[], &names(1)), "missing [0, 1], of another shape [0]");
        let many = "unexpected [0, 1, 2, 3, 4, 5, 6, 7 and 2 more]";
        assert_eq!(describe(&[], &names(10), &[]), many);
    }
}
