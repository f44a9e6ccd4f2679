//! Keys and bearer tokens of a lab: public keys for the servers, tokens of many clients signed with the private ones.
//!
//! Private keys live in this process only, and only as long as it does.

use anyhow::{Context, Result, anyhow};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::{KeyPair as RsaKeyPair, KeySize};
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair, RSA_PKCS1_SHA256,
};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Clients that post for any user, each with a token of its own.
const WRITERS: u32 = 16;
/// How long a token lives: longer than any invocation.
const LIFE_S: i64 = 24 * 3_600;
const ISSUER: &str = "bench";
const AUDIENCE: &str = "daybook";

/// Tokens and the file by which a server knows them.
#[derive(Debug)]
pub struct Tokens {
    keys_file: PathBuf,
    writers: Vec<String>,
    mixed: Vec<String>,
}

impl Tokens {
    /// Makes a key of each public-key algorithm, writes the public halves into a keys file, and signs tokens that may read and write
    /// for anybody.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn make(keys_file: &Path) -> Result<Self> {
        let keys = [Key::es256()?, Key::eddsa()?, Key::rs256()?];
        let mut public = Vec::new();
        for key in &keys {
            public.push(key.public()?);
        }
        let file = json!({"issuers": [{"issuer": ISSUER, "audience": AUDIENCE, "keys": public}]});
        std::fs::write(keys_file, file.to_string())
            .with_context(|| keys_file.display().to_string())?;
        let now_s = Timestamp::now().as_second();
        let signed = |keys: &[Key]| -> Result<Vec<String>> {
            let keys = keys.iter().cycle().zip(0..WRITERS);
            keys.map(|(key, number)| token(key, &format!("writer-{number}"), now_s))
                .collect()
        };
        let [es256, ..] = &keys;
        Ok(Tokens {
            keys_file: keys_file.to_owned(),
            writers: signed(std::slice::from_ref(es256))?,
            mixed: signed(&keys)?,
        })
    }

    /// The file that servers are given.
    pub fn keys_file(&self) -> &Path {
        &self.keys_file
    }

    /// Tokens of clients that may write for anybody: ES256.
    pub fn writers(&self) -> &[String] {
        &self.writers
    }

    /// The same clients with tokens of ES256, EdDSA and RS256 in turn.
    pub fn mixed(&self) -> &[String] {
        &self.mixed
    }
}

/// A private key.
enum Key {
    Es256(EcdsaKeyPair),
    EdDsa(Ed25519KeyPair),
    Rs256(RsaKeyPair),
}

impl Key {
    fn es256() -> Result<Self> {
        let made = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING);
        Ok(Key::Es256(made.map_err(|_| anyhow!("no ES256 key"))?))
    }

    fn eddsa() -> Result<Self> {
        let made = Ed25519KeyPair::generate();
        Ok(Key::EdDsa(made.map_err(|_| anyhow!("no EdDSA key"))?))
    }

    fn rs256() -> Result<Self> {
        let made = RsaKeyPair::generate(KeySize::Rsa2048);
        Ok(Key::Rs256(made.map_err(|_| anyhow!("no RS256 key"))?))
    }

    /// Its name, which is also the key's id.
    fn algorithm(&self) -> &'static str {
        match self {
            Key::Es256(_) => "ES256",
            Key::EdDsa(_) => "EdDSA",
            Key::Rs256(_) => "RS256",
        }
    }

    /// The public half as a JWK.
    fn public(&self) -> Result<Value> {
        let name = self.algorithm();
        Ok(match self {
            Key::Es256(key) => {
                // An uncompressed point: 4, then the two coordinates.
                let point = key.public_key().as_ref();
                let (x, y) = (point.get(1..33), point.get(33..65));
                let (x, y) = x.zip(y).context("a public key of another form")?;
                json!({"kty": "EC", "crv": "P-256", "kid": name, "alg": name, "use": "sig", "x": base64(x), "y": base64(y)})
            }
            Key::EdDsa(key) => {
                let x = base64(key.public_key().as_ref());
                json!({"kty": "OKP", "crv": "Ed25519", "kid": name, "alg": name, "use": "sig", "x": x})
            }
            Key::Rs256(key) => {
                let public = key.public_key();
                let n = base64(public.modulus().big_endian_without_leading_zero());
                let e = base64(public.exponent().big_endian_without_leading_zero());
                json!({"kty": "RSA", "kid": name, "alg": name, "use": "sig", "n": n, "e": e})
            }
        })
    }

    fn sign(&self, text: &str) -> Result<String> {
        let random = SystemRandom::new();
        let signature = match self {
            Key::Es256(key) => key
                .sign(&random, text.as_bytes())
                .map(|signature| base64(signature.as_ref())),
            Key::EdDsa(key) => Ok(base64(key.sign(text.as_bytes()).as_ref())),
            Key::Rs256(key) => {
                let mut signature = vec![0; key.public_modulus_len()];
                key.sign(&RSA_PKCS1_SHA256, &random, text.as_bytes(), &mut signature)
                    .map(|()| base64(&signature))
            }
        };
        signature.map_err(|_| anyhow!("a token could not be signed"))
    }
}

fn base64(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn token(key: &Key, subject: &str, now_s: i64) -> Result<String> {
    let algorithm = key.algorithm();
    let header = json!({"typ": "JWT", "alg": algorithm, "kid": algorithm});
    let claims = json!({
        "iss": ISSUER, "aud": AUDIENCE, "sub": subject, "jti": format!("{:032x}", rand::random::<u128>()),
        "iat": now_s, "exp": now_s + LIFE_S,
        "scope": "ledger:read ledger:write ledger:read:any ledger:write:any",
    });
    let signed = format!(
        "{}.{}",
        base64(header.to_string().as_bytes()),
        base64(claims.to_string().as_bytes())
    );
    let signature = key.sign(&signed)?;
    Ok(format!("{signed}.{signature}"))
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
        assert_eq!((tokens.writers().len(), tokens.mixed().len()), (16, 16));
        for token in tokens.writers().iter().chain(tokens.mixed()) {
            let principal = verifier.verify(token, Timestamp::now()).unwrap();
            assert!(principal.subject.as_str().starts_with("writer-"));
        }
        let algorithms = |tokens: &[String]| -> Vec<String> {
            let heads = tokens.iter().map(|token| token.split('.').next().unwrap());
            let mut names: Vec<String> = heads
                .map(|head| {
                    let head: Value =
                        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(head).unwrap()).unwrap();
                    head["alg"].as_str().unwrap().to_owned()
                })
                .collect();
            names.sort_unstable();
            names.dedup();
            names
        };
        assert_eq!(algorithms(tokens.writers()), ["ES256"]);
        assert_eq!(algorithms(tokens.mixed()), ["ES256", "EdDSA", "RS256"]);
        std::fs::remove_file(&file).unwrap();
    }
}
