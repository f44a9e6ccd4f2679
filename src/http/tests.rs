//! Tests of the edge without a database: what is refused before one is asked.

use super::*;
use crate::auth::{generate_dev_keys, issue};
use crate::commit;
use crate::domain::Subject;
use crate::store::handover::Handover;
use axum::body::to_bytes;
use axum::http::header::{ALLOW, AUTHORIZATION, RETRY_AFTER, WWW_AUTHENTICATE};
use serde_json::Value;
use std::time::Duration;
use tower::ServiceExt;

struct Edge {
    app: App,
    router: Router,
    keys: std::path::PathBuf,
}

impl Drop for Edge {
    fn drop(&mut self) {
        std::fs::remove_file(&self.keys).unwrap();
    }
}

/// A pool whose database is not there: port 1 refuses.
fn unreachable_pool() -> Pool {
    let config = "host=127.0.0.1 port=1 user=nobody connect_timeout=1";
    let manager = deadpool_postgres::Manager::new(config.parse().unwrap(), tokio_postgres::NoTls);
    Pool::builder(manager).max_size(1).build().unwrap()
}

fn edge() -> Edge {
    let keys = std::env::temp_dir().join(format!("daybook-edge-{}.json", uuid::Uuid::now_v7()));
    generate_dev_keys(&keys).unwrap();
    let metrics = Arc::new(Metrics::new());
    let (lanes, _) = Lanes::start(&commit::Settings {
        database_url: "postgres://nobody@127.0.0.1:1/none".to_owned().into(),
        ledger: "main".to_owned(),
        lanes: 1,
        queue: 1,
        queue_bytes: 1024,
        batch_max: 1,
        dedupe_days: 1,
        committed: Handover::default(),
        metrics: metrics.clone(),
    });
    let app = App {
        config: Arc::new(Config::default()),
        registry: Arc::new(Registry::load(None).unwrap()),
        verifier: Arc::new(Verifier::load(&keys).unwrap()),
        lanes,
        pool: unreachable_pool(),
        sums: sums(1),
        metrics,
    };
    Edge {
        router: router(app.clone()),
        app,
        keys,
    }
}

impl Edge {
    fn token(&self, scopes: &[Scope]) -> String {
        let alice = Subject::parse("alice").unwrap();
        let hour = Duration::from_secs(3_600);
        let token = issue(&self.keys, &alice, scopes, hour, jiff::Timestamp::now()).unwrap();
        format!("Bearer {token}")
    }

    async fn send(&self, request: Request) -> (Response<Body>, Value) {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = to_bytes(body, 1024 * 1024).await.unwrap();
        let value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        (Response::from_parts(parts, Body::empty()), value)
    }
}

fn request(method: &str, path: &str, token: Option<&str>, body: &str) -> Request {
    let mut builder = axum::http::Request::builder().method(method).uri(path);
    if let Some(token) = token {
        builder = builder.header(AUTHORIZATION, token);
    }
    builder
        .header(CONTENT_TYPE, "application/json")
        .header("idempotency-key", "k-1")
        .body(Body::from(body.to_owned()))
        .unwrap()
}

fn concrete(route: &Route) -> (&'static str, String) {
    let method = match route.method {
        Verb::Get => "GET",
        Verb::Post => "POST",
    };
    let path = route
        .path
        .replace("{id}", "0193b2f5-0c7b-7000-8000-000000000000")
        .replace("{subject}", "alice")
        .replace("{address}", "users:alice:available")
        .replace("{type}", "transfer")
        .replace("{version}", "1.0");
    (method, path)
}

