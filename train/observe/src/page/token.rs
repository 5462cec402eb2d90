//! The secret that a client presents.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;

use subtle::ConstantTimeEq;

use super::error::PageError;

/// Number of random bytes of a token.
const BYTES: usize = 24;

/// Minimum number of characters of a token.
const LEAST: usize = 16;

/// A secret that a client presents to see the page. Its text is for the person who starts the server, who
/// shares it as part of an address.
#[derive(Clone)]
pub struct AccessToken(String);

impl AccessToken {
    /// Creates a token that cannot be guessed.
    ///
    /// # Errors
    ///
    /// If the system has no random bytes.
    pub fn random() -> io::Result<AccessToken> {
        random_hex::<BYTES>().map(AccessToken)
    }

    /// Creates a token from chosen text, such as the value of an environment variable.
    ///
    /// # Errors
    ///
    /// If it is short, or has characters other than letters, digits, `-` and `_`.
    pub fn new(text: impl Into<String>) -> Result<AccessToken, PageError> {
        let text = text.into();
        let is_plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
        if is_plain && text.len() >= LEAST { Ok(AccessToken(text)) } else { Err(PageError::WeakToken) }
    }

    /// The token itself.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Returns a short text that distinguishes tokens.
    pub(super) fn mark(&self) -> String {
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    }

    /// Compares `shown` with this token, in a time that does not reveal how much of it is right.
    pub(super) fn is(&self, shown: &str) -> bool {
        bool::from(self.0.as_bytes().ct_eq(shown.as_bytes()))
    }
}

impl fmt::Debug for AccessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AccessToken")
    }
}

/// Returns `N` random bytes in hexadecimal digits.
pub(super) fn random_hex<const N: usize>() -> io::Result<String> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_itself_is_right() {
        let token = AccessToken::random().unwrap();
        assert_eq!(token.text().len(), 2 * BYTES);
        assert!(token.is(token.text()) && !token.is("") && !token.is(&token.text()[1..]));
        assert_ne!(token.text(), AccessToken::random().unwrap().text());
        assert!(
            AccessToken::new("0123456789abcde").is_err() && AccessToken::new("0123456789abcde;").is_err()
        );
        assert!(AccessToken::new("0123456789abcde_").is_ok());
        assert!(!format!("{token:?}").contains(token.text()));
    }
}
