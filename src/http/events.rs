//! Events: append one, get one, list them.
//!
//! A record leaves as the bytes that are stored; it is never parsed or written anew here.

use super::problem::Problem;
use super::request::Call;
use super::{cursor, json};
use crate::commit::Outcome;
use crate::commit::record::hash;
use crate::domain::{IdempotencyKey, Scope, Subject, TypeName};
use crate::store::reads::{self, Numbered, Page};
use axum::body::Body;
use axum::http::header::{CONTENT_LOCATION, CONTENT_TYPE, ETAG, IF_NONE_MATCH, LOCATION};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use uuid::Uuid;

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
const REPR_DIGEST: HeaderName = HeaderName::from_static("repr-digest");

/// Most numbers one page looks at. With a filter that matches little, a page may so be short and still have a next.
const SCAN_MAX: i64 = 10_000;

/// `POST /v1/events`
pub(super) async fn append(call: Call) -> Result<Response<Body>, Problem> {
    let key = idempotency_key(&call.headers)?;
    let draft =
        call.app
            .registry
            .draft(&call.principal, key, call.traceparent.clone(), &call.body)?;
    match call.app.lanes.submit(draft, call.deadline).await {
        Outcome::Created(recorded) => {
            let mut response = record(recorded.event_id, &recorded.record, recorded.hash);
            *response.status_mut() = StatusCode::CREATED;
            locate(&mut response, recorded.event_id);
            Ok(response)
        }
        Outcome::Replayed(stored) => {
            let mut response = record(stored.event_id, &stored.record, hash(&stored.record));
            locate(&mut response, stored.event_id);
            response
                .headers_mut()
                .insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("true"));
            Ok(response)
        }
        Outcome::Rejected(rejection) => Err(Problem::rejected(&rejection, Timestamp::now())),
        Outcome::Unavailable(why) => Err(why.into()),
        Outcome::Unknown => Err(Problem::new(
            "outcome_unknown",
            "it may have been written: send the same request with the same key again",
        )),
        Outcome::Failed => Err(Problem::internal()),
    }
}

fn idempotency_key(headers: &HeaderMap) -> Result<IdempotencyKey, Problem> {
    let mut values = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(value) = values.next() else {
        return Err(Problem::new(
            "idempotency_key_missing",
            "the header Idempotency-Key is required",
        ));
    };
    value
        .to_str()
        .ok()
        .filter(|_| values.next().is_none())
        .and_then(IdempotencyKey::parse)
        .ok_or_else(|| {
            Problem::new(
                "idempotency_key_invalid",
                "exactly one header Idempotency-Key with 1 to 128 visible ASCII characters",
            )
        })
}

/// `GET /v1/events/{id}`
pub(super) async fn get(call: Call) -> Result<Response<Body>, Problem> {
    let id = Uuid::try_parse(call.path("id"))
        .map_err(|_| Problem::invalid("an event's id is a UUID"))?;
    let client = call.client().await?;
    let found = call.read(&client, reads::event_by_id(&client, id)).await?;
    let owned = found
        .filter(|owned| call.may_read(&owned.subject))
        .ok_or_else(Problem::not_found)?;
    let mut response = record(id, &owned.record, hash(&owned.record));
    let matched = response
        .headers()
        .get(ETAG)
        .is_some_and(|etag| names(&call.headers, etag));
    if matched {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        *response.body_mut() = Body::empty();
        response.headers_mut().remove(CONTENT_TYPE);
    }
    Ok(response)
}

/// Whether `If-None-Match` names this tag; weak and strong compare the same here (RFC 9110, 13.1.2).
fn names(headers: &HeaderMap, etag: &HeaderValue) -> bool {
    headers
        .get_all(IF_NONE_MATCH)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|text| text.split(','))
        .map(str::trim)
        .any(|tag| tag == "*" || tag.trim_start_matches("W/").as_bytes() == etag.as_bytes())
}

fn record(id: Uuid, record: &str, hash: [u8; 32]) -> Response<Body> {
    let mut response = Response::new(Body::from(record.to_owned()));
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/cloudevents+json"),
    );
    for (name, text) in [
        (ETAG, format!("\"{}\"", hex::encode(hash))),
        (REPR_DIGEST, format!("sha-256=:{}:", STANDARD.encode(hash))),
        (CONTENT_LOCATION, format!("/v1/events/{id}")),
    ] {
        if let Ok(value) = HeaderValue::from_str(&text) {
            headers.insert(name, value);
        }
    }
    response
}

fn locate(response: &mut Response<Body>, id: Uuid) {
    if let Ok(value) = HeaderValue::from_str(&format!("/v1/events/{id}")) {
        response.headers_mut().insert(LOCATION, value);
    }
}

/// What a list is asked for.
struct Filter {
    subject: Option<Subject>,
    event_type: Option<TypeName>,
    key: Option<IdempotencyKey>,
    limit: u16,
}

