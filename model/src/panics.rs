//! Panics of a program's own parts, whose messages get the name of the part.

use std::any::Any;
use std::cell::Cell;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

thread_local! {
    /// True while a panic that has the name of a part unwinds this thread.
    static HAS_NAME: Cell<bool> = const { Cell::new(false) };
}

/// Runs `part`. If it panics, the panic continues with `name` in front of its message, unless the message begins with
/// the name, or a part inside has given its own name.
pub fn named<T>(name: impl Display, part: impl FnOnce() -> T) -> T {
    HAS_NAME.set(false);
    // The panic continues, so nobody sees a state that it has left behind.
    match catch_unwind(AssertUnwindSafe(part)) {
        Ok(result) => result,
        Err(panic) if HAS_NAME.replace(true) => resume_unwind(panic),
        Err(panic) => {
            let (name, text) = (name.to_string(), message(&*panic));
            let text = if text.starts_with(&name) { text.to_owned() } else { format!("{name}: {text}") };
            resume_unwind(Box::new(text))
        }
    }
}

/// Returns the message of a panic, or `no message` if its payload is not text.
pub fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caught(run: impl FnOnce()) -> String {
        message(&*catch_unwind(AssertUnwindSafe(run)).unwrap_err()).to_owned()
    }

    #[test]
    fn the_innermost_part_is_named() {
        let inside = || named("layers.0", || named("layers.0.ffn", || panic!("no {}", "idea")));
        assert_eq!(caught(inside), "layers.0.ffn: no idea");
        let after = || named("objective", || assert_eq!(named("layers.0", || 1), 2, "unequal"));
        assert!(caught(after).starts_with("objective: "), "the layer has returned");
        assert_eq!(caught(|| named("layers.0", || panic!("layers.0 is odd"))), "layers.0 is odd");
    }
}