#[tokio::test]
async fn a2_every_route_refuses_without_token_without_scope_and_with_the_wrong_scope() {
    let edge = edge();
    for route in ROUTES {
        let (method, path) = concrete(route);
        let (response, problem) = edge.send(request(method, &path, None, "{}")).await;
        assert_eq!(response.status(), 401, "{route:?}");
        assert_eq!(problem["code"], "token_missing", "{route:?}");
        assert!(response.headers().contains_key(WWW_AUTHENTICATE));
        let (_, problem) = edge
            .send(request(method, &path, Some("Bearer a.b.c"), "{}"))
            .await;
        assert_eq!(problem["code"], "token_invalid", "{route:?}");
        let Needs::OneOf(needed) = route.needs else {
            continue;
        };
        let wrong: Vec<Scope> = Scope::ALL
            .into_iter()
            .filter(|scope| {
                let held: crate::domain::Scopes = [*scope].into_iter().collect();
                needed.iter().all(|need| !held.has(*need))
            })
            .collect();
        assert!(!wrong.is_empty());
        for scopes in [Vec::new(), wrong] {
            let token = edge.token(&scopes);
            let (response, problem) = edge.send(request(method, &path, Some(&token), "{}")).await;
            assert_eq!(response.status(), 403, "{route:?} {scopes:?}");
            assert_eq!(problem["code"], "scope_missing", "{route:?} {scopes:?}");
        }
    }
}

