//! Tests of tokens: all algorithms, every claim, and what an attacker would try.

use super::*;
use aws_lc_rs::encoding::AsDer;
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::{KeyPair as RsaKeyPair, KeySize};
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair,
};
use jsonwebtoken::{EncodingKey, Header};
use serde_json::{Value, json};
use std::sync::OnceLock;

/// What PKCS#8 puts before the PKCS#1 key of 2048 bits, which is what signs.
const PKCS8_HEAD: usize = 26;
const NOW_S: i64 = 1_800_000_000;

fn now() -> Timestamp {
    Timestamp::from_second(NOW_S).unwrap()
}

fn b64(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// A key of each algorithm: its JWK and what signs with it.
struct Pair {
    algorithm: Algorithm,
    jwk: Value,
    signing: EncodingKey,
}

fn pairs() -> &'static Vec<Pair> {
    static PAIRS: OnceLock<Vec<Pair>> = OnceLock::new();
    PAIRS.get_or_init(|| {
        let ed = Ed25519KeyPair::generate().unwrap();
        let ed_der = ed.to_pkcs8v1().unwrap();
        let random = SystemRandom::new();
        let ec_der = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        let ec = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, ec_der.as_ref()).unwrap();
        let point = ec.public_key().as_ref();
        let rsa = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
        let rsa_der: aws_lc_rs::encoding::Pkcs8V1Der<'_> = rsa.as_der().unwrap();
        let n = rsa.public_key().modulus().big_endian_without_leading_zero();
        let e = rsa.public_key().exponent().big_endian_without_leading_zero();
        vec![
            Pair {
                algorithm: Algorithm::EdDSA,
                jwk: json!({"kty":"OKP","crv":"Ed25519","kid":"ed","alg":"EdDSA","x":b64(ed.public_key().as_ref())}),
                signing: EncodingKey::from_ed_der(ed_der.as_ref()),
            },
            Pair {
                algorithm: Algorithm::ES256,
                jwk: json!({"kty":"EC","crv":"P-256","kid":"ec","alg":"ES256","use":"sig","x":b64(&point[1..33]),"y":b64(&point[33..])}),
                signing: EncodingKey::from_ec_der(ec_der.as_ref()),
            },
            Pair {
                algorithm: Algorithm::RS256,
                jwk: json!({"kty":"RSA","kid":"rsa","alg":"RS256","n":b64(n),"e":b64(e)}),
                signing: EncodingKey::from_rsa_der(&rsa_der.as_ref()[PKCS8_HEAD..]),
            },
            Pair {
                algorithm: Algorithm::HS256,
                jwk: json!({"kty":"oct","kid":"hs","alg":"HS256","k":b64(&[7; 32])}),
                signing: EncodingKey::from_secret(&[7; 32]).unwrap(),
            },
        ]
    })
}

fn pair(algorithm: Algorithm) -> &'static Pair {
    pairs().iter().find(|p| p.algorithm == algorithm).unwrap()
}

fn file() -> Value {
    let keys: Vec<&Value> = pairs().iter().map(|pair| &pair.jwk).collect();
    json!({"issuers":[{"issuer":"https://id.test","audience":"daybook","keys":keys}]})
}

fn verifier_of(file: &Value) -> Result<Verifier, KeysError> {
    Verifier::with(&keys::parse(file.to_string().as_bytes())?)
}

fn verifier() -> Verifier {
    verifier_of(&file()).unwrap()
}

fn claims() -> Value {
    json!({"iss":"https://id.test","aud":"daybook","sub":"alice","iat":NOW_S - 10,"exp":NOW_S + 600,
        "jti":"t-1","scope":"ledger:read ledger:write mail:send"})
}

fn changed(name: &str, value: Value) -> Value {
    let mut claims = claims();
    match value {
        Value::Null => claims.as_object_mut().unwrap().remove(name),
        value => claims
            .as_object_mut()
            .unwrap()
            .insert(name.to_owned(), value),
    };
    claims
}

fn sign(pair: &Pair, claims: &Value) -> String {
    let mut header = Header::new(pair.algorithm);
    header.kid = Some(pair.jwk["kid"].as_str().unwrap().to_owned());
    jsonwebtoken::encode(&header, claims, &pair.signing).unwrap()
}