impl Filter {
    fn of(call: &Call) -> Result<Self, Problem> {
        let read_any = call.principal.scopes.has(Scope::ReadAny);
        let subject =
            match call.query("subject") {
                Some(text) => Some(Subject::parse(text).ok_or_else(|| {
                    Problem::invalid("subject is 1 to 128 visible ASCII characters")
                })?),
                None => (!read_any).then(|| call.principal.subject.clone()),
            };
        let event_type = call
            .query("type")
            .map(|text| {
                TypeName::parse(text).ok_or_else(|| Problem::invalid("type is not a type's name"))
            })
            .transpose()?;
        let key = call
            .query("idempotency_key")
            .map(|text| {
                IdempotencyKey::parse(text).ok_or_else(|| {
                    Problem::invalid("idempotency_key is 1 to 128 visible ASCII characters")
                })
            })
            .transpose()?;
        if key.is_some() && subject.is_none() {
            return Err(Problem::invalid("idempotency_key needs subject"));
        }
        Ok(Filter {
            subject,
            event_type,
            key,
            limit: call.limit()?,
        })
    }

    /// What makes it this list and no other.
    fn identity(&self) -> [&str; 4] {
        [
            "events",
            self.subject.as_ref().map_or("", Subject::as_str),
            self.event_type.as_ref().map_or("", TypeName::as_str),
            self.key.as_ref().map_or("", IdempotencyKey::as_str),
        ]
    }

    fn page(&self, after: i64, end: i64) -> Page<'_> {
        // A key has an index of its own, and who asks for one must find it on the first page.
        let until = match self.key {
            Some(_) => end,
            None => end.min(after.saturating_add(SCAN_MAX)),
        };
        Page {
            after,
            until,
            event_type: self.event_type.as_ref(),
            limit: self.limit,
        }
    }
}

/// `GET /v1/events`
pub(super) async fn list(call: Call) -> Result<Response<Body>, Problem> {
    let filter = Filter::of(&call)?;
    let after = match call.query("after") {
        Some(text) => cursor::decode(&filter.identity(), text)?
            .parse()
            .map_err(|_| Problem::invalid("after is not a cursor of this list"))?,
        None => 0,
    };
    if filter
        .subject
        .as_ref()
        .is_some_and(|subject| !call.may_read(subject.as_str()))
    {
        return Err(Problem::not_found());
    }
    let client = call.client().await?;
    let (items, page_end, end) = match &filter.subject {
        Some(subject) => {
            let head = call
                .read(&client, reads::user_head(&client, subject))
                .await?;
            let Some(head) = head else {
                return Ok(page_of(&[], None));
            };
            let page = filter.page(after, head.sequence);
            let items = reads::user_events(&client, head.user_no, filter.key.as_ref(), &page).await;
            (items, page.until, head.sequence)
        }
        None => {
            let end = call.read(&client, reads::horizon(&client)).await?;
            let page = filter.page(after, end);
            (reads::all_events(&client, &page).await, page.until, end)
        }
    };
    let items = items.map_err(|error| super::request::database(&error))?;
    let next = next_place(&items, filter.limit, page_end, end)
        .map(|place| cursor::encode(&filter.identity(), &place.to_string()));
    Ok(page_of(&items, next))
}

/// Where the list goes on, if it does.
fn next_place(items: &[Numbered], limit: u16, page_end: i64, end: i64) -> Option<i64> {
    let last = if items.len() >= usize::from(limit) {
        items.last()?.number
    } else {
        page_end
    };
    (last < end).then_some(last)
}

fn page_of(items: &[Numbered], next: Option<String>) -> Response<Body> {
    let size: usize = items.iter().map(|item| item.record.len() + 1).sum();
    let mut text = String::with_capacity(size + 128);
    text.push_str("{\"items\":[");
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        text.push_str(&item.record);
    }
    text.push_str("],\"next\":");
    // A cursor is base64url: nothing in it needs escaping.
    match next {
        Some(cursor) => text.push_str(&format!("\"{cursor}\"}}")),
        None => text.push_str("null}"),
    }
    json(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(values: &[&'static str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(IDEMPOTENCY_KEY, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn exactly_one_key_with_or_without_quotation_marks() {
        let code = |values| idempotency_key(&headers(values)).map_err(|p| p.code().to_owned());
        assert_eq!(code(&["k"]), code(&["\"k\""]));
        assert!(code(&["k"]).is_ok());
        assert_eq!(code(&[]), Err("idempotency_key_missing".to_owned()));
        for bad in [&["k", "k"][..], &[""], &["a b"], &["\"\""]] {
            assert_eq!(code(bad), Err("idempotency_key_invalid".to_owned()));
        }
    }

    #[test]
    fn a_records_tag_is_its_hash() {
        let response = record(Uuid::nil(), "{}", hash("{}"));
        let hash = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";
        assert_eq!(response.headers()[ETAG], format!("\"{hash}\"").as_str());
        assert_eq!(
            response.headers()[REPR_DIGEST],
            "sha-256=:RBNvo1WzZ4oRRq0W9+hknpT7T8If536DEMBg9hyq/4o=:"
        );
        let mut headers = HeaderMap::new();
        headers.insert(IF_NONE_MATCH, HeaderValue::from_static("\"a\", W/\"b\""));
        assert!(names(&headers, &HeaderValue::from_static("\"b\"")));
        assert!(!names(&headers, &HeaderValue::from_static("\"c\"")));
    }

    #[test]
    fn a_short_page_goes_on_when_the_scan_was_cut() {
        let item = |number| Numbered {
            number,
            record: "{}".to_owned(),
        };
        assert_eq!(next_place(&[item(1), item(2)], 2, 9, 9), Some(2));
        assert_eq!(next_place(&[item(8), item(9)], 2, 9, 9), None);
        assert_eq!(next_place(&[item(1)], 2, 10_000, 20_000), Some(10_000));
        assert_eq!(next_place(&[], 2, 9, 9), None);
    }
}