/// Requests that parse but do not fit: all of them are 400 `invalid_request`.
const INVALID: [(&str, &str, &str); 15] = [
    ("POST", "/v1/events?dry_run=true", "{}"),
    ("GET", "/v1/events?limit=0", ""),
    ("GET", "/v1/events?limit=101", ""),
    ("GET", "/v1/events?limit=1&limit=2", ""),
    ("GET", "/v1/events?typo=1", ""),
    ("GET", "/v1/events?after=zzz", ""),
    ("GET", "/v1/events?type=Bad", ""),
    ("GET", "/v1/events?subject=a%00b", ""),
    ("GET", "/v1/events?idempotency_key=k", ""),
    ("GET", "/v1/events/7", ""),
    ("GET", "/v1/users/a%20b", ""),
    ("GET", "/v1/accounts/a::b", ""),
    ("POST", "/v1/tokens/revoke", "{"),
    ("POST", "/v1/tokens/revoke", "{}"),
    ("POST", "/v1/tokens/revoke", r#"{"jti":"a","x":1}"#),
];

/// What a subject's revocation may not say.
const INVALID_REVOCATIONS: [&str; 2] = [
    r#"{"jti":"a","subject":"b"}"#,
    r#"{"subject":"b","issued_before":"9999-01-01T00:00:00Z"}"#,
];

#[tokio::test]
async fn what_the_edge_refuses() {
    let edge = edge();
    let all = edge.token(&Scope::ALL);
    let big = "x".repeat(BODY_BYTES_MAX + 1);
    let others = [
        ("GET", "/v1/nothing", "", 404, "not_found"),
        ("DELETE", "/v1/events", "", 405, "method_not_allowed"),
        ("POST", "/v1/events", &*big, 413, "body_too_large"),
        ("GET", "/v1/accounts/nowhere", "", 404, "not_found"),
        ("GET", "/v1/events", "", 503, "database_unavailable"),
    ];
    let revocations = INVALID_REVOCATIONS.map(|body| ("POST", "/v1/tokens/revoke", body));
    let invalid = INVALID
        .into_iter()
        .chain(revocations)
        .map(|(method, path, body)| (method, path, body, 400, "invalid_request"));
    for (method, path, body, status, code) in others.into_iter().chain(invalid) {
        let (response, problem) = edge.send(request(method, path, Some(&all), body)).await;
        assert_eq!(response.status(), status, "{method} {path} {problem}");
        assert_eq!(problem["code"], code, "{method} {path}");
        assert_eq!(problem["type"], format!("/problems/{code}"));
        assert_eq!(response.headers()[CONTENT_TYPE], "application/problem+json");
        let id = response.headers()["x-request-id"].to_str().unwrap();
        assert_eq!(problem["request_id"], id);
        let timing = response.headers()["server-timing"].to_str().unwrap();
        assert!(timing.starts_with("app;dur="), "{timing}");
        if status == 405 {
            let allow = response.headers()[ALLOW].to_str().unwrap();
            assert!(allow.contains("GET") && allow.contains("POST"), "{allow}");
        }
        assert_eq!(response.headers().contains_key(RETRY_AFTER), status == 503);
    }
}

#[tokio::test]
async fn what_is_not_yours_is_404_on_a_read_and_403_on_a_write() {
    let edge = edge();
    let own = edge.token(&[Scope::Read, Scope::Write]);
    for path in ["/v1/users/bob", "/v1/accounts/world"] {
        let (response, _) = edge.send(request("GET", path, Some(&own), "")).await;
        assert_eq!(response.status(), 404, "{path}");
    }
    let (response, _) = edge
        .send(request("GET", "/v1/events?subject=bob", Some(&own), ""))
        .await;
    assert_eq!(response.status(), 404);
    for body in [r#"{"subject":"bob"}"#, r#"{"jti":"another"}"#] {
        let (response, _) = edge
            .send(request("POST", "/v1/tokens/revoke", Some(&own), body))
            .await;
        assert_eq!(response.status(), 403, "{body}");
    }
}

#[tokio::test]
async fn a_write_needs_json_and_one_key() {
    let edge = edge();
    let own = edge.token(&[Scope::Write]);
    let mut plain = request("POST", "/v1/events", Some(&own), "{}");
    plain
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    let (response, _) = edge.send(plain).await;
    assert_eq!(response.status(), 415);
    let mut none = request("POST", "/v1/events", Some(&own), "{}");
    none.headers_mut().remove("idempotency-key");
    let (_, problem) = edge.send(none).await;
    assert_eq!(problem["code"], "idempotency_key_missing");
    let mut two = request("POST", "/v1/events", Some(&own), "{}");
    two.headers_mut()
        .append("idempotency-key", HeaderValue::from_static("k-2"));
    let (_, problem) = edge.send(two).await;
    assert_eq!(problem["code"], "idempotency_key_invalid");
}

static PANICS: Route = get("/panics", Needs::Token, &[], |_| {
    Box::pin(async { panic!("a secret") })
});
static HANGS: Route = get("/hangs", Needs::Token, &[], |_| {
    Box::pin(std::future::pending())
});
static HANGS_WRITING: Route = post("/hangs", Needs::Token, |_| Box::pin(std::future::pending()));

#[tokio::test]
async fn a7_a_panic_or_a_hang_tells_nothing_but_the_requests_id() {
    let edge = edge();
    let token = edge.token(&[]);
    let app = Arc::new(App {
        config: Arc::new(Config {
            request_timeout_ms: 100,
            ..Config::default()
        }),
        ..edge.app.clone()
    });
    for (route, method, status, code) in [
        (&PANICS, "GET", 500, "internal"),
        (&HANGS, "GET", 503, "deadline_passed"),
        (&HANGS_WRITING, "POST", 504, "outcome_unknown"),
    ] {
        let handler = {
            let app = app.clone();
            move |request: Request| request::run(route, app, request)
        };
        let router = Router::new().route("/x", axum::routing::any(handler));
        let request = request(method, "/x", Some(&token), "{}");
        let response = router.oneshot(request).await.unwrap();
        assert_eq!(response.status(), status);
        let headers = response.headers();
        assert!(headers.contains_key("x-request-id") && headers.contains_key("server-timing"));
        assert_eq!(headers.contains_key(RETRY_AFTER), status == 503);
        let body = to_bytes(response.into_body(), 10_000).await.unwrap();
        let text = String::from_utf8(body.to_vec()).unwrap();
        assert!(text.contains(code) && text.contains("request_id"), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
}

#[tokio::test]
async fn the_server_answers_limits_heads_and_drains() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let edge = edge();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let limits = Limits {
        header_timeout: Duration::from_millis(200),
        write_stall: Duration::from_secs(5),
        stream_stall: Duration::from_secs(5),
        connections_max: 10,
        drain: Duration::from_secs(5),
    };
    let gauge = prometheus_client::metrics::gauge::Gauge::default();
    let serving = serve(
        listener,
        edge.router.clone(),
        async { drop(stopped.await) },
        limits,
        gauge.clone(),
    );
    let server = tokio::spawn(serving);
    let mut slow = tokio::net::TcpStream::connect(address).await.unwrap();
    slow.write_all(b"GET / HTTP/1.1\r\nHost:").await.unwrap();
    let mut rest = Vec::new();
    slow.read_to_end(&mut rest).await.unwrap();
    let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
    client
        .write_all(b"GET /v1/types HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
    assert!(answer.contains("server-timing: app;dur="));
    stop.send(()).unwrap();
    tokio::time::timeout(Duration::from_secs(5), server)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(gauge.get(), 0);
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_body_of_unknown_length_over_http_2_has_the_same_limit() {
    let edge = edge();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let limits = Limits {
        header_timeout: Duration::from_secs(5),
        write_stall: Duration::from_secs(5),
        stream_stall: Duration::from_secs(5),
        connections_max: 1,
        drain: Duration::from_secs(1),
    };
    let never = std::future::pending();
    let unseen = prometheus_client::metrics::gauge::Gauge::default();
    tokio::spawn(serve(listener, edge.router.clone(), never, limits, unseen));
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let mut client = client.ready().await.unwrap();
    // A body at the limit is read, and found to be no JSON.
    for (length, status) in [(BODY_BYTES_MAX + 1, 413), (BODY_BYTES_MAX, 400)] {
        let post = axum::http::Request::post("http://x/v1/events")
            .header(AUTHORIZATION, edge.token(&[Scope::Write]))
            .header(CONTENT_TYPE, "application/json")
            .header("idempotency-key", "k-1")
            .body(())
            .unwrap();
        let (answer, mut body) = client.send_request(post, false).unwrap();
        body.send_data(vec![b'x'; length].into(), true).unwrap();
        let answer = tokio::time::timeout(Duration::from_secs(20), answer);
        assert_eq!(answer.await.unwrap().unwrap().status(), status, "{length}");
    }
}

const BIG: usize = 32 * 1024 * 1024;
const STALL: Duration = Duration::from_secs(1);

/// A server with room for one connection, whose answer is more than the kernel buffers.
async fn narrow_server() -> std::net::SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let limits = Limits {
        header_timeout: Duration::from_secs(60),
        write_stall: STALL,
        stream_stall: STALL,
        connections_max: 1,
        drain: Duration::from_secs(1),
    };
    let big = axum::routing::get(|| async { vec![b'x'; BIG] });
    let router = Router::new().route("/big", big);
    let gauge = prometheus_client::metrics::gauge::Gauge::default();
    tokio::spawn(serve(
        listener,
        router,
        std::future::pending(),
        limits,
        gauge,
    ));
    address
}

#[tokio::test]
async fn a_client_that_does_not_read_loses_its_place_and_a_slow_one_does_not() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    const GET: &[u8] = b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n";
    let address = narrow_server().await;
    let mut deaf = tokio::net::TcpStream::connect(address).await.unwrap();
    deaf.write_all(&GET.repeat(20)).await.unwrap();
    // The one place is taken: this client is served only once the other has lost it.
    let mut slow = tokio::net::TcpStream::connect(address).await.unwrap();
    slow.write_all(GET).await.unwrap();
    let started = tokio::time::Instant::now();
    let mut buffer = vec![0; BIG / 128];
    let mut received = 0;
    while received < BIG {
        let read = tokio::time::timeout(Duration::from_secs(20), slow.read(&mut buffer));
        let read = read.await.unwrap().unwrap();
        assert!(read > 0, "cut off after {received} bytes");
        received += read;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(started.elapsed() > 2 * STALL);
}