fn verify(claims: &Value) -> Result<Arc<Principal>, AuthError> {
    verifier().verify(&sign(pair(Algorithm::HS256), claims), now())
}

#[test]
fn every_algorithm_verifies_and_a_changed_token_does_not() {
    let verifier = verifier();
    for pair in pairs() {
        let token = sign(pair, &claims());
        let principal = verifier.verify(&token, now()).unwrap();
        assert_eq!(principal.subject.as_str(), "alice");
        assert!(principal.scopes.has(Scope::Write) && !principal.scopes.has(Scope::Admin));
        let (head, rest) = token.split_once('.').unwrap();
        let (_, signature) = rest.split_once('.').unwrap();
        let other = b64(changed("sub", json!("bob")).to_string().as_bytes());
        let forged = format!("{head}.{other}.{signature}");
        assert_eq!(
            verifier.verify(&forged, now()),
            Err(AuthError::Signature),
            "{:?}",
            pair.algorithm
        );
    }
}

#[test]
fn a1_the_algorithm_is_never_taken_from_the_token() {
    let verifier = verifier();
    let rsa = pair(Algorithm::RS256);
    let n = URL_SAFE_NO_PAD
        .decode(rsa.jwk["n"].as_str().unwrap())
        .unwrap();
    // HS256, signed with what is public of the RSA key, under the RSA key's id.
    for secret in [n.as_slice(), rsa.jwk.to_string().as_bytes()] {
        let mut header = Header::new(Algorithm::HS256);
        header.kid = Some("rsa".to_owned());
        let key = EncodingKey::from_secret(secret).unwrap();
        let token = jsonwebtoken::encode(&header, &claims(), &key).unwrap();
        assert_eq!(verifier.verify(&token, now()), Err(AuthError::Algorithm));
    }
    for (alg, kid) in [("none", "rsa"), ("None", "hs"), ("", "hs"), ("HS512", "hs")] {
        let head = b64(json!({"alg":alg,"kid":kid}).to_string().as_bytes());
        let body = b64(claims().to_string().as_bytes());
        for signature in ["", "AA"] {
            let token = format!("{head}.{body}.{signature}");
            assert_eq!(verifier.verify(&token, now()), Err(AuthError::Algorithm));
        }
    }
    // A key that the token brings along is not looked at.
    let own = EncodingKey::from_secret(&[9; 32]).unwrap();
    let mut header = Header::new(Algorithm::HS256);
    header.kid = Some("hs".to_owned());
    header.jku = Some("https://evil.test/jwks".to_owned());
    let token = jsonwebtoken::encode(&header, &claims(), &own).unwrap();
    assert_eq!(verifier.verify(&token, now()), Err(AuthError::Signature));
}

#[test]
fn every_claim_is_required_and_checked() {
    for name in ["iss", "aud", "sub", "exp", "iat", "jti"] {
        assert!(
            matches!(
                verify(&changed(name, Value::Null)),
                Err(AuthError::Malformed(_))
            ),
            "{name}"
        );
    }
    for (name, value, error) in [
        ("iss", json!("https://other.test"), AuthError::Issuer),
        ("aud", json!("other"), AuthError::Audience),
        ("aud", json!(["a", "b"]), AuthError::Audience),
        ("exp", json!(NOW_S - LEEWAY_S), AuthError::Expired),
        ("nbf", json!(NOW_S + LEEWAY_S + 1), AuthError::NotYet),
        (
            "iat",
            json!(NOW_S + LEEWAY_S + 1),
            AuthError::IssuedInFuture,
        ),
    ] {
        assert_eq!(verify(&changed(name, value)), Err(error), "{name}");
    }
    for (name, value) in [
        ("aud", json!(["other", "daybook"])),
        ("exp", json!(NOW_S - LEEWAY_S + 1)),
        ("exp", json!(NOW_S as f64 + 0.5)),
        ("nbf", json!(NOW_S + LEEWAY_S)),
        ("iat", json!(NOW_S + LEEWAY_S)),
        ("jti", json!("x".repeat(128))),
    ] {
        assert!(verify(&changed(name, value)).is_ok(), "{name}");
    }
    for (name, value) in [
        ("jti", json!("x".repeat(129))),
        ("jti", json!("a\nb")),
        ("jti", json!(7)),
        ("sub", json!("")),
        ("sub", json!("a b")),
        ("sub", json!("é")),
        ("sub", json!("x".repeat(129))),
        ("exp", json!("tomorrow")),
        ("exp", json!(1e30)),
        ("iat", json!(-1)),
    ] {
        assert!(
            matches!(
                verify(&changed(name, value.clone())),
                Err(AuthError::Malformed(_))
            ),
            "{name} {value}"
        );
    }
}

