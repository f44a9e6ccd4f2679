//! What every request goes through, in one place: id and trace, token, scope, query, body, deadline, metrics.
//!
//! A handler sees a request only after all of it. A panic in one becomes a 500 with the request's id and nothing else.

use super::problem::Problem;
use super::{App, Needs, Route, Verb};
use crate::commit::BEGUN_GRACE;
use crate::domain::{Principal, Scope};
use crate::store::reads;
use crate::telemetry::RequestLabels;
use axum::body::Body;
use axum::extract::{FromRequestParts, Query as QueryString, RawPathParams, Request};
use axum::http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response};
use bytes::Bytes;
use deadpool_postgres::Client;
use futures_util::FutureExt;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use jiff::Timestamp;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tracing::Instrument;

/// Longest body, in bytes.
pub const BODY_BYTES_MAX: usize = 64 * 1024;
/// How much of a refused request's body is still taken in, in bytes, and for how long.
const DISCARD_BYTES_MAX: usize = 1024 * 1024;
const DISCARD_TIME_MAX: Duration = Duration::from_secs(1);
/// Longest request id that is taken from a client, in bytes.
const REQUEST_ID_BYTES_MAX: usize = 64;
/// How much longer than the deadline a write may take to tell its outcome. The lanes decide it within their grace; this is
/// the backstop behind them, and the bound of writes that go through no lane.
const WRITE_BACKSTOP: Duration = BEGUN_GRACE.saturating_add(Duration::from_secs(1));

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// A request that may be served: who sends it, and what with.
pub(super) struct Call {
    pub(super) app: Arc<App>,
    pub(super) principal: Arc<Principal>,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    pub(super) deadline: Instant,
    pub(super) traceparent: Option<String>,
    path: Vec<(String, String)>,
    query: Vec<(String, String)>,
}

impl Call {
    /// A parameter of the path; the route table names them.
    pub(super) fn path(&self, name: &str) -> &str {
        find(&self.path, name).unwrap_or_default()
    }

    /// A parameter of the query.
    pub(super) fn query(&self, name: &str) -> Option<&str> {
        find(&self.query, name)
    }

    /// The parameter `limit`: 1 to [`reads::PAGE_MAX`].
    pub(super) fn limit(&self) -> Result<u16, Problem> {
        const DEFAULT: u16 = 50;
        let Some(text) = self.query("limit") else {
            return Ok(DEFAULT);
        };
        text.parse()
            .ok()
            .filter(|limit| (1..=reads::PAGE_MAX).contains(limit))
            .ok_or_else(|| Problem::invalid(format!("limit is 1 to {}", reads::PAGE_MAX)))
    }

    /// Whether this subject's own things are this client's to see.
    pub(super) fn may_read(&self, subject: &str) -> bool {
        let scopes = self.principal.scopes;
        scopes.has(Scope::ReadAny)
            || (scopes.has(Scope::Read) && self.principal.subject.as_str() == subject)
    }

    /// A connection of the read pool.
    pub(super) async fn client(&self) -> Result<Client, Problem> {
        self.app.pool.get().await.map_err(|error| {
            tracing::debug!(%error, "no connection");
            Problem::new(
                "database_unavailable",
                "no connection could be had; send the same request again",
            )
        })
    }

    /// Awaits a read beside the check that the token still counts: one round trip.
    pub(super) async fn read<T>(
        &self,
        client: &Client,
        read: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, Problem> {
        let (revoked, value) = tokio::join!(reads::token_revoked(client, &self.principal), read);
        if revoked.map_err(|error| database(&error))? {
            return Err(Problem::new("token_revoked", "the token has been revoked"));
        }
        value.map_err(|error| database(&error))
    }
}

fn find<'a>(pairs: &'a [(String, String)], name: &str) -> Option<&'a str> {
    pairs
        .iter()
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.as_str())
}

