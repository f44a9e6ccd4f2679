//! Reads the body of a request: strict JSON, then the envelope around the data.
//!
//! Never lets through what two readers could understand differently: duplicate members, fractions, exponents, integers
//! beyond 64 bits, unknown members.

use super::FieldError;
use crate::domain::{Subject, Version, time};
use jiff::Timestamp;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::cell::RefCell;
use std::fmt;

/// The place of a value in the body, as a list from the value up to the root; lives on the stack.
enum Path<'a> {
    Root,
    Member(&'a Path<'a>, &'a str),
    Item(&'a Path<'a>, usize),
}

/// A member name as a segment of a JSON Pointer.
pub(super) fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

impl Path<'_> {
    fn pointer(&self) -> String {
        match self {
            Path::Root => String::new(),
            Path::Member(parent, name) => format!("{}/{}", parent.pointer(), escaped(name)),
            Path::Item(parent, index) => format!("{}/{index}", parent.pointer()),
        }
    }
}

/// Reads one value strictly. serde_json itself bounds the depth (128).
struct Strict<'a> {
    path: Path<'a>,
    found: &'a RefCell<Option<FieldError>>,
}

impl Strict<'_> {
    fn refuse<E: serde::de::Error>(&self, detail: &str) -> E {
        *self.found.borrow_mut() = Some(FieldError {
            pointer: self.path.pointer(),
            detail: detail.to_owned(),
        });
        E::custom(detail)
    }
}

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_bool<E>(self, flag: bool) -> Result<Value, E> {
        Ok(Value::Bool(flag))
    }
    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(Value::from(number))
    }
    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(Value::from(number))
    }
    fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<Value, E> {
        Err(self.refuse("a number is an integer of at most 64 bits, without fraction or exponent"))
    }
    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::from(text))
    }
    fn visit_string<E>(self, text: String) -> Result<Value, E> {
        Ok(Value::String(text))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(Strict {
            path: Path::Item(&self.path, list.len()),
            found: self.found,
        })? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(name) = members.next_key::<String>()? {
            let path = Path::Member(&self.path, &name);
            let inner = Strict {
                path,
                found: self.found,
            };
            if map.contains_key(&name) {
                return Err(inner.refuse("the member appears twice"));
            }
            let value = members.next_value_seed(inner)?;
            map.insert(name, value);
        }
        Ok(Value::Object(map))
    }
}

/// Reads a text as one strict JSON value.
pub(super) fn strict(body: &[u8]) -> Result<Value, FieldError> {
    let found = RefCell::new(None);
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let seed = Strict {
        path: Path::Root,
        found: &found,
    };
    let value = seed.deserialize(&mut deserializer).and_then(|value| {
        deserializer.end()?;
        match std::str::from_utf8(body) {
            Ok(_) => Ok(value),
            Err(_) => Err(serde_json::Error::custom("the body is not UTF-8")),
        }
    });
    value.map_err(|error| {
        found.take().unwrap_or_else(|| FieldError {
            pointer: String::new(),
            detail: error.to_string(),
        })
    })
}

/// A member that is absent, right, or wrong (and reported).
fn member<T>(
    map: &mut Map<String, Value>,
    name: &str,
    errors: &mut Vec<FieldError>,
    read: impl FnOnce(Value) -> Result<T, &'static str>,
) -> Option<T> {
    match read(map.remove(name)?) {
        Ok(value) => Some(value),
        Err(detail) => {
            errors.push(FieldError {
                pointer: format!("/{name}"),
                detail: detail.to_owned(),
            });
            None
        }
    }
}

/// The members of `POST /v1/events` around the data.
#[derive(Debug)]
pub(super) struct Envelope {
    /// The type's name; None when it is not a text or missing, and reported.
    pub(super) event_type: Option<String>,
    /// The version's text; None when it is not a text or missing, and reported.
    pub(super) schema: Option<String>,
    /// About whom, if said.
    pub(super) subject: Option<Subject>,
    /// When it took effect, if said.
    pub(super) time: Option<Timestamp>,
    /// The sequence that the client believes, if said.
    pub(super) expected_sequence: Option<u64>,
    /// The data; None when missing, and reported.
    pub(super) data: Option<Value>,
    /// All that is wrong with the members.
    pub(super) errors: Vec<FieldError>,
}

