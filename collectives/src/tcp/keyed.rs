//! Keyed hashes (HMAC-SHA-256), which prove that their maker knows the key.

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// A keyed hash that is being computed.
pub(super) type Keyed = Hmac<Sha256>;

/// A keyed hash of `text`; `role` keeps it apart from hashes for other uses. No role may start with another.
pub(super) fn keyed(key: &[u8], role: &[u8], text: &[u8]) -> Keyed {
    // HMAC takes keys of any length; `new_from_slice` cannot fail for it.
    let mut mac =
        <Keyed as Mac>::new_from_slice(key).unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"));
    mac.update(role);
    mac.update(text);
    mac
}