/// 503 when trying again may help, 500 when the statement itself failed.
pub(super) fn database(error: &tokio_postgres::Error) -> Problem {
    let passing = match error.code() {
        // Connection, rollback, resources, not in the needed state, operator's intervention (time-outs among them).
        Some(state) => ["08", "40", "53", "55", "57"]
            .iter()
            .any(|class| state.code().starts_with(class)),
        None => {
            error.is_closed()
                || std::error::Error::source(error)
                    .is_some_and(|source| source.is::<std::io::Error>())
        }
    };
    if passing {
        tracing::debug!(%error, "the database failed a read");
        return Problem::new(
            "database_unavailable",
            "the database did not answer; send the same request again",
        );
    }
    tracing::error!(%error, code = error.code().map(tokio_postgres::error::SqlState::code), "a statement failed");
    Problem::internal()
}

/// What is known of a request before anything is decided.
struct Edge {
    started: Instant,
    request_id: HeaderValue,
    traceparent: Option<String>,
    method: &'static str,
}

impl Edge {
    fn of(method: &Method, headers: &HeaderMap) -> Self {
        let given = headers
            .get(X_REQUEST_ID)
            .filter(|id| (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()))
            .filter(|id| id.as_bytes().iter().all(u8::is_ascii_graphic));
        let request_id = given.cloned().unwrap_or_else(|| {
            let id = uuid::Uuid::now_v7().to_string();
            HeaderValue::from_str(&id).unwrap_or(HeaderValue::from_static("none"))
        });
        Edge {
            started: Instant::now(),
            request_id,
            traceparent: headers
                .get(TRACEPARENT)
                .and_then(|value| value.to_str().ok())
                .filter(|text| is_traceparent(text))
                .map(str::to_owned),
            method: match *method {
                Method::GET => "GET",
                Method::HEAD => "HEAD",
                Method::POST => "POST",
                Method::PUT => "PUT",
                Method::PATCH => "PATCH",
                Method::DELETE => "DELETE",
                Method::OPTIONS => "OPTIONS",
                _ => "other",
            },
        }
    }

    fn id(&self) -> &str {
        self.request_id.to_str().unwrap_or_default()
    }

    fn span(&self) -> tracing::Span {
        let trace_id = self.traceparent.as_ref().and_then(|text| text.get(3..35));
        tracing::info_span!("request", request_id = self.id(), trace_id)
    }

    /// Adds what every answer carries, and counts it.
    fn finish(
        self,
        app: &App,
        route: &'static str,
        answer: Result<Response<Body>, Problem>,
    ) -> Response<Body> {
        let mut response = answer.unwrap_or_else(|problem| {
            tracing::debug!(code = problem.code(), "refused");
            problem.into_response(self.id())
        });
        let took = self.started.elapsed();
        let timing = format!("app;dur={:.3}", took.as_secs_f64() * 1_000.0);
        if let Ok(timing) = HeaderValue::from_str(&timing) {
            response.headers_mut().insert(SERVER_TIMING, timing);
        }
        response.headers_mut().insert(X_REQUEST_ID, self.request_id);
        let labels = RequestLabels {
            route,
            method: self.method,
            status: response.status().as_u16(),
        };
        app.metrics.requests.get_or_create(&labels).inc();
        app.metrics.request_seconds.observe(took.as_secs_f64());
        tracing::debug!(
            route,
            method = self.method,
            status = labels.status,
            "answered"
        );
        response
    }
}