fn text(value: Value) -> Result<String, &'static str> {
    match value {
        Value::String(text) => Ok(text),
        _ => Err("expected a string"),
    }
}

impl Envelope {
    /// Takes the body apart.
    ///
    /// # Errors
    /// The one reason why it is no JSON object at all.
    pub(super) fn read(body: &[u8]) -> Result<Self, FieldError> {
        let Value::Object(mut map) = strict(body)? else {
            return Err(FieldError {
                pointer: String::new(),
                detail: "expected an object".to_owned(),
            });
        };
        let mut errors = Vec::new();
        for required in ["type", "schema", "data"] {
            if !map.contains_key(required) {
                errors.push(FieldError {
                    pointer: format!("/{required}"),
                    detail: "the member is required".to_owned(),
                });
            }
        }
        let mut envelope = Envelope {
            event_type: member(&mut map, "type", &mut errors, text),
            schema: member(&mut map, "schema", &mut errors, text),
            subject: member(&mut map, "subject", &mut errors, subject),
            time: member(&mut map, "time", &mut errors, instant),
            expected_sequence: member(&mut map, "expected_sequence", &mut errors, sequence),
            data: map.remove("data"),
            errors,
        };
        envelope.errors.extend(map.keys().map(|name| FieldError {
            pointer: format!("/{}", escaped(name)),
            detail: "there is no such member".to_owned(),
        }));
        Ok(envelope)
    }
}

fn subject(value: Value) -> Result<Subject, &'static str> {
    Subject::parse(&text(value)?).ok_or("expected 1 to 128 visible ASCII characters")
}

fn sequence(value: Value) -> Result<u64, &'static str> {
    const EXPECTED: &str = "expected a non-negative integer, or one as a decimal string";
    let number = match &value {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text
            .parse()
            .ok()
            .filter(|number: &u64| number.to_string() == *text),
        _ => None,
    };
    number.ok_or(EXPECTED)
}

fn instant(value: Value) -> Result<Timestamp, &'static str> {
    const EXPECTED: &str =
        "expected an RFC 3339 time with an offset, from 1970 to 9999, such as 2026-11-30T10:59:00Z";
    let text = text(value)?;
    let at = if shaped(&text) {
        text.parse::<Timestamp>().ok()
    } else {
        None
    };
    at.filter(|at| *at >= Timestamp::UNIX_EPOCH)
        .map(time::truncate)
        .ok_or(EXPECTED)
}

/// Whether a text has RFC 3339's form; the parser beneath also reads others.
fn shaped(text: &str) -> bool {
    const DATE: &[u8] = b"0000-00-00T00:00:00";
    let like = |bytes: &[u8], form: &[u8]| {
        bytes.len() == form.len()
            && bytes.iter().zip(form).all(|(byte, form)| match form {
                b'0' => byte.is_ascii_digit(),
                other => byte == other,
            })
    };
    let Some((date, rest)) = text.as_bytes().split_at_checked(DATE.len()) else {
        return false;
    };
    let rest = match rest.strip_prefix(b".") {
        None => rest,
        Some(fraction) => {
            let digits = fraction.iter().take_while(|b| b.is_ascii_digit()).count();
            if !(1..=9).contains(&digits) {
                return false;
            }
            &fraction[digits..]
        }
    };
    like(date, DATE) && (rest == b"Z" || like(rest, b"+00:00") || like(rest, b"-00:00"))
}

/// The hash of a request's meaning as sent: type, version, subject, time and data, members sorted, no white space.
/// `data` is compact JSON with sorted members.
pub(super) fn fingerprint(
    event_type: &str,
    schema: Version,
    subject: &Subject,
    at: Option<Timestamp>,
    data: &str,
) -> [u8; 32] {
    let at = at.map(time::micros);
    let head = serde_json::json!({
        "type": event_type, "schema": schema, "subject": subject, "time": at,
    });
    let mut hash = Sha256::new();
    hash.update(head.to_string());
    hash.update(data);
    hash.finalize().into()
}
