//! The HTTP API: one table of routes, and what serves them.
//!
//! Decides nothing of its own: it translates between HTTP and the domain. Every route of the API port needs a token.

mod accounts;
mod cursor;
mod events;
mod ops;
mod outbox;
mod preface;
mod problem;
mod request;
mod serve;
mod stall;
mod streams;
#[cfg(test)]
mod streams_tests;
#[cfg(test)]
mod tests;
mod tokens;
mod types;
mod users;

pub use ops::{Ops, ops_router};
pub use problem::{CODES, Code, Problem};
pub use request::BODY_BYTES_MAX;
pub use serve::{Limits, WRITE_STALL_MAX, serve};

use crate::auth::Verifier;
use crate::commit::Lanes;
use crate::config::Config;
use crate::domain::Scope;
use crate::schema::Registry;
use crate::telemetry::Metrics;
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::http::{Response, StatusCode};
use axum::routing::{MethodFilter, on};
use deadpool_postgres::Pool;
use futures_util::future::BoxFuture;
use request::Call;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// What handlers work with.
#[derive(Clone, Debug)]
pub struct App {
    /// The configuration.
    pub config: Arc<Config>,
    /// Event types, assets, accounts.
    pub registry: Arc<Registry>,
    /// Tokens.
    pub verifier: Arc<Verifier>,
    /// Where drafts go.
    pub lanes: Lanes,
    /// Connections for reads. Its own time-outs bound every wait for one.
    pub pool: Pool,
    /// Turns of the sums over unguarded accounts: see [`sums`].
    pub sums: Arc<Semaphore>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
}

/// The turns of sums for a pool of this size: half of it, so that other reads find a connection; one at least.
#[must_use]
pub fn sums(pool_size: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new((pool_size / 2).max(1)))
}

/// A method that routes take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// `GET`, and `HEAD` with it.
    Get,
    /// `POST`, with a JSON body.
    Post,
}

/// What a token needs for a route, before the resource itself is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Any valid token.
    Token,
    /// One of these scopes.
    OneOf(&'static [Scope]),
}

type Handler = fn(Call) -> BoxFuture<'static, Result<Response<Body>, Problem>>;

/// One row of the route table.
pub struct Route {
    /// The method.
    pub method: Verb,
    /// The path's pattern.
    pub path: &'static str,
    /// What the token needs.
    pub needs: Needs,
    /// The query parameters it knows; any other is refused.
    query: &'static [&'static str],
    /// Whether it changes anything: then a passed deadline leaves its outcome open.
    writes: bool,
    handler: Handler,
}

impl std::fmt::Debug for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {}", self.method, self.path)
    }
}

const fn get(
    path: &'static str,
    needs: Needs,
    query: &'static [&'static str],
    handler: Handler,
) -> Route {
    Route {
        method: Verb::Get,
        path,
        needs,
        query,
        writes: false,
        handler,
    }
}

const fn post(path: &'static str, needs: Needs, handler: Handler) -> Route {
    Route {
        method: Verb::Post,
        path,
        needs,
        query: &[],
        writes: true,
        handler,
    }
}

const READ: Needs = Needs::OneOf(&[Scope::Read]);
/// Which of the two an event takes, its type says.
const WRITE: Needs = Needs::OneOf(&[Scope::Write, Scope::Admin]);
const ADMIN: Needs = Needs::OneOf(&[Scope::Admin]);
const LIST: &[&str] = &["subject", "type", "idempotency_key", "after", "limit"];

/// Every route of the API.
pub static ROUTES: &[Route] = &[
    post("/v1/events", WRITE, |c| Box::pin(events::append(c))),
    get("/v1/events", READ, LIST, |c| Box::pin(events::list(c))),
    get("/v1/events/{id}", READ, &[], |c| Box::pin(events::get(c))),
    get("/v1/users/{subject}", READ, &["after", "limit"], |c| {
        Box::pin(users::get(c))
    }),
    get("/v1/accounts/{address}", READ, &[], |c| {
        Box::pin(accounts::get(c))
    }),
    get("/v1/types", READ, &[], |c| Box::pin(types::list(c))),
    get("/v1/types/{type}", READ, &[], |c| Box::pin(types::get(c))),
    get("/v1/types/{type}/{version}", READ, &[], |c| {
        Box::pin(types::version(c))
    }),
    post("/v1/tokens/revoke", Needs::Token, |c| {
        Box::pin(tokens::revoke(c))
    }),
    get("/v1/outbox", ADMIN, &[], |c| Box::pin(outbox::get(c))),
];

/// The API, built from the route table.
pub fn router(app: App) -> Router {
    let app = Arc::new(app);
    let mut router = Router::new();
    for route in ROUTES {
        let filter = match route.method {
            Verb::Get => MethodFilter::GET,
            Verb::Post => MethodFilter::POST,
        };
        let app = app.clone();
        let handler = move |request: Request| request::run(route, app.clone(), request);
        router = router.route(route.path, on(filter, handler));
    }
    let methods = app.clone();
    router
        .method_not_allowed_fallback(move |request: Request| async move {
            let detail = "see the header Allow";
            let problem = Problem::new("method_not_allowed", detail);
            request::refuse(&methods, request, problem).await
        })
        .fallback(move |request: Request| async move {
            let problem = Problem::new("not_found", "there is no such path");
            request::refuse(&app, request, problem).await
        })
}

/// An answer in JSON.
fn json(body: impl Into<Body>) -> Response<Body> {
    let mut response = Response::new(body.into());
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// An answer without a body.
fn no_content() -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}