/// W3C trace context, version 00: lower-case hexadecimal, neither id all zeros.
fn is_traceparent(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let hex = |part: &str, length| {
        part.len() == length
            && part
                .bytes()
                .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    let named = |part: &str, length| hex(part, length) && part.bytes().any(|b| b != b'0');
    matches!(parts[..], ["00", trace, parent, flags]
        if named(trace, 32) && named(parent, 16) && hex(flags, 2))
}

/// Answers a request for a row of the route table.
pub(super) async fn run(route: &'static Route, app: Arc<App>, request: Request) -> Response<Body> {
    let edge = Edge::of(request.method(), request.headers());
    let span = edge.span();
    async {
        let traceparent = edge.traceparent.clone();
        let deadline = edge.started + app.config.request_timeout();
        let (parts, mut body) = request.into_parts();
        let expects = parts.headers.contains_key(EXPECT);
        let answering = answer(route, app.clone(), parts, &mut body, traceparent, deadline);
        let answer = match AssertUnwindSafe(answering).catch_unwind().await {
            Ok(answer) => answer,
            Err(_) => {
                tracing::error!(route = route.path, "a handler panicked");
                Err(Problem::internal())
            }
        };
        // Who asked before sending has sent nothing yet.
        if answer.is_err() && !expects {
            discard(&mut body).await;
        }
        edge.finish(&app, route.path, answer)
    }
    .instrument(span)
    .await
}

/// Answers a request that no row of the route table takes.
pub(super) async fn refuse(app: &App, request: Request, problem: Problem) -> Response<Body> {
    let edge = Edge::of(request.method(), request.headers());
    let span = edge.span();
    if !request.headers().contains_key(EXPECT) {
        discard(&mut request.into_body()).await;
    }
    span.in_scope(|| edge.finish(app, "none", Err(problem)))
}

/// Takes in what a refused request is still sending, within limits: a connection that is closed with bytes unread is reset, and
/// the answer is lost with it.
async fn discard(body: &mut Body) {
    let taking = async {
        let mut left = DISCARD_BYTES_MAX;
        while let Some(Ok(frame)) = body.frame().await {
            let taken = frame.data_ref().map_or(0, Bytes::len);
            let Some(less) = left.checked_sub(taken) else {
                return;
            };
            left = less;
        }
    };
    let _ = tokio::time::timeout(DISCARD_TIME_MAX, taking).await;
}

async fn answer(
    route: &'static Route,
    app: Arc<App>,
    mut parts: Parts,
    body: &mut Body,
    traceparent: Option<String>,
    deadline: Instant,
) -> Result<Response<Body>, Problem> {
    let principal = app
        .verifier
        .verify(bearer(&parts.headers)?, Timestamp::now())?;
    if let Needs::OneOf(scopes) = route.needs
        && !scopes.iter().any(|scope| principal.scopes.has(*scope))
    {
        let names: Vec<&str> = scopes.iter().map(|scope| scope.name()).collect();
        return Err(Problem::scope_missing(&names.join(" or ")));
    }
    let query = query(route, &parts)?;
    let path = path(&mut parts).await?;
    let body = match route.method {
        Verb::Get => Bytes::new(),
        Verb::Post => tokio::time::timeout_at(deadline, read_body(&parts.headers, body))
            .await
            .map_err(|_| Problem::new("request_timeout", "the body did not arrive in time"))??,
    };
    let call = Call {
        app,
        principal,
        headers: parts.headers,
        body,
        deadline,
        traceparent,
        path,
        query,
    };
    if route.writes {
        // What may have been written is never answered with "nothing was done".
        return tokio::time::timeout_at(deadline + WRITE_BACKSTOP, (route.handler)(call))
            .await
            .map_err(|_| Problem::new("outcome_unknown", "the deadline passed"))?;
    }
    tokio::time::timeout_at(deadline, (route.handler)(call))
        .await
        .map_err(|_| Problem::new("deadline_passed", "the answer took too long"))?
}

fn bearer(headers: &HeaderMap) -> Result<&str, Problem> {
    use crate::auth::AuthError;
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let Some(value) = values.next() else {
        return Err(AuthError::Missing.into());
    };
    if values.next().is_some() {
        return Err(AuthError::Malformed("more than one Authorization header").into());
    }
    let text = value
        .to_str()
        .map_err(|_| AuthError::Malformed("not ASCII"))?;
    match text.split_once(' ') {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => Ok(token.trim()),
        _ => Err(AuthError::Missing.into()),
    }
}

fn query(route: &Route, parts: &Parts) -> Result<Vec<(String, String)>, Problem> {
    let QueryString(pairs) = QueryString::<Vec<(String, String)>>::try_from_uri(&parts.uri)
        .map_err(|_| Problem::invalid("the query does not parse"))?;
    for (index, (name, _)) in pairs.iter().enumerate() {
        if !route.query.contains(&name.as_str()) {
            return Err(Problem::invalid("the query has an unknown parameter").with(
                "parameter",
                name.chars().take(REQUEST_ID_BYTES_MAX).collect::<String>(),
            ));
        }
        if pairs[..index].iter().any(|(other, _)| other == name) {
            return Err(
                Problem::invalid("a parameter is there twice").with("parameter", name.as_str())
            );
        }
    }
    Ok(pairs)
}

async fn path(parts: &mut Parts) -> Result<Vec<(String, String)>, Problem> {
    let params = RawPathParams::from_request_parts(parts, &())
        .await
        .map_err(|_| Problem::invalid("the path is not UTF-8"))?;
    Ok(params
        .iter()
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect())
}

async fn read_body(headers: &HeaderMap, body: &mut Body) -> Result<Bytes, Problem> {
    let mut types = headers.get_all(CONTENT_TYPE).iter();
    if !is_json(types.next()) || types.next().is_some() {
        return Err(Problem::new(
            "unsupported_media_type",
            "the header Content-Type is application/json, once",
        ));
    }
    let too_large = || {
        Problem::new(
            "body_too_large",
            format!("a body has at most {BODY_BYTES_MAX} bytes"),
        )
    };
    let announced = headers
        .get(CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|length| length > BODY_BYTES_MAX) {
        return Err(too_large());
    }
    match Limited::new(body, BODY_BYTES_MAX).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(too_large()),
        Err(_) => Err(Problem::invalid("the body did not arrive whole")),
    }
}

