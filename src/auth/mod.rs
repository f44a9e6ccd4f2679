//! From a bearer token to a [`Principal`].
//!
//! Never takes the algorithm, the key or any other rule from the token: the key named by `kid` AND issuer brings its own
//! algorithm. Whether a token was revoked is not known here; the database says so.

mod issue;
mod keys;
#[cfg(test)]
mod tests;

pub use issue::{DEV_AUDIENCE, DEV_ISSUER, IssueError, LIFE_MAX, generate_dev_keys, issue};
pub use keys::KeysError;

use crate::domain::{Principal, Scope, Scopes, Subject};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::{SignedDuration, Timestamp};
use jsonwebtoken::{Algorithm, Validation};
use keys::{Issuer, VerifyingKey};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// How far the clocks of issuer and pod may be apart, in seconds.
pub const LEEWAY_S: i64 = 60;
/// Longest token, in bytes.
pub const TOKEN_BYTES_MAX: usize = 8 * 1024;
/// Longest `jti`, in bytes.
pub const TOKEN_ID_BYTES_MAX: usize = 128;
/// The last second of the year 9999: what every clock and the database can still hold.
const DATE_MAX: i64 = 253_402_300_799;
/// Verified tokens that are remembered.
const CACHE_MAX: u64 = 10_000;

/// Why a request has no principal (401). Its text never holds a part of the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// No token came with the request.
    #[error("a bearer token is required")]
    Missing,
    /// It is not a token, or a claim is missing or has the wrong form.
    #[error("the token is malformed: {0}")]
    Malformed(&'static str),
    /// No issuer of the keys file has this name.
    #[error("the token's issuer is not known")]
    Issuer,
    /// The issuer has no such key.
    #[error("the issuer has no key of the token's kid")]
    Key,
    /// The token claims another algorithm than the key's.
    #[error("the token's algorithm is not the key's")]
    Algorithm,
    /// The signature does not verify.
    #[error("the token's signature does not verify")]
    Signature,
    /// For somebody else.
    #[error("the token's audience is another")]
    Audience,
    /// `exp` has passed.
    #[error("the token is expired")]
    Expired,
    /// `nbf` has not come.
    #[error("the token is not valid yet")]
    NotYet,
    /// `iat` has not come.
    #[error("the token was issued in the future")]
    IssuedInFuture,
}

impl AuthError {
    /// Its stable code.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            AuthError::Missing => "token_missing",
            _ => "token_invalid",
        }
    }
}

#[derive(Deserialize)]
struct Head {
    alg: String,
    kid: Option<String>,
    /// Whether the header names extensions that must be understood.
    #[serde(default, deserialize_with = "present")]
    crit: bool,
}

/// True whatever the value is, null among them.
fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    serde::de::IgnoredAny::deserialize(deserializer).map(|_| true)
}

#[derive(Deserialize)]
struct IssuerOnly {
    iss: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// Every claim is optional here, so that what is missing can be named.
#[derive(Deserialize)]
struct Claims {
    iss: Option<String>,
    aud: Option<OneOrMany>,
    sub: Option<String>,
    exp: Option<f64>,
    iat: Option<f64>,
    nbf: Option<f64>,
    jti: Option<String>,
    scope: Option<String>,
    scp: Option<OneOrMany>,
}

/// A verified token, as it is remembered.
#[derive(Clone)]
struct Verified {
    principal: Arc<Principal>,
    not_before: Option<i64>,
}

impl Verified {
    fn check(&self, now: Timestamp) -> Result<(), AuthError> {
        let now = now.as_second();
        if now >= self.principal.expires_at.saturating_add(LEEWAY_S) {
            return Err(AuthError::Expired);
        }
        if self
            .not_before
            .is_some_and(|at| at > now.saturating_add(LEEWAY_S))
        {
            return Err(AuthError::NotYet);
        }
        if self.principal.issued_at > now.saturating_add(LEEWAY_S) {
            return Err(AuthError::IssuedInFuture);
        }
        Ok(())
    }
}

/// Verifies tokens against the keys of a file.
pub struct Verifier {
    issuers: HashMap<Arc<str>, Issuer>,
    /// By the token's SHA-256, so that a token itself is never kept. A signature takes 50 to 100 us to verify.
    cache: moka::sync::Cache<[u8; 32], Verified>,
}

impl std::fmt::Debug for Verifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Verifier")
            .field("issuers", &self.issuers.keys())
            .finish_non_exhaustive()
    }
}

impl Verifier {
    /// Reads the keys file.
    ///
    /// # Errors
    /// [`KeysError`] when it cannot be read, or anything in it is not understood.
    pub fn load(path: &Path) -> Result<Self, KeysError> {
        Self::with(&keys::read(path)?)
    }

    fn with(file: &keys::KeysFile) -> Result<Self, KeysError> {
        Ok(Verifier {
            issuers: keys::issuers(file)?,
            cache: moka::sync::Cache::new(CACHE_MAX),
        })
    }

