//! Keys and bearer tokens of a lab: a public key for the servers, tokens of many clients signed with the private one.
//!
//! The private key lives in this process only, and only as long as it does.

use anyhow::{Context, Result, anyhow};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Clients that post for any user, each with a token of its own.
const WRITERS: u32 = 16;
/// How long a token lives: longer than any invocation.
const LIFE_S: i64 = 24 * 3_600;
const ISSUER: &str = "bench";
const AUDIENCE: &str = "daybook";
const KEY_ID: &str = "es";

/// Tokens and the file by which a server knows them.
#[derive(Debug)]
pub struct Tokens {
    keys_file: PathBuf,
    writers: Vec<String>,
}

impl Tokens {
    /// Makes a key (ES256), writes the public half into a keys file, and signs tokens that may read and write for anybody.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn make(keys_file: &Path) -> Result<Self> {
        let key = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING)
            .map_err(|_| anyhow!("no key could be made"))?;
        // An uncompressed point: 4, then the two coordinates.
        let point = key.public_key().as_ref();
        let (x, y) = (point.get(1..33), point.get(33..65));
        let (x, y) = x.zip(y).context("a public key of another form")?;
        let keys = json!({"issuers": [{"issuer": ISSUER, "audience": AUDIENCE, "keys": [{
            "kty": "EC", "crv": "P-256", "kid": KEY_ID, "alg": "ES256", "use": "sig",
            "x": URL_SAFE_NO_PAD.encode(x), "y": URL_SAFE_NO_PAD.encode(y),
        }]}]});
        std::fs::write(keys_file, keys.to_string())
            .with_context(|| keys_file.display().to_string())?;
        let now_s = Timestamp::now().as_second();
        let writers = (0..WRITERS)
            .map(|number| sign(&key, &format!("writer-{number}"), now_s))
            .collect::<Result<_>>()?;
        Ok(Tokens {
            keys_file: keys_file.to_owned(),
            writers,
        })
    }

    /// The file that servers are given.
    pub fn keys_file(&self) -> &Path {
        &self.keys_file
    }

    /// Tokens of clients that may write for anybody.
    pub fn writers(&self) -> &[String] {
        &self.writers
    }
}

fn sign(key: &EcdsaKeyPair, subject: &str, now_s: i64) -> Result<String> {
    let header = json!({"typ": "JWT", "alg": "ES256", "kid": KEY_ID});
    let claims = json!({
        "iss": ISSUER, "aud": AUDIENCE, "sub": subject, "jti": format!("{:032x}", rand::random::<u128>()),
        "iat": now_s, "exp": now_s + LIFE_S,
        "scope": "ledger:read ledger:write ledger:read:any ledger:write:any",
    });
    let signed = format!(
        "{}.{}",
        URL_SAFE_NO_PAD.encode(header.to_string()),
        URL_SAFE_NO_PAD.encode(claims.to_string())
    );
    let signature = key
        .sign(&SystemRandom::new(), signed.as_bytes())
        .map_err(|_| anyhow!("a token could not be signed"))?;
    Ok(format!(
        "{signed}.{}",
        URL_SAFE_NO_PAD.encode(signature.as_ref())
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use daybook::auth::Verifier;

    #[test]
    fn a_server_accepts_them() {
        let file =
            std::env::temp_dir().join(format!("daybook-keys-{:016x}.json", rand::random::<u64>()));
        let tokens = Tokens::make(&file).unwrap();
        let verifier = Verifier::load(tokens.keys_file()).unwrap();
        assert_eq!(tokens.writers().len(), 16);
        for token in tokens.writers() {
            let principal = verifier.verify(token, Timestamp::now()).unwrap();
            assert!(principal.subject.as_str().starts_with("writer-"));
        }
        std::fs::remove_file(&file).unwrap();
    }
}
