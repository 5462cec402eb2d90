//! What the launcher says on stderr.

use kiln_process::output::complain;

/// Says something on stderr.
pub(super) fn say(text: &str) {
    complain(&format!("kiln launch: {text}"));
}

/// A signal as people know it.
pub(super) fn signal_name(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => format!("{name} ({signal})"),
        None => format!("signal {signal}"),
    }
}
