//! The secret that a client shows.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;

use subtle::ConstantTimeEq;

use super::error::PageError;

/// Random bytes of a token.
const BYTES: usize = 24;

/// Characters of a token at least.
const LEAST: usize = 16;

/// A secret that a client shows to see the page. Its text is for the one who starts the server, who gives it to
/// others as part of an address.
#[derive(Clone)]
pub struct AccessToken(String);

impl AccessToken {
    /// A token that nobody can guess.
    ///
    /// # Errors
    ///
    /// If the system has no random bytes.
    pub fn random() -> io::Result<AccessToken> {
        random_hex::<BYTES>().map(AccessToken)
    }

    /// A token that someone has chosen, such as one from the environment.
    ///
    /// # Errors
    ///
    /// If it is short, or has other characters than letters, digits, `-` and `_`.
    pub fn new(text: impl Into<String>) -> Result<AccessToken, PageError> {
        let text = text.into();
        let is_plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
        if is_plain && text.len() >= LEAST { Ok(AccessToken(text)) } else { Err(PageError::WeakToken) }
    }

    /// The token itself.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// A short text that tells tokens apart.
    pub(super) fn mark(&self) -> String {
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    }

    /// Whether `shown` is this token, in a time that does not tell how much of it is right.
    pub(super) fn is(&self, shown: &str) -> bool {
        bool::from(self.0.as_bytes().ct_eq(shown.as_bytes()))
    }
}

impl fmt::Debug for AccessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AccessToken")
    }
}

/// `N` random bytes in hexadecimal digits.
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
