use std::ffi::{c_int, c_void};
use std::ptr;

pub(super) fn action_of(signal: c_int) -> Option<libc::sigaction> {
    // SAFETY: all fields of the plain C structure may be zero.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: without a new action the call only writes the current one to `action`.
    let status = unsafe { libc::sigaction(signal, ptr::null(), &raw mut action) };
    (status == 0).then_some(action)
}

/// Installs `handler` for `signal`. Returns whether that succeeded.
///
/// # Safety
///
/// The handler must be safe to call at any moment.
pub(super) unsafe fn handle(
    signal: c_int,
    handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void),
    flags: c_int,
) -> bool {
    // SAFETY: all fields of the plain C structure may be zero.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | flags;
    // SAFETY: the handler has the signature of SA_SIGINFO; the caller vouches for its content.
    unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) == 0 }
}

/// Returns the address of the instruction that a signal interrupted, from the handler's `context`; 0 if unknown.
pub(super) fn interrupted_at(context: *mut c_void) -> usize {
    // SAFETY: the system gives a handler with SA_SIGINFO a structure of this type.
    let Some(context) = (unsafe { context.cast::<libc::ucontext_t>().as_ref() }) else { return 0 };
    #[cfg(target_arch = "x86_64")]
    let address = context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize;
    #[cfg(target_arch = "aarch64")]
    let address = context.uc_mcontext.pc as usize;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let address = {
        let _ = context;
        0
    };
    address
}
