//! The keys file: issuers, what they call this service, and their keys.
//!
//! Reads a file once, at start. Never prints key material, and refuses everything it does not understand: a member that is
//! silently ignored is a rule that silently does not hold.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, DecodingKey};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Largest keys file, in bytes.
const FILE_BYTES_MAX: u64 = 1024 * 1024;
/// Most issuers.
const ISSUERS_MAX: usize = 100;
/// Most keys of one issuer.
const KEYS_MAX: usize = 100;
/// Shortest HS256 secret, in bytes: as long as the hash (RFC 7518, 3.2).
const SECRET_BYTES_MIN: usize = 32;
/// Shortest and longest RSA modulus, in bytes: 2048 to 8192 bits, what the verifier takes.
const MODULUS_BYTES: std::ops::RangeInclusive<usize> = 256..=1024;

/// Why the keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The file cannot be read or written.
    #[error("keys file {path}: {source}")]
    File {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The file's content is wrong.
    #[error("keys file: {0}")]
    Content(String),
}

/// The file as it is written.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KeysFile {
    pub(super) issuers: Vec<IssuerEntry>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct IssuerEntry {
    pub(super) issuer: String,
    pub(super) audience: String,
    #[serde(default)]
    pub(super) subject_prefix: String,
    pub(super) keys: Vec<Jwk>,
}

/// A JSON Web Key. A private member (`d`) is unknown on purpose: it has no business in a verifier's file.
#[derive(Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Jwk {
    pub(super) kty: String,
    pub(super) kid: String,
    pub(super) alg: String,
    #[serde(rename = "use", skip_serializing_if = "Option::is_none")]
    purpose: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_ops: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    x5c: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    x5t: Option<String>,
    #[serde(rename = "x5t#S256", skip_serializing_if = "Option::is_none")]
    x5t_s256: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    crv: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    x: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    y: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    n: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    e: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) k: Option<String>,
}

impl std::fmt::Debug for Jwk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Jwk")
            .field("kid", &self.kid)
            .finish_non_exhaustive()
    }
}

impl Jwk {
    pub(super) fn symmetric(kid: &str, secret: &[u8]) -> Self {
        Jwk {
            kty: "oct".to_owned(),
            kid: kid.to_owned(),
            alg: "HS256".to_owned(),
            k: Some(URL_SAFE_NO_PAD.encode(secret)),
            ..Jwk::default()
        }
    }

    /// The bytes of a base64url member, if it is there, decodes, and is of a length that fits.
    fn bytes(member: Option<&String>, lengths: std::ops::RangeInclusive<usize>) -> Option<Vec<u8>> {
        let bytes = URL_SAFE_NO_PAD.decode(member?).ok()?;
        lengths.contains(&bytes.len()).then_some(bytes)
    }

    /// The secret of a symmetric key.
    pub(super) fn secret(&self) -> Option<Vec<u8>> {
        Self::bytes(self.k.as_ref(), SECRET_BYTES_MIN..=1024)
    }

    fn verifying(&self) -> Option<VerifyingKey> {
        let curve = self.crv.as_deref();
        let (algorithm, key) = match (self.alg.as_str(), self.kty.as_str(), curve) {
            ("EdDSA", "OKP", Some("Ed25519")) => {
                let x = Self::bytes(self.x.as_ref(), 32..=32)?;
                (Algorithm::EdDSA, DecodingKey::from_ed_der(&x))
            }
            ("ES256", "EC", Some("P-256")) => {
                let mut point = vec![4];
                point.extend(Self::bytes(self.x.as_ref(), 32..=32)?);
                point.extend(Self::bytes(self.y.as_ref(), 32..=32)?);
                (Algorithm::ES256, DecodingKey::from_ec_der(&point))
            }
            ("RS256", "RSA", None) => {
                let n = Self::bytes(self.n.as_ref(), MODULUS_BYTES)?;
                let e = Self::bytes(self.e.as_ref(), 1..=8)?;
                (
                    Algorithm::RS256,
                    DecodingKey::from_rsa_raw_components(&n, &e),
                )
            }
            ("HS256", "oct", None) => (
                Algorithm::HS256,
                DecodingKey::from_secret(&self.secret()?).ok()?,
            ),
            _ => return None,
        };
        Some(VerifyingKey { algorithm, key })
    }
}