fn is_json(content_type: Option<&HeaderValue>) -> bool {
    let Some(text) = content_type.and_then(|value| value.to_str().ok()) else {
        return false;
    };
    let mut parts = text.split(';').map(str::trim);
    let json = parts
        .next()
        .is_some_and(|essence| essence.eq_ignore_ascii_case("application/json"));
    json && parts.all(|parameter| {
        parameter.split_once('=').is_some_and(|(name, value)| {
            name.eq_ignore_ascii_case("charset")
                && value.trim_matches('"').eq_ignore_ascii_case("utf-8")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_json_in_utf8_is_json() {
        for (text, json) in [
            ("application/json", true),
            ("Application/JSON; charset=UTF-8", true),
            ("application/json;charset=\"utf-8\"", true),
            ("application/json; charset=latin1", false),
            ("application/json; version=1", false),
            ("text/plain", false),
            ("", false),
        ] {
            let value = HeaderValue::from_static(text);
            assert_eq!(is_json(Some(&value)), json, "{text:?}");
        }
        assert!(!is_json(None));
    }

    #[test]
    fn only_a_well_formed_traceparent_is_taken() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert!(is_traceparent(good));
        for bad in [
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x",
            "00-0af7651916cd43dd8448eb211c80319c",
            "",
        ] {
            assert!(!is_traceparent(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_clients_request_id_is_taken_when_it_is_short_and_visible() {
        let id = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(X_REQUEST_ID, HeaderValue::from_static(value));
            Edge::of(&Method::GET, &headers).id().to_owned()
        };
        assert_eq!(id("abc-1"), "abc-1");
        assert_ne!(id("a b"), "a b");
        assert_eq!(id("").len(), 36);
    }

    #[test]
    fn a_token_comes_once_and_as_bearer() {
        let token = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(AUTHORIZATION, HeaderValue::from_static(value));
            }
            bearer(&headers)
                .map(str::to_owned)
                .map_err(|problem| problem.code().to_owned())
        };
        assert_eq!(token(&["bearer a.b.c"]), Ok("a.b.c".to_owned()));
        assert_eq!(token(&[]), Err("token_missing".to_owned()));
        assert_eq!(token(&["Basic x"]), Err("token_missing".to_owned()));
        assert_eq!(
            token(&["Bearer a", "Bearer b"]),
            Err("token_invalid".to_owned())
        );
    }
}