#[test]
fn scopes_come_from_scope_or_scp() {
    for value in [json!("x ledger:admin"), json!(["x", "ledger:admin"])] {
        let mut claims = changed("scope", Value::Null);
        claims["scp"] = value;
        let scopes = verify(&claims).unwrap().scopes;
        assert!(scopes.has(Scope::Admin) && !scopes.has(Scope::Read));
    }
    let none = verify(&changed("scope", json!("ledger:everything"))).unwrap();
    assert_eq!(none.scopes, Scopes::default());
}

#[test]
fn what_is_no_token_is_refused() {
    let verifier = verifier();
    let good = sign(pair(Algorithm::HS256), &claims());
    for text in [
        "",
        "a",
        "a.b",
        "a.b.c",
        "..",
        "a.b.c.d",
        &format!("{good}.x"),
        &format!("{good}="),
    ] {
        assert!(verifier.verify(text, now()).is_err(), "{text:?}");
    }
    let long = format!("{good}{}", "A".repeat(TOKEN_BYTES_MAX));
    assert!(matches!(
        verifier.verify(&long, now()),
        Err(AuthError::Malformed(_))
    ));
    let mut header = Header::new(Algorithm::HS256);
    let key = &pair(Algorithm::HS256).signing;
    let token = jsonwebtoken::encode(&header, &claims(), key).unwrap();
    assert!(matches!(
        verifier.verify(&token, now()),
        Err(AuthError::Malformed(_))
    ));
    header.kid = Some("ghost".to_owned());
    let token = jsonwebtoken::encode(&header, &claims(), key).unwrap();
    assert_eq!(verifier.verify(&token, now()), Err(AuthError::Key));
}

#[test]
fn a_token_with_a_critical_extension_is_refused() {
    let verifier = verifier();
    let body = b64(claims().to_string().as_bytes());
    let signed = |head: Value| {
        let signed = format!("{}.{body}", b64(head.to_string().as_bytes()));
        let key = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, &[7; 32]);
        let signature = aws_lc_rs::hmac::sign(&key, signed.as_bytes());
        format!("{signed}.{}", b64(signature.as_ref()))
    };
    let plain = signed(json!({"alg":"HS256","kid":"hs","b64":true}));
    assert!(verifier.verify(&plain, now()).is_ok());
    for crit in [
        json!(["b64"]),
        json!(["x"]),
        json!([]),
        json!("x"),
        json!(null),
    ] {
        let token = signed(json!({"alg":"HS256","kid":"hs","b64":true,"x":1,"crit":crit}));
        assert!(
            matches!(verifier.verify(&token, now()), Err(AuthError::Malformed(_))),
            "{crit}"
        );
    }
}

#[test]
fn a_remembered_token_still_expires() {
    let verifier = verifier();
    let token = sign(pair(Algorithm::ES256), &changed("nbf", json!(NOW_S - 5)));
    let at = |seconds| Timestamp::from_second(NOW_S + seconds).unwrap();
    let first = verifier.verify(&token, at(0)).unwrap();
    let second = verifier.verify(&token, at(1)).unwrap();
    assert!(
        Arc::ptr_eq(&first, &second),
        "the second comes from the cache"
    );
    assert_eq!(verifier.verify(&token, at(660)), Err(AuthError::Expired));
    assert_eq!(verifier.verify(&token, at(-70)), Err(AuthError::NotYet));
}

