//! Querying the action for a signal.

use std::ffi::c_int;
use std::ptr;

/// Returns the action for `signal`; `None` if there is no such signal.
pub(super) fn action_of(signal: c_int) -> Option<libc::sigaction> {
    // SAFETY: all fields of the plain C structure may be zero.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: without a new action the call only writes the current one to `action`.
    let status = unsafe { libc::sigaction(signal, ptr::null(), &raw mut action) };
    (status == 0).then_some(action)
}