/// A key and the one algorithm it may be used with.
pub(super) struct VerifyingKey {
    pub(super) algorithm: Algorithm,
    pub(super) key: DecodingKey,
}

/// An issuer whose tokens are accepted.
pub(super) struct Issuer {
    pub(super) name: Arc<str>,
    pub(super) audience: String,
    pub(super) subject_prefix: String,
    pub(super) keys: HashMap<String, VerifyingKey>,
}

pub(super) fn read(path: &Path) -> Result<KeysFile, KeysError> {
    let failed = |source| KeysError::File {
        path: path.to_owned(),
        source,
    };
    let size = std::fs::metadata(path).map_err(failed)?.len();
    if size > FILE_BYTES_MAX {
        return Err(KeysError::Content(format!(
            "longer than {FILE_BYTES_MAX} bytes"
        )));
    }
    let text = std::fs::read(path).map_err(failed)?;
    parse(&text)
}

pub(super) fn parse(text: &[u8]) -> Result<KeysFile, KeysError> {
    serde_json::from_slice(text).map_err(|error| KeysError::Content(error.to_string()))
}

pub(super) fn issuers(file: &KeysFile) -> Result<HashMap<Arc<str>, Issuer>, KeysError> {
    let content = |text: String| Err(KeysError::Content(text));
    if !(1..=ISSUERS_MAX).contains(&file.issuers.len()) {
        return content(format!("1 to {ISSUERS_MAX} issuers"));
    }
    let mut issuers = HashMap::new();
    for entry in &file.issuers {
        let name: Arc<str> = entry.issuer.as_str().into();
        if entry.issuer.is_empty() || entry.issuer.chars().any(char::is_control) {
            return content("an issuer's name is visible text".to_owned());
        }
        if entry.audience.is_empty() {
            return content(format!("{name}: the audience is empty"));
        }
        let keys = keys_of(entry)?;
        let issuer = Issuer {
            name: name.clone(),
            audience: entry.audience.clone(),
            subject_prefix: entry.subject_prefix.clone(),
            keys,
        };
        if issuers.insert(name.clone(), issuer).is_some() {
            return content(format!("{name} is there twice"));
        }
    }
    apart(&file.issuers)?;
    Ok(issuers)
}

fn keys_of(entry: &IssuerEntry) -> Result<HashMap<String, VerifyingKey>, KeysError> {
    let name = &entry.issuer;
    if !(1..=KEYS_MAX).contains(&entry.keys.len()) {
        return Err(KeysError::Content(format!("{name}: 1 to {KEYS_MAX} keys")));
    }
    let mut keys = HashMap::new();
    for jwk in &entry.keys {
        let kid = &jwk.kid;
        if kid.is_empty() || jwk.alg.is_empty() {
            return Err(KeysError::Content(format!(
                "{name}: each key needs kid and alg"
            )));
        }
        if jwk.purpose.as_ref().is_some_and(|purpose| purpose != "sig") {
            return Err(KeysError::Content(format!(
                "{name}: key {kid:?} is not for signatures"
            )));
        }
        let Some(key) = jwk.verifying() else {
            return Err(KeysError::Content(format!(
                "{name}: key {kid:?} is not a key of EdDSA (Ed25519), ES256 (P-256), RS256 (2048 to 8192 bits) or HS256 (32 bytes or more)"
            )));
        };
        if keys.insert(kid.clone(), key).is_some() {
            return Err(KeysError::Content(format!(
                "{name}: key {kid:?} is there twice"
            )));
        }
    }
    Ok(keys)
}

/// Two issuers must never be able to name the same subject. That needs every prefix to be there, and none to begin another:
/// `a` + `bx` and `ab` + `x` are one subject.
fn apart(entries: &[IssuerEntry]) -> Result<(), KeysError> {
    for (index, one) in entries.iter().enumerate() {
        for other in &entries[index + 1..] {
            let (a, b) = (&one.subject_prefix, &other.subject_prefix);
            if a.starts_with(b.as_str()) || b.starts_with(a.as_str()) {
                return Err(KeysError::Content(format!(
                    "{} and {} could name the same subject: each needs a subject_prefix, and none may begin another",
                    one.issuer, other.issuer
                )));
            }
        }
    }
    Ok(())
}