    /// Verifies a token at this time.
    ///
    /// # Errors
    /// [`AuthError`], without a part of the token.
    pub fn verify(&self, token: &str, now: Timestamp) -> Result<Arc<Principal>, AuthError> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(AuthError::Malformed("longer than 8 KiB"));
        }
        let hash: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        if let Some(verified) = self.cache.get(&hash) {
            // Time passes while a token is remembered.
            return verified.check(now).map(|()| verified.principal);
        }
        let verified = self.verify_anew(token)?;
        verified.check(now)?;
        self.cache.insert(hash, verified.clone());
        Ok(verified.principal)
    }

    /// The issuer that names this subject: no two can, see the keys file.
    #[must_use]
    pub fn issuer_of(&self, subject: &Subject) -> Option<Arc<str>> {
        self.issuers
            .values()
            .find(|issuer| subject.as_str().starts_with(&issuer.subject_prefix))
            .map(|issuer| issuer.name.clone())
    }

    /// The issuer of this name, if its tokens are accepted.
    #[must_use]
    pub fn issuer(&self, name: &str) -> Option<Arc<str>> {
        self.issuers.get(name).map(|issuer| issuer.name.clone())
    }

    fn verify_anew(&self, token: &str) -> Result<Verified, AuthError> {
        let mut parts = token.split('.');
        let (Some(head), Some(claims), Some(_), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(AuthError::Malformed("not three parts"));
        };
        let head: Head = decode_part(head).ok_or(AuthError::Malformed("header"))?;
        if head.crit {
            // RFC 7515, 4.1.11: an extension that is not understood refuses the token, and none is understood here.
            return Err(AuthError::Malformed("crit names an extension"));
        }
        // What is read before the signature is verified only chooses the key.
        let IssuerOnly { iss } = decode_part(claims).ok_or(AuthError::Malformed("iss"))?;
        let issuer = self.issuers.get(iss.as_str()).ok_or(AuthError::Issuer)?;
        let kid = head.kid.ok_or(AuthError::Malformed("kid is missing"))?;
        let key = issuer.keys.get(&kid).ok_or(AuthError::Key)?;
        if head.alg.parse::<Algorithm>().ok() != Some(key.algorithm) {
            return Err(AuthError::Algorithm);
        }
        principal(issuer, verify_signature(token, key)?)
    }
}

fn decode_part<T: serde::de::DeserializeOwned>(part: &str) -> Option<T> {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).ok()?).ok()
}

fn verify_signature(token: &str, key: &VerifyingKey) -> Result<Claims, AuthError> {
    let mut validation = Validation::new(key.algorithm);
    // Claims are checked here, against the time that was passed in; the library would read the clock itself.
    validation.required_spec_claims.clear();
    validation.validate_exp = false;
    validation.validate_nbf = false;
    validation.validate_aud = false;
    jsonwebtoken::decode(token, &key.key, &validation)
        .map(|data| data.claims)
        .map_err(|error| match error.kind() {
            jsonwebtoken::errors::ErrorKind::InvalidAlgorithm => AuthError::Algorithm,
            jsonwebtoken::errors::ErrorKind::Json(_) => {
                AuthError::Malformed("a claim has the wrong form")
            }
            _ => AuthError::Signature,
        })
}

/// Seconds since 1970 of a `NumericDate`, whose fraction does not matter.
fn seconds(date: Option<f64>, missing: &'static str) -> Result<i64, AuthError> {
    let date = date.ok_or(AuthError::Malformed(missing))?;
    SignedDuration::try_from_secs_f64(date.floor())
        .map(|duration| duration.as_secs())
        .ok()
        .filter(|seconds| (0..=DATE_MAX).contains(seconds))
        .ok_or(AuthError::Malformed("a date is out of range"))
}

fn principal(issuer: &Issuer, claims: Claims) -> Result<Verified, AuthError> {
    if claims.iss.as_deref() != Some(&issuer.name) {
        return Err(AuthError::Issuer);
    }
    let meant = match claims.aud.ok_or(AuthError::Malformed("aud is missing"))? {
        OneOrMany::One(audience) => audience == issuer.audience,
        OneOrMany::Many(audiences) => audiences.contains(&issuer.audience),
    };
    if !meant {
        return Err(AuthError::Audience);
    }
    let expires_at = seconds(claims.exp, "exp is missing")?;
    let issued_at = seconds(claims.iat, "iat is missing")?;
    let not_before = match claims.nbf {
        Some(date) => Some(seconds(Some(date), "nbf")?),
        None => None,
    };
    let token_id = claims.jti.ok_or(AuthError::Malformed("jti is missing"))?;
    if !is_token_id(&token_id) {
        return Err(AuthError::Malformed("jti is 1 to 128 visible characters"));
    }
    let name = claims.sub.ok_or(AuthError::Malformed("sub is missing"))?;
    let subject = Some(format!("{}{name}", issuer.subject_prefix))
        .filter(|_| !name.is_empty())
        .and_then(|text| Subject::parse(&text))
        .ok_or(AuthError::Malformed(
            "sub is 1 to 128 visible ASCII characters",
        ))?;
    let mut scopes = parse_scopes(claims.scope.as_deref().unwrap_or_default());
    match &claims.scp {
        None => {}
        Some(OneOrMany::One(text)) => scopes.extend(parse_scopes(text)),
        Some(OneOrMany::Many(names)) => scopes.extend(names.iter().filter_map(|n| Scope::parse(n))),
    }
    Ok(Verified {
        principal: Arc::new(Principal {
            subject,
            issuer: issuer.name.clone(),
            token_id: token_id.into(),
            issued_at,
            expires_at,
            scopes: scopes.into_iter().collect::<Scopes>(),
        }),
        not_before,
    })
}

/// Whether a text can be a token's id.
#[must_use]
pub fn is_token_id(text: &str) -> bool {
    (1..=TOKEN_ID_BYTES_MAX).contains(&text.len()) && !text.chars().any(char::is_control)
}

/// Scopes of other services are not ours to judge.
fn parse_scopes(text: &str) -> Vec<Scope> {
    text.split(' ').filter_map(Scope::parse).collect()
}