#[test]
fn the_key_is_the_issuers_own_and_subjects_are_kept_apart() {
    let two = |a: &str, b: &str| {
        let entry = |issuer: &str, prefix: &str, secret: u8| {
            json!({"issuer":issuer,"audience":"daybook","subject_prefix":prefix,
                "keys":[{"kty":"oct","kid":"hs","alg":"HS256","k":b64(&[secret; 32])}]})
        };
        json!({"issuers":[entry("https://id.test", a, 7), entry("https://b.test", b, 8)]})
    };
    for (a, b) in [("", ""), ("a/", ""), ("", "b/"), ("a", "ab"), ("a/", "a/")] {
        assert!(verifier_of(&two(a, b)).is_err(), "{a:?} {b:?}");
    }
    let verifier = verifier_of(&two("a/", "b/")).unwrap();
    let mine = sign(pair(Algorithm::HS256), &claims());
    assert_eq!(
        verifier.verify(&mine, now()).unwrap().subject.as_str(),
        "a/alice"
    );
    let stolen = sign(
        pair(Algorithm::HS256),
        &changed("iss", json!("https://b.test")),
    );
    assert_eq!(verifier.verify(&stolen, now()), Err(AuthError::Signature));
    let subject = |text| Subject::parse(text).unwrap();
    assert_eq!(
        &*verifier.issuer_of(&subject("b/x")).unwrap(),
        "https://b.test"
    );
    assert!(verifier.issuer_of(&subject("c/x")).is_none());
}

#[test]
fn a_keys_file_that_is_not_understood_is_refused() {
    let with_key = |jwk: Value| json!({"issuers":[{"issuer":"i","audience":"a","keys":[jwk]}]});
    let rsa = &pair(Algorithm::RS256).jwk;
    let hs = &pair(Algorithm::HS256).jwk;
    let change = |jwk: &Value, name: &str, value: Value| {
        let mut jwk = jwk.clone();
        jwk[name] = value;
        jwk
    };
    let mut no_alg = hs.clone();
    no_alg.as_object_mut().unwrap().remove("alg");
    for bad in [
        with_key(no_alg),
        with_key(change(rsa, "alg", json!("HS256"))),
        with_key(change(rsa, "alg", json!("PS256"))),
        with_key(change(hs, "alg", json!("RS256"))),
        with_key(change(hs, "kid", json!(""))),
        with_key(change(hs, "k", json!(b64(&[7; 31])))),
        with_key(change(rsa, "n", json!(b64(&[255; 128])))),
        with_key(change(rsa, "d", json!("AQAB"))),
        with_key(change(rsa, "use", json!("enc"))),
        with_key(change(&pair(Algorithm::ES256).jwk, "crv", json!("P-384"))),
        json!({"issuers":[{"issuer":"i","audience":"a","keys":[hs, hs]}]}),
        json!({"issuers":[{"issuer":"i","audience":"a","keys":[]}]}),
        json!({"issuers":[{"issuer":"i","audience":"","keys":[hs]}]}),
        json!({"issuers":[{"issuer":"i","audience":"a","keys":[hs],"x":1}]}),
        json!({"issuers":[],"x":1}),
        json!({"issuers":[]}),
    ] {
        assert!(verifier_of(&bad).is_err(), "{bad}");
    }
    assert!(verifier_of(&with_key(hs.clone())).is_ok());
}

#[test]
fn development_tokens_verify() {
    use std::os::unix::fs::PermissionsExt;
    let path = std::env::temp_dir().join(format!("daybook-keys-{}.json", uuid::Uuid::now_v7()));
    generate_dev_keys(&path).unwrap();
    assert!(generate_dev_keys(&path).is_err(), "never overwritten");
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let alice = Subject::parse("alice").unwrap();
    let hour = std::time::Duration::from_secs(3_600);
    let token = issue(&path, &alice, &[Scope::Read, Scope::Write], hour, now()).unwrap();
    let principal = Verifier::load(&path)
        .unwrap()
        .verify(&token, now())
        .unwrap();
    assert_eq!(principal.subject, alice);
    assert_eq!(&*principal.issuer, DEV_ISSUER);
    assert!(principal.scopes.has(Scope::Write) && !principal.scopes.has(Scope::ReadAny));
    assert!(issue(&path, &alice, &[], LIFE_MAX * 2, now()).is_err());
    std::fs::remove_file(&path).unwrap();
}
