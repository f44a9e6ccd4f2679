//! Development tokens: a keys file with a random secret, and tokens signed with it.
//!
//! For development only. Never used by a running service, which only verifies.

use super::keys::{self, IssuerEntry, Jwk, KeysError, KeysFile};
use crate::domain::{Scope, Subject};
use jiff::Timestamp;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde::Serialize;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

/// The issuer of a generated keys file.
pub const DEV_ISSUER: &str = "daybook-dev";
/// The audience of a generated keys file.
pub const DEV_AUDIENCE: &str = "daybook";
const DEV_KEY_ID: &str = "dev-1";
/// Longest life of a development token.
pub const LIFE_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

/// Why no token was made.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    /// The keys file cannot be used.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// Only HS256 keys can sign here.
    #[error("the keys file has no HS256 key for the subject {0}")]
    NoKey(Subject),
    /// Too long, or nothing at all.
    #[error("a token lives for 1 s to 366 days")]
    Life,
    /// The signature failed.
    #[error("the token could not be signed: {0}")]
    Sign(#[from] jsonwebtoken::errors::Error),
}

#[derive(Serialize)]
struct Claims<'a> {
    iss: &'a str,
    aud: &'a str,
    sub: &'a str,
    scope: String,
    iat: i64,
    exp: i64,
    jti: String,
}

/// Signs a token for `subject` with the first HS256 key of the keys file whose issuer may name that subject. `now` is its
/// `iat`, `now + life` its `exp` (whole seconds).
///
/// # Errors
/// [`IssueError`] when the file cannot be used, has no such key, or the life is out of range.
pub fn issue(
    keys_file: &Path,
    subject: &Subject,
    scopes: &[Scope],
    life: Duration,
    now: Timestamp,
) -> Result<String, IssueError> {
    let file = keys::read(keys_file)?;
    keys::issuers(&file)?;
    let (entry, jwk, name, secret) = file
        .issuers
        .iter()
        .find_map(|entry| {
            let name = subject.as_str().strip_prefix(&entry.subject_prefix)?;
            let jwk = entry.keys.iter().find(|jwk| jwk.alg == "HS256")?;
            Some((entry, jwk, name, jwk.secret()?))
        })
        .filter(|(_, _, name, _)| !name.is_empty())
        .ok_or_else(|| IssueError::NoKey(subject.clone()))?;
    if life < Duration::from_secs(1) || life > LIFE_MAX {
        return Err(IssueError::Life);
    }
    let seconds = i64::try_from(life.as_secs()).map_err(|_| IssueError::Life)?;
    let names: Vec<&str> = scopes.iter().map(|scope| scope.name()).collect();
    let claims = Claims {
        iss: &entry.issuer,
        aud: &entry.audience,
        sub: name,
        scope: names.join(" "),
        iat: now.as_second(),
        exp: now.as_second().saturating_add(seconds),
        jti: uuid::Uuid::now_v7().to_string(),
    };
    let mut header = Header::new(Algorithm::HS256);
    header.kid = Some(jwk.kid.clone());
    let key = EncodingKey::from_secret(&secret)?;
    Ok(jsonwebtoken::encode(&header, &claims, &key)?)
}

/// Writes a keys file with one random HS256 secret, readable by its owner only. An existing file is never overwritten.
///
/// # Errors
/// [`KeysError`] when the file exists or cannot be written.
pub fn generate_dev_keys(path: &Path) -> Result<(), KeysError> {
    let failed = |source| KeysError::File {
        path: path.to_owned(),
        source,
    };
    let secret: [u8; 32] = rand::random();
    let file = KeysFile {
        issuers: vec![IssuerEntry {
            issuer: DEV_ISSUER.to_owned(),
            audience: DEV_AUDIENCE.to_owned(),
            subject_prefix: String::new(),
            keys: vec![Jwk::symmetric(DEV_KEY_ID, &secret)],
        }],
    };
    let text =
        serde_json::to_vec_pretty(&file).map_err(|error| KeysError::Content(error.to_string()))?;
    std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(&text))
        .map_err(failed)
}
